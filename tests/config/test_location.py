from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.location import (
    LAYOUT,
    Download,
    HubFile,
    beside,
    check_url,
    file_of,
    hub_file,
)
from hatch_epcontext.errors import Kind
from hatch_epcontext.text import hide_credentials, hide_url_credentials, show
from tests.config.examples import problems, read

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA = "ab" * 32
HUB = f"hf://org/repo@{COMMIT}/onnx/model.onnx"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (HUB, "model.onnx"),
        ("hf://org/repo/a b.onnx", "a b.onnx"),
        ("https://host/dir/a%20b.onnx", "a b.onnx"),
        ("http://127.0.0.1:8000/model.onnx", "model.onnx"),
    ],
)
def test_a_location_has_the_name_of_its_file(url: str, name: str) -> None:
    assert check_url(url) is None
    assert file_of(url) == name


@pytest.mark.parametrize(
    "url",
    [
        "",
        "model.onnx",
        "hf://org/model.onnx",
        "hf://org/repo/../x/model.onnx",
        "hf://org/repo/%2e%2e/model.onnx",
        "hf://org/repo/a\\..\\model.onnx",
        "hf://user:password@org/repo/model.onnx",
        f"{HUB}?token=1",
        "http://host/model.onnx",
        "file:///model.onnx",
        "https://user@host/model.onnx",
        "https://host/model.onnx?token=1",
        "https://host/",
        "https://host/%2e%2e/model.onnx",
        "https://host/a%3Ab.onnx",
        "https://host/dir/a%2Fb.onnx",
        "https://host:port/model.onnx",
        "https://[host/model.onnx",
        "s3://bucket/model.onnx",
        "simplecache::https://host/model.onnx",
    ],
)
def test_other_locations_are_refused(url: str) -> None:
    assert check_url(url)


def test_a_revision_is_pinned_only_by_a_whole_commit() -> None:
    assert hub_file(HUB) == HubFile("org/repo", COMMIT, "onnx/model.onnx")
    for revision, pinned in ((COMMIT, True), (COMMIT[:8], False), ("main", False), (None, False)):
        assert HubFile("org/repo", revision, "a.onnx").is_pinned == pinned
        assert hub_file(str(HubFile("org/repo", revision, "a.onnx"))) is not None


@pytest.mark.parametrize("name", ["a", "_a-b.c_1", "A" * 96, "a.git.b"])
def test_a_repository_has_a_name_that_the_hub_allows(name: str) -> None:
    assert hub_file(f"hf://{name}/{name}/m.onnx") == HubFile(f"{name}/{name}", None, "m.onnx")


@pytest.mark.parametrize(
    "name",
    [
        *("..", ".", "a..b", "a--b", "-a", "a-", ".a", "a.", "A" * 97),
        *("%2e%2e", "a%2fb", "a\\b", "\u00e9", "\u6587", "a b", "a\tb", "a:b", "", "a~"),
    ],
)
def test_a_repository_of_another_name_is_refused_before_it_is_asked_for(name: str) -> None:
    for repo in (f"{name}/repo", f"org/{name}"):
        for url in (
            f"hf://{repo}/m.onnx",
            f"hf://{repo}@{COMMIT}/m.onnx",
            f"https://huggingface.co/{repo}/blob/main/m.onnx",
        ):
            assert hub_file(url) is None
    assert check_url(f"hf://org/{name}@main/m.onnx")
    assert check_url("hf://org/repo.git/m.onnx")


@pytest.mark.parametrize(
    ("revision", "is_valid"),
    [
        *[(name, True) for name in ("main", "v1.0", "refs%2Fpr%2F1", "feature-%C3%A9")],
        *[(name, False) for name in ("..", ".", "%2e%2e", "%252e%252e", "a..b", "a%2F..%2Fb")],
        *[(name, False) for name in (".a", "a%2F.b", "a.", "a.lock", "a%5Cb", "%2Fa", "a%2F%2Fb")],
        *[
            (name, False)
            for name in ("a%20b", "a%0Ab", "a~1", "a^", "a:b", "a%3Fb", "a*", "\udcff")
        ],
    ],
)
def test_a_revision_has_a_name_that_git_allows(revision: str, is_valid: bool) -> None:
    assert (check_url(f"hf://org/repo@{revision}/m.onnx") is None) == is_valid
    assert (
        hub_file(f"https://huggingface.co/org/repo/blob/{revision}/m.onnx") is not None
    ) == is_valid


@pytest.mark.parametrize(
    "link",
    [
        HUB,
        f"https://huggingface.co/org/repo/blob/{COMMIT}/onnx/model.onnx",
        f"https://huggingface.co/org/repo/resolve/{COMMIT}/onnx/model.onnx?download=true",
        f"https://huggingface.co/org/repo/raw/{COMMIT}/onnx%2Fmodel.onnx",
    ],
)
def test_links_of_pages_are_files_of_the_hub(link: str) -> None:
    assert str(hub_file(link)) == HUB
    assert check_url(link) is None


def test_other_links_are_no_files_of_the_hub() -> None:
    for link in (
        f"https://other/org/repo/blob/{COMMIT}/model.onnx",
        "https://huggingface.co/org",
        "hf://org/a.onnx",
    ):
        assert hub_file(link) is None


def test_data_is_beside_the_model() -> None:
    assert beside(HUB, "a b.data") == f"hf://org/repo@{COMMIT}/onnx/a b.data"
    assert beside("https://host/x/m.onnx", "a b.data") == "https://host/x/a%20b.data"
    assert beside("https://host/x/m.onnx", "d/a.data") == "https://host/x/d/a.data"


def test_a_key_identifies_names_and_contents() -> None:
    one = Download(HUB, SHA, {"a": SHA, "b": SHA})
    same = Download("https://host/model.onnx", SHA, {"b": SHA, "a": SHA})
    assert one.key == same.key
    others = (
        Download(HUB, SHA, {"a": SHA}),
        Download("https://host/other.onnx", SHA, {"a": SHA, "b": SHA}),
        Download(HUB, "cd" * 32, {"a": SHA, "b": SHA}),
    )
    assert len({one.key, *(each.key for each in others)}) == 4


def test_a_revision_is_no_password() -> None:
    for text in (hide_credentials(HUB), hide_url_credentials(HUB), show(HUB).strip('"')):
        assert text.startswith("hf://org/repo@0123")
    for secret in ("hf://user:pw@org/repo/m.onnx", "https://user:pw@host/m.onnx"):
        assert "pw" not in hide_credentials(secret) + hide_url_credentials(secret)


TABLE = 'targets.cpu.provider = "cpu"\n[[models]]\n'


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (f'url = "{HUB}"', {"models[0].url": Kind.NOT_PINNED}),
        (
            f'url = "hf://org/repo@main/m.onnx"\nsha256 = "{SHA}"',
            {"models[0].url": Kind.NOT_PINNED},
        ),
        ('url = "https://host/m.onnx"', {"models[0].url": Kind.NOT_PINNED}),
        (f'url = "{HUB}"\nsha256 = "AB"', {"models[0].sha256": Kind.INVALID_VALUE}),
        (
            f'url = "{HUB}"\nsha256 = "{SHA}"\ndata = {{ "../x" = "{SHA}" }}',
            {"models[0].data": Kind.INVALID_VALUE},
        ),
        (
            f'url = "{HUB}"\nsha256 = "{SHA}"\ndata = {{ "model.onnx" = "{SHA}" }}',
            {"models[0].data": Kind.INVALID_VALUE},
        ),
        (
            f'url = "{HUB}"\nsha256 = "{SHA}"\npath = "m.onnx"',
            {"models[0].url": Kind.CONFLICTING_KEYS},
        ),
        ('url = "https://u:secret@host/m.onnx"', {"models[0].url": Kind.INVALID_VALUE}),
        (f'path = "models/a.onnx"\nsha256 = "{SHA}"', {"models[0].sha256": Kind.NOT_APPLICABLE}),
    ],
)
def test_what_is_wrong_with_a_location_is_reported_with_its_key(
    project: Path, toml: str, expected: dict[str, Kind]
) -> None:
    found = problems(project, TABLE + toml)
    assert {place: each.kind for place, each in found.items()} == expected
    text = "".join(map(str, found.values()))
    assert "secret" not in text
    assert ("epcontext fetch --pin" in text) == (Kind.NOT_PINNED in expected.values())


def test_a_model_lies_in_the_users_cache(project: Path, tmp_path: Path) -> None:
    toml = f'{TABLE}url = "{HUB}"\nsha256 = "{SHA}"'
    (model,) = read(project, toml, CACHE_DIR=str(tmp_path)).models
    assert model.download == Download(HUB, SHA)
    assert model.path == tmp_path / LAYOUT / "models" / model.download.key / "files" / "model.onnx"
    assert model.name == "model"

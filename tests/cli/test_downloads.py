"""``epcontext add`` and ``fetch`` with a hub on this machine; what ``cache`` and ``init`` know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hatch_epcontext.cache.store import Store
from hatch_epcontext.cli.app import app as commands
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import temp_dir
from hatch_epcontext.tools.pinning import Table, pin_location
from tests.cli.conftest import Cli, problems
from tests.hub import COMMIT, Hub, model_hub, sha256
from tests.models import network, save, save_with_data
from tests.projects import HEAD

TOML = f"""{HEAD}
[tool.epcontext]
targets.cpu.provider = "cpu"  # for all

# The first one.
[[tool.epcontext.models]]
url = "hf://org/repo/onnx/a.onnx"  # from the hub
dims = {{ batch = 1 }}

# The second one.
[[tool.epcontext.models]]
name = "b"
url = "WEB"
license = "MIT"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    save(network(), tmp_path / "files" / "a.onnx")
    save_with_data(network(1), tmp_path / "files" / "b.onnx")
    files = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    with model_hub({f"onnx/{name}": data for name, data in files.items()} | files) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture
def app(project: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    """A project with two models that are not pinned."""
    for path in (project / "models").iterdir():
        path.unlink()
    text = TOML.replace("WEB", hub.web("b.onnx"))
    (project / "pyproject.toml").write_text(text, encoding="utf-8", newline="")
    return project


def models(project: Path) -> list[dict[str, object]]:
    values = parse((project / "pyproject.toml").read_text(encoding="utf-8"))
    result: list[dict[str, object]] = values["tool"]["epcontext"]["models"]
    return result


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_all_locations_are_pinned_in_place(cli: Cli, app: Path, hub: Hub, ends: str) -> None:
    file = app / "pyproject.toml"
    before = file.read_text(encoding="utf-8").replace("\n", ends)
    file.write_text(before, encoding="utf-8", newline="")
    cli("fetch", "--pin", app)
    first, second = models(app)
    assert first == {
        "url": f"hf://org/repo@{COMMIT}/onnx/a.onnx",
        "sha256": sha256(hub.files["a.onnx"]),
        "license": "Apache-2.0",
        "dims": {"batch": 1},
    }
    assert second == {
        "name": "b",
        "url": hub.web("b.onnx"),
        "sha256": sha256(hub.files["b.onnx"]),
        "data": {"network.data": sha256(hub.files["network.data"])},
        "license": "MIT",
    }
    after = file.read_bytes().decode()
    added = ("sha256", "data", 'license = "Apache')
    kept = [line for line in after.split(ends) if not line.startswith(added)]
    assert ends.join(kept) == before.replace("repo/onnx", f"repo@{COMMIT}/onnx")
    requests = len(hub.requests)
    assert cli("fetch", "--pin", app).stdout.startswith("all models from elsewhere are pinned\n2 ")
    assert len(hub.requests) == requests
    # What was downloaded is where builds find it.
    assert cli("build", app, "--dry-run").exit_code == 0
    assert sorted(hub.downloads) == ["a.onnx", "b.onnx", "network.data"]
    # The last line of a file may have no end.
    file.write_bytes(before.rpartition(ends + "license")[0].encode())
    cli("fetch", "--pin", app)
    assert [{*model} >= {"url", "sha256"} for model in models(app)] == [True, True]
    assert not any("\r" in line or "\n" in line for line in file.read_bytes().decode().split(ends))


def test_a_pinned_hash_is_never_replaced(cli: Cli, app: Path, hub: Hub) -> None:
    cli("fetch", "--pin", app)
    file = app / "pyproject.toml"
    lines = file.read_text(encoding="utf-8").split("\n")
    kept = "\n".join(line for line in lines if not line.startswith(("data", "license")))
    kept = kept.replace(f"@{COMMIT}", "@main")
    file.write_text(kept, encoding="utf-8")
    hub.files["onnx/a.onnx"] = hub.files["b.onnx"]
    cli("cache", "prune", "--all")
    result = cli("fetch", "--pin", app, code=1)
    assert [line.split()[-1] for line in problems(result)] == ["EPC221"]
    assert file.read_text(encoding="utf-8") == kept


def test_data_that_lacks_a_file_is_an_error(cli: Cli, app: Path, hub: Hub) -> None:
    cli("fetch", "--pin", app)
    file = app / "pyproject.toml"
    digest = sha256(hub.files["network.data"])
    whole = file.read_text(encoding="utf-8")
    text = whole.replace(f'{{ "network.data" = "{digest}" }}', "{}")
    for without in ("", f'sha256 = "{sha256(hub.files["b.onnx"])}"\n'):
        text = text.replace(without, "")
        file.write_text(text, encoding="utf-8")
        command = ("fetch", "--pin") if without else ("build", "--dry-run")
        result = cli(*command, app, code=1)
        assert [line.split()[-1] for line in problems(result)] == ["EPC203"]
        assert "epcontext fetch --pin" in result.stderr
        assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"[" * 100_000,
        b'{"sha": null, "siblings": []}',
        f'{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "a", "lfs": {{"sha256": "zz"}}}}]}}'.encode(),
        None,
    ],
)
def test_nothing_is_written_unless_all_is_known(
    cli: Cli, app: Path, hub: Hub, answer: bytes | None
) -> None:
    if answer is None:
        hub.faults = {"b.onnx": 404}
    hub.answer = answer
    before = (app / "pyproject.toml").read_bytes()
    result = cli("fetch", "--pin", app, code=1)
    assert {line.split()[-1] for line in problems(result)} == {"EPC220"}
    assert (app / "pyproject.toml").read_bytes() == before


def test_a_file_that_changes_meanwhile_stays_as_it_is(
    cli: Cli, app: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = app / "pyproject.toml"
    before = file.read_text(encoding="utf-8")

    def edit(*arguments: object, **named: object) -> Table:
        file.write_text(f"{before}# mine\n", encoding="utf-8")
        return pin_location(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("hatch_epcontext.cli.fetch.pin_location", edit)
    assert [line.split()[-1] for line in problems(cli("fetch", "--pin", app, code=2))] == ["EPC025"]
    assert file.read_text(encoding="utf-8") == f"{before}# mine\n"


def test_models_in_a_list_are_pinned(cli: Cli, app: Path, hub: Hub) -> None:
    text = f"""{HEAD}
[tool.epcontext]
targets.cpu.provider = "cpu"
models = [
    {{ url = "https://huggingface.co/org/repo/blob/main/onnx/b.onnx", license = "MIT" }},  # one
]
"""
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    cli("fetch", "--pin", app)
    (model,) = models(app)
    assert model["url"] == f"hf://org/repo@{COMMIT}/onnx/b.onnx"
    assert model["license"] == "MIT"
    # The hub has no hash of a small file.
    assert model["data"] == {"network.data": sha256(hub.files["network.data"])}
    assert "},  # one" in (app / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("url", "id_"),
    [
        ("hf://org/other/a.onnx", "EPC220"),
        ("hf://org/repo@v9/onnx/a.onnx", "EPC220"),
        ("hf://org/repo/onnx/c.onnx", "EPC220"),
        ("hf://org/repo/onnx/network.data", "EPC201"),
        ("https://user:secret@host/a.onnx", "EPC005"),
        ("a.onnx", "EPC005"),
        ("hf://datasets/org/repo/a.onnx", "EPC005"),
    ],
)
def test_what_cannot_be_pinned_says_why(cli: Cli, app: Path, url: str, id_: str) -> None:
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    text = text.partition("# The first one.")[0]
    (app / "pyproject.toml").write_text(
        f'{text}[[tool.epcontext.models]]\nurl = "{url}"\n', encoding="utf-8"
    )
    fetched = CliRunner().invoke(commands, ["fetch", "--pin", str(app)])
    (app / "pyproject.toml").write_text(HEAD, encoding="utf-8")
    added = cli("add", url, code=1)
    for result in (fetched, added):
        assert result.exit_code
        assert [line.split()[-1] for line in problems(result)] == [id_]
        assert "secret" not in result.output
        assert "are pinned" not in result.output


@pytest.mark.parametrize(
    ("card", "license_"),
    [
        ({"license": "mit"}, "MIT"),
        ({"license": "cc-by-nc-4.0"}, "CC-BY-NC-4.0"),
        ({"license": "gemma"}, None),
        ({}, None),
        ({"license": ["mit"]}, None),
    ],
)
def test_the_license_is_that_of_the_card(
    cli: Cli, app: Path, hub: Hub, card: dict[str, str], license_: str | None
) -> None:
    hub.card = card
    printed = cli("fetch", "--pin", app)
    assert models(app)[0].get("license") == license_
    assert ("read its terms" in printed.stdout.partition("\n")[0]) == (license_ is None)
    cli("build", app, "--dry-run")


def test_a_model_is_added_with_its_sizes(cli: Cli, app: Path, hub: Hub) -> None:
    (app / "pyproject.toml").write_text(HEAD, encoding="utf-8")
    link = "https://huggingface.co/org/repo/blob/main/onnx/a.onnx"
    printed = cli("add", link, "-p", "cpu")
    (model,) = models(app)
    assert model["url"] == f"hf://org/repo@{COMMIT}/onnx/a.onnx"
    assert 'load("a")' in printed.stdout
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    assert "# in: x: float32" in text
    assert 'requires = ["hatchling", "hatch-epcontext"]' in text
    cli("build", app, "--dry-run")
    for same in ("hf://org/repo/onnx/a.onnx", str(model["url"])):
        before = len(hub.requests)
        assert "stays as it is" in cli("add", same).stdout
        assert (len(hub.requests) == before) == (same == model["url"])
    for name in ("A", "b/c"):
        named = ("add", hub.web("b.onnx"), "--name", name)
        assert "EPC" in cli(*named, code=2).stderr
    cli("add", hub.web("b.onnx"), "--name", "second")
    assert [each.get("url") for each in models(app)] == [model["url"], hub.web("b.onnx")]
    assert models(app)[1]["name"] == "second"


def test_nothing_is_added_that_is_no_model(cli: Cli, app: Path, hub: Hub) -> None:
    cli("add", hub.web("a.onnx"), code=2)
    assert not hub.requests
    (app / "pyproject.toml").write_text(HEAD, encoding="utf-8")
    before = (app / "pyproject.toml").read_bytes()
    hub.faults = {"b.onnx": "html"}
    assert "is no ONNX model" in cli("add", hub.web("b.onnx"), code=1).stderr
    assert (app / "pyproject.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("toml", "options", "id_"),
    [
        ('[tool.epcontext]\ntargets.cpu.provider = "cpu"\n', ["-p", "cpu"], "EPC025"),
        ('[tool.epcontext]\ntargets.cpu.provider = "none"\n', [], "EPC008"),
        ("tool.hatch = {}\n", ["-p", "cpu"], "EPC025"),
        ('[build-system]\nrequires = "hatchling"\n', ["-p", "cpu"], "EPC025"),
        ("", ["-p", "cpu", "--name", "a/b"], "EPC012"),
    ],
)
def test_what_the_project_refuses_is_not_downloaded(
    cli: Cli, app: Path, hub: Hub, toml: str, options: list[str], id_: str
) -> None:
    head = HEAD.partition("[tool")[0] if "hatch =" in toml else HEAD
    text = f"{toml}{head}" if "build-system" not in toml else toml
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    for url in (hub.web("b.onnx"), "hf://org/repo/onnx/a.onnx"):
        result = cli("add", url, *options, code=2)
        assert [line.split()[-1] for line in problems(result)] == [id_]
    assert (app / "pyproject.toml").read_text(encoding="utf-8") == text
    assert not hub.requests


def test_what_pinning_cannot_mend_is_not_downloaded(cli: Cli, app: Path, hub: Hub) -> None:
    text = TOML.replace("WEB", hub.web("b.onnx")) + f'data = {{ "b.onnx" = "{"0" * 64}" }}\n'
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    result = cli("fetch", "--pin", app, code=2)
    assert [line.split()[-1] for line in problems(result)] == ["EPC005"]
    assert "is the model itself" in result.stderr
    assert not hub.requests


def test_without_a_network_builds_find_what_was_fetched_and_nothing_is_pinned(
    cli: Cli, app: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("fetch", "--pin", app)
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("HATCH_EPCONTEXT_OFFLINE", "1")
    result = cli("build", app, "--dry-run", code=1)
    assert [line.split()[-1] for line in problems(result)] == ["EPC220", "EPC220"]
    assert "epcontext fetch" in result.stderr
    monkeypatch.delenv("HATCH_EPCONTEXT_OFFLINE")
    assert cli("fetch", app).stdout.startswith("2 models")
    monkeypatch.setenv("HATCH_EPCONTEXT_OFFLINE", "1")
    cli("build", app, "--dry-run")
    cli("fetch", app)
    hub.requests.clear()
    (app / "pyproject.toml").write_text(TOML.replace("WEB", hub.web("b.onnx")), encoding="utf-8")
    assert len(problems(cli("fetch", "--pin", app, code=1))) == 2
    (app / "pyproject.toml").write_text(HEAD, encoding="utf-8")
    cli("add", "hf://org/repo/onnx/a.onnx", code=1)
    assert not hub.requests


def test_the_cache_lists_and_removes_models(cli: Cli, app: Path, tmp_path: Path) -> None:
    cli("fetch", "--pin", app)
    store = Store(tmp_path / "cache")
    listed = cli("cache", "info").stdout
    assert "0 artifacts, 2 downloaded models" in listed
    assert "b.onnx" in listed
    with temp_dir(store.staging) as folder:
        (folder / "a.onnx").touch()
        assert "2 downloaded models" in cli("cache", "prune", "--all").stdout
        # What somebody downloads stays.
        assert (folder / "a.onnx").exists()
    assert store.entries() == []

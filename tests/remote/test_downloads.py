"""Downloads from a real server with faults, and from a real S3 server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.cache.store import Files, Store
from hatch_epcontext.config.location import Download
from hatch_epcontext.errors import BuildError, DownloadError, Kind
from hatch_epcontext.files import file_sha256
from hatch_epcontext.remote import web
from hatch_epcontext.remote.downloads import Downloads
from hatch_epcontext.system import Heartbeat
from tests.hub import SIGNED, TOKEN, Hub, model_hub, sha256

MODEL = os.urandom(300_000)
DATA = os.urandom(200_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with model_hub({"onnx/m.onnx": MODEL, "onnx/m.onnx_data": DATA, "m.onnx": MODEL}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setattr(web, "_PAUSE", 0.01)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture
def download(hub: Hub) -> Download:
    """One file on a web server."""
    return Download(hub.web("m.onnx"), sha256(MODEL))


def with_data(hub: Hub) -> Download:
    files = {"m.onnx_data": sha256(DATA)}
    return Download(hub.location("onnx/m.onnx"), sha256(MODEL), files)


def run(download: Download, root: Path, *, offline: bool = False) -> tuple[Path, list[str]]:
    """Download into the cache at ``root``; the folder with the files, and the lines of its log."""
    log = list[str]()
    Downloads(Store(root), log.append, offline=offline).run(download)
    return download.path(root).parent, log


def failure(download: Download, root: Path, *, offline: bool = False) -> DownloadError:
    with pytest.raises(DownloadError) as raised:
        run(download, root, offline=offline)
    for name in download.files:
        assert not download.path(root).with_name(name).exists()
    return raised.value


def test_a_model_is_downloaded_once_with_its_data(hub: Hub, tmp_path: Path) -> None:
    folder, log = run(with_data(hub), tmp_path)
    assert (folder / "m.onnx").read_bytes() == MODEL
    assert (folder / "m.onnx_data").read_bytes() == DATA
    files = Store(tmp_path).get("models", with_data(hub).key, Files)
    assert files is not None
    assert {name: file.sha256 for name, file in files.files.items()} == with_data(hub).files
    assert len(log) == 2
    before = len(hub.requests)
    # Another project names the same contents elsewhere.
    same = Download(hub.web("m.onnx"), sha256(MODEL), with_data(hub).data)
    assert run(same, tmp_path) == (folder, [])
    assert len(hub.requests) == before
    assert all(file.stat().st_nlink == 1 for file in folder.iterdir())
    assert not any(file.is_symlink() for file in folder.iterdir())


def test_a_long_download_is_reported(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heartbeat, "due", lambda self: True)
    _, log = run(download, tmp_path)
    first, *_, last = log
    assert first == f"downloading {hub.web('m.onnx')}: 0 bytes of 300.0 kB"
    assert last.startswith("downloaded ")


@pytest.mark.parametrize("fault", ["cut-once", "reset-once"])
def test_a_connection_that_ends_early_is_tried_again(hub: Hub, tmp_path: Path, fault: str) -> None:
    hub.faults = {"onnx/m.onnx": fault}
    folder, _ = run(with_data(hub), tmp_path)
    assert file_sha256(folder / "m.onnx") == sha256(MODEL)
    sent = [path for _, path, _ in hub.requests if "/large/onnx/m.onnx?" in path]
    assert len(sent) == 2


def test_an_end_of_tries_is_an_error(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults = {"m.onnx": "cut"}
    assert failure(download, tmp_path)
    assert len(hub.downloads) == 3


@pytest.mark.parametrize("fault", ["unasked", 204])
def test_an_answer_that_is_not_the_file_is_an_error(
    hub: Hub, tmp_path: Path, fault: str | int
) -> None:
    hub.faults = {"m.onnx": fault}
    with pytest.raises(DownloadError, match=r"HTTP 20[46]"):
        web.download(hub.web("m.onnx"), tmp_path / "p", len(MODEL), lambda *_: None)
    assert not (tmp_path / "p").exists()


def test_a_byte_from_time_to_time_is_reported_and_then_an_error(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_WINDOW", 0.5)
    monkeypatch.setattr(Heartbeat, "due", lambda self: True)
    hub.faults = {"m.onnx": "slow"}
    log = list[str]()
    with pytest.raises(DownloadError, match="fewer than 1000 bytes a second"):
        Downloads(Store(tmp_path), log.append, offline=False).run(download)
    assert "bytes of 300.0 kB" in log[0]
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("status", "tries"), [(401, 1), (403, 1), (404, 1), (429, 3), (500, 3), (503, 3)]
)
def test_a_refusal_is_final_and_what_may_pass_is_tried_again(
    hub: Hub, download: Download, tmp_path: Path, status: int, tries: int
) -> None:
    hub.faults = {"m.onnx": status}
    error = failure(download, tmp_path)
    assert str(status) in str(error)
    assert ("HF_TOKEN" in error.hint) == (status in (401, 403))
    assert len(hub.downloads) == tries


def test_other_bytes_are_never_used(hub: Hub, tmp_path: Path) -> None:
    for name, download in (
        ("m.onnx", Download(hub.web("m.onnx"), sha256(MODEL))),
        ("onnx/m.onnx", with_data(hub)),
    ):
        hub.faults = {name: "wrong"}
        assert failure(download, tmp_path).kind is Kind.OTHER_CONTENT
    hub.faults = {"onnx/m.onnx_data": "wrong"}
    with pytest.raises(DownloadError) as raised:
        run(with_data(hub), tmp_path)
    assert "m.onnx_data" in str(raised.value)


@pytest.mark.parametrize(
    "place",
    [
        "file:///etc/hostname",
        "http://192.0.2.1/m.onnx",
        "ftp://localhost/m.onnx",
        "http://[::1",
        "http://localhost:99999/m.onnx",
        "http://localhost:abc/m.onnx",
    ],
)
def test_redirects_that_are_not_encrypted_are_refused(
    hub: Hub, download: Download, tmp_path: Path, place: str
) -> None:
    hub.faults = {"m.onnx": place}
    error = failure(download, tmp_path)
    assert error.kind is Kind.NOT_DOWNLOADED
    assert len(hub.requests) == 1


def test_a_redirect_in_a_circle_ends(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.faults = {"m.onnx": hub.web("m.onnx")}
    assert failure(download, tmp_path)
    assert len(hub.requests) < 20


def test_the_token_goes_to_the_hub_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = True
    error = failure(with_data(hub), tmp_path)
    assert "GatedRepo" in str(error)
    assert "HF_TOKEN" in error.hint
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "terms" in failure(with_data(hub), tmp_path).hint
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    hub.requests.clear()
    _, log = run(with_data(hub), tmp_path)
    sent = {path: headers.get("Authorization") for _, path, headers in hub.requests}
    assert {path.split("/")[1] for path in sent} == {"org", "large"}
    for path, authorization in sent.items():
        assert authorization == (f"Bearer {TOKEN}" if path.startswith("/org/") else None)
    # A web server is another place, also on the same host.
    hub.requests.clear()
    run(Download(hub.web("m.onnx"), sha256(MODEL)), tmp_path / "other")
    assert [headers.get("Authorization") for *_, headers in hub.requests] == [None]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for text in (*log, *(file.read_bytes().decode("latin-1") for file in files)):
        assert TOKEN not in text
        assert SIGNED not in text


def test_a_renamed_repository_gets_the_token_too(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    url = hub.location("onnx/m.onnx").replace("org/repo", "org/old")
    run(Download(url, sha256(MODEL)), tmp_path)
    sent = [headers.get("Authorization") for *_, headers in hub.requests]
    assert sent == [f"Bearer {TOKEN}", f"Bearer {TOKEN}", None]


@pytest.mark.parametrize("token", ["hf_a\nb", "hf_\u2019"])
def test_an_impossible_token_is_not_shown(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    error = failure(with_data(hub), tmp_path)
    assert "hf_" not in str(error) + error.hint
    assert "HF_TOKEN" in error.hint
    for endpoint in ("http://me:s3cret@[x", "https://me:s3cret@host", "localhost:80", "ftp://host"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        error = failure(with_data(hub), tmp_path)
        assert "HF_ENDPOINT" in str(error)
        assert "s3cret" not in str(error) + error.hint


def test_nothing_for_this_machine_goes_through_a_proxy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_hub({}) as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        run(with_data(hub), tmp_path)
        assert proxy.requests == []


def test_a_file_beyond_the_limit_is_refused(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.remote.downloads.MAX_BYTES", 1000)
    for fault in (None, "no-length"):
        hub.faults = {"m.onnx": fault}
        error = failure(download, tmp_path)
        assert "1.0 kB" in str(error)
        assert not list(tmp_path.rglob("m.onnx"))


def test_nothing_is_downloaded_offline(hub: Hub, tmp_path: Path) -> None:
    error = failure(with_data(hub), tmp_path, offline=True)
    assert "epcontext fetch" in error.hint
    assert not hub.requests
    folder, _ = run(with_data(hub), tmp_path)
    assert run(with_data(hub), tmp_path, offline=True) == (folder, [])


def test_builds_at_the_same_time_download_once(hub: Hub, tmp_path: Path) -> None:
    errors = list[BaseException]()

    def build() -> None:
        try:
            run(with_data(hub), tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(hub.downloads) == ["m.onnx", "m.onnx_data"]


def test_a_damaged_file_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    folder, _ = run(with_data(hub), tmp_path)
    (folder / "m.onnx").write_bytes(bytes(len(MODEL)))
    hub.requests.clear()
    run(with_data(hub), tmp_path)
    assert (folder / "m.onnx").read_bytes() == MODEL
    assert sorted(hub.downloads) == ["m.onnx", "m.onnx_data"]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")
def test_a_folder_that_others_can_write_to_is_not_used(hub: Hub, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BuildError, match="chmod"):
        run(with_data(hub), shared)
    assert not hub.requests

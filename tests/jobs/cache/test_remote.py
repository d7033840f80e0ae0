from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.files import FileRecord, record_files
from hatch_epcontext.jobs.artifact import Artifact, Record
from hatch_epcontext.jobs.cache.envelope import envelope_around
from hatch_epcontext.jobs.cache.remote import Remote
from hatch_epcontext.jobs.cache.signing import new_keys
from hatch_epcontext.serialize import to_json
from tests.conftest import any_record, make_record
from tests.remotes import (
    S3_KEY,
    S3_SECRET,
    WebServer,
    make_bucket,
    s3_server,
    use_s3,
    web_server,
)

KEY = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with web_server(tmp_path / "served") as running:
        yield running


@pytest.fixture(params=["s3", "http", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty remote of each kind."""
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        use_s3(server, monkeypatch)
        return f"s3://{make_bucket(server)}/team"
    if request.param == "http":
        return str(request.getfixturevalue("server").url)
    return folder_url(tmp_path / "remote")


def folder_url(folder: Path) -> str:
    return f"file://{'' if folder.as_posix().startswith('/') else '/'}{folder.as_posix()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a remote that the test can change."""
    return tmp_path / "remote"


@pytest.fixture
def make(folder: Path, warnings: list[str]) -> Callable[[], Remote]:
    """A build's view of the remote in `folder`, which the build may write."""
    return lambda: Remote(folder_url(folder), warnings.append, can_write=True)


def test_an_artifact_that_one_build_sends_is_fetched_by_another(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (artifact.folder / "parts").mkdir()
    (artifact.folder / "parts" / "empty.bin").touch()
    # More than one piece.
    (artifact.folder / "parts" / "large.bin").write_bytes(bytes(range(256)) * 20_000)
    (artifact.folder / "parts" / "larger.bin").write_bytes(bytes(range(256)) * 70_000)
    record = make_record(record_files(artifact.folder))
    first, second = (Remote(url, warnings.append, can_write=can) for can in (True, False))
    assert not second.has(KEY, any_record)
    assert second.fetch(KEY, tmp_path / "missing", any_record) is None
    first.send(KEY, artifact.folder, record, any_record)
    assert second.has(KEY, any_record)
    assert not second.has(OTHER, any_record)
    assert second.fetch(KEY, tmp_path / "fetched", any_record) == record
    assert record_files(tmp_path / "fetched") == record.files
    assert not (tmp_path / "missing").exists()
    assert not warnings


def test_documents_are_written_again_and_read(url: str, warnings: list[str]) -> None:
    remote = Remote(url, warnings.append, can_write=True)
    assert remote.read("latest/x") is None
    remote.write("latest/x", "old\n")
    remote.write("latest/x", "newer: ü\n")
    assert Remote(url, warnings.append).read("latest/x") == "newer: ü\n"
    assert not warnings


def test_a_build_writes_only_when_it_may(
    folder: Path, artifact: Artifact, warnings: list[str]
) -> None:
    remote = Remote(folder_url(folder), warnings.append)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    remote.write("latest/x", "text")
    assert not remote.can_write
    assert not folder.exists()
    assert not warnings


def test_files_that_the_remote_has_are_not_sent_again(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    remote = Remote(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    server.requests.clear()
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    remote.send(OTHER, artifact.folder, artifact.record, any_record)
    sent = [path for method, path in server.requests if method == "PUT"]
    assert sent == [f"/cache/v4/entries/cd/{OTHER}.json"]
    assert not warnings


def test_an_entry_is_sent_after_its_files(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    Remote(server.url, warnings.append, can_write=True).send(
        KEY, artifact.folder, artifact.record, any_record
    )
    sent = [path for method, path in server.requests if method == "PUT"]
    assert sent[-1].startswith("/cache/v4/entries/")
    assert {path.split("/")[3] for path in sent[:-1]} == {"blobs"}


def test_asking_for_an_artifact_downloads_none_of_its_files(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    remote = Remote(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    server.requests.clear()
    assert remote.has(KEY, any_record)
    assert server.requests == [("GET", f"/cache/v4/entries/ab/{KEY}.json")]


def blob(folder: Path, file: FileRecord) -> Path:
    return folder / "v4" / "blobs" / file.sha256[:2] / file.sha256


def entry(folder: Path, fingerprint: str = KEY) -> Path:
    return folder / "v4" / "entries" / fingerprint[:2] / f"{fingerprint}.json"


@pytest.mark.parametrize("harm", ["changed", "shorter", "missing"])
def test_a_damaged_file_is_a_miss_and_is_sent_again(
    make: Callable[[], Remote],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    harm: str,
) -> None:
    make().send(KEY, artifact.folder, artifact.record, any_record)
    damaged = blob(folder, artifact.record.files["a_ctx_qnn.bin"])
    content = damaged.read_bytes()
    if harm == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(content[:-4] if harm == "shorter" else content[:-4] + b"BLOB")
    build = make()
    assert build.fetch(KEY, tmp_path / "fetched", any_record) is None
    assert not (tmp_path / "fetched").exists()
    (warning,) = warnings
    assert f"the artifact {KEY[:12]} in the shared cache" in warning
    assert "is damaged (its file a_ctx_qnn.bin " in warning
    build.send(KEY, artifact.folder, artifact.record, any_record)
    assert make().fetch(KEY, tmp_path / "fetched", any_record) == artifact.record
    assert len(warnings) == 1


def test_an_incomplete_artifact_is_sent_again_by_a_build_that_has_it(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (artifact.folder / "empty.bin").touch()
    record = make_record(record_files(artifact.folder))
    # As after a store has removed a file by its age: an entry, and only some of its files.
    documents = Remote(url, warnings.append, can_write=True)
    documents.write(f"entries/ab/{KEY}.json", to_json(record))
    Remote(url, warnings.append, can_write=True).send(KEY, artifact.folder, record, any_record)
    assert Remote(url, warnings.append).fetch(KEY, tmp_path / "fetched", any_record) == record
    assert not warnings


def test_a_file_that_was_not_sent_to_its_end_is_sent_again_by_a_build_that_has_it(
    make: Callable[[], Remote],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
) -> None:
    make().send(KEY, artifact.folder, artifact.record, any_record)
    cut = blob(folder, artifact.record.files["a_ctx_qnn.bin"])
    cut.write_bytes(cut.read_bytes()[:10])
    make().send(KEY, artifact.folder, artifact.record, any_record)
    assert make().fetch(KEY, tmp_path / "fetched", any_record) == artifact.record
    assert not warnings


def test_a_document_that_is_too_large_to_be_read_is_not_written(
    make: Callable[[], Remote], folder: Path, warnings: list[str]
) -> None:
    remote = make()
    remote.write("latest/x", "x" * (5 << 20))
    remote.write("latest/y", "y")
    assert [path.name for path in (folder / "v4" / "latest").iterdir()] == ["y"]
    (warning,) = warnings
    assert "does not get a document of 5.2 MB" in warning


def test_an_incomplete_artifact_is_replaced_by_one_with_other_files(
    make: Callable[[], Remote],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
) -> None:
    make().send(KEY, artifact.folder, artifact.record, any_record)
    first = artifact.record.files["a_ctx_qnn.bin"]
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"compiled on another machine")
    other = make_record(record_files(artifact.folder))
    make().send(KEY, artifact.folder, other, any_record)
    assert make().fetch(KEY, tmp_path / "first", any_record) == artifact.record
    blob(folder, first).unlink()
    make().send(KEY, artifact.folder, other, any_record)
    assert make().fetch(KEY, tmp_path / "second", any_record) == other
    assert not warnings


def test_a_longer_file_of_a_server_is_not_downloaded_to_its_end(
    server: WebServer, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    remote = Remote(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    sent = blob(server.folder / "cache", artifact.record.files["a_ctx_qnn.bin"])
    with sent.open("r+b") as file:
        file.truncate(1 << 30)
    assert remote.fetch(KEY, tmp_path / "fetched", any_record) is None
    assert "is larger than its record says" in warnings[0]


def test_the_record_of_another_artifact_is_a_miss(
    make: Callable[[], Remote],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
) -> None:
    make().send(KEY, artifact.folder, artifact.record, any_record)
    entry(folder, OTHER).parent.mkdir(parents=True)
    shutil.copyfile(entry(folder), entry(folder, OTHER))
    assert make().fetch(OTHER, tmp_path / "fetched", any_record) is None
    assert "is damaged (it belongs to something else)" in warnings[0]
    # Not even where its name was changed.
    text = entry(folder).read_text(encoding="utf-8").replace(f"ab/{KEY}", f"cd/{OTHER}")
    entry(folder, OTHER).write_text(text, encoding="utf-8")
    assert not make().has(OTHER, any_record)
    assert "is damaged (its text was changed)" in warnings[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not a document of this cache"),
        ("<html>Please log in</html>", "it is not a document of this cache"),
        ("\ufeff[]", "it is not a document of this cache"),
        ("[" * 100_000, "it is not a document of this cache"),
        ('{"name": "x", "text": ' + "9" * 100_000 + "}", "it is not a document of this cache"),
        (
            '{"format": 2, "name": "x", "text": "", "sha256": ""}',
            "it has the format of another version",
        ),
        ('{"name": "x", "text": 3, "sha256": ""}', "its text was changed"),
        ('{"name": "\\ud800", "text": "", "sha256": ""}', "it is not a document of this cache"),
        ('{"format": 1, "name": "x", "text": "", "sha256": ""}', "its text was changed"),
    ],
)
def test_an_entry_that_is_none_is_a_miss(
    make: Callable[[], Remote], folder: Path, warnings: list[str], text: str, reason: str
) -> None:
    entry(folder).parent.mkdir(parents=True)
    entry(folder).write_text(text, encoding="utf-8")
    assert not make().has(KEY, any_record)
    assert reason in warnings[0]


def seal(record: Record, folder: Path) -> None:
    """Write an entry with a valid checksum for ``record``, whatever it says."""
    document = envelope_around(f"entries/ab/{KEY}.json", to_json(record))
    entry(folder).parent.mkdir(parents=True, exist_ok=True)
    entry(folder).write_text(document, encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.bin",
        "/tmp/evil.bin",
        "a/../../evil.bin",
        "..\\evil.bin",
        "C:evil.bin",
        "C:/evil.bin",
        "a//evil.bin",
        "a/./evil.bin",
        "evil.bin:stream",
        "evil.bin.",
        "",
        "a\n",
        "con",
        "parts/NUL.bin",
        "\udcff.bin",
    ],
)
def test_a_record_that_names_files_elsewhere_is_a_miss(
    make: Callable[[], Remote],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    name: str,
) -> None:
    make().send(KEY, artifact.folder, artifact.record, any_record)
    file = artifact.record.files["a_ctx_qnn.bin"]
    seal(dataclasses.replace(artifact.record, files={**artifact.record.files, name: file}), folder)
    before = sorted(tmp_path.rglob("*"))
    assert make().fetch(KEY, tmp_path / "fetched", any_record) is None
    assert "has a file outside of the artifact" in warnings[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a_ctx.onnx": FileRecord(7, "x"), "A_CTX.onnx": FileRecord(7, "x")}, "invalid size or h"),
        (
            {"a_ctx.onnx": FileRecord(7, KEY), "A_CTX.onnx": FileRecord(7, KEY)},
            "two files of one name",
        ),
        ({"a_ctx.onnx": FileRecord(7, "../../secret")}, "invalid size or hash"),
        ({"a_ctx.onnx": FileRecord(-7, KEY)}, "invalid size or hash"),
        ({"other.onnx": FileRecord(7, KEY)}, "a model without a file"),
    ],
)
def test_a_record_that_no_build_writes_is_a_miss(
    make: Callable[[], Remote],
    folder: Path,
    warnings: list[str],
    files: dict[str, FileRecord],
    reason: str,
) -> None:
    seal(make_record(files), folder)
    assert not make().has(KEY, any_record)
    assert reason in warnings[0]


def test_many_threads_and_builds_send_and_fetch_at_once(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    remotes = [Remote(url, warnings.append, can_write=True) for _ in range(2)]

    def work(index: int) -> Record | None:
        remote = remotes[index % 2]
        remote.send(KEY, artifact.folder, artifact.record, any_record)
        return remote.fetch(KEY, tmp_path / f"fetched-{index}", any_record)

    with ThreadPoolExecutor(4) as pool:
        assert set(map(to_json, pool.map(work, range(8)))) == {to_json(artifact.record)}
    assert not warnings


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_unreachable_remote_is_one_warning(
    scheme: str,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    use_s3(address, monkeypatch)
    url = "s3://bucket/team" if scheme == "s3" else f"{address}/cache"
    remote = Remote(url, warnings.append, can_write=True)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda key: remote.has(key, any_record), [KEY, OTHER] * 2))
    assert remote.fetch(KEY, tmp_path / "fetched", any_record) is None
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    remote.write("latest/x", "text")
    (warning,) = warnings
    assert warning.startswith(f"the shared cache {url} cannot be reached (")
    assert warning.endswith("this build goes on without it")
    # aiohttp's, which would only confuse.
    assert "ssl:" not in warning


def test_a_remote_that_does_not_answer_is_asked_once(warnings: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        remote = Remote(url, warnings.append, timeout=0.5)
        assert remote.read("latest/x") is None
        assert remote.read("latest/y") is None
    (warning,) = warnings
    assert "kept the build waiting for too long (0.5 s without a byte in all" in warning


def test_a_remote_that_answers_byte_by_byte_is_not_waited_for(warnings: list[str]) -> None:
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b"x")

    # Importing it does not count.
    importlib.import_module("fsspec.implementations.http")
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/cache"
        assert Remote(url, warnings.append, timeout=1).read("latest/x") is None
        ended.set()
        thread.join()
    (warning,) = warnings
    assert "kept the build waiting for too long (1 s without a byte in all" in warning


def slow_server(seconds: float, body: bytes, pieces: int) -> Callable[[socket.socket], None]:
    """A server that answers each request after so many seconds, and takes as long for each piece."""

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n"
                    connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
                    for index in range(pieces):
                        time.sleep(seconds)
                        size = len(body) // pieces
                        connection.sendall(body[index * size : (index + 1) * size])

    return serve


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/cache"
        server.shutdown(socket.SHUT_RDWR)


def test_a_slow_remote_is_waited_for_only_so_long_in_all(warnings: list[str]) -> None:
    importlib.import_module("fsspec.implementations.http")
    with serving(slow_server(0.3, b"not a document", 1)) as url:
        remote = Remote(url, warnings.append, timeout=1)
        started = time.monotonic()
        for index in range(20):
            assert remote.read(f"latest/{index}") is None
        assert time.monotonic() - started < 3
    assert "kept the build waiting for too long" in warnings[-1]
    assert remote.trouble is not None
    assert url in remote.trouble


def test_a_transfer_that_progresses_is_waited_for(
    artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    importlib.import_module("fsspec.implementations.http")
    content = bytes(400_000)
    with serving(slow_server(0.2, content, 10)) as url:
        remote = Remote(url, warnings.append, timeout=1)
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        remote._download("a.bin", record, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == content


def test_a_missing_bucket_is_not_taken_for_an_empty_one(
    s3: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    assert not Remote("s3://a-bucket-that-nobody-made/team", warnings.append).has(KEY, any_record)
    assert "cannot be reached (The specified bucket does not exist)" in warnings[0]


def test_a_server_that_takes_no_files_is_one_warning_and_still_read(
    server: WebServer, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    Remote(server.url, warnings.append, can_write=True).send(
        KEY, artifact.folder, artifact.record, any_record
    )
    server.takes_files = False
    remote = Remote(server.url, warnings.append, can_write=True)
    remote.send(OTHER, artifact.folder, artifact.record, any_record)
    remote.write("latest/x", "text")
    (warning,) = warnings
    assert "cannot be written (" in warning
    assert not remote.can_write
    assert remote.fetch(KEY, tmp_path / "fetched", any_record) == artifact.record


def test_a_folder_that_cannot_be_written_is_one_warning(
    artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    remote = Remote(folder_url(tmp_path / "file" / "cache"), warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    remote.write("latest/x", "text")
    assert len(warnings) == 1


def test_passwords_come_from_the_users_files_and_are_never_printed(
    server: WebServer,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.password = "the-password-of-the-test"
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    netrc.write_text("machine 127.0.0.1 login builder password wrong\n", encoding="utf-8")
    denied = Remote(server.url, warnings.append, can_write=True)
    assert not denied.has(KEY, any_record)
    assert not denied.has(OTHER, any_record)
    denied.send(KEY, artifact.folder, artifact.record, any_record)
    assert "does not allow reading (" in warnings[0]
    assert "cannot be written (" in warnings[1]
    assert len(warnings) == 2
    assert "wrong" not in "".join(warnings)
    netrc.write_text(
        f"machine 127.0.0.1 login builder password {server.password}\n", encoding="utf-8"
    )
    allowed = Remote(server.url, warnings.append, can_write=True)
    allowed.send(KEY, artifact.folder, artifact.record, any_record)
    assert allowed.fetch(KEY, tmp_path / "fetched", any_record) == artifact.record
    assert len(warnings) == 2
    assert server.password not in "".join(warnings)


def test_passwords_go_to_the_host_of_the_url_and_to_no_other(
    server: WebServer,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "netrc").write_text("default login builder password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with web_server(tmp_path / "elsewhere") as other:
        Remote(other.url, warnings.append, can_write=True).send(
            KEY, artifact.folder, artifact.record, any_record
        )
        assert set(other.authorizations) == {"Basic YnVpbGRlcjpzZWNyZXQ="}
        other.authorizations.clear()
        server.elsewhere = other.url.replace("127.0.0.1", "localhost")
        redirected = Remote(server.url, warnings.append)
        assert redirected.fetch(KEY, tmp_path / "fetched", any_record) == artifact.record
        assert set(server.authorizations) == {"Basic YnVpbGRlcjpzZWNyZXQ="}
        assert set(other.authorizations) == {None}
    assert warnings == []


def test_requests_go_through_the_proxy_of_the_environment(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server(tmp_path / "proxy") as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/cache"))
        Remote("http://cache.invalid/team", warnings.append).has(KEY, any_record)
        assert proxy.requests[0][1].startswith("http://cache.invalid/team/")


def test_warnings_contain_no_secret_of_the_environment(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The backend's message has the whole address.
    address = f"http://127.0.0.1:{closed_port()}/{S3_KEY}?sig={S3_SECRET}"
    use_s3(address, monkeypatch)
    assert not Remote("s3://bucket/team", warnings.append).has(KEY, any_record)
    assert "cannot be reached" in warnings[0]
    assert S3_SECRET not in warnings[0]
    assert S3_KEY not in warnings[0]


def test_an_interrupted_build_waits_for_no_request(warnings: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        remote = Remote(url, warnings.append, timeout=3600)
        results: list[str | None] = ["not yet"]

        def read() -> None:
            results[0] = remote.read("latest/x")

        thread = threading.Thread(target=read)
        thread.start()
        silent.accept()[0].close()
        remote.stop()
        thread.join()
    assert results == [None]
    assert not remote.has(KEY, any_record)


_WITHOUT_BACKEND = """
import json, sys
sys.modules[sys.argv[1]] = None
from hatch_epcontext.jobs.cache.remote import Remote
warnings = []
remote = Remote(sys.argv[2], warnings.append, can_write=True)
found = remote.has("ab" * 32, lambda record: None)
print(json.dumps([remote.read("a"), found, remote.write("a", "b"), warnings]))
"""


@pytest.mark.parametrize(
    ("package", "url", "requirement"),
    [
        ("s3fs", "s3://bucket/team", "s3fs>="),
        ("gcsfs", "gs://bucket/team", "gcsfs>="),
        ("adlfs", "az://container/team", "adlfs>="),
        ("adlfs", "abfs://container@account.dfs.core.windows.net/team", "adlfs>="),
        ("aiohttp", "https://example.invalid/team", "fsspec[http]>="),
        ("fsspec", "file:///team", "fsspec>="),
    ],
)
def test_a_missing_backend_is_one_warning_with_the_command_that_installs_it(
    package: str, url: str, requirement: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BACKEND, package, url],
        capture_output=True,
        text=True,
        check=True,
    )
    result: list[Any] = json.loads(done.stdout)
    assert result[:3] == [None, False, None]
    (warning,) = result[3]
    assert warning.startswith(f"the shared cache {url} needs a package (run: ")
    assert f'-m pip install "{requirement}' in warning
    assert not done.stderr


def test_what_a_trusted_key_signed_is_used(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (old, old_public), (key, public) = new_keys(), new_keys()
    for name, private in ((KEY, old), (OTHER, key)):
        writer = Remote(
            url, warnings.append, can_write=True, trust=(old_public, public), key=private
        )
        writer.send(name, artifact.folder, artifact.record, any_record)
    reader = Remote(url, warnings.append, trust=(old_public, public))
    assert reader.fetch(KEY, tmp_path / "first", any_record) == artifact.record
    assert reader.fetch(OTHER, tmp_path / "second", any_record) == artifact.record
    # A key that is not trusted any more.
    assert not Remote(url, warnings.append, trust=(public,)).has(KEY, any_record)
    assert "not signed by any of build.cache-keys" in warnings[0]


@pytest.mark.parametrize("signed", [True, False])
def test_what_no_trusted_key_signed_is_not_used_and_is_written_again(
    folder: Path, artifact: Artifact, tmp_path: Path, warnings: list[str], *, signed: bool
) -> None:
    (stranger, _), (key, public) = new_keys(), new_keys()
    private = stranger if signed else None
    writer = Remote(folder_url(folder), warnings.append, can_write=True, key=private)
    writer.send(KEY, artifact.folder, artifact.record, any_record)
    writer.write("latest/x", "forged")
    # Who trusts everybody reads it.
    assert Remote(folder_url(folder), warnings.append).read("latest/x") == "forged"
    reader = Remote(folder_url(folder), warnings.append, trust=(public,))
    assert not reader.has(KEY, any_record)
    assert reader.fetch(KEY, tmp_path / "fetched", any_record) is None
    assert reader.read("latest/x") is None
    (warning,) = warnings
    reason = "a document is not signed" + (" by any of build.cache-keys" if signed else "")
    assert f"has documents that are not trusted ({reason})" in warning
    owner = Remote(folder_url(folder), print, can_write=True, trust=(public,), key=key)
    owner.send(KEY, artifact.folder, artifact.record, any_record)
    owner.share("latest/x", "right")
    again = Remote(folder_url(folder), warnings.append, trust=(public,))
    assert again.fetch(KEY, tmp_path / "fetched", any_record) == artifact.record
    assert again.read("latest/x") == "right"
    assert len(warnings) == 1


@pytest.mark.parametrize("harm", ["text", "name", "signature", "no text", "number"])
def test_a_signature_is_for_one_name_and_one_text(
    folder: Path, warnings: list[str], harm: str
) -> None:
    key, public = new_keys()
    remote = Remote(folder_url(folder), warnings.append, can_write=True, trust=(public,), key=key)
    remote.write("latest/x", "first")
    remote.write("latest/y", "second")
    x, y = (json.loads((folder / "v4" / "latest" / n).read_text("utf-8")) for n in "xy")
    forged = json.loads(envelope_around("latest/x", "forged", x["signature"]))
    document: dict[str, Any] = {
        "text": forged,
        "name": json.loads(envelope_around("latest/x", "second", y["signature"])),
        "signature": {**x, "signature": x["signature"][:-8] + "AAAAAAA="},
        "no text": {**x, "signature": "!"},
        "number": {**x, "signature": 5},
    }[harm]
    (folder / "v4" / "latest" / "x").write_text(json.dumps(document), encoding="utf-8")
    assert remote.read("latest/x") is None
    assert "not signed by any of build.cache-keys" in warnings[0]
    assert remote.read("latest/y") == "second"


def test_a_build_whose_key_nobody_trusts_writes_nothing(
    folder: Path, artifact: Artifact, warnings: list[str]
) -> None:
    (key, _), (_, public) = new_keys(), new_keys()
    remote = Remote(folder_url(folder), warnings.append, can_write=True, trust=(public,), key=key)
    remote.send(KEY, artifact.folder, artifact.record, any_record)
    remote.write("latest/x", "text")
    assert not folder.exists()
    (warning,) = warnings
    assert "HATCH_EPCONTEXT_CACHE_KEY belongs to none of build.cache-keys" in warning
    assert key not in warning


def test_without_the_package_for_signatures_nothing_is_trusted() -> None:
    script = _WITHOUT_BACKEND.replace("can_write=True", "can_write=True, trust=()")
    command = [sys.executable, "-c", script, "cryptography", "file:///team"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[:3] == [None, False, None]

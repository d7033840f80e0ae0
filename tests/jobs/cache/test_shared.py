from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.files import FileRecord, record_file, record_files
from hatch_epcontext.jobs.artifact import Artifact, Record
from hatch_epcontext.jobs.cache import shared, signing
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.shared import SharedCache
from hatch_epcontext.jobs.cache.signing import Statement, new_keys
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.serialize import to_json
from tests.conftest import make_record
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

PRIVATE, PUBLIC = new_keys()


def anything(record: Record) -> bool:
    """Whether an artifact fits, where it always does."""
    return True


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
def make(folder: Path, warnings: list[str]) -> Callable[[], SharedCache]:
    """A build's view of the remote in `folder`, which the build may write."""
    return lambda: SharedCache(folder_url(folder), warnings.append, can_write=True)


@pytest.fixture
def signed(folder: Path, warnings: list[str]) -> SharedCache:
    """The remote in `folder`, for a build that signs what it writes and trusts only its own key."""
    return SharedCache(
        folder_url(folder), warnings.append, can_write=True, trust=(PUBLIC,), key=PRIVATE
    )


def test_an_artifact_that_one_build_sends_is_fetched_by_another(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (artifact.folder / "parts").mkdir()
    (artifact.folder / "parts" / "empty.bin").touch()
    # More than one piece.
    (artifact.folder / "parts" / "large.bin").write_bytes(bytes(range(256)) * 20_000)
    (artifact.folder / "parts" / "larger.bin").write_bytes(bytes(range(256)) * 70_000)
    record = make_record(record_files(artifact.folder))
    first, second = (SharedCache(url, warnings.append, can_write=can) for can in (True, False))
    assert not second.has(KEY)
    assert second.fetch(KEY, tmp_path / "missing", anything) is None
    first.send(KEY, artifact.folder, record)
    assert second.has(KEY)
    assert not second.has(OTHER)
    assert second.fetch(KEY, tmp_path / "fetched", anything) == record
    assert record_files(tmp_path / "fetched") == record.files
    assert not (tmp_path / "missing").exists()
    assert not warnings


def test_a_file_is_sent_once_and_fetched_by_its_content(url: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 70_000
    (tmp_path / "file").write_bytes(content)
    sent = shared.Transport(url).send_file(tmp_path / "file")
    assert (
        sent == record_file(tmp_path / "file") == shared.Transport(url).send_file(tmp_path / "file")
    )
    shared.Transport(url).fetch_file(sent.sha256, sent.size, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content
    with pytest.raises(DamagedError, match="is missing"):
        shared.Transport(url).fetch_file(OTHER, 3, tmp_path / "other")


def test_documents_are_written_again_and_read(url: str, warnings: list[str]) -> None:
    remote = SharedCache(url, warnings.append, can_write=True)
    assert remote.read("latest", "x") is None
    remote.write("latest", "x", "old\n")
    remote.write("latest", "x", "newer: ü\n")
    assert SharedCache(url, warnings.append).read("latest", "x") == "newer: ü\n"
    assert not warnings


def test_a_build_writes_only_when_it_may(
    folder: Path, artifact: Artifact, warnings: list[str]
) -> None:
    remote = SharedCache(folder_url(folder), warnings.append)
    remote.send(KEY, artifact.folder, artifact.record)
    remote.write("latest", "x", "text")
    assert not remote.can_write
    assert not folder.exists()
    assert not warnings


def test_files_that_the_remote_has_are_not_sent_again(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    remote = SharedCache(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record)
    server.requests.clear()
    remote.send(KEY, artifact.folder, artifact.record)
    remote.send(OTHER, artifact.folder, artifact.record)
    sent = [path for method, path in server.requests if method == "PUT"]
    assert sent == [f"/cache/v6/artifact/{OTHER}.json"]
    assert not warnings


def test_a_statement_is_sent_after_its_archive(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    SharedCache(server.url, warnings.append, can_write=True).send(
        KEY, artifact.folder, artifact.record
    )
    sent = [path for method, path in server.requests if method == "PUT"]
    assert [path.split("/")[3] for path in sent] == ["blobs", "artifact"]


def test_asking_for_an_artifact_downloads_none_of_its_files(
    server: WebServer, artifact: Artifact, warnings: list[str]
) -> None:
    remote = SharedCache(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record)
    server.requests.clear()
    assert remote.has(KEY)
    assert server.requests == [("GET", f"/cache/v6/artifact/{KEY}.json")]


def blob(folder: Path) -> Path:
    """The only archive."""
    (found,) = (folder / "v6" / "blobs").iterdir()
    return found


def statement(folder: Path, key: str = KEY) -> Path:
    return folder / "v6" / "artifact" / f"{key}.json"


@pytest.mark.parametrize("harm", ["changed", "shorter", "missing"])
def test_a_damaged_file_is_a_miss_and_is_sent_again(
    make: Callable[[], SharedCache],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    harm: str,
) -> None:
    make().send(KEY, artifact.folder, artifact.record)
    damaged = blob(folder)
    content = damaged.read_bytes()
    if harm == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(content[:-4] if harm == "shorter" else content[:-4] + b"BLOB")
    build = make()
    assert build.fetch(KEY, tmp_path / "fetched", anything) is None
    assert not (tmp_path / "fetched").exists()
    (warning,) = warnings
    assert "has something damaged or forged, which is not used: " in warning
    assert damaged.name in warning
    build.send(KEY, artifact.folder, artifact.record)
    assert make().fetch(KEY, tmp_path / "fetched", anything) == artifact.record
    assert len(warnings) == 1


def test_a_file_that_was_not_sent_to_its_end_is_sent_again_by_a_build_that_has_it(
    make: Callable[[], SharedCache],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
) -> None:
    make().send(KEY, artifact.folder, artifact.record)
    cut = blob(folder)
    cut.write_bytes(cut.read_bytes()[:10])
    make().send(KEY, artifact.folder, artifact.record)
    assert make().fetch(KEY, tmp_path / "fetched", anything) == artifact.record
    assert not warnings


def test_a_document_that_is_too_large_to_be_read_is_not_written(
    make: Callable[[], SharedCache], folder: Path, warnings: list[str]
) -> None:
    remote = make()
    remote.write("latest", "x", "x" * (5 << 20))
    remote.write("latest", "y", "y")
    assert [path.name for path in (folder / "v6" / "latest").iterdir()] == ["y.json"]
    (warning,) = warnings
    assert "no statement of 5.2 MB" in warning


def test_an_incomplete_artifact_is_replaced_by_one_with_other_files(
    make: Callable[[], SharedCache],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
) -> None:
    make().send(KEY, artifact.folder, artifact.record)
    first = blob(folder)
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"compiled on another machine")
    other = make_record(record_files(artifact.folder))
    make().send(KEY, artifact.folder, other)
    assert make().fetch(KEY, tmp_path / "first", anything) == artifact.record
    # As a store does that removes files by their age.
    first.unlink()
    make().send(KEY, artifact.folder, other)
    assert make().fetch(KEY, tmp_path / "second", anything) == other
    assert not warnings


def test_a_longer_file_of_a_server_is_not_downloaded_to_its_end(
    server: WebServer, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    remote = SharedCache(server.url, warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record)
    sent = blob(server.folder / "cache")
    with sent.open("r+b") as file:
        file.truncate(1 << 30)
    assert remote.fetch(KEY, tmp_path / "fetched", anything) is None
    assert "is larger than its record" in warnings[0]


def lie(folder: Path, place: Path, **changes: object) -> None:
    """Sign a statement with right keys in which something is changed, and put it at ``place``."""
    document = json.loads(statement(folder).read_text(encoding="utf-8"))
    fields = {**json.loads(document["statement"]), **changes}
    if isinstance(fields["archive"], dict):
        fields["archive"] = FileRecord(**fields["archive"])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(signing.signed(Statement(**fields), PRIVATE))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "validation"}, "a statement has another kind or name"),
        ({"kind": "other"}, "a statement cannot be read"),
        ({"name": OTHER}, "a statement has another kind or name"),
        ({"archive": None}, "a statement is not complete"),
        ({"format": 2}, "a statement has the format of another version"),
        ({"archive": {"size": 20, "sha256": OTHER}}, f"{OTHER} is missing"),
        ({"archive": {"size": 20, "sha256": "../../../../secret"}}, "a statement is not complete"),
        ({"archive": {"size": -1, "sha256": OTHER}}, "a statement is not complete"),
    ],
)
def test_a_valid_signature_of_something_else_is_a_miss(
    signed: SharedCache,
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    changes: dict[str, object],
    reason: str,
) -> None:
    signed.send(KEY, artifact.folder, artifact.record)
    lie(folder, statement(folder), **changes)
    before = sorted(tmp_path.rglob("*"))
    assert signed.fetch(KEY, tmp_path / "fetched", anything) is None
    assert reason in warnings[0]
    assert sorted(tmp_path.rglob("*")) == before
    # It is replaced by who has the right one.
    signed.send(KEY, artifact.folder, artifact.record)
    assert signed.fetch(KEY, tmp_path / "again", anything) == artifact.record


def test_a_valid_signature_of_another_artifact_or_recipe_is_a_miss(
    signed: SharedCache, folder: Path, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    signed.send(KEY, artifact.folder, artifact.record)
    shutil.copyfile(statement(folder), statement(folder, OTHER))
    assert signed.fetch(OTHER, tmp_path / "fetched", anything) is None
    assert "which is not used: a statement has another kind or name" in warnings[0]
    # Of another kind with the same name.
    signed.write("latest", KEY, "text")
    shutil.copyfile(folder / "v6" / "latest" / f"{KEY}.json", statement(folder))
    assert not signed.has(KEY)


def test_a_signed_archive_with_a_member_that_its_record_does_not_name_is_a_miss(
    signed: SharedCache, folder: Path, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    signed.send(KEY, artifact.folder, artifact.record)
    with tarfile.open(blob(folder), "a") as archive:
        archive.add(artifact.folder / "a_ctx.onnx", "files/../../evil.onnx")
    record = record_file(blob(folder))
    blob(folder).rename(folder / "v6" / "blobs" / record.sha256)
    lie(folder, statement(folder), archive=dataclasses.asdict(record))
    assert signed.fetch(KEY, tmp_path / "fetched", anything) is None
    assert "its archive has more than its record names" in warnings[0]
    assert not (tmp_path / "fetched").exists()
    assert not list(tmp_path.rglob("evil.onnx"))


def test_a_signed_artifact_that_does_not_fit_is_a_miss(
    signed: SharedCache, folder: Path, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    signed.send(KEY, artifact.folder, artifact.record)
    own = Cache(tmp_path / "own", warnings.append, signed)
    optimized = own.get(
        "artifacts", KEY, Record, tmp_path / "taken", lambda record: record.product == "optimized"
    )
    assert optimized is None
    (warning,) = warnings
    assert warning.endswith(f"the artifact {KEY[:12]} belongs to another job")
    # Nor is it kept.
    assert not Cache(tmp_path / "own", warnings.append).has("artifacts", KEY, Record)
    assert not (tmp_path / "taken").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_in_a_folder_is_missing_and_holds_nobody_up(
    make: Callable[[], SharedCache],
    folder: Path,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    kind: str,
) -> None:
    make().send(KEY, artifact.folder, artifact.record)
    place = blob(folder)
    for path in (place, statement(folder, OTHER)):
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path)
    cache = make()
    assert cache.fetch(KEY, tmp_path / "fetched", anything) is None
    assert not cache.has(OTHER)
    (warning,) = warnings
    assert f"which is not used: {folder_url(folder)}/v6/blobs/{place.name} is missing" in warning
    # It is still asked for others.
    cache.write("latest", "x", "text")
    assert cache.read("latest", "x") == "text"


def test_a_full_disk_of_this_machine_is_not_blamed_on_the_cache(
    make: Callable[[], SharedCache],
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = shared._copy

    def full(source: Path, target: Path, progress: Any) -> None:
        if target.name == "archive":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        copy(source, target, progress)

    make().send(KEY, artifact.folder, artifact.record)
    monkeypatch.setattr(shared, "_copy", full)
    cache = make()
    assert cache.fetch(KEY, tmp_path / "fetched", anything) is None
    assert cache.has(KEY)
    (warning,) = warnings
    assert "what cannot be stored here (No space left on device)" in warning


def test_an_older_statement_of_the_same_name_is_accepted(
    signed: SharedCache, folder: Path, warnings: list[str]
) -> None:
    signed.write("latest", "x", "older")
    file = folder / "v6" / "latest" / "x.json"
    older = file.read_bytes()
    signed.write("latest", "x", "newer")
    file.write_bytes(older)
    assert signed.read("latest", "x") == "older"
    assert not warnings


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>Please log in</html>",
        "\ufeff[]",
        "[" * 100_000,
        '{"statement": ' + "9" * 100_000 + "}",
        '{"statement": 3}',
        '{"statement": "\\ud800"}',
        '{"statement": "\\ud800", "signature": "eA=="}',
        '{"statement": "[]"}',
        '{"statement": "' + "[" * 100_000 + '"}',
    ],
)
def test_a_statement_that_is_none_is_a_miss(
    make: Callable[[], SharedCache], folder: Path, warnings: list[str], text: str
) -> None:
    statement(folder).parent.mkdir(parents=True)
    statement(folder).write_text(text, encoding="utf-8")
    assert not make().has(KEY)
    assert "a statement cannot be read" in warnings[0]


def test_many_threads_and_builds_send_and_fetch_at_once(
    url: str, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    remotes = [SharedCache(url, warnings.append, can_write=True) for _ in range(2)]

    def work(index: int) -> Record | None:
        remote = remotes[index % 2]
        remote.send(KEY, artifact.folder, artifact.record)
        return remote.fetch(KEY, tmp_path / f"fetched-{index}", anything)

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
    remote = SharedCache(url, warnings.append, can_write=True)
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(remote.has, [KEY, OTHER] * 2))
    assert remote.fetch(KEY, tmp_path / "fetched", anything) is None
    remote.send(KEY, artifact.folder, artifact.record)
    remote.write("latest", "x", "text")
    (warning,) = warnings
    assert warning.startswith(f"the shared cache {url} cannot be reached (")
    assert warning.endswith("this build goes on without it")
    # aiohttp's, which would only confuse.
    assert "ssl:" not in warning


def test_a_remote_that_does_not_answer_is_asked_once(warnings: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        remote = SharedCache(url, warnings.append, timeout=0.5)
        assert remote.read("latest", "x") is None
        assert remote.read("latest", "y") is None
    (warning,) = warnings
    assert "kept the build waiting for too long (0.5 s without an answer" in warning


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
        assert SharedCache(url, warnings.append, timeout=1).read("latest", "x") is None
        ended.set()
        thread.join()
    (warning,) = warnings
    assert "kept the build waiting for too long (1 s without an answer" in warning


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
        # Only Linux wakes a waiting `accept` so; elsewhere closing the socket does.
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def test_a_transfer_that_progresses_is_waited_for(
    artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    importlib.import_module("fsspec.implementations.http")
    content = bytes(400_000)
    with serving(slow_server(0.2, content, 10)) as url:
        remote = SharedCache(url, warnings.append, timeout=1)
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        remote.transport.fetch_blob(record, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == content


def test_a_missing_bucket_is_not_taken_for_an_empty_one(
    s3: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    assert not SharedCache("s3://a-bucket-that-nobody-made/team", warnings.append).has(KEY)
    assert "cannot be reached (The specified bucket does not exist)" in warnings[0]


def test_a_server_that_takes_no_files_is_one_warning_and_still_read(
    server: WebServer, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    SharedCache(server.url, warnings.append, can_write=True).send(
        KEY, artifact.folder, artifact.record
    )
    server.takes_files = False
    remote = SharedCache(server.url, warnings.append, can_write=True)
    remote.send(OTHER, artifact.folder, artifact.record)
    remote.write("latest", "x", "text")
    (warning,) = warnings
    assert "cannot be written (" in warning
    assert not remote.can_write
    assert remote.fetch(KEY, tmp_path / "fetched", anything) == artifact.record


def test_a_folder_that_cannot_be_written_is_one_warning(
    artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    remote = SharedCache(folder_url(tmp_path / "file" / "cache"), warnings.append, can_write=True)
    remote.send(KEY, artifact.folder, artifact.record)
    remote.write("latest", "x", "text")
    assert len(warnings) == 1


def test_passwords_of_netrc_are_not_sent_and_a_refusal_is_one_warning(
    server: WebServer,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.password = "the-password-of-the-test"
    (tmp_path / "netrc").write_text("default login builder password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    denied = SharedCache(server.url, warnings.append, can_write=True)
    assert not denied.has(KEY)
    assert not denied.has(OTHER)
    denied.send(KEY, artifact.folder, artifact.record)
    assert "does not allow reading (" in warnings[0]
    assert "cannot be written (" in warnings[1]
    assert len(warnings) == 2
    assert set(server.authorizations) == {None}


def test_requests_go_through_the_proxy_of_the_environment(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server(tmp_path / "proxy") as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/cache"))
        SharedCache("http://cache.invalid/team", warnings.append).has(KEY)
        assert proxy.requests[0][1].startswith("http://cache.invalid/team/")


def test_warnings_contain_no_secret_of_the_environment(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The backend's message has the whole address.
    address = f"http://127.0.0.1:{closed_port()}/{S3_KEY}?sig={S3_SECRET}"
    use_s3(address, monkeypatch)
    assert not SharedCache("s3://bucket/team", warnings.append).has(KEY)
    assert "cannot be reached" in warnings[0]
    assert S3_SECRET not in warnings[0]
    assert S3_KEY not in warnings[0]


def test_an_interrupted_build_waits_for_no_request(warnings: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        remote = SharedCache(url, warnings.append, timeout=3600)
        results: list[str | None] = ["not yet"]

        def read() -> None:
            results[0] = remote.read("latest", "x")

        thread = threading.Thread(target=read)
        thread.start()
        silent.accept()[0].close()
        remote.stop()
        thread.join()
    assert results == [None]
    assert not remote.has(KEY)


_WITHOUT_BACKEND = """
import json, sys
sys.modules[sys.argv[1]] = None
from hatch_epcontext.jobs.cache.shared import SharedCache
warnings = []
remote = SharedCache(sys.argv[2], warnings.append, can_write=True)
found = remote.has("ab" * 32)
print(json.dumps([remote.read("latest", "a"), found, remote.write("latest", "a", "b"), warnings]))
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
        writer = SharedCache(
            url, warnings.append, can_write=True, trust=(old_public, public), key=private
        )
        writer.send(name, artifact.folder, artifact.record)
    reader = SharedCache(url, warnings.append, trust=(old_public, public))
    assert reader.fetch(KEY, tmp_path / "first", anything) == artifact.record
    assert reader.fetch(OTHER, tmp_path / "second", anything) == artifact.record
    # A key that is not trusted any more.
    assert not SharedCache(url, warnings.append, trust=(public,)).has(KEY)
    assert "not signed by any of build.cache-keys" in warnings[0]


@pytest.mark.parametrize("signed", [True, False])
def test_what_no_trusted_key_signed_is_not_used_and_is_written_again(
    folder: Path, artifact: Artifact, tmp_path: Path, warnings: list[str], *, signed: bool
) -> None:
    (stranger, _), (key, public) = new_keys(), new_keys()
    private = stranger if signed else None
    writer = SharedCache(folder_url(folder), warnings.append, can_write=True, key=private)
    writer.send(KEY, artifact.folder, artifact.record)
    writer.write("latest", "x", "forged")
    # Who trusts everybody reads it.
    assert SharedCache(folder_url(folder), warnings.append).read("latest", "x") == "forged"
    reader = SharedCache(folder_url(folder), warnings.append, trust=(public,))
    assert not reader.has(KEY)
    assert reader.fetch(KEY, tmp_path / "fetched", anything) is None
    assert reader.read("latest", "x") is None
    (warning,) = warnings
    reason = "a statement is not signed" + (" by any of build.cache-keys" if signed else "")
    assert f"which is not used: {reason}" in warning
    owner = SharedCache(folder_url(folder), print, can_write=True, trust=(public,), key=key)
    owner.send(KEY, artifact.folder, artifact.record)
    owner.share("latest", "x", "right")
    again = SharedCache(folder_url(folder), warnings.append, trust=(public,))
    assert again.fetch(KEY, tmp_path / "fetched", anything) == artifact.record
    assert again.read("latest", "x") == "right"
    assert len(warnings) == 1


@pytest.mark.parametrize("harm", ["text", "name", "signature", "no text", "number"])
def test_a_signature_is_for_one_name_and_one_text(
    folder: Path, warnings: list[str], harm: str
) -> None:
    key, public = new_keys()
    remote = SharedCache(
        folder_url(folder), warnings.append, can_write=True, trust=(public,), key=key
    )
    remote.write("latest", "x", "first")
    remote.write("latest", "y", "second")
    x, y = (json.loads((folder / "v6" / "latest" / f"{n}.json").read_text("utf-8")) for n in "xy")
    document: dict[str, Any] = {
        "text": {**x, "statement": x["statement"].replace("first", "forged")},
        "name": {**y, "statement": y["statement"].replace('"y"', '"x"')},
        "signature": {**x, "signature": x["signature"][:-8] + "AAAAAAA="},
        "no text": {**x, "signature": "!"},
        "number": {**x, "signature": 5},
    }[harm]
    assert document != x
    (folder / "v6" / "latest" / "x.json").write_text(json.dumps(document), encoding="utf-8")
    assert remote.read("latest", "x") is None
    reason = (
        "a statement cannot be read"
        if harm == "number"
        else "not signed by any of build.cache-keys"
    )
    assert reason in warnings[0]
    assert remote.read("latest", "y") == "second"


def test_a_build_whose_key_nobody_trusts_writes_nothing(
    folder: Path, artifact: Artifact, warnings: list[str]
) -> None:
    (key, _), (_, public) = new_keys(), new_keys()
    remote = SharedCache(
        folder_url(folder), warnings.append, can_write=True, trust=(public,), key=key
    )
    remote.send(KEY, artifact.folder, artifact.record)
    remote.write("latest", "x", "text")
    assert not folder.exists()
    (warning,) = warnings
    assert "HATCH_EPCONTEXT_CACHE_KEY belongs to none of build.cache-keys" in warning
    assert key not in warning


def test_without_the_package_for_signatures_nothing_is_trusted() -> None:
    script = _WITHOUT_BACKEND.replace("can_write=True", "can_write=True, trust=()")
    command = [sys.executable, "-c", script, "cryptography", "file:///team"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[:3] == [None, False, None]

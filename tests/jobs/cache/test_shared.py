from __future__ import annotations

import contextlib
import importlib
import json
import os
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

from hatch_epcontext.config.settings import BuildSettings
from hatch_epcontext.files import record_file, record_files
from hatch_epcontext.jobs.artifact import Artifact, Record
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.shared import SharedCache, Transport
from hatch_epcontext.jobs.cache.signing import new_keys, sign, verify
from hatch_epcontext.jobs.cache.store import DamagedError
from hatch_epcontext.serialize import to_json
from tests.conftest import make_record
from tests.remotes import (
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a shared cache."""
    return tmp_path / "shared"


@pytest.fixture(params=["s3", "http", "file"])
def url(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty shared cache of each kind."""
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        use_s3(server, monkeypatch)
        return f"s3://{make_bucket(server)}/team"
    return (
        str(request.getfixturevalue("server").url) if request.param == "http" else folder.as_uri()
    )


Open = Callable[..., SharedCache]


@pytest.fixture
def shared(folder: Path, warnings: list[str]) -> Open:
    """Opens the shared cache in `folder`, or at a URL, for a build that may write."""

    def make(url: str = "", timeout: float = 20, **settings: Any) -> SharedCache:
        keys = {"cache_keys": (PUBLIC,), "cache_key": PRIVATE, "cache_write": True}
        build = BuildSettings(**{**keys, **settings}, cache=url or folder.as_uri())
        return SharedCache(build, warnings.append, timeout)

    return make


def statement(folder: Path, kind: str = "artifacts", key: str = KEY) -> Path:
    return folder / LAYOUT / kind / key


def blob(folder: Path, artifact: Artifact, name: str = "a_ctx_qnn.bin") -> Path:
    return folder / LAYOUT / "blobs" / artifact.record.files[name].sha256


def fetch(cache: SharedCache, folder: Path, key: str = KEY) -> Record | None:
    return cache.get("artifacts", key, Record, folder / "fetched")


def test_an_artifact_that_one_build_sends_is_fetched_by_another(
    url: str, shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (artifact.folder / "parts").mkdir()
    (artifact.folder / "parts" / "empty.bin").touch()
    # More than one piece.
    (artifact.folder / "parts" / "ü.bin").write_bytes(bytes(range(256)) * 70_000)
    record = make_record(record_files(artifact.folder))
    reader = shared(url, cache_key=None, cache_write=False)
    assert fetch(reader, tmp_path) is None
    assert not (tmp_path / "fetched").exists()
    shared(url).put("artifacts", KEY, record, artifact.folder)
    assert reader.get("artifacts", KEY, Record) == record
    assert reader.get("artifacts", OTHER, Record) is None
    assert fetch(reader, tmp_path) == record
    assert record_files(tmp_path / "fetched") == record.files
    assert not warnings


def test_what_has_no_files_is_replaced(url: str, shared: Open, warnings: list[str]) -> None:
    for text in ("old\n", "new: ü\n"):
        shared(url).put("refs", KEY, text)
        assert shared(url).get("refs", KEY, str) == text
    assert not warnings


def test_a_file_is_sent_once_and_fetched_by_its_content(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 1000)
    file = Transport(server.url).send_file(tmp_path / "file")
    assert (
        file == record_file(tmp_path / "file") == Transport(server.url).send_file(tmp_path / "file")
    )
    assert [method for method, _ in server.requests].count("PUT") == 1
    Transport(server.url).fetch_file(file.sha256, file.size, tmp_path / "fetched")
    assert record_file(tmp_path / "fetched") == file
    with pytest.raises(DamagedError, match=f"{OTHER} is missing"):
        Transport(server.url).fetch_file(OTHER, 3, tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"cache_write": False}, None),
        # As for the CI of a pull request, which has the same workflow, and none of its secrets.
        ({"cache_key": None}, "cannot be written (HATCH_EPCONTEXT_CACHE_KEY has no key of"),
        (
            {"cache_key": new_keys()[0]},
            "cannot be written (HATCH_EPCONTEXT_CACHE_KEY has no key of",
        ),
    ],
)
def test_a_build_writes_only_what_others_would_use(
    folder: Path,
    shared: Open,
    artifact: Artifact,
    warnings: list[str],
    settings: dict[str, Any],
    warning: str | None,
) -> None:
    cache = shared(**settings)
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    cache.put("refs", KEY, OTHER)
    assert not folder.exists()
    assert len(warnings) == (warning is not None)
    assert not warning or warning in warnings[0]


def test_what_is_there_costs_no_request_for_a_day(
    server: WebServer, shared: Open, artifact: Artifact, tmp_path: Path
) -> None:
    def requests(**settings: Any) -> list[tuple[str, str]]:
        server.requests.clear()
        cache = shared(server.url, **settings)
        cache.sent = tmp_path / "sent"
        cache.put("artifacts", KEY, artifact.record, artifact.folder)
        cache.put("refs", KEY, OTHER)
        return [(method, path.split("/")[3]) for method, path in server.requests]

    first = requests()
    # Files before the statement that names them.
    assert [kind for method, kind in first if method == "PUT"] == [
        "blobs",
        "blobs",
        "artifacts",
        "refs",
    ]
    assert requests() == []
    for mark in (tmp_path / "sent").iterdir():
        os.utime(mark, (1, time.time() - 25 * 3600))
    assert requests() == [
        ("GET", "artifacts"),
        ("HEAD", "blobs"),
        ("HEAD", "blobs"),
        ("GET", "refs"),
    ]
    assert requests() == []
    # What was sent to one URL is not at another one.
    server.url += "/other"
    assert requests() != []


def test_an_artifact_is_not_replaced_while_its_files_are_there(
    folder: Path, shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    shared().put("artifacts", KEY, artifact.record, artifact.folder)
    first = blob(folder, artifact)
    (artifact.folder / "a_ctx_qnn.bin").write_bytes(b"compiled on another machine")
    other = make_record(record_files(artifact.folder))
    shared().put("artifacts", KEY, other, artifact.folder)
    assert shared().get("artifacts", KEY, Record) == artifact.record
    # As a store does that removes files by their age.
    first.unlink()
    shared().put("artifacts", KEY, other, artifact.folder)
    assert fetch(shared(), tmp_path) == other
    assert not warnings


def missing(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def longer(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(1 << 30)


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def unsigned(file: Path) -> None:
    file.write_bytes(b"\n" + file.read_bytes().partition(b"\n")[2])


def by_a_stranger(file: Path) -> None:
    record = file.read_bytes().split(b"\n", 2)[2].decode()
    file.write_bytes(sign("artifacts", KEY, record, new_keys()[0]))


@pytest.mark.parametrize("harm", [missing, empty, cut, longer, changed])
def test_an_artifact_with_a_damaged_file_is_a_miss_and_is_sent_again(
    server: WebServer,
    shared: Open,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    harm: Callable[[Path], None],
) -> None:
    shared(server.url).put("artifacts", KEY, artifact.record, artifact.folder)
    harm(blob(server.folder / "cache", artifact))
    cache = shared(server.url)
    assert fetch(cache, tmp_path) is None
    assert not (tmp_path / "fetched").exists()
    (warning,) = warnings
    assert "has something damaged or forged, which is not used: " in warning
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    assert fetch(shared(server.url), tmp_path) == artifact.record
    assert len(warnings) == 1


@pytest.mark.parametrize("harm", [empty, cut, longer, changed, unsigned, by_a_stranger])
def test_a_damaged_statement_is_a_miss_and_is_sent_again(
    folder: Path,
    shared: Open,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    harm: Callable[[Path], None],
) -> None:
    shared().put("artifacts", KEY, artifact.record, artifact.folder)
    harm(statement(folder))
    cache = shared()
    assert fetch(cache, tmp_path) is None
    (warning,) = warnings
    assert "damaged or forged, which is not used: " in warning
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    assert fetch(shared(), tmp_path) == artifact.record
    assert len(warnings) == 1


def test_no_byte_of_a_statement_can_be_altered(artifact: Artifact) -> None:
    record = to_json(artifact.record, indent=None)
    content = sign("artifacts", KEY, record, PRIVATE)
    for index in range(len(content)):
        for bit in (1, 16, 128):
            altered = bytearray(content)
            altered[index] ^= bit
            # The last digit of a number in base64 has bits that mean nothing.
            with contextlib.suppress(DamagedError):
                assert verify(bytes(altered), "artifacts", KEY, (PUBLIC,)) == record
                assert index < content.index(b"\n")


def test_no_byte_of_a_file_can_be_altered(
    folder: Path, shared: Open, artifact: Artifact, tmp_path: Path
) -> None:
    shared().put("artifacts", KEY, artifact.record, artifact.folder)
    for name in artifact.record.files:
        file = blob(folder, artifact, name)
        content = file.read_bytes()
        for index in range(0, len(content), 40):
            file.write_bytes(content[:index] + b"\0" + content[index + 1 :])
            assert fetch(shared(), tmp_path) is None
        file.write_bytes(content)
    assert fetch(shared(), tmp_path) == artifact.record


def test_a_statement_is_valid_for_one_kind_and_key(
    folder: Path, shared: Open, artifact: Artifact, warnings: list[str]
) -> None:
    shared().put("artifacts", KEY, artifact.record, artifact.folder)
    statement(folder, "facts").parent.mkdir()
    for place in (statement(folder, "artifacts", OTHER), statement(folder, "facts")):
        shutil.copyfile(statement(folder), place)
    assert shared().get("artifacts", OTHER, Record) is None
    assert shared().get("facts", KEY, Record) is None
    assert all("a statement is about another entry" in warning for warning in warnings)
    assert len(warnings) == 2


def test_an_older_statement_of_the_same_entry_is_accepted(
    folder: Path, shared: Open, warnings: list[str]
) -> None:
    shared().put("refs", KEY, "older")
    older = statement(folder, "refs").read_bytes()
    shared().put("refs", KEY, "newer")
    statement(folder, "refs").write_bytes(older)
    assert shared().get("refs", KEY, str) == "older"
    assert not warnings


@pytest.mark.parametrize(
    "name", ["../evil.bin", "/evil.bin", "..\\evil.bin", "C:evil.bin", "a/./b", "con", "", "\udcff"]
)
def test_a_signed_record_names_no_files_elsewhere(
    folder: Path, shared: Open, tmp_path: Path, warnings: list[str], name: str
) -> None:
    (tmp_path / "file").write_bytes(b"evil")
    file = shared().transport.send_file(tmp_path / "file")
    record = to_json(make_record({"a_ctx.onnx": file, name: file}), indent=None)
    statement(folder).parent.mkdir()
    statement(folder).write_bytes(sign("artifacts", KEY, record, PRIVATE))
    before = sorted(tmp_path.rglob("*"))
    assert fetch(shared(), tmp_path) is None
    assert "a file outside of" in warnings[0]
    assert sorted(tmp_path.rglob("*")) == before


def alterations(value: Any) -> Iterator[Any]:
    """Copies of plain ``value`` in each of which one part has another type or value, or is missing."""
    others: list[Any] = [None, -1, "\ud800", [], {"x": 1}]
    yield from (other for other in others if other != value)
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: each for other, each in value.items() if other != name}
            yield from ({**value, name: altered} for altered in alterations(part))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], each, *value[index + 1 :]] for each in alterations(part))


def test_no_field_of_a_record_that_nobody_signed_is_a_traceback(
    folder: Path, shared: Open, artifact: Artifact, tmp_path: Path
) -> None:
    cache = shared(cache_keys=(), cache_key=None)
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    fields = json.loads(statement(folder).read_bytes().split(b"\n", 2)[2])
    for altered in alterations(fields):
        statement(folder).write_bytes(sign("artifacts", KEY, json.dumps(altered), None))
        record = fetch(cache, tmp_path)
        if record is not None:
            assert record_files(tmp_path / "fetched") == record.files
            assert len(record.preparations) == len(record.contexts)
            assert record.files.keys() >= {context.model_file for context in record.contexts}
            shutil.rmtree(tmp_path / "fetched")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>Please log in</html>",
        "\ufeff[]",
        "[" * 100_000,
        f"\nartifacts/{KEY}\n" + "[" * 100_000,
        f"\nartifacts/{KEY}\n" + "9" * 100_000,
        f"\nartifacts/{KEY}\n" + '{"product": NaN}',
    ],
)
def test_a_statement_that_is_none_is_a_miss(
    folder: Path, shared: Open, warnings: list[str], text: str
) -> None:
    statement(folder).parent.mkdir(parents=True)
    statement(folder).write_text(text, encoding="utf-8")
    assert shared(cache_keys=(), cache_key=None).get("artifacts", KEY, Record) is None
    assert "damaged or forged" in warnings[0]


def test_keys_are_replaced_one_after_the_other(
    shared: Open, artifact: Artifact, warnings: list[str]
) -> None:
    old, old_public = new_keys()
    both = (old_public, PUBLIC)
    shared(cache_keys=both, cache_key=old).put("artifacts", KEY, artifact.record, artifact.folder)
    shared(cache_keys=both).put("artifacts", OTHER, artifact.record, artifact.folder)
    for key in (KEY, OTHER):
        assert shared(cache_keys=both).get("artifacts", key, Record) == artifact.record
    assert not warnings
    assert shared().get("artifacts", KEY, Record) is None
    assert "not signed by any of build.cache-keys" in warnings[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_in_a_folder_is_missing_and_holds_nobody_up(
    folder: Path, shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str], kind: str
) -> None:
    shared().put("artifacts", KEY, artifact.record, artifact.folder)
    for path in (blob(folder, artifact), statement(folder, "artifacts", OTHER)):
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path)
    cache = shared()
    assert fetch(cache, tmp_path) is None
    assert fetch(cache, tmp_path, OTHER) is None
    (warning,) = warnings
    assert f"{blob(folder, artifact).name} is missing" in warning
    # It is still asked for others.
    cache.put("refs", KEY, OTHER)
    assert cache.get("refs", KEY, str) == OTHER


def test_many_threads_and_builds_send_and_fetch_at_once(
    url: str, shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    caches = [shared(url) for _ in range(2)]

    def work(index: int) -> Record | None:
        cache = caches[index % 2]
        cache.put("artifacts", KEY, artifact.record, artifact.folder)
        return fetch(cache, tmp_path / str(index))

    with ThreadPoolExecutor(4) as pool:
        assert set(map(to_json, pool.map(work, range(8)))) == {to_json(artifact.record)}
    assert not warnings


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_unreachable_cache_is_one_warning_without_secrets(
    scheme: str,
    shared: Open,
    artifact: Artifact,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    # The backend's message has the whole address.
    use_s3(f"{address}/?sig={S3_SECRET}", monkeypatch)
    cache = shared("s3://bucket/team" if scheme == "s3" else f"{address}/cache")
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda key: cache.get("refs", key, str), [KEY, OTHER] * 2))
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    (warning,) = warnings
    assert warning.startswith(f"the shared cache {cache.transport.url} cannot be used (")
    assert warning.endswith("this build goes on without it")
    assert S3_SECRET not in warning


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """The URL of a server whose connections ``serve`` answers one after the other."""
    # Importing it does not count.
    importlib.import_module("fsspec.implementations.http")

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/cache"
        # Only Linux wakes a waiting `accept` so; elsewhere closing the socket does.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_the_first_request_without_an_answer_in_time_is_the_last_one(
    shared: Open, artifact: Artifact, warnings: list[str], answer: bytes
) -> None:
    ended, requests = threading.Event(), []

    def drip(connection: socket.socket) -> None:
        requests.append(connection)
        connection.sendall(answer)
        while not ended.wait(0.05):
            connection.sendall(b"x" if answer else b"")

    with serving(drip) as url:
        cache = shared(url, timeout=0.5)
        assert cache.get("refs", KEY, str) is None
        assert cache.get("refs", OTHER, str) is None
        cache.put("artifacts", KEY, artifact.record, artifact.folder)
        assert len(requests) == 1
        ended.set()
    (warning,) = warnings
    assert "cannot be used (0.5 s without an answer); this build goes on without it" in warning


def test_a_transfer_that_progresses_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(400_000))
    file = record_file(tmp_path / "file")

    def send(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {file.size}\r\n\r\n".encode())
        for _ in range(10):
            time.sleep(0.2)
            connection.sendall(bytes(40_000))

    with serving(send) as url:
        Transport(url, timeout=1).fetch_file(file.sha256, file.size, tmp_path / "fetched")
    assert record_file(tmp_path / "fetched") == file


def test_an_interrupted_build_waits_for_no_request(shared: Open, warnings: list[str]) -> None:
    asked = threading.Event()

    def never(connection: socket.socket) -> None:
        asked.set()
        connection.recv(4096)

    with serving(never) as url:
        cache = shared(url, timeout=3600)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cache.get, "refs", KEY, str)
            asked.wait()
            cache.stop()
            assert answer.result() is None
        assert cache.get("refs", OTHER, str) is None
    assert not warnings


def test_a_missing_bucket_is_not_taken_for_an_empty_one(
    s3: str, shared: Open, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    assert shared("s3://a-bucket-that-nobody-made/team").get("refs", KEY, str) is None
    assert "cannot be used (The specified bucket does not exist)" in warnings[0]


def test_a_server_that_takes_no_files_is_one_warning_and_still_read(
    server: WebServer, shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    shared(server.url).put("artifacts", KEY, artifact.record, artifact.folder)
    server.takes_files = False
    cache = shared(server.url)
    cache.put("artifacts", OTHER, artifact.record, artifact.folder)
    cache.put("refs", KEY, OTHER)
    (warning,) = warnings
    assert "cannot be written (" in warning
    assert fetch(cache, tmp_path) == artifact.record


def test_a_folder_that_cannot_be_written_is_one_warning(
    shared: Open, artifact: Artifact, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").touch()
    cache = shared((tmp_path / "file" / "cache").as_uri())
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    cache.put("refs", KEY, OTHER)
    assert len(warnings) == 1


def test_passwords_of_netrc_are_not_sent_and_a_refusal_is_one_warning(
    server: WebServer,
    shared: Open,
    artifact: Artifact,
    tmp_path: Path,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.password = "the-password-of-the-test"
    (tmp_path / "netrc").write_text("default login builder password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    cache = shared(server.url)
    assert cache.get("refs", KEY, str) is None
    cache.put("artifacts", KEY, artifact.record, artifact.folder)
    (warning,) = warnings
    assert "cannot be used (401" in warning
    assert server.authorizations == [None]


def test_requests_go_through_the_proxy_of_the_environment(
    shared: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server(tmp_path / "proxy") as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/cache"))
        shared("http://cache.invalid/team").get("refs", KEY, str)
        assert proxy.requests[0][1].startswith("http://cache.invalid/team/")


_WITHOUT_PACKAGE = """
import json, sys
from hatch_epcontext.config.settings import BuildSettings
from hatch_epcontext.jobs.cache.shared import SharedCache
_, package, url, key, place = sys.argv
warnings = []
def cache():
    settings = BuildSettings(cache=url, cache_write=True, cache_keys=(key,), cache_key=None)
    return SharedCache(settings, warnings.append)
sys.modules[package] = None
one = cache()
print(json.dumps([one.get("refs", "ab" * 32, str), one.get("refs", "cd" * 32, str), warnings]))
"""


@pytest.mark.parametrize(
    ("package", "url", "requirement"),
    [
        ("s3fs", "s3://bucket/team", "s3fs>="),
        ("adlfs", "abfs://container@account.dfs.core.windows.net/team", "adlfs>="),
        ("aiohttp", "https://example.invalid/team", "fsspec[http]>="),
        ("cryptography", "", "cryptography>="),
    ],
)
def test_a_missing_package_is_one_warning_with_the_command_that_installs_it(
    folder: Path, shared: Open, package: str, url: str, requirement: str
) -> None:
    shared().put("refs", KEY, OTHER)
    url = url or folder.as_uri()
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PACKAGE, package, url, PUBLIC, folder],
        capture_output=True,
        text=True,
        check=True,
    )
    *records, warnings = json.loads(done.stdout)
    assert records == [None, None]
    (warning,) = warnings
    assert warning.startswith(f"the shared cache {url} cannot be used (")
    assert f'-m pip install "{requirement}' in warning
    assert not done.stderr

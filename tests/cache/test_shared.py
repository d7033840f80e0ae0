from __future__ import annotations

import contextlib
import dataclasses
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

from hatch_epcontext.cache.shared import SharedCache, Transport
from hatch_epcontext.cache.signing import new_keys, sign, verify
from hatch_epcontext.cache.store import DamagedError, Store
from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.config.settings import BuildSettings
from hatch_epcontext.files import FileRecord, record_file, record_files
from hatch_epcontext.jobs.recipe import Record
from hatch_epcontext.serialize import to_json
from tests.conftest import make_record, wait_for
from tests.remotes import (
    S3_SECRET,
    WebServer,
    make_bucket,
    use_s3,
    web_server,
)
from tests.results import Artifact

KEY = "ab" * 32
OTHER = "cd" * 32

PRIVATE, PUBLIC = new_keys()


@dataclasses.dataclass
class Team:
    """Builds that share the cache in ``folder``, and have compiled ``artifact``; with their warnings."""

    folder: Path
    artifact: Artifact
    warnings: list[str] = dataclasses.field(default_factory=list)

    def open(self, url: str = "", timeout: float = 20, **settings: Any) -> SharedCache:
        """The cache, or that at ``url``, for one build; it may write if no setting differs."""
        keys = {
            "shared_cache_keys": (PUBLIC,),
            "shared_cache_key": PRIVATE,
            "shared_cache_write": True,
        }
        build = BuildSettings(**{**keys, **settings}, shared_cache=url or self.folder.as_uri())
        cache = SharedCache(build, self.warnings.append)
        cache.transport.timeout = timeout
        return cache

    def statement(self, kind: str = "artifacts", key: str = KEY) -> Path:
        return self.folder / LAYOUT / kind / key

    def blob(self) -> Path:
        name = self.artifact.record.files["a_ctx_qnn.bin"].sha256
        return self.folder / LAYOUT / "blobs" / name

    def send(self, cache: SharedCache, key: str = KEY) -> None:
        cache.put("artifacts", key, self.artifact.record, self.artifact.folder)

    def fetch(self, cache: SharedCache, name: str = "fetched", key: str = KEY) -> Record | None:
        return cache.get("artifacts", key, Record, self.folder.parent / name)


@pytest.fixture
def team(tmp_path: Path, artifact: Artifact) -> Team:
    return Team(tmp_path / "shared", artifact)


@pytest.fixture(params=["s3", "http", "file"])
def url(request: pytest.FixtureRequest, team: Team, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty shared cache of each kind."""
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        use_s3(server, monkeypatch)
        return f"s3://{make_bucket(server)}/team"
    is_web = request.param == "http"
    return str(request.getfixturevalue("server").url) if is_web else team.folder.as_uri()


def test_an_artifact_that_one_build_sends_is_fetched_by_another(
    url: str, team: Team, tmp_path: Path
) -> None:
    (team.artifact.folder / "parts").mkdir()
    (team.artifact.folder / "parts" / "empty.bin").touch()
    # More than one piece.
    (team.artifact.folder / "parts" / "ü.bin").write_bytes(bytes(range(256)) * 70_000)
    record = make_record(record_files(team.artifact.folder))
    reader = team.open(url, shared_cache_key=None, shared_cache_write=False)
    assert team.fetch(reader) is None
    assert not (tmp_path / "fetched").exists()
    team.open(url).put("artifacts", KEY, record, team.artifact.folder)
    assert reader.get("artifacts", KEY, Record) == record
    assert reader.get("artifacts", OTHER, Record) is None
    assert team.fetch(reader) == record
    assert record_files(tmp_path / "fetched") == record.files
    assert not team.warnings


def test_what_has_no_files_is_replaced(url: str, team: Team) -> None:
    cache = team.open(url)
    for text in ("first", "old\n", "new: ü\n"):
        cache.put("refs", KEY, text)
        assert team.open(url).get("refs", KEY, str) == text
        assert cache.get("refs", KEY, str) == text
    assert not team.warnings


def test_a_file_is_sent_once_and_fetched_by_its_content(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 1000)
    file = Transport(server.url).send_file(tmp_path / "file")
    assert (
        file == record_file(tmp_path / "file") == Transport(server.url).send_file(tmp_path / "file")
    )
    assert [method for method, _ in server.requests].count("PUT") == 1
    Transport(server.url).fetch_files({"fetched": file}, tmp_path)
    assert record_file(tmp_path / "fetched") == file
    with pytest.raises(DamagedError, match=f"{OTHER} is missing"):
        Transport(server.url).fetch_files({"other": FileRecord(3, OTHER)}, tmp_path)


@pytest.mark.parametrize(
    "settings",
    # The second as in the CI of a pull request, which has the same workflow, and none of its secrets.
    [
        {"shared_cache_write": False},
        {"shared_cache_key": None},
        {"shared_cache_key": new_keys()[0]},
    ],
)
def test_a_build_writes_only_what_others_would_use(team: Team, settings: dict[str, Any]) -> None:
    cache = team.open(**settings)
    team.send(cache)
    cache.put("refs", KEY, OTHER)
    assert not team.folder.exists()
    assert len(team.warnings) == ("shared_cache_key" in settings)
    reason = (
        "cannot be written (HATCH_EPCONTEXT_SHARED_CACHE_KEY has no key of build.shared-cache-keys)"
    )
    assert all(reason in warning for warning in team.warnings)


def test_what_is_there_costs_no_request_for_a_day(
    server: WebServer, team: Team, tmp_path: Path
) -> None:
    def requests() -> str:
        server.requests.clear()
        cache = team.open(server.url)
        cache.sent = Store(tmp_path / "sent")
        team.send(cache)
        cache.put("refs", KEY, OTHER)
        return ", ".join(f"{method} {path.split('/')[3]}" for method, path in server.requests)

    # Files before the statement that names them.
    sent = [request for request in requests().split(", ") if "PUT" in request]
    assert sent == ["PUT blobs", "PUT blobs", "PUT artifacts", "PUT refs"]
    assert requests() == ""
    for record in (tmp_path / "sent").rglob("record.json"):
        record.write_text(str(time.time() - 25 * 3600), encoding="utf-8")
    assert requests() == "GET artifacts, HEAD blobs, HEAD blobs, GET refs"
    assert requests() == ""
    # What was sent to one URL is not at another one.
    server.url += "/other"
    assert requests() != ""


def test_an_artifact_is_not_replaced_while_its_files_are_there(team: Team) -> None:
    team.send(team.open())
    first = team.blob()
    (team.artifact.folder / "a_ctx_qnn.bin").write_bytes(b"compiled on another machine")
    other = make_record(record_files(team.artifact.folder))
    team.open().put("artifacts", KEY, other, team.artifact.folder)
    assert team.open().get("artifacts", KEY, Record) == team.artifact.record
    # As a store does that removes files by their age.
    first.unlink()
    team.open().put("artifacts", KEY, other, team.artifact.folder)
    assert team.fetch(team.open()) == other
    assert not team.warnings


def by_a_stranger(file: Path) -> None:
    record = file.read_bytes().rpartition(b"\n{")[2].decode()
    file.write_bytes(sign("artifacts", KEY, "{" + record, new_keys()[0]))


HARMS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "longer": lambda file: os.truncate(file, 1 << 30),
    "changed": lambda file: file.write_bytes(
        file.read_bytes()[:-9] + b"?" + file.read_bytes()[-8:]
    ),
    "unsigned": lambda file: file.write_bytes(b"\n" + file.read_bytes().partition(b"\n")[2]),
    "by a stranger": by_a_stranger,
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("part", ["file", "statement"])
def test_what_is_damaged_is_a_miss_and_is_sent_again(
    server: WebServer, team: Team, tmp_path: Path, part: str, harm: str
) -> None:
    team.send(team.open(server.url))
    team.folder = server.folder / "cache"
    HARMS[harm](team.blob() if part == "file" else team.statement())
    cache = team.open(server.url)
    assert team.fetch(cache) is None
    assert not (tmp_path / "fetched").exists()
    assert len(team.warnings) == (part == "file" or harm != "missing")
    assert all("has something damaged or forged, which is not used: " in w for w in team.warnings)
    team.send(cache)
    assert team.fetch(team.open(server.url)) == team.artifact.record
    assert len(team.warnings) <= 1


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


def test_a_statement_is_valid_for_one_kind_and_key(team: Team) -> None:
    team.send(team.open())
    team.statement("facts").parent.mkdir()
    for place in (
        team.statement("artifacts", OTHER),
        team.statement("facts"),
    ):
        shutil.copyfile(team.statement(), place)
    assert team.open().get("artifacts", OTHER, Record) is None
    assert team.open().get("facts", KEY, Record) is None
    assert all("a statement is about another entry" in warning for warning in team.warnings)
    assert len(team.warnings) == 2


@pytest.mark.parametrize(
    "name", ["../evil.bin", "/evil.bin", "..\\evil.bin", "C:evil.bin", "a/./b", "con", "", "\udcff"]
)
def test_a_signed_record_names_no_files_elsewhere(team: Team, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"evil")
    file = team.open().transport.send_file(tmp_path / "file")
    record = to_json(make_record({"a_ctx.onnx": file, name: file}), indent=None)
    team.statement().parent.mkdir()
    team.statement().write_bytes(sign("artifacts", KEY, record, PRIVATE))
    before = sorted(tmp_path.rglob("*"))
    assert team.fetch(team.open()) is None
    assert "a file outside of" in team.warnings[0]
    assert sorted(tmp_path.rglob("*")) == before


def alterations(value: Any) -> Iterator[Any]:
    """Copies of plain ``value`` in each of which one part has another type or value, or is missing."""
    others: list[Any] = [None, -1, "\ud800", [], {"x": 1}]
    yield from (other for other in others if other != value)
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: altered} for altered in alterations(part))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in alterations(part))


def test_no_field_of_a_record_that_nobody_signed_is_a_traceback(team: Team, tmp_path: Path) -> None:
    cache = team.open(shared_cache_keys=(), shared_cache_key=None)
    team.send(cache)
    fields = json.loads(team.statement().read_bytes().split(b"\n", 2)[2])
    for altered in alterations(fields):
        team.statement().write_bytes(sign("artifacts", KEY, json.dumps(altered), None))
        record = team.fetch(cache)
        if record is not None:
            assert record_files(tmp_path / "fetched") == record.files
            assert len(record.preparations) == len(record.contexts)
            assert record.files.keys() >= {context.model_file for context in record.contexts}
            shutil.rmtree(tmp_path / "fetched")


def test_keys_are_replaced_one_after_the_other(team: Team) -> None:
    old, old_public = new_keys()
    both = (old_public, PUBLIC)
    team.send(team.open(shared_cache_keys=both, shared_cache_key=old))
    team.send(team.open(shared_cache_keys=both), OTHER)
    for key in (KEY, OTHER):
        assert (
            team.open(shared_cache_keys=both).get("artifacts", key, Record) == team.artifact.record
        )
    assert not team.warnings
    assert team.open().get("artifacts", KEY, Record) is None
    assert "not signed by any of build.shared-cache-keys" in team.warnings[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_in_a_folder_is_missing_and_holds_nobody_up(team: Team, kind: str) -> None:
    team.send(team.open())
    for path in (team.blob(), team.statement("artifacts", OTHER)):
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    cache = team.open()
    assert team.fetch(cache) is None
    assert team.fetch(cache, key=OTHER) is None
    (warning,) = team.warnings
    assert f"{team.blob().name} is missing" in warning
    # It is still asked for others.
    cache.put("refs", KEY, OTHER)
    assert cache.get("refs", KEY, str) == OTHER


def test_many_threads_and_builds_send_and_fetch_at_once(url: str, team: Team) -> None:
    caches = [team.open(url) for _ in range(2)]

    def work(index: int) -> Record | None:
        cache = caches[index % 2]
        team.send(cache)
        return team.fetch(cache, str(index))

    with ThreadPoolExecutor(4) as pool:
        assert set(map(to_json, pool.map(work, range(8)))) == {to_json(team.artifact.record)}
    assert not team.warnings


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_unreachable_cache_is_one_warning_without_secrets(
    scheme: str, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{closed_port()}"
    # The backend's message has the whole address.
    use_s3(f"{address}/?sig={S3_SECRET}", monkeypatch)
    cache = team.open("s3://bucket/team" if scheme == "s3" else f"{address}/cache")
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda key: cache.get("refs", key, str), [KEY, OTHER] * 2))
    team.send(cache)
    (warning,) = team.warnings
    assert warning.startswith(f"the shared cache {cache.transport.url} cannot be used (")
    assert warning.endswith("this build goes on without it")
    assert S3_SECRET not in warning


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """The URL of a server whose connections ``serve`` answers one after the other."""

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
    team: Team, answer: bytes
) -> None:
    ended, requests = threading.Event(), []

    def drip(connection: socket.socket) -> None:
        requests.append(connection)
        connection.sendall(answer)
        while not ended.wait(0.05):
            connection.sendall(b"x" if answer else b"")

    with serving(drip) as url:
        cache = team.open(url, timeout=1)
        assert cache.get("refs", KEY, str) is None
        assert cache.get("refs", OTHER, str) is None
        team.send(cache)
        # The server is a thread, which may begin with it later.
        wait_for(lambda: bool(requests))
        ended.set()
    assert len(requests) == 1
    (warning,) = team.warnings
    assert "cannot be used (1 s without an answer); this build goes on without it" in warning


def test_importing_a_backend_takes_none_of_the_time_of_an_answer(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = importlib.import_module("fsspec.registry")
    import_class = registry._import_class

    def slow(name: str) -> object:
        time.sleep(2)
        return import_class(name)

    monkeypatch.setattr(registry, "_import_class", slow)
    # As if nothing had imported it.
    monkeypatch.delitem(registry._registry, "file", raising=False)
    cache = team.open(timeout=1)
    team.send(cache)
    assert team.fetch(cache) == team.artifact.record
    assert not team.warnings


@pytest.mark.slow
def test_a_transfer_that_progresses_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(400_000))
    file = record_file(tmp_path / "file")

    def send(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {file.size}\r\n\r\n".encode())
        for _ in range(10):
            time.sleep(0.4)
            connection.sendall(bytes(40_000))

    with serving(send) as url:
        Transport(url, timeout=3).fetch_files({"fetched": file}, tmp_path)
    assert record_file(tmp_path / "fetched") == file


def test_an_interrupted_build_waits_for_no_request(team: Team) -> None:
    asked = threading.Event()

    def never(connection: socket.socket) -> None:
        asked.set()
        connection.recv(4096)

    with serving(never) as url:
        cache = team.open(url, timeout=3600)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cache.get, "refs", KEY, str)
            asked.wait()
            cache.stop()
            assert answer.result() is None
        assert cache.get("refs", OTHER, str) is None
    assert not team.warnings


def test_a_missing_bucket_is_not_taken_for_an_empty_one(
    s3: str, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    assert team.open("s3://a-bucket-that-nobody-made/team").get("refs", KEY, str) is None
    assert "cannot be used (The specified bucket does not exist)" in team.warnings[0]


@pytest.mark.parametrize("kind", ["http", "file"])
def test_what_cannot_be_written_is_one_warning_and_still_read(
    server: WebServer, team: Team, kind: str
) -> None:
    team.folder = server.folder / "cache"
    url = server.url if kind == "http" else team.folder.as_uri()
    team.send(team.open(url))
    server.takes_files = False
    (team.folder / LAYOUT / "refs").touch()
    cache = team.open(url)
    cache.put("refs", KEY, OTHER)
    cache.put("refs", OTHER, OTHER)
    (warning,) = team.warnings
    assert "cannot be written (" in warning
    assert team.fetch(cache) == team.artifact.record


def test_passwords_of_netrc_are_not_sent_and_a_refusal_is_one_warning(
    server: WebServer, team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.password = "the-password-of-the-test"
    (tmp_path / "netrc").write_text("default login builder password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    cache = team.open(server.url)
    assert cache.get("refs", KEY, str) is None
    team.send(cache)
    (warning,) = team.warnings
    assert "cannot be used (401" in warning
    assert server.authorizations == [None]


def test_requests_go_through_the_proxy_of_the_environment(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_server(tmp_path / "proxy") as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/cache"))
        team.open("http://cache.invalid/team").get("refs", KEY, str)
        assert proxy.requests[0][1].startswith("http://cache.invalid/team/")


_WITHOUT_PACKAGE = """
import json, sys
from hatch_epcontext.config.settings import BuildSettings
from hatch_epcontext.cache.shared import SharedCache
warnings = []
sys.modules[sys.argv[1]] = None
settings = BuildSettings(shared_cache=sys.argv[2], shared_cache_keys=(sys.argv[3],))
cache = SharedCache(settings, warnings.append)
print(json.dumps([cache.get("refs", key * 32, str) for key in ("ab", "cd")] + [warnings]))
"""


@pytest.mark.parametrize(
    ("package", "url", "requirement"),
    [
        ("s3fs", "s3://bucket/team", "s3fs>="),
        ("adlfs", "az://container/team", "adlfs>="),
        ("aiohttp", "https://example.invalid/team", "fsspec[http]>="),
        ("cryptography", "", "cryptography>="),
    ],
)
def test_a_missing_package_is_one_warning_with_the_command_that_installs_it(
    team: Team, package: str, url: str, requirement: str
) -> None:
    team.open().put("refs", KEY, OTHER)
    url = url or team.folder.as_uri()
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PACKAGE, package, url, PUBLIC],
        capture_output=True,
        text=True,
        check=True,
    )
    *records, team.warnings = json.loads(done.stdout)
    assert records == [None, None]
    (warning,) = team.warnings
    assert warning.startswith(f"the shared cache {url} cannot be used (")
    assert f'-m pip install "{requirement}' in warning
    assert not done.stderr

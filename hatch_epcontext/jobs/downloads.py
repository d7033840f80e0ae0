"""Models from elsewhere: downloaded once, compared with their hashes, and kept in the user's cache.

Below the cache's root, ``models/<key>/`` has the files of one model, ``models/<key>.json`` their hashes by
name, and ``models/<key>.lock`` is locked while somebody downloads them. The key is the hash of the names and
hashes, so that projects share them. They are plain files: ONNX and ONNX Runtime refuse links for external
data.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.location import BUCKETS, Download, files_key, hub_file
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import (
    MAX_BYTES,
    file_sha256,
    is_regular,
    mark_used,
    patiently,
    remove,
    sync,
    write_atomically,
)
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.cache.folder import untrusted
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.system import writing
from hatch_epcontext.text import show_size

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from hatch_epcontext.jobs.web import WebError

PINNING = "pinning"
"""The name that is locked in the folder of models while a location is pinned, and its key is unknown."""

_POLL_SECONDS = 0.5

_BUCKET_TIMEOUT = 60.0
"""Seconds without a byte after which a bucket counts as unreachable."""

Log = Callable[[str], None]


def download_models(
    models: Iterable[Model],
    config: Config,
    index: Index,
    log: Log,
    pulse: Heartbeat | None = None,
) -> None:
    """Put those ``models`` that come from elsewhere into the user's cache, unless they are there.

    ``log`` gets a line for each file, and for a long download from time to time, as ``pulse`` says. Raises
    BuildError with the problems of all models.
    """
    problems: list[Problem] = []
    beat = pulse or Heartbeat()
    for model in {each.path: each for each in models if each.download}.values():
        assert model.download is not None, "only such models are downloaded"
        try:
            downloading = Downloading(
                model.download, model.path.parent, config.root, config.offline, log, beat
            )
            with writing("a downloaded model", model.path.parent):
                downloading.run(index)
        except FailedError as error:
            key = model.key / ("data" if error.in_data else "url")
            problems.append(Problem.at(key, error.kind, str(error), error.hint))
    if problems:
        raise BuildError(*problems)


class FailedError(Exception):
    """A file that cannot be downloaded; the text says why, and ``hint`` what to do.

    ``in_data``: whether it is one of the external data.
    """

    def __init__(self, reason: str, hint: str, kind: Kind = Kind.NOT_DOWNLOADED) -> None:
        super().__init__(reason)
        self.hint = hint
        self.kind = kind
        self.in_data = False


@dataclass(frozen=True)
class Downloading:
    """One model from elsewhere, which belongs in ``folder``; ``project`` may be an sdist that contains it."""

    download: Download
    folder: Path
    project: Path
    offline: bool
    log: Log
    beat: Heartbeat

    def run(self, index: Index) -> None:
        """Put its files into the folder, unless they are there; raises FailedError, and OSError."""
        check_root(self.folder.parents[1])
        if self._is_there(index) and recorded_files(self.folder) is not None:
            mark_used(self.folder)
            return
        with locked(self.folder, self.log):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(record_file(self.folder), json.dumps(dict(self.download.files)))
            for name, digest in self.download.files.items():
                self._get(name, digest)

    def _is_there(self, index: Index) -> bool:
        return all(
            is_regular(path := self.folder / name)
            and not path.is_symlink()
            and index.sha256(path) == digest
            for name, digest in self.download.files.items()
        )

    def _get(self, name: str, digest: str) -> None:
        place, in_data = self.folder / PurePosixPath(name), name in self.download.data
        if is_regular(place) and not place.is_symlink() and file_sha256(place) == digest:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f".{digest[:16]}.part")
        url = self.download.url_of(name)
        shipped = self.project / self.download.place_in_sdist / PurePosixPath(name)
        if not any(copied(near, part, digest) for near in (shipped, *near_files(url))):
            check_allowed(url, self.offline)
            limit = MAX_BYTES if in_data else PROTOBUF_LIMIT
            try:
                fetch_pinned(url, part, digest, limit, self.beat, self.log)
            except FailedError as error:
                error.in_data = in_data
                raise
        keep(part, place)


def near_files(url: str) -> Iterator[Path]:
    """Where other programs on this machine may have the file at ``url``."""
    from hatch_epcontext.jobs import web

    if hub := hub_file(url):
        yield web.hub_cached(hub)


def fetch_pinned(url: str, part: Path, digest: str, limit: int, beat: Heartbeat, log: Log) -> None:
    """Download ``url`` to ``part``, and compare it with its hex sha256; raises FailedError."""
    continued = part.exists()
    fetch(url, part, limit, beat, log, pinned=True)
    found = file_sha256(part)
    if found != digest and continued:
        # What had arrived before may be of something else.
        remove(part)
        fetch(url, part, limit, beat, log, pinned=True)
        found = file_sha256(part)
    if found != digest:
        what = described(part)
        remove(part)
        raise FailedError(
            f"{url} has the sha256 {found}, and not {digest}.{what}",
            "Find out why. If the new file is wanted: remove sha256, and run epcontext pin.",
            Kind.OTHER_CONTENT,
        )


def check_root(root: Path) -> None:
    """Raise FailedError if other users could change what is in the cache's folder ``root``."""
    if reason := untrusted(root):
        hint = f"{PREFIX}CACHE_DIR names another folder."
        raise FailedError(f"the cache folder {root} is not used, because {reason}.", hint)


def keep(part: Path, place: Path) -> None:
    """Rename a complete file; raises OSError."""
    sync(part)
    patiently(lambda: part.replace(place))


def copied(source: Path, target: Path, digest: str) -> bool:
    """Whether ``target`` is now a copy of the file ``source`` with this hex sha256."""
    if not is_regular(source) or file_sha256(source) != digest:
        return False
    shutil.copyfile(source, target)
    # The file of another program may change meanwhile.
    same = file_sha256(target) == digest
    if not same:
        remove(target)
    return same


def record_file(folder: Path) -> Path:
    """The file with the hashes of the files in the ``folder`` of a model."""
    return folder.with_name(f"{folder.name}.json")


def recorded_files(folder: Path) -> Mapping[str, str] | None:
    """The hashes of the files that belong in the ``folder`` of a model, by name; None if they are damaged."""
    try:
        files = json.loads(record_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return files if isinstance(files, dict) and files_key(files) == folder.name else None


@contextlib.contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Hold the right to download into ``folder``, unless somebody else has it; whether it is held."""
    import filelock

    try:
        with _lock(folder).acquire(timeout=0):
            yield True
    except filelock.Timeout:
        yield False


def _lock(folder: Path) -> BaseFileLock:
    # Imported here because it imports asyncio.
    import filelock

    folder.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(folder.with_name(f"{folder.name}.lock"), thread_local=False)


@contextlib.contextmanager
def locked(folder: Path, log: Log) -> Iterator[None]:
    """Hold the right to download into ``folder``, in this process and all others; raises OSError."""
    import filelock

    lock, beat = _lock(folder), Heartbeat()
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_POLL_SECONDS)
        except filelock.Timeout:
            if beat.due():
                log("waiting for another process, which downloads")
    try:
        yield
    finally:
        lock.release()


def fetch(url: str, part: Path, limit: int, beat: Heartbeat, log: Log, *, pinned: bool) -> None:
    """Download ``url``, a valid location, to ``part``, and continue what is there; raises FailedError.

    ``pinned``: whether its hash is known.
    """

    def progress(arrived: int, total: int | None = None) -> None:
        if beat.due():
            of = "" if total is None else f" of {show_size(total)}"
            log(f"downloading {url}: {show_size(arrived)}{of}")

    if urlsplit(url).scheme in BUCKETS:
        _fetch_from_bucket(url, part, limit, progress)
    else:
        _fetch_from_web(url, part, limit, progress, pinned=pinned)
    log(f"downloaded {url} ({show_size(part.stat().st_size)})")


def _fetch_from_web(
    url: str,
    part: Path,
    limit: int,
    progress: Callable[[int, int | None], None],
    *,
    pinned: bool,
) -> None:
    from hatch_epcontext.jobs import web

    hub = hub_file(url)
    try:
        address = web.hub_url(hub) if hub else url
        web.download(address, part, limit, progress, pinned=pinned)
    except web.WebError as error:
        kept = part.stat().st_size if part.exists() else 0
        more = f" {show_size(kept)} are kept for the next attempt." if kept else ""
        message = f"{url} cannot be downloaded: {error}.{more}"
        raise FailedError(message, advice(error, is_hub=hub is not None)) from error


def advice(error: WebError, *, is_hub: bool) -> str:
    """What to do after the answer of a server."""
    from hatch_epcontext.jobs import web

    if error.hint:
        return error.hint
    if error.status in (401, 403):
        if not is_hub:
            return (
                "Put a user and a password for this host into .netrc, or choose a public location."
            )
        if web.hub_token() is None:
            return "If it exists, it is not public: set HF_TOKEN to a token that may read it."
        return "Accept the model's terms on its page, or set HF_TOKEN to a token that may read it."
    if error.status is not None and error.status < 500:
        return "Check the location: is the file still there?"
    return "Try again. If the network needs a proxy, set https_proxy."


def _fetch_from_bucket(url: str, part: Path, limit: int, progress: Callable[[int], None]) -> None:
    from hatch_epcontext.jobs.cache.archive import DamagedError
    from hatch_epcontext.jobs.cache.transport import FailureReason, Transport, TransportError

    folder, _, name = url.rpartition("/")
    remove(part)
    try:
        transport = Transport(folder, _BUCKET_TIMEOUT, in_all=False, folder="")
        transport.fetch(name, part, limit, progress)
    except DamagedError as error:
        remove(part)
        message = f"{url} has more than {show_size(limit)}."
        raise FailedError(message, "Choose another file.", Kind.OTHER_CONTENT) from error
    except TransportError as error:
        remove(part)
        hint = "Check the location, and the credentials in the environment."
        if error.failure is FailureReason.NO_BACKEND:
            hint = "Or build with isolation: then the front end installs it."
        raise FailedError(f"{url} cannot be downloaded: {error}.", hint) from error


def described(file: Path) -> str:
    """What a file looks like that is not the expected one; empty if it may be anything."""
    with file.open("rb") as opened:
        start = opened.read(64).lstrip()
    if start.startswith(b"<"):
        return " It is a web page: the server may want a login."
    if start.startswith(b"version https://git-lfs"):
        return " It is a Git LFS pointer, and not the file itself."
    return ""


def check_allowed(url: str, offline: bool, hint: str = "") -> None:
    """Raise FailedError if a variable forbids to download ``url``; ``offline``: whether our own does."""
    given = os.environ.get("HF_HUB_OFFLINE", "").lower()
    of_hub = hub_file(url) is not None and given in ("1", "on", "yes", "true")
    if offline or of_hub:
        variable = f"{PREFIX}OFFLINE" if offline else "HF_HUB_OFFLINE"
        raise FailedError(
            f"{url} is not in the cache, and {variable} forbids downloads.",
            hint or "Run this where there is a network: epcontext fetch",
        )

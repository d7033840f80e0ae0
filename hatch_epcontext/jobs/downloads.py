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
from dataclasses import field
from pathlib import Path
from urllib.parse import urlsplit

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.location import (
    BUCKETS,
    DOWNLOADS,
    Download,
    beside,
    files_key,
    hub_file,
)
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import BuildError, DownloadError, Kind, Problem
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

PINNING = "pinning"
"""The name that is locked in the folder of models while a location is pinned, and its key is unknown."""

_PATIENCE = 10.0
"""Seconds after which a build says that it waits for another one."""

_BUCKET_TIMEOUT = 60.0
"""Seconds without a byte after which a bucket counts as unreachable."""

Log = Callable[[str], None]


def download_models(
    models: Iterable[Model], config: Config, index: Index, log: Log, pulse: Heartbeat | None = None
) -> None:
    """Put those ``models`` that come from elsewhere into the user's cache, unless they are there.

    ``log`` gets a line for each file, and for a long download from time to time, as ``pulse`` says. Raises
    BuildError with the problems of all models.
    """
    problems: list[Problem] = []
    beat = pulse or Heartbeat()
    for model in {model.path: model for model in models}.values():
        if model.download is None:
            continue
        downloads = Downloads(model.path.parents[2], config.offline, log, beat)
        try:
            downloads.run(model.download, config.root, index)
        except DownloadError as error:
            problems.append(Problem.at(model.key / error.key, error.kind, str(error), error.hint))
    if problems:
        raise BuildError(*problems)


@dataclass(frozen=True)
class Downloads:
    """Downloads into the cache at ``root``; all methods raise DownloadError, and BuildError for OSErrors."""

    root: Path
    offline: bool
    log: Log
    beat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def store(self) -> Path:
        """The folder of all models."""
        return self.root / DOWNLOADS

    def run(self, download: Download, project: Path, index: Index) -> None:
        """Put the files of ``download`` into its folder, unless they are there.

        ``project`` may be an sdist that contains them.
        """
        folder = self.store / download.key
        with self.writing():
            if recorded_files(folder) is not None and all(
                is_own(folder / name) and index.sha256(folder / name) == digest
                for name, digest in download.files.items()
            ):
                mark_used(folder)
                return
            with self.folder_of(download):
                for name, digest in download.files.items():
                    place = folder / name
                    if is_own(place) and file_sha256(place) == digest:
                        continue
                    part = place.with_name(f".{digest[:16]}.part")
                    shipped = project / download.place_in_sdist / name
                    limit = MAX_BYTES if name in download.data else PROTOBUF_LIMIT
                    try:
                        self.get(beside(download.url, name), part, digest, limit, [shipped])
                    except DownloadError as error:
                        error.key = "data" if name in download.data else "url"
                        raise
                    keep(part, place)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise BuildError in place of OSErrors, and DownloadError if others could change what is there."""
        with writing("a downloaded model", self.store):
            if reason := untrusted(self.root):
                hint = f"{PREFIX}CACHE_DIR names another folder."
                raise DownloadError(
                    f"the cache folder {self.root} is not used, because {reason}.", hint
                )
            yield

    @contextlib.contextmanager
    def folder_of(self, download: Download) -> Iterator[Path]:
        """The locked folder for the files of ``download``, beside their hashes."""
        folder = self.store / download.key
        with locked(folder, self.log):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(record_file(folder), json.dumps(dict(download.files)))
            yield folder

    def get(
        self, url: str, part: Path, digest: str | None, limit: int, near: Iterable[Path] = ()
    ) -> str:
        """Put the file at ``url`` into ``part``, and return its hex sha256: ``digest``, unless that is None.

        ``near``: files of this machine that are copied if they have that hash.
        """
        from hatch_epcontext.jobs import web

        part.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(part) and not is_own(part):
            raise DownloadError(f"{part} is no regular file.", "Remove it.")
        hub = hub_file(url)
        # The part may be whole: then the last build was killed before it could rename it.
        for file in (part, *near, *([web.hub_cached(hub)] if hub else ())):
            if digest and is_regular(file) and file_sha256(file) == digest:
                if file != part:
                    shutil.copyfile(file, part)
                # The file of another program may change meanwhile.
                if file_sha256(part) == digest:
                    return digest
        check_allowed(url, offline=self.offline)
        continues = digest is not None and part.exists()
        self._fetch(url, part, limit, pinned=digest is not None)
        actual = file_sha256(part)
        if digest is None or actual == digest:
            return actual
        what = described(part)
        remove(part)
        if continues:
            # What had arrived before may be of something else.
            return self.get(url, part, digest, limit)
        raise DownloadError(
            f"{url} has the sha256 {actual}, and not {digest}.{what}",
            "Find out why. If the new file is wanted: remove sha256 and data, and run epcontext fetch --pin.",
            Kind.OTHER_CONTENT,
        )

    def _fetch(self, url: str, part: Path, limit: int, *, pinned: bool) -> None:
        from hatch_epcontext.jobs import web

        def progress(arrived: int, total: int | None = None) -> None:
            if self.beat.due():
                of = "" if total is None else f" of {show_size(total)}"
                self.log(f"downloading {url}: {show_size(arrived)}{of}")

        if urlsplit(url).scheme in BUCKETS:
            _fetch_from_bucket(url, part, limit, progress)
        else:
            hub = hub_file(url)
            address = web.hub_url(hub) if hub else url
            web.download(address, part, limit, progress, pinned=pinned)
        self.log(f"downloaded {url} ({show_size(part.stat().st_size)})")


def _fetch_from_bucket(url: str, part: Path, limit: int, progress: Callable[[int], None]) -> None:
    from hatch_epcontext.jobs.cache.archive import DamagedError
    from hatch_epcontext.jobs.cache.shared import Failure, Transport, TransportError

    folder, _, name = url.rpartition("/")
    remove(part)
    try:
        transport = Transport(folder, _BUCKET_TIMEOUT, folder="")
        transport.fetch(name, part, limit, progress)
    except DamagedError as error:
        message = f"{url} has more than {show_size(limit)}."
        raise DownloadError(message, "Choose another file.", Kind.OTHER_CONTENT) from error
    except TransportError as error:
        hint = "Check the location, and the credentials in the environment."
        if error.failure is Failure.NO_BACKEND:
            hint = "Or build with isolation: then the front end installs it."
        raise DownloadError(f"{url} cannot be downloaded: {error}.", hint) from error


def described(file: Path) -> str:
    """What a file looks like that is not the expected one; empty if it may be anything."""
    with file.open("rb") as opened:
        start = opened.read(64).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return " It is a Git LFS pointer, and not the file itself."
    return " It is a web page: the server may want a login." if start.startswith(b"<") else ""


def check_allowed(url: str, *, offline: bool) -> None:
    """Raise DownloadError if a variable forbids to download ``url``; ``offline``: whether our own does."""
    hub_is_off = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if offline or (hub_is_off and hub_file(url)):
        variable = f"{PREFIX}OFFLINE" if offline else "HF_HUB_OFFLINE"
        message = f"{url} is not in the cache, and {variable} forbids downloads."
        raise DownloadError(message, "Run this where there is a network: epcontext fetch")


def is_own(file: Path) -> bool:
    """Whether this is a regular file, and no link to one."""
    return is_regular(file) and not file.is_symlink()


def keep(part: Path, place: Path) -> None:
    """Rename a complete file; raises OSError."""
    sync(part)
    place.parent.mkdir(parents=True, exist_ok=True)
    patiently(lambda: part.replace(place))


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
def locked(folder: Path, log: Log | None = None) -> Iterator[bool]:
    """Hold the right to download into ``folder``, in this process and all others; raises OSError.

    Without ``log`` it does not wait for others, and the value is whether it is held.
    """
    # Imported here because it imports asyncio.
    import filelock

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"), thread_local=False)
    try:
        lock.acquire(timeout=_PATIENCE if log else 0)
    except filelock.Timeout:
        if log:
            log("waiting for another process, which downloads")
            lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()

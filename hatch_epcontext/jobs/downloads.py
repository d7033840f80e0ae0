"""Models from elsewhere: downloaded once, compared with their hashes, and kept in the user's cache.

The key of such an entry is the hash of the files' names and hashes, so that projects share them. They are
plain files with one name each: ONNX and ONNX Runtime refuse links for external data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from pathlib import Path
from urllib.parse import urlsplit

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.location import BUCKETS, Download, beside, hub_file
from hatch_epcontext.config.paths import default_root
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import BuildError, DownloadError, Kind, Problem
from hatch_epcontext.files import MAX_BYTES, FileRecord, file_sha256, is_regular, remove
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.cache.store import DamagedError, Files, Store, untrusted
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.system import writing
from hatch_epcontext.text import show_size

_BUCKET_TIMEOUT = 60.0
"""Seconds without a byte after which a bucket counts as unreachable."""

Log = Callable[[str], None]


def download_models(
    models: Iterable[Model], config: Config, log: Log, pulse: Heartbeat | None = None
) -> None:
    """Put those ``models`` that come from elsewhere into the user's cache, unless they are there.

    ``log`` gets a line for each file, and for a long download from time to time, as ``pulse`` says. Raises
    BuildError with the problems of all models.
    """
    problems: list[Problem] = []
    root, beat = config.cache_dir or default_root(), pulse or Heartbeat()
    for model in {model.path: model for model in models}.values():
        # Without a folder for it a location is a problem of the configuration.
        if model.download is None or root is None:
            continue
        try:
            Downloads(Store(root), config.offline, log, beat).run(model.download, config.root)
        except DownloadError as error:
            problems.append(Problem.at(model.key / "url", error.kind, str(error), error.hint))
    if problems:
        raise BuildError(*problems)


@dataclass(frozen=True)
class Downloads:
    """Downloads into the user's cache; all methods raise DownloadError, and BuildError for OSErrors."""

    store: Store
    offline: bool
    log: Log
    beat: Heartbeat = field(default_factory=Heartbeat)

    def run(self, download: Download, project: Path) -> None:
        """Put the files of ``download`` into the cache, unless they are there.

        ``project`` may be an sdist that contains them.
        """
        if self._has(download):
            return
        with self.parts(download.key) as parts:
            # Another process may have downloaded it in the meantime.
            if self._has(download):
                return
            for name, digest in download.files.items():
                own = download.folder(self.store.root) / name
                shipped = project / download.place_in_sdist / name
                limit = MAX_BYTES if name in download.data else PROTOBUF_LIMIT
                url = beside(download.url, name)
                self.get(url, parts / name, digest, limit, [own, shipped])
            self.keep(download, parts)

    def _has(self, download: Download) -> bool:
        with self.writing(), contextlib.suppress(DamagedError):
            return self.store.get("models", download.key, Files) is not None
        return False

    def keep(self, download: Download, parts: Path) -> None:
        """Store the files of ``download``, which are complete, from the folder ``parts``."""
        sizes = {name: (parts / name).stat().st_size for name in download.files}
        files = {name: FileRecord(sizes[name], sha256) for name, sha256 in download.files.items()}
        self.store.put("models", download.key, Files(files), parts)

    @contextlib.contextmanager
    def parts(self, key: str) -> Iterator[Path]:
        """The locked folder for the files of the download ``key`` while they arrive."""

        def wait() -> None:
            if self.beat.due():
                self.log("waiting for another process, which downloads")

        with self.writing(), self.store.parts(key, wait) as folder:
            yield folder

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise BuildError in place of OSErrors, and DownloadError if others could change what is there."""
        with writing("a downloaded model", self.store.root):
            if reason := untrusted(self.store.root):
                hint = f"{PREFIX}CACHE_DIR names another folder."
                raise DownloadError(
                    f"the cache folder {self.store.root} is not used, because {reason}.", hint
                )
            yield

    def get(
        self, url: str, part: Path, digest: str | None, limit: int, near: Iterable[Path] = ()
    ) -> str:
        """Put the file at ``url`` into ``part``, and return its hex sha256: ``digest``, unless that is None.

        ``near``: files of this machine that are copied if they have that hash.
        """
        part.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(part) and (part.is_symlink() or not is_regular(part)):
            raise DownloadError(f"{part} is no regular file.", "Remove it.")
        # The part may be whole: then the last build was ended before it had all parts.
        for file in (part, *near):
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
    from hatch_epcontext.jobs.cache.shared import Transport, TransportError

    folder, _, name = url.rpartition("/")
    remove(part)
    try:
        Transport(folder, _BUCKET_TIMEOUT).fetch(name, part, limit, progress)
    except DamagedError as error:
        message = f"{url} has more than {show_size(limit)}."
        raise DownloadError(message, "Choose another file.", Kind.OTHER_CONTENT) from error
    except TransportError as error:
        hint = "Check the location, and the credentials in the environment."
        if isinstance(error.__cause__, ImportError):
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

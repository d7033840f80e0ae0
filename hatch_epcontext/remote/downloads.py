"""Models from elsewhere: downloaded once, compared with their hashes, and kept in the user's cache.

The key of such an entry is the hash of the files' names and hashes, so that projects share them. They are
plain files with one name each: ONNX and ONNX Runtime reject links for external data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hatch_epcontext.cache.store import DamagedError, Files, Store, untrusted
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.location import Download, beside, hub_file
from hatch_epcontext.config.paths import default_root
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, DownloadError, Kind, Problem
from hatch_epcontext.files import MAX_BYTES, FileRecord, file_sha256, temp_dir
from hatch_epcontext.system import Heartbeat, writing
from hatch_epcontext.text import show_size

Log = Callable[[str], None]


def download_models(config: Config, log: Log, pulse: Heartbeat | None = None) -> None:
    """Put those models that come from elsewhere into the user's cache, unless they are there.

    ``log`` gets a line for each file, and for a long download from time to time, as ``pulse`` says. Raises
    BuildError with the problems of all models.
    """
    problems: list[Problem] = []
    root = config.environment.cache_dir or default_root()
    remote = [model for model in config.models if model.download]
    # Without a folder for it a location is a problem of the configuration.
    if root is None or not remote:
        return
    downloads = Downloads(Store(root), log, offline=config.environment.offline, beat=pulse)
    for model in {model.path: model for model in remote}.values():
        assert model.download is not None, "only such models are remote"
        try:
            downloads.run(model.download)
        except DownloadError as error:
            problems.append(Problem.at(model.key / "url", error.kind, str(error), error.hint))
    BuildError.check(problems)


class Downloads:
    """Downloads into the user's cache; all methods raise DownloadError, and BuildError for OSErrors.

    Raises BuildError if other users could change what is there.
    """

    def __init__(
        self, store: Store, log: Log, *, offline: bool, beat: Heartbeat | None = None
    ) -> None:
        self.store = store
        self._log, self._offline, self._beat = log, offline, beat or Heartbeat()
        if reason := untrusted(store.root):
            message = f"is not used, because {reason}."
            hint = f"{PREFIX}CACHE_DIR names another folder."
            raise BuildError(Problem(Kind.NOT_DOWNLOADED, str(store.root), message, hint))

    def run(self, download: Download) -> None:
        """Put the files of ``download`` into the cache, unless they are there."""
        if self._has(download):
            return
        with self.store.lock(download.key, self._wait), self.staging() as folder:
            # Another process may have downloaded it in the meantime.
            if self._has(download):
                return
            for name, digest in download.files.items():
                self.get(beside(download.url, name), folder / name, digest)
            self.keep(download, folder)

    def _has(self, download: Download) -> bool:
        with contextlib.suppress(DamagedError, OSError):
            return self.store.get("models", download.key, Files) is not None
        return False

    def _wait(self) -> None:
        if self._beat.due():
            self._log("waiting for another process, which downloads")

    def keep(self, download: Download, folder: Path) -> None:
        """Store the files of ``download``, which are complete, from ``folder``."""
        files = {
            name: FileRecord((folder / name).stat().st_size, sha256)
            for name, sha256 in download.files.items()
        }
        self.store.put("models", download.key, Files(files), folder)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary folder for files while they arrive."""
        with writing("a downloaded model", self.store.root), temp_dir(self.store.staging) as folder:
            yield folder

    def check_online(self, url: str) -> None:
        """Raise DownloadError if the environment forbids to download ``url``."""
        if self._offline:
            message = f"{url} is not in the cache, and {PREFIX}OFFLINE forbids downloads."
            raise DownloadError(message, "Run this where there is a network: epcontext fetch")

    def get(self, url: str, file: Path, digest: str | None) -> str:
        """Put what is at ``url`` into ``file``, and return its hex sha256: ``digest``, if that is known."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.check_online(url)
        self._fetch(url, file)
        actual = file_sha256(file)
        if digest is None or actual == digest:
            return actual
        raise DownloadError(
            f"{url} has the sha256 {actual}, and not {digest}.",
            "Find out why. If the new file is wanted: remove sha256 and data, and run epcontext fetch --pin.",
            Kind.OTHER_CONTENT,
        )

    def _fetch(self, url: str, file: Path) -> None:
        from hatch_epcontext.remote import web

        def progress(arrived: int, total: int | None) -> None:
            if self._beat.due():
                of = "" if total is None else f" of {show_size(total)}"
                self._log(f"downloading {url}: {show_size(arrived)}{of}")

        hub = hub_file(url)
        address, token = (web.hub_url(hub), web.hub_token()) if hub else (url, "")
        web.download(address, file, MAX_BYTES, progress, token)
        self._log(f"downloaded {url} ({show_size(file.stat().st_size)})")

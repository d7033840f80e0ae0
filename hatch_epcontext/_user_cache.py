# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""The app's folder in the user's cache, and what the loader beside this module copies into it.

A copy of ``hatch_epcontext/_user_cache.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hatch_epcontext.loader import Package

_DAY = 24 * 60 * 60.0
_UNUSED = 30 * _DAY  # The seconds until an unused folder is removed.
_SOON = 7 * _DAY  # The same while folders have more than `_MOST` bytes together.
_MOST = 4 << 30


def make_folder(loader: Any) -> Path:
    """The app's own folder in the user's cache, or one for this process where that cannot be written.

    ``loader`` is the module beside this one.
    """
    import atexit

    try:
        folder = find_folder(loader)
        make_writable(folder)
    except (OSError, RuntimeError) as error:
        # RuntimeError: this user has no home.
        reason = f"the user's cache folder cannot be used, and starts are slower: {error}"
        loader.log("warning", reason)
        folder = Path(tempfile.mkdtemp(prefix="epcontext-"))
        # Not in a process that was forked from this one.
        maker = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, True) if maker == os.getpid() else None)
    return folder


def find_folder(loader: Any) -> Path:
    """The path of the app's own folder in the user's cache. Raises RuntimeError if this user has no home."""
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    defaults = {"win32": "~/AppData/Local", "darwin": "~/Library/Caches"}
    base = os.environ.get(variable) or defaults.get(sys.platform, "~/.cache")
    return Path(base).expanduser() / str(loader.__name__.split(".")[0])


def make_writable(folder: Path) -> None:
    """Make ``folder``. Raises OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def mark_used(folder: Path) -> None:
    """Keep ``folder``, which is in the user's cache, and remove what was unused for long beside it."""
    # It may have become read-only, and another process may remove the same.
    with contextlib.suppress(OSError):
        os.utime(folder)
        now = folder.stat().st_mtime
        unused = {other: now - other.stat().st_mtime for other in folder.parent.iterdir()}
        is_much = max(unused.values()) > _SOON and sum(map(_size, unused)) > _MOST
        for other, seconds in unused.items():
            if seconds > (_SOON if is_much and other.is_dir() else _UNUSED):
                shutil.rmtree(other) if other.is_dir() else other.unlink()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def unpack(loader: Any, package: Package, *, verify: bool) -> Path:
    """The folder, in the user's cache, with a copy of ``package``, which is inside an archive.

    With ``verify`` a copy is made again if a file's sha256 differs, else if its size does.
    """
    import hashlib

    parent: Path = loader.user_folder() / "unpacked"
    folder = parent / hashlib.sha256(package.text).hexdigest()[:32]
    manifest = folder / loader.MANIFEST

    def is_whole() -> bool:
        is_copy = manifest.is_file() and manifest.read_bytes() == package.text
        return is_copy and not loader.damage(folder, package.files, verify=verify)

    if not is_whole():
        parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as temporary:
            new, old = parent / temporary / "new", parent / temporary / "old"
            for name in (*package.files, loader.MANIFEST):
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                with (package.root / name).open("rb") as file, (new / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            # Another process may have made a copy and use it already: only a damaged one is moved away.
            # On Windows a folder that another process has open stays: it is the same.
            for source, target in ((new, folder), (folder, old), (new, folder)):
                if not is_whole():
                    with contextlib.suppress(OSError):
                        source.rename(target)
    mark_used(folder)
    return folder

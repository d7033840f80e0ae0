"""The folder of a user's cache, safe for several builds at once.

Below its root: ``v5/<first two digits>/<key>/`` with ``files/``, ``record.json`` and a
``validation-<key>.json`` for each way in which the artifact was validated; ``v5/latest/<key>`` with the key
of an artifact; ``v5/locks/``; ``v5/cut/`` (see `cut_models`); ``v5/index/`` (see `index`); ``v5/staging/``
with artifacts that are not yet published, or being removed; ``models/`` (see `downloads`); and ``reports/``
with the report of each project's last build.

Only a folder that no other user can write to is used (`untrusted`), so its contents come from this user's
builds. A file that has changed is compared with its record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from hatch_epcontext.files import (
    link_or_copy,
    patiently,
    read_regular,
    sync,
    temp_dir,
    write_atomically,
)
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.archive import DamagedError, read_record
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.serialize import to_json

_ATTEMPTS = 3
"""How many times an artifact is published again while other processes remove it."""

STAGING = "staging"
"""The folder of the layout with artifacts that are not yet published, or being removed."""


def untrusted(root: Path) -> str | None:
    """Why the contents of the folder ``root`` may not be this user's, as the end of a sentence; else None.

    A missing folder is created so that, if possible, only this user can enter it.
    """
    for folder in (root, root / LAYOUT):
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        try:
            status = folder.stat()
        except OSError:
            # It cannot be written either: `write_entry` reports that.
            return None
        if sys.platform == "win32":
            continue
        # The superuser's builds run on folders of other users, as in a container.
        if os.geteuid() not in (0, status.st_uid):
            return f"{folder} belongs to another user"
        if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            return f"other users can write to {folder} (chmod go-w {folder})"
    # What is below has the modes that the user's processes give new files.
    with contextlib.suppress(OSError):
        (root / LAYOUT).chmod(0o700)
    return None


def write_entry(root: Path, key: str, folder: Path, record: Record, index: Index) -> None:
    """Store the files in ``folder`` under ``key``, unless it is stored already; raises OSError."""
    entry = entry_folder(root, key)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with staging(root / LAYOUT) as made:
        staged = made / "entry"
        shutil.copytree(folder, staged / "files", copy_function=link_or_copy)
        for file in (staged / "files").rglob("*"):
            if file.is_file():
                sync(file)
        write_atomically(staged / "record.json", to_json(record, indent=None))
        for name, recorded in record.files.items():
            index.remember(staged / "files" / PurePosixPath(name), recorded)
        _publish(staged, entry, index)


@contextlib.contextmanager
def staging(layout: Path) -> Iterator[Path]:
    """A new folder on the file system of the artifacts, so that they can be renamed; raises OSError."""
    parent = layout / STAGING
    parent.mkdir(parents=True, exist_ok=True)
    with temp_dir(parent) as folder:
        yield folder


def _publish(staged: Path, entry: Path, index: Index) -> None:
    for _ in range(_ATTEMPTS):
        # Other builds also remove what is damaged, or clean the cache.
        entry.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            patiently(lambda: staged.rename(entry))
            return
        # Another build was faster, or the existing entry is damaged.
        with contextlib.suppress(OSError, DamagedError):
            checked_record(entry, index)
            return
        patiently(lambda: discard(entry))
    patiently(lambda: staged.rename(entry))


def discard(entry: Path) -> None:
    """Remove an entry so that a build finds all of it or nothing."""
    with staging(entry.parents[1]) as trash, contextlib.suppress(FileNotFoundError):
        entry.rename(trash / "entry")


def entry_folder(root: Path, key: str) -> Path:
    """Where the artifact of that key is."""
    return root / LAYOUT / key[:2] / key


def validation_file(root: Path, key: str, validation: str) -> Path:
    """Where the validation under the key ``validation`` of that artifact is."""
    return entry_folder(root, key) / f"validation-{validation}.json"


def stored_record(entry: Path) -> Record:
    """The record of an entry; raises OSError, and DamagedError if it cannot be read."""
    entry.stat()
    try:
        return read_record(read_regular(entry / "record.json"))
    except FileNotFoundError:
        raise DamagedError("its record is missing") from None


def checked_record(entry: Path, index: Index) -> Record:
    """The record of an entry whose files are unchanged.

    Raises FileNotFoundError if there is no entry, DamagedError if it is damaged, and OSError if it cannot be
    read.
    """
    record = stored_record(entry)
    for name, recorded in record.files.items():
        if not index.is_intact(entry / "files" / PurePosixPath(name), recorded):
            raise DamagedError(f"its file {name} is missing or has other content")
    return record

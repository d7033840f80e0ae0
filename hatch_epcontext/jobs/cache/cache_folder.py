"""The folder of a cache: where its documents and entries are, and how an entry is read, written and removed.

Below the cache's root: ``v4/<first two digits>/<fingerprint>/`` with ``files/``, ``record.json``,
``checked.json`` and a ``validation-<key>.json`` for each way in which the artifact was validated;
``v4/latest/<settings key>`` with the fingerprint of the last artifact of the same models and settings,
compiled by any versions; ``v4/locks/``; ``v4/staging/`` with what is not yet, or no longer, an entry;
``v4/index/``, which `index` describes; and ``reports/`` with the report of each project's last build.

Each document is in an envelope with its name and a checksum, and the record has the sha256 of each file. So
a damaged entry is noticed, and one in the place of another. Who may write to the folder is trusted: a
checksum can be made by anybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.files import (
    is_intact,
    link_or_copy,
    read_regular,
    sync,
    temp_dir,
    write_atomically,
)
from hatch_epcontext.jobs.artifact import Record
from hatch_epcontext.jobs.cache.entry import LAYOUT, entry_name, read_record
from hatch_epcontext.jobs.cache.envelope import DamagedError, envelope_around, read_envelope
from hatch_epcontext.serialize import to_json

_ATTEMPTS = 3
"""How often an entry is put in its place while others remove it."""

STAGING = "staging"
"""The folder of the layout with artifacts that are not yet in their place, or no longer."""


def write_entry(root: Path, fingerprint: str, folder: Path, record: Record) -> None:
    """Store the files in ``folder`` under ``fingerprint``, unless they are there; raises OSError."""
    entry = entry_folder(root, fingerprint)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with staging(root / LAYOUT) as made:
        staged = made / "entry"
        shutil.copytree(folder, staged / "files", copy_function=link_or_copy)
        for file in (staged / "files").rglob("*"):
            if file.is_file():
                sync(file)
        document = envelope_around(entry_name(fingerprint), to_json(record))
        write_atomically(staged / "record.json", document)
        _write_states(staged, record)
        _publish(staged, entry)


@contextlib.contextmanager
def staging(layout: Path) -> Iterator[Path]:
    """A new folder on the file system of the artifacts, so that they can be renamed; raises OSError."""
    parent = layout / STAGING
    parent.mkdir(parents=True, exist_ok=True)
    with temp_dir(parent) as folder:
        yield folder


def _publish(staged: Path, entry: Path) -> None:
    for _ in range(_ATTEMPTS):
        # Others remove what is damaged too, and clean the cache.
        entry.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            staged.rename(entry)
            return
        # Another build was faster, or the existing entry is damaged.
        if is_intact_entry(entry):
            return
        discard(entry)
    staged.rename(entry)


def discard(entry: Path) -> None:
    """Remove an entry so that a build finds the whole of it or nothing."""
    with staging(entry.parents[1]) as trash, contextlib.suppress(FileNotFoundError):
        entry.rename(trash / "entry")


def entry_folder(root: Path, fingerprint: str) -> Path:
    """Where the entry of that fingerprint is."""
    return root / LAYOUT / fingerprint[:2] / fingerprint


def validation_file(root: Path, fingerprint: str, key: str) -> Path:
    """Where the validation under ``key`` of that entry is."""
    return entry_folder(root, fingerprint) / f"validation-{key}.json"


def read_document(file: Path, name: str) -> str:
    """The text of the document ``name``; raises OSError, and DamagedError if the file has another one."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise DamagedError(f"{file.name} is not a regular file")
    return read_envelope(file.read_bytes(), name).text


def stored_record(entry: Path) -> Record:
    """The record of an entry; raises OSError, and DamagedError if it cannot be its own."""
    if not stat.S_ISDIR(entry.lstat().st_mode):
        raise DamagedError("it is not a folder")
    try:
        text = read_document(entry / "record.json", entry_name(entry.name))
    except FileNotFoundError:
        raise DamagedError("its record is missing") from None
    return read_record(text)


def checked_record(entry: Path, *, read_all: bool = False) -> Record:
    """The record of an entry whose files are as they were stored.

    Files that changed are read again, or with ``read_all`` all of them. Raises FileNotFoundError if there is
    no entry, DamagedError if it is damaged, and OSError if it cannot be read.
    """
    record = stored_record(entry)
    states = _list_files(entry / "files")
    if states.keys() != record.files.keys():
        name = min(states.keys() ^ record.files.keys())
        what = "has no file" if name in record.files else "has a file more than its record:"
        raise DamagedError(f"it {what} {name}")
    known = _read_states(entry)
    changed: list[str] = []
    for name, recorded in record.files.items():
        if states[name][0] != recorded.size:
            raise DamagedError(f"its file {name} has another size")
        if known.get(name) != [*states[name], recorded.sha256]:
            changed.append(name)
    for name in record.files if read_all else changed:
        if not is_intact(entry / "files", {name: record.files[name]}):
            raise DamagedError(f"its file {name} has other content")
    if changed:
        with contextlib.suppress(OSError):
            _write_states(entry, record)
    return record


def is_intact_entry(entry: Path, *, read_all: bool = False) -> bool:
    """Whether an entry is as `checked_record` wants it."""
    try:
        checked_record(entry, read_all=read_all)
    except (OSError, DamagedError):
        return False
    return True


def _list_files(folder: Path) -> dict[str, list[int]]:
    """The state of each file below ``folder``; raises DamagedError if there is a link or a device."""
    found: dict[str, list[int]] = {}
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedError(f"{folder.name} is not a folder")
    waiting = [(folder, "")]
    while waiting:
        inside, prefix = waiting.pop()
        with os.scandir(inside) as items:
            for item in items:
                status, name = item.stat(follow_symlinks=False), prefix + item.name
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((Path(item.path), f"{name}/"))
                elif stat.S_ISREG(status.st_mode):
                    found[name] = _state(Path(item.path))
                else:
                    raise DamagedError(f"{name} is not a regular file")
    return found


def _state(path: Path) -> list[int]:
    """Size in bytes, time of the last change in ns, and inode of a file.

    For one that was verified by sha256 a cheap way to see that nobody wrote to it since. Not the time of
    its last status change, which every hard link to it moves.
    """
    # Not from the folder's listing, which has no inodes on Windows.
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_states(entry: Path) -> Mapping[str, Any]:
    """The state and the sha256 of each file when its content was checked, by its name; empty if unknown."""
    try:
        found = json.loads(read_regular(entry / "checked.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_states(entry: Path, record: Record) -> None:
    folder = entry / "files"
    states = {
        name: [*_state(folder / PurePosixPath(name)), recorded.sha256]
        for name, recorded in record.files.items()
    }
    write_atomically(entry / "checked.json", json.dumps(states), durable=False)

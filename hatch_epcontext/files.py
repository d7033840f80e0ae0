"""Files: written whole or not at all, recorded by size and sha256, linked or copied."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from hatch_epcontext.text import show_size

_CHUNK = 1 << 20

MOST_BYTES = 256 * 10**9
"""Bytes of one file or of all weights of a model: more than a machine of today can compile."""

_LARGE = 10**9
"""Bytes from which a file is not read before it is clear what for."""

_TIMES = 100
"""How much larger than what is used of it, or was written to it, such a file may be."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its hex sha256."""

    size: int
    sha256: str


def write_atomically(file: Path, text: str, *, durable: bool = True) -> Path:
    """Write ``file`` so that readers see the old text or the new one; its folder is made if needed.

    Without ``durable`` a power cut can leave it empty: that is faster, and enough for what can be made again.

    An existing file keeps its mode. Characters that are not Unicode, which file names can have, are
    written as escapes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a file can only be renamed within its file system.
    own = f"{os.getpid()}-{threading.get_ident()}"
    temporary = file.with_name(f".{file.name}.{own}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
        if durable:
            sync(temporary)
        if file.exists():
            shutil.copymode(file, temporary)
        return temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def sync(file: Path) -> None:
    """Make the system write ``file`` to its disk: a power cut can leave a renamed file empty."""
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


@contextlib.contextmanager
def temp_dir() -> Iterator[Path]:
    """A temporary folder, which is removed in the end."""
    with tempfile.TemporaryDirectory(
        prefix="hatch-epcontext-", ignore_cleanup_errors=True
    ) as folder:
        # Resolved, because a temporary folder is often behind a link, and EPs compare paths.
        yield Path(folder).resolve()


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """Put the file ``source`` at ``target`` too: a hard link where the file system has them, or a copy.

    For targets that nothing writes to. The signature is that of `shutil.copytree`'s ``copy_function``.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return str(target)


def symlink_or_copy(source: Path, target: Path) -> None:
    """Put the file ``source`` at ``target`` too: a symbolic link where the system allows it, or a copy.

    For files of the user: a hard link would change their status, and who looks at it would read them again.
    """
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a file that can be read: no folder, pipe or device, and a possible name."""
    # `Path.is_file` raises for names that are too long.
    return os.path.isfile(path)  # noqa: PTH113


def too_large(status: os.stat_result, used: int | None = None) -> str | None:
    """Why a file of this ``status`` is not read, as the end of a sentence; None if it can be.

    ``used``: its bytes that are used, if that is known. A file without contents can have any size.
    """
    size = status.st_size
    if size > MOST_BYTES:
        return f"is larger than {show_size(MOST_BYTES)}: {show_size(size)}"
    if size < _LARGE:
        return None
    if used is not None and size > _TIMES * used:
        return f"has {show_size(size)}, and the model uses {show_size(used)} of it"
    # Windows does not count them.
    blocks: int | None = getattr(status, "st_blocks", None)
    if blocks is not None and size > _TIMES * 512 * blocks:
        return f"has {show_size(size)}, of which only {show_size(512 * blocks)} were ever written"
    return None


def file_sha256(path: Path) -> str:
    """The hex sha256 of a file, read in pieces of 1 MiB."""
    with path.open("rb") as file:
        return stream_sha256(file)


def stream_sha256(file: IO[bytes]) -> str:
    """The hex sha256 of the rest of ``file``, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def is_portable(name: str) -> bool:
    """Whether ``name`` is a relative path that stays below its folder on every system."""
    # A part may not end with a dot: that also refuses "..".
    return not re.search(r'[\\:*?"<>|\x00-\x1f]', name) and all(
        part and part[-1] not in ". " for part in name.split("/")
    )


def is_sha256(text: str) -> bool:
    """Whether ``text`` is a hex sha256, as this package writes it."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def record_file(path: Path) -> FileRecord:
    """The record of the file at ``path``."""
    return FileRecord(path.stat().st_size, file_sha256(path))


def record_files(folder: Path) -> dict[str, FileRecord]:
    """The record of every file below ``folder``, by its path there with forward slashes."""
    return {
        path.relative_to(folder).as_posix(): record_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_intact(folder: Path, files: Mapping[str, FileRecord]) -> bool:
    """Whether each file of ``files`` is below ``folder`` as it was recorded."""
    for name, recorded in files.items():
        path = folder / PurePosixPath(name)
        if not path.is_file() or record_file(path) != recorded:
            return False
    return True

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

_CHUNK = 1 << 20


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


_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d) *(\.|$)", re.IGNORECASE)
"""How the names begin that are devices in every folder of Windows."""


def is_portable(name: str) -> bool:
    """Whether ``name`` is a relative path that stays below its folder, and names a file, on every system."""
    # A part may not end with a dot: that also refuses "..". Surrogates are bytes that are no text.
    return not re.search(r'[\\:*?"<>|\x00-\x1f\x7f\ud800-\udfff]', name) and all(
        part and part[-1] not in ". " and not _DEVICES.match(part) for part in name.split("/")
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

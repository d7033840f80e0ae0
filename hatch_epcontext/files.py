"""Files: written atomically, recorded by size and sha256, linked or copied."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import is_device, show_size

T = TypeVar("T")

_CHUNK = 1 << 20

_LFS = b"version https://git-lfs"
"""The first bytes of a Git LFS pointer."""

TEMP_VARIABLE = "TEMP" if sys.platform == "win32" else "TMPDIR"
"""The variable that names the folder for temporary files."""

STAGING_PREFIX, _PREFIX_BESIDE = "hatch-epcontext-", ".epcontext-"
"""The prefixes of temporary folders: in the system's folder for them, and beside a user's files."""

_MARKER = ".lock"
"""The file in a temporary folder that names its owner, and is locked while the folder is in use."""

_OURS = "hatch-epcontext made the folder {}, and removes it when nobody has locked this file.\n"
"""The contents of a marker, with the folder's name: a folder without it is never removed.

A copy of the folder has another name, and belongs to the user.
"""

_EARLIER, _READY = "earlier", "ready"
"""In a temporary folder of `replace_files`: what it moved away, and what it moves after that."""

_LOCKED_BYTE = 1000
"""The locked byte of a marker on Windows. Locking makes it unreadable, so it is after the text."""

_LOCKED = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK, 0})
"""The system's errors for a file that is locked: of POSIX, two of Windows, and none at all under Wine."""

_BINARY = getattr(os, "O_BINARY", 0)

MAX_BYTES = 256 * 10**9
"""The most bytes of one file or of all weights of a model: more than today's machines can compile."""

_NAMED = 40
"""The number of a file's name's characters in the name of its temporary file."""

_IN_USE = frozenset({5, 32, 33})
"""Windows errors for files in use: access denied, sharing violation, lock violation."""

_PATIENCE, _PAUSE = 2.0, 0.05
"""Seconds for retries while a file is in use, and between two attempts: virus scanners and indexers open new
files."""

_LARGE = 10**9
"""Bytes from which a file is read only if its size is plausible."""

_MAX_UNUSED = 100
"""The largest ratio of such a file's size to its used, or written, part."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its hex sha256."""

    size: int
    sha256: str


def patiently(action: Callable[[], T]) -> T:
    """Return the result of ``action``, with retries while another program has its file open.

    Only Windows fails to replace, rename and remove such files. Raises OSError.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return action()
        except OSError as error:
            if not is_in_use(error) or time.monotonic() > end:
                raise
        time.sleep(_PAUSE)


def remove(file: Path) -> None:
    """Remove ``file`` after an error; an error of the removal is ignored."""
    with contextlib.suppress(OSError):
        patiently(lambda: file.unlink(missing_ok=True))


def is_in_use(error: OSError) -> bool:
    """Whether ``error`` may mean that another program has the file open. Only Windows reports that."""
    number = getattr(error, "winerror", None)
    # Opening a file calls a C function, which has one error number for all of these.
    is_of_c = sys.platform == "win32" and number is None and error.errno == errno.EACCES
    return is_of_c or number in _IN_USE


def write_atomically(file: Path, text: str, *, durable: bool = True) -> Path:
    """Write ``file`` so that readers see the old text or the new one; its folder is made if needed.

    Without ``durable`` it is faster, but a power cut can leave it empty: for files that can be made again.

    An existing file keeps its mode. Surrogates, which file names can contain, are written as escapes.
    """
    # In the same folder, because files can be renamed only within a file system; with a short name, because
    # the file's own may be as long as the file system allows.
    own = f"{os.getpid()}-{threading.get_ident()}"
    temporary = file.with_name(f".{file.name[:_NAMED]}.{own}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            handle.write(text.encode("utf-8", "backslashreplace"))
            if durable:
                handle.flush()
                os.fsync(handle.fileno())
        if file.exists():
            shutil.copymode(file, temporary)
        return patiently(lambda: temporary.replace(file))
    except BaseException as error:
        remove(temporary)
        # The error of a write does not name the file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def sync(file: Path) -> None:
    """Make the system write ``file`` to its disk: otherwise a power cut can leave a renamed file empty."""
    with patiently(lambda: file.open("rb+")) as handle:
        os.fsync(handle.fileno())


@contextlib.contextmanager
def temp_dir(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder in ``parent``, or in the system's folder; it is removed at the end.

    ``parent`` is made if needed. First removes such folders of killed processes. Raises OSError.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    if parent is None and not is_text(system := Path(tempfile.gettempdir())):
        raise OSError(
            f"the folder for temporary files, {system}, has a path that is not UTF-8, and ONNX Runtime "
            f"cannot open such paths. Set {TEMP_VARIABLE} to another folder."
        )
    prefix = STAGING_PREFIX if parent is None else _PREFIX_BESIDE
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        marker = os.open(folder / _MARKER, os.O_RDWR | os.O_CREAT | _BINARY, 0o600)
    except OSError:
        folder.rmdir()
        raise
    try:
        # Locked before it names the owner: other processes ignore an empty marker, and a locked one.
        with contextlib.suppress(OSError):
            lock(marker)
        os.write(marker, _OURS.format(folder.name).encode())
        # Resolved, because a temporary folder is often a link, and EPs compare paths.
        yield folder.resolve()
    finally:
        _remove(folder, marker)


def sweep(parent: Path | None = None) -> None:
    """Remove the folders that `temp_dir` made in ``parent`` for processes that no longer run."""
    prefix = STAGING_PREFIX if parent is None else _PREFIX_BESIDE
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _sweep_one(Path(entry.path))


def _sweep_one(folder: Path) -> None:
    # In a folder for all users, other users may have folders with this name.
    if sys.platform != "win32" and folder.lstat().st_uid != os.geteuid():
        return
    # Not blocking: it can be a pipe.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | _BINARY
    marker = os.open(folder / _MARKER, os.O_RDWR | flags)
    content, is_unused = _OURS.format(folder.name).encode("utf-8", "surrogateescape"), False
    with contextlib.suppress(OSError):
        is_unused = os.read(marker, len(content) + 1) == content and lock(marker)
    try:
        if is_unused:
            _recover(folder)
    except OSError:
        os.close(marker)
        raise
    if is_unused:
        _remove(folder, marker)
    else:
        os.close(marker)


def _recover(folder: Path) -> None:
    """Finish or undo what a killed `replace_files` had begun, whose temporary folder this is."""
    moved = next((folder / name for name in (_READY, _EARLIER) if (folder / name).is_dir()), None)
    files = [] if moved is None else [path for path in moved.rglob("*") if not path.is_dir()]
    for path in sorted(files, key=lambda path: path.lstat().st_mtime_ns):
        target = folder.parent / path.relative_to(moved or folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def lock(file: int) -> bool:
    """Lock an open file until it is closed; False if it is locked already. Raises OSError if it cannot be."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            os.lseek(file, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _LOCKED:
            raise
        return False
    return True


def _remove(folder: Path, marker: int) -> None:
    """Remove a folder of `temp_dir`, and close its marker.

    The marker goes last, and only if nothing else is left: a later removal takes files that are in use, or
    that a killed removal left.
    """
    try:
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARKER:
                with contextlib.suppress(OSError):
                    entry.unlink()
        is_empty = [entry.name for entry in folder.iterdir()] == [_MARKER]
    except OSError:
        is_empty = False
    # Windows removes no open file.
    os.close(marker)
    if is_empty:
        with contextlib.suppress(OSError):
            (folder / _MARKER).unlink()
            folder.rmdir()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder in ``folder``: at the end its files replace those of the same names there, unless by an error.

    Each at once: also if the process is killed or the disk is full, there is the earlier file or the new one.
    Raises OSError.
    """
    with temp_dir(folder) as new:
        yield new
        for file in new.iterdir():
            if file.name != _MARKER:
                sync(file)
                patiently(partial(file.replace, folder / file.name))


def replace_files(
    folder: Path,
    files: Mapping[str, Path],
    obsolete: Iterable[str] = (),
    check: Callable[[Path], None] = lambda copies: None,
) -> None:
    """Copy ``files`` to their paths in ``folder``, and remove the ``obsolete`` ones: all of it, or nothing.

    A file that names others comes after them: it disappears first and appears last, so that a killed process
    leaves none beside files of another version; `sweep` then finishes the work, or undoes it. A single file
    is replaced at once. ``check`` gets the folder with the copies, and may raise.
    Raises OSError, also if a file is in use: then all is as it was before.
    """
    folder = folder.resolve()
    is_new = not folder.exists()
    names = [*(name for name in obsolete if name not in files), *files]
    for path in map(folder.joinpath, names):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temp_dir(folder) as beside:
            new, earlier, ready = (beside / name for name in ("new", _EARLIER, _READY))
            for name, source in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, new / name)
            new.mkdir(exist_ok=True)
            check(new)
            moves = [(folder / name, earlier / name) for name in reversed(names) if names[1:]]
            moves = [(old, new_path) for old, new_path in moves if os.path.lexists(old)]
            moves.append((new, ready))
            _move_all([*moves, *((ready / name, folder / name) for name in files)])
    finally:
        inside = {parent for name in names for parent in (folder / name).parents}
        for parent in sorted(inside, reverse=True):
            if parent.is_relative_to(folder) and (is_new or parent != folder):
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _move_all(moves: list[tuple[Path, Path]]) -> None:
    """Rename the first file of each pair to the second, or none; raises OSError."""
    for index, (source, target) in enumerate(moves):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            patiently(partial(source.replace, target))
        except BaseException as error:
            for before, after in reversed(moves[:index]):
                patiently(partial(after.replace, before))
            if isinstance(error, OSError):
                # The user's own file, and not that in the temporary folder.
                own = target if _PREFIX_BESIDE in str(source) else source
                error.filename, error.filename2 = str(own), None
            raise


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """Make ``target`` a hard link to the file ``source``, or a copy if the file system has no hard links.

    For targets that nothing writes to. The signature is that of `shutil.copytree`'s ``copy_function``.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return str(target)


def symlink_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a symbolic link to the file ``source``, or a copy if the system allows no links.

    For files of the user: a hard link would change their status, and an index would read them again.
    """
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def put_files(
    names: Iterable[str], source: Path, folder: Path, copy: Callable[..., object] = link_or_copy
) -> None:
    """Put the files ``names``, which are in ``source``, into ``folder``, as links, unless they are there."""
    for name in names:
        target = folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            copy((source / name).resolve(), target)


def mentions(path: Path, words: Iterable[str]) -> bool:
    """Whether the file at ``path``, if there is one, contains one of ``words``."""
    import mmap  # Imported here: few builds need it.

    # Empty files cannot be mapped.
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as map_:
            return any(map_.find(word.encode()) >= 0 for word in words)
    except (OSError, ValueError):
        return False


def is_text(path: Path) -> bool:
    """Whether ``path`` is text: on Linux a name may be any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a regular file: not a folder, pipe or device, nor an impossible name."""
    # `Path.is_file` raises for names that are too long.
    return os.path.isfile(path)  # noqa: PTH113


def is_missing(path: Path) -> bool:
    """Whether there is nothing at ``path``, not even a link, as far as this user can see."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL)
    except ValueError:
        return True
    return False


def read_regular(path: Path) -> bytes:
    """The bytes of the regular file ``path``; raises OSError for others: a pipe, for example, would block."""
    if os.path.exists(path) and not is_regular(path):  # noqa: PTH110, as in `is_regular`
        raise FileNotFoundError(errno.ENOENT, "there is no regular file", str(path))
    return path.read_bytes()


def known_text(path: Path) -> str | None:
    """The text of the file ``path``; None if there is no such file, or if it is not text."""
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeError):
        return None


def mark_used(path: Path) -> None:
    """Refresh the time of ``path`` in a cache: ``prune`` removes what was not used since then."""
    # Another user's file, or one that is being removed, can be read all the same.
    with contextlib.suppress(OSError):
        os.utime(path)


@dataclass(frozen=True)
class Rejection:
    """Why a file cannot be used: the end of a sentence, and what to do."""

    message: str
    hint: str


USE_UTF8 = (
    f"Here Python reads names of files as {sys.getfilesystemencoding()}: set PYTHONUTF8=1, or a locale "
    "of UTF-8 such as LC_ALL=C.UTF-8."
)
"""What to do where names of files are not UTF-8 for Python."""

RENAME = USE_UTF8
if sys.getfilesystemencoding() == "utf-8":
    RENAME = "Rename its folders, or the file."

_CHECK = "Check the path, and let this user read it."


def unreadable(path: Path) -> Rejection | None:
    """Why the file at ``path`` cannot be read; None if it can be."""
    if not is_text(path):
        return Rejection("has a path that is not UTF-8, which ONNX Runtime cannot open.", RENAME)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if not os.path.islink(path):  # noqa: PTH114, the other raises for names that are too long
            return Rejection(f"cannot be read: {reason}.", _CHECK)
        hint = "Fetch the file, for example with git annex get, dvc pull or hf download, or put it there."
        return Rejection(f"is a link to {path.readlink()}, which cannot be read: {reason}.", hint)
    if not stat.S_ISREG(mode):
        return Rejection("is a folder, a pipe or a device, and not a file.", "Name a file.")
    if not os.access(path, os.R_OK):
        return Rejection("cannot be read: Permission denied.", _CHECK)
    return None


def too_large(status: os.stat_result, used: int | None = None) -> str | None:
    """Why a file of this ``status`` is not read, as the end of a sentence; None if it is.

    ``used``: the number of its used bytes, if known. A sparse file can have any size.
    """
    size = status.st_size
    if size > MAX_BYTES:
        return f"is larger than {show_size(MAX_BYTES)}: {show_size(size)}"
    if size < _LARGE:
        return None
    if used is not None and size > _MAX_UNUSED * used:
        return f"has {show_size(size)}, and the model uses {show_size(used)} of it"
    # Windows does not count blocks.
    blocks: int | None = getattr(status, "st_blocks", None)
    if blocks is not None and size > _MAX_UNUSED * 512 * blocks:
        return f"has {show_size(size)}, of which only {show_size(512 * blocks)} were ever written"
    return None


def file_sha256(path: Path) -> str:
    """The hex sha256 of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a pointer instead of the file at ``path``."""
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def is_portable(name: str) -> bool:
    """Whether ``name`` is a relative path that stays below its folder, and names a file, on every system."""
    # A part may not end with a dot, which also excludes "..". Surrogates are bytes that are not text.
    return not re.search(r'[\\:*?"<>|\x00-\x1f\x7f\ud800-\udfff]', name) and all(
        part and part[-1] not in ". " and not is_device(part) for part in name.split("/")
    )


def is_inside(path: str) -> bool:
    """Whether the relative ``path`` stays in its folder, on any system; also if it is the folder."""
    pure, windows = PurePosixPath(path), PureWindowsPath(path)
    if not path or pure.is_absolute() or windows.drive or windows.root:
        return False
    # Joined to a folder a part can become a drive, and Windows reads ".. " as the parent folder.
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
    return all(part.strip(". ") and not PureWindowsPath(part).drive for part in parts)


def is_sha256(text: str) -> bool:
    """Whether ``text`` is a hex sha256 in lower case."""
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


def is_intact(path: Path, recorded: FileRecord) -> bool:
    """Whether there is a regular file at ``path`` that is as ``recorded``."""
    return is_regular(path) and record_file(path) == recorded

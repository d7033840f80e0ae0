"""What the system refuses, in words: a full disk, a folder that cannot be written, too many open files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hatch_epcontext.errors import BuildError, EpcontextError, Kind, OutputError, Problem
from hatch_epcontext.files import STAGING_PREFIX, TEMP_VARIABLE, Output, is_in_use, remove
from hatch_epcontext.text import show_size

_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""What the system answers when there is no room for a file."""

_REFUSALS = _FULL | {
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "EIO", "ESTALE", "ENODEV", "ENXIO"),
        *("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ETIMEDOUT"),
    )
}
"""What the system answers whatever a program does right. A missing file can be the program's own fault."""

_FULL_IN_WORDS = re.compile(
    r"no space left on device|disk quota exceeded|not enough space on the disk", re.IGNORECASE
)

_NO_ROOM = 64 << 10
"""Bytes below which a file system counts as full: libraries that fail to write there rarely report why."""


def check_apart(report: Path | None, place: Path) -> None:
    """Raise OutputError if ``report`` is to be written where ``place``, a result, is."""
    if report is not None and report.resolve().is_relative_to(place.resolve()):
        message = f"is where the result itself is written: {place}."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(report), message, "Choose another place."))


_WORDS = {
    Output.PAGE: "HTML report",
    Output.REPORT: "report",
    Output.MEASUREMENTS: "measurements",
    Output.CHART: "chart",
}


@contextlib.contextmanager
def writing(
    what: str, folder: Path, location: str = "", error: type[EpcontextError] = BuildError
) -> Iterator[None]:
    """Raise ``error`` with one problem in place of an OSError, while ``what`` is written to ``folder``."""
    try:
        yield
    except OSError as refused:
        raise error(system_problem(refused, folder, what, location)) from refused


def check_folder(folder: Path) -> None:
    """Raise OutputError if ``folder`` or one of its parents is a file, or if nothing can be written there."""
    existing = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not existing.is_dir():
        message = "is a file, and not a folder."
        raise OutputError(
            Problem(Kind.FILE_EXISTS, str(existing), message, "Choose another place.")
        )
    with writing("a result", existing, str(folder), OutputError):
        # Tried, because no system reports reliably whether a folder can be written to.
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            # Its own path is one that no user knows.
            raise OSError(error.errno, error.strerror, str(existing)) from error


def check_file(path: Path, kind: Output) -> None:
    """Raise OutputError unless ``path`` is that of a new file, or of one of this ``kind``."""
    with writing("a report", path.parent, str(path), OutputError):
        try:
            # Not `exists`, which is also false for a name that the file system does not take.
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            check_folder(path.parent)
            if sys.platform == "win32" and path.parent.is_dir():
                # Tried with another name, because Windows reports no file for one that is too long.
                other = path.with_name(f"~{os.getpid():05}{path.name[6:]}")
                other.touch(exist_ok=False)
                remove(other)
            return
        if not kind.is_at(path):
            message = f"exists already, and is no {_WORDS[kind]} that epcontext wrote."
            hint = "Choose another name, or move it away: it is never overwritten."
            raise OutputError(Problem(Kind.FILE_EXISTS, str(path), message, hint))


def system_problem(
    error: OSError, folder: Path | None = None, what: str = "", location: str = ""
) -> Problem:
    """The problem for ``error``, which came while ``what`` was written to ``folder``.

    Without ``folder`` it is that of the file that ``error`` names.
    """
    path, reason = _path_and_reason(error)
    place = folder or (Path(path).absolute().parent if path else Path.cwd())
    doing = f" while {what} was written" if what else ""
    message = f"{reason}{doing}: {path or place}."
    full = error.errno in _FULL or _FULL_IN_WORDS.search(reason) is not None
    if full:
        message += f"\n{_room(place)}"
    advice = _advice(place, full=full)
    if is_in_use(error) and not full:
        advice = f"If another program has it open, close that, or try again. Otherwise: {advice}"
    return Problem(Kind.SYSTEM_ERROR, location, message, advice)


def _path_and_reason(error: OSError) -> tuple[str, str]:
    """The path that ``error`` names, if there is one, and the reason in words."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        # Of a whole folder: (source, target, reason) for each file.
        _, target, reason = error.args[0][0]
        # The reason is the text of an OSError, which names the files too.
        found = re.match(r"\[(?:Errno|WinError) -?\d+\] ([^:]+)", str(reason))
        return str(target), found[1] if found else str(reason)
    name = error.filename2 or error.filename
    path = os.fsdecode(name) if isinstance(name, str | bytes) else ""
    return path, error.strerror or str(error)


def refusal(error: OSError, folder: Path) -> str:
    """Why ``folder`` cannot be written, in one line; with the room on its file system if that is full."""
    _, reason = _path_and_reason(error)
    full = error.errno in _FULL or _FULL_IN_WORDS.search(reason)
    return f"{reason}. {_room(folder)}" if full else reason


def os_error_text(error: OSError) -> str:
    """``error`` as a message: with what to do where the system refuses."""
    refused = is_refusal(error) or isinstance(error, shutil.Error)
    return system_problem(error).text() if refused else str(error)


def is_refusal(error: OSError) -> bool:
    """Whether the system refuses, and the program that got ``error`` is not to blame."""
    return error.errno in _REFUSALS


def removed_problem(folder: Path, location: str) -> Problem:
    """The problem when somebody has removed the temporary ``folder`` of a step."""
    message = f"the temporary folder {folder} was removed while the build was running."
    hint = f"Keep programs that clean temporary folders away from it, or set {TEMP_VARIABLE} to another one."
    return Problem(Kind.SYSTEM_ERROR, location, message, hint)


def full_disk_problem(folder: Path, location: str, output: str) -> Problem | None:
    """The problem if ``folder``, where something failed with this ``output``, has no room left; else None."""
    if not _FULL_IN_WORDS.search(output) and not _is_full(folder):
        return None
    message = f"No space left on device while the worker wrote: {folder}.\n{_room(folder)}"
    return Problem(Kind.SYSTEM_ERROR, location, message, _advice(folder, full=True))


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _NO_ROOM
    except OSError:
        return False


def _room(folder: Path) -> str:
    """How much room the file system of ``folder`` has, and where it is mounted."""
    try:
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        mount = next(each for each in (existing, *existing.parents) if os.path.ismount(each))
        usage = shutil.disk_usage(existing)
    except (OSError, StopIteration):
        return "The file system does not report how much is left."
    if hasattr(os, "statvfs") and (counts := os.statvfs(existing)).f_files and not counts.f_favail:
        return f"The file system {mount} has room for no more files, however small."
    left = f"The file system {mount} has {show_size(usage.free)} of {show_size(usage.total)} left."
    if usage.free < _NO_ROOM:
        return left
    return f"{left} Perhaps it had no room for more files, or the build has removed what filled it."


def _advice(folder: Path, *, full: bool) -> str:
    is_temporary = any(part.startswith(STAGING_PREFIX) for part in folder.parts)
    if is_temporary or folder == Path(tempfile.gettempdir()):
        other = f"set {TEMP_VARIABLE} to another folder"
    else:
        other = "choose another folder"
    if full:
        return f"Free space there, or {other}, on another file system."
    return f"Let this user write there, or {other}."

"""The operating system: its errors in messages, such as a full disk, its signals as errors, its libraries.

And the cores, the memory and the Python of this process, and when to report that something still runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from hatch_epcontext.errors import AccidentError, EpcontextError, Kind, OutputError, Problem
from hatch_epcontext.files import STAGING_PREFIX, TEMP_VARIABLE, USE_UTF8, is_in_use
from hatch_epcontext.text import show_size

LIBRARIES = (".so", ".dll", ".dylib")
"""The suffixes of shared libraries."""

_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
"""The system's errors when there is no room for a file."""

_OURS = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EBADF}
)
"""The system's errors that may be the program's fault."""

_FULL_IN_WORDS = r"(?i)no space left on device|disk quota exceeded|not enough space on the disk"

_NO_ROOM = 64 << 10
"""Bytes below which a file system counts as full: libraries that fail to write rarely report the reason."""

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def writing(
    what: str, folder: Path, location: str = "", error: type[EpcontextError] = AccidentError
) -> Iterator[None]:
    """Raise ``error`` with one problem instead of an OSError, while ``what`` is written to ``folder``."""
    try:
        yield
    except OSError as cause:
        raise error(system_problem(cause, folder, what, location)) from cause


def check_folder(folder: Path) -> None:
    """Raise OutputError if ``folder`` or one of its parents is a file, or if nothing can be written there."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        message = "is a file, and not a folder."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(existing), message, "Choose another path."))
    with writing("a result", existing, str(folder), OutputError):
        # Tested by writing, because no system reliably reports write permission.
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            # The temporary file's path means nothing to the user.
            raise OSError(error.errno, error.strerror, str(existing)) from error


def system_problem(
    error: OSError, folder: Path | None = None, what: str = "", location: str = ""
) -> Problem:
    """The problem for ``error`` while ``what`` was written to ``folder``, or to the file in ``error``."""
    path, reason = _path_and_reason(error)
    written = folder or (Path(path).absolute().parent if path else Path.cwd())
    doing = f" while {what} was written" if what else ""
    message = f"{reason}{doing}: {path or written}."
    full = error.errno in _FULL or re.search(_FULL_IN_WORDS, reason) is not None
    if full:
        message += f"\n{_room(written)}"
    advice = _advice(written, full=full)
    if is_in_use(error) and not full:
        advice = f"If another program has it open, close that, or try again. Otherwise: {advice}"
    return Problem(Kind.SYSTEM_ERROR, location, message, advice)


def _path_and_reason(error: OSError) -> tuple[str, str]:
    """The path that ``error`` names, if there is one, and the reason in words."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        # From copying a folder: (source, target, reason) for each file.
        _, target, reason = error.args[0][0]
        # The reason is the text of an OSError, which names the files too.
        match = re.match(r"\[(?:Errno|WinError) -?\d+\] ([^:]+)", str(reason))
        return str(target), match[1] if match else str(reason)
    name = error.filename2 or error.filename
    path = os.fsdecode(name) if isinstance(name, str | bytes) else ""
    return path, error.strerror or str(error)


def reason_not_written(error: OSError, folder: Path) -> str:
    """Why ``folder`` cannot be written, in one line; with the free space if its file system is full."""
    _, reason = _path_and_reason(error)
    full = error.errno in _FULL or re.search(_FULL_IN_WORDS, reason)
    return f"{reason}. {_room(folder)}" if full else reason


def system_error_text(error: BaseException) -> str | None:
    """``error`` as a message, if it comes from the system, or may come from the locale; None for others.

    With a hint if it is not the program's fault.
    """
    if isinstance(error, OSError):
        is_foreign = is_of_system(error) or isinstance(error, shutil.Error)
        return system_problem(error).text() if is_foreign else str(error)
    has_cause = isinstance(error, UnicodeError) and sys.getfilesystemencoding() != "utf-8"
    return f"{error}.\n    {USE_UTF8}" if has_cause else None


def is_of_system(error: OSError) -> bool:
    """Whether the system is the cause of ``error``, and not the program."""
    return error.errno is not None and error.errno not in _OURS


def removed_problem(folder: Path, location: str) -> Problem:
    """The problem that another program removed the temporary ``folder`` of a worker."""
    message = f"the temporary folder {folder} was removed while the build was running."
    hint = f"Keep programs that clean temporary folders away from it, or set {TEMP_VARIABLE} to another one."
    return Problem(Kind.SYSTEM_ERROR, location, message, hint)


def full_disk_problem(folder: Path, location: str, output: str) -> Problem | None:
    """The problem if ``folder``, in which a worker failed with this ``output``, is full; else None."""
    with contextlib.suppress(OSError):
        has_room = shutil.disk_usage(folder).free >= _NO_ROOM
        if has_room and not re.search(_FULL_IN_WORDS, output):
            return None
    message = f"No space left on device while the worker wrote: {folder}.\n{_room(folder)}"
    return Problem(Kind.SYSTEM_ERROR, location, message, _advice(folder, full=True))


def _room(folder: Path) -> str:
    """The free space on the file system of ``folder``."""
    try:
        usage = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    except (OSError, StopIteration):
        return "The file system does not report its free space."
    return f"The file system has {show_size(usage.free)} of {show_size(usage.total)} left."


def _advice(folder: Path, *, full: bool) -> str:
    is_temporary = any(part.startswith(STAGING_PREFIX) for part in folder.parts)
    if is_temporary or folder == Path(tempfile.gettempdir()):
        other = f"set {TEMP_VARIABLE} to another folder"
    else:
        other = "choose another folder"
    if full:
        return f"Free space there, or {other}, on another file system."
    return f"Let this user write there, or {other}."


_SIGNALS = (signal.SIGTERM, *(number for number in signal.Signals if number.name == "SIGBREAK"))
"""Those that end a process, and that a shell or a service sends."""


class Terminated(SystemExit):
    """The process got a signal that ends it."""


@contextlib.contextmanager
def terminated_as_error() -> Iterator[None]:
    """In this context SIGTERM raises Terminated with the exit code of a shell, 143; a second one kills.

    So does Ctrl-Break on Windows, which has no SIGTERM. It does nothing if the process has a handler of its
    own, or outside of the main thread, which handles signals. The earlier handlers are restored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    unhandled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not in_main_thread or not unhandled:
        yield
        return
    for number in unhandled:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _end(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_DFL)
    raise Terminated(128 + signal_number)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> list[int]:
    """The numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def free_memory() -> int | None:
    """Bytes of free memory, within the limits of this process's control groups; None if unknown."""
    if sys.platform != "linux":
        return None
    return min((*_system_memory(), *_group_memory()), default=None)


def _system_memory() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _group_memory() -> Iterator[int]:
    """The bytes left in this process's control group, and in those around it (version 2)."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUP.read_text(encoding="utf-8").splitlines():
            own = _GROUPS / line.removeprefix("0::/")
            for group in (own, *own.parents) if line.startswith("0::/") else ():
                with contextlib.suppress(OSError, ValueError):
                    limit = int((group / "memory.max").read_text(encoding="ascii"))
                    used = int((group / "memory.current").read_text(encoding="ascii"))
                    yield max(0, limit - used)


def pip_install(requirements: Iterable[str]) -> str:
    """The command that installs ``requirements`` into this environment."""
    # Markers have quotes of their own.
    texts = (requirement.replace('"', "'") for requirement in requirements)
    quoted = " ".join(f'"{text}"' for text in texts)
    return f"{python()} -m pip install {quoted}"


def python() -> str:
    """The command that runs this Python."""
    return sys.executable or "python"


_FIRST_BEAT, _NEXT_BEATS = 10.0, 30.0
"""Seconds until what runs is reported, and between further reports."""


class Heartbeat:
    """When to report that something still runs: after ten seconds, then every thirty without a line.

    Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = time.monotonic() + _FIRST_BEAT

    def due(self) -> bool:
        """Whether a report is due; after True, not until the next one."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return False
            self._next = now + _NEXT_BEATS
            return True

    def mark_reported(self) -> None:
        """Restart the interval, because a line was printed."""
        with self._lock:
            self._next = time.monotonic() + _NEXT_BEATS

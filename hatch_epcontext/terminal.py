"""Lines on the user's terminal, for front ends that do not show the output of a build.

pip, for example, shows it only if the build fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

_OFF = ("", "0", "false", "no", "off")


class Terminal:
    """The controlling terminal of this process; ``write`` writes bytes to it, and may raise OSError."""

    def __init__(self, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        self._write = write
        self._close = close

    def close(self) -> None:
        """Close it; no more lines can be shown."""
        with contextlib.suppress(OSError, ValueError):
            self._close()

    def show(self, line: str) -> bool:
        """Show ``line``, which has no control characters; False if that is not possible now.

        Never waits, and never raises an error.
        """
        # The front end may be in the middle of a line. The empty line is for front ends, such as uv, that
        # redraw their last two lines from above the cursor.
        text = f"\r\n{line}\r\n\r\n"
        try:
            self._write(text.encode("utf-8", "replace"))
        except (OSError, ValueError):
            return False
        return True


def find_terminal(environ: Mapping[str, str]) -> Terminal | None:
    """The terminal of this process, unless its output goes there anyway.

    None in CI, in the background, and if the front end itself writes elsewhere: lines would disturb there.
    """
    if environ.get("CI", "").lower() not in _OFF:
        return None
    if any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
        return None
    with contextlib.suppress(OSError, ValueError):
        return _console() if sys.platform == "win32" else _posix_terminal()
    return None


def _posix_terminal() -> Terminal | None:
    if sys.platform == "win32":
        return None
    # A suspended terminal (Ctrl-S) must not block the build.
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open("/dev/tty", flags)

    def write(data: bytes) -> None:
        if _is_background(descriptor):
            raise BlockingIOError
        # In the meantime the user may have put the build into the background.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.write(descriptor, data)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    if _is_background(descriptor) or not _is_shown_by_front_end():
        os.close(descriptor)
        return None
    return Terminal(write, lambda: os.close(descriptor))


def _is_background(descriptor: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:
        return True


def _is_shown_by_front_end() -> bool:
    """Whether the parent process writes to the same terminal; True if that is unknown."""
    if sys.platform != "linux":
        return True
    try:
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        number = int(fields[4])
        device = os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)
        streams = (f"/proc/{os.getppid()}/fd/{stream}" for stream in (1, 2))
        return any(Path(stream).stat().st_rdev == device for stream in streams)
    except (OSError, ValueError, IndexError):
        return True


def _console() -> Terminal:
    """The console of a process on Windows."""
    # Unlike a descriptor, it accepts all characters, whatever the code page.
    console = Path("CONOUT$").open("w", encoding="utf-8", newline="")  # noqa: SIM115
    last: list[threading.Thread] = []

    def show(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            console.write(text)
            console.flush()

    def write(data: bytes) -> None:
        # A console blocks its writers while the user selects text.
        if last and last[-1].is_alive():
            raise BlockingIOError
        last[:] = [threading.Thread(target=show, args=(data.decode(),), daemon=True)]
        last[0].start()

    return Terminal(write, lambda: None)

"""Reads the log of a worker while it grows and after it ended, in limited pieces: it can be a flood."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

from hatch_epcontext.text import printable, show_size

POLL_SECONDS = 0.2
"""Seconds between two looks at the log of a worker."""

TAIL = 40
"""The number of lines of a worker's log that an error shows."""

_TAIL_BYTES = 64 << 10
"""Bytes of the end of a log in which these lines are looked for."""

_PIECE = 1 << 20
"""Bytes of a log that are forwarded at once."""

_LONGEST_LINE = 2000
"""Characters of a line of a log that are shown."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def follow(log_path: Path, ended: threading.Event, log: Callable[[str], None]) -> None:
    """Give each line of a file to ``log`` as soon as it is complete, and the last one when ``ended`` is set.

    A file and not a pipe: processes that a vendor's compiler starts and leaves running would keep a
    pipe open.
    """
    offset, rest = 0, b""
    last = False
    while not last:
        last = ended.wait(POLL_SECONDS)
        while found := _piece(log_path, offset):
            offset += len(found)
            *lines, rest = (rest + found).split(b"\n")
            if len(rest) > _PIECE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                log(_shown(line))
    if rest:
        log(_shown(rest))


def _piece(log_path: Path, offset: int) -> bytes:
    try:
        with log_path.open("rb") as file:
            file.seek(offset)
            return file.read(_PIECE)
    except FileNotFoundError:
        return b""


def _shown(line: bytes) -> str:
    text = line[: 4 * _LONGEST_LINE].decode("utf-8", "replace")
    if len(text) <= _LONGEST_LINE and len(line) <= 4 * _LONGEST_LINE:
        return _plain(text)
    return f"{_plain(text[:_LONGEST_LINE])} ... ({show_size(len(line))})"


def _plain(text: str) -> str:
    # ONNX Runtime writes colours even to a file.
    return printable(_COLOUR.sub("", text).rstrip("\r"))


def file_size(path: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def log_tail(log_path: Path) -> str:
    """The last lines of a log, as an error shows them."""
    size = log_path.stat().st_size
    with log_path.open("rb") as file:
        file.seek(max(size - _TAIL_BYTES, 0))
        lines = file.read(_TAIL_BYTES).rstrip().splitlines()
    return "\n".join(map(_shown, lines[-TAIL:]))

"""Reads the log of a worker while it grows and after it ended, in limited pieces: it can be a flood."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from hatch_epcontext.providers import is_benign
from hatch_epcontext.text import hide_values, printable, show_size

POLL_SECONDS = 0.2
"""Seconds between two looks at the log of a worker."""

LOG_LIMIT = 100 * 10**6
"""Bytes of a log above which its worker is stopped. ONNX Runtime's whole log of a large model has less."""

TAIL = 40
"""The number of lines of a worker's log that an error shows."""

_TAIL_BYTES = 64 << 10
"""Bytes of the end of a log in which these lines are looked for."""

_PIECE = 1 << 20
"""Bytes of a log that are forwarded at once."""

_LONGEST_LINE = 2000
"""Characters of a line of a log that are shown."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def follow(
    log_path: Path, ended: threading.Event, log: Callable[[str], None], secrets: Collection[str]
) -> None:
    """Give each line of a file to ``log`` as soon as it is complete, and the last one when ``ended`` is set.

    No line has ``secrets``. A file and not a pipe: processes that a vendor's compiler starts and leaves
    running would keep a pipe open.
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
                log(_shown(line, secrets))
    if rest:
        log(_shown(rest, secrets))


def _piece(log_path: Path, offset: int) -> bytes:
    try:
        with log_path.open("rb") as file:
            file.seek(offset)
            return file.read(_PIECE)
    except FileNotFoundError:
        return b""


def _shown(line: bytes, secrets: Collection[str]) -> str:
    # Before it is cut: half a secret is one too.
    text = hide_values(line.decode("utf-8", "replace"), secrets)
    if len(text) <= _LONGEST_LINE:
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


def hide_in_log(log_path: Path, secrets: Collection[str]) -> None:
    """Replace ``secrets`` in a log that nobody writes any more: it stays until the end of the build."""
    if secrets and 0 < file_size(log_path) <= LOG_LIMIT:
        text = log_path.read_text(encoding="utf-8", errors="replace")
        log_path.write_text(hide_values(text, secrets), encoding="utf-8")


def log_tail(log_path: Path, secrets: Collection[str], *, only_errors: bool = False) -> str:
    """The last lines of a log without ``secrets``, as an error shows them.

    Without lines that clean runs print too; with ``only_errors`` without everything but errors.
    """
    start = max(log_path.stat().st_size - _TAIL_BYTES, 0)
    with log_path.open("rb") as file:
        file.seek(start)
        lines = file.read(_TAIL_BYTES).rstrip().splitlines()
    # The first line may begin within a secret.
    whole = lines[1:] if start and secrets else lines
    shown = [_shown(line, secrets) for line in whole]
    return "\n".join(list(_relevant(shown, only_errors=only_errors))[-TAIL:])


_ENTRY = re.compile(r"\[([VIWEF]):onnxruntime")
"""Where ONNX Runtime's log has the severity of an entry; lines without it belong to the entry before them."""


def _relevant(lines: Iterable[str], *, only_errors: bool) -> Iterator[str]:
    kept = not only_errors
    for line in lines:
        if is_benign(line):
            continue
        if only_errors and (entry := _ENTRY.search(line)):
            kept = entry[1] in "EF"
        if kept:
            yield line

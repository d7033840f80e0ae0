"""Reads the log of a worker while it grows and after it ended, in limited pieces: it can be huge."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hatch_epcontext.providers import is_benign
from hatch_epcontext.text import narrow, printable, show_size
from hatch_epcontext.worker.protocol import LOG, STEP

LOG_LIMIT = 100 * 10**6
"""Bytes of a log above which its worker is stopped: more than ONNX Runtime's verbose log of a large model."""

TAIL = 40
"""The most lines of a worker's log that an error shows."""

_TAIL_BYTES = 64 << 10
"""Bytes at the end of a log that are searched for these lines."""

_PIECE = 1 << 20
"""Bytes of a log that are forwarded at once."""

_MAX_LINE = 2000
"""The most characters that are shown of a line of a log."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerLog:
    """The log of a worker in ``folder``.

    ``listener``, if given, gets the lines that `forward` finds, each with the ``label``. It is a file and not
    a pipe, because a vendor's compiler may leave processes running that would keep a pipe open.
    """

    def __init__(
        self,
        folder: Path,
        label: str = "",
        listener: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.path = folder, folder / LOG
        self._label, self._listener = label, listener
        self._offset, self._rest = 0, b""

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def last_step(self) -> str:
        """The worker's last step and its seconds, for the end of a sentence."""
        step = self.folder / STEP
        with contextlib.suppress(OSError):
            seconds = time.time() - step.stat().st_mtime
            if text := step.read_text("utf-8"):
                return f" while {text} (for {seconds:.0f} s)"
        return ""

    def forward(self) -> None:
        """Pass the new lines to the listener."""
        end = self.size if self._listener else 0
        while self._offset < end and (piece := self._read(self._offset, _PIECE)):
            self._offset += len(piece)
            *lines, rest = (self._rest + narrow(piece)).split(b"\n")
            if len(rest) > _PIECE:
                lines, rest = [*lines, rest], b""
            self._rest = rest
            self._pass(lines)

    def finish(self) -> None:
        """Pass the last lines to the listener."""
        if self._listener:
            self.forward()
            self._pass([self._rest] if self._rest else [])

    def _pass(self, lines: Iterable[bytes]) -> None:
        assert self._listener is not None, "it gets them"
        for line in lines:
            self._listener(f"{self._label} | {self._shown(line)}")

    def tail(self, *, only_errors: bool = False) -> str:
        """The last lines, as an error shows them.

        Without lines that clean runs print too; with ``only_errors`` only errors.
        """
        start = max(self.size - _TAIL_BYTES, 0)
        lines = narrow(self._read(start, _TAIL_BYTES)).rstrip().splitlines()
        return "\n".join(list(_relevant(map(self._shown, lines), only_errors=only_errors))[-TAIL:])

    def _read(self, offset: int, size: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def _shown(self, line: bytes) -> str:
        text = line.decode("utf-8", "replace")
        if len(text) <= _MAX_LINE:
            return _plain(text)
        return f"{_plain(text[:_MAX_LINE])} ... ({show_size(len(line))})"


def _plain(text: str) -> str:
    # ONNX Runtime writes colours even to a file.
    return printable(_COLOUR.sub("", text).rstrip("\r"))


_ENTRY = re.compile(r"\[([VIWEF]):onnxruntime")
"""The severity of an entry in ONNX Runtime's log; lines without one belong to the entry before them."""


def _relevant(lines: Iterable[str], *, only_errors: bool) -> Iterator[str]:
    kept = not only_errors
    for line in lines:
        if is_benign(line):
            continue
        if only_errors and (entry := _ENTRY.search(line)):
            kept = entry[1] in "EF"
        if kept:
            yield line

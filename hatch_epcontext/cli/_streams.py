"""Tolerates closed pipes and full disks at standard output and standard error.

As in ``epcontext doctor | head``, and ``epcontext doctor >/dev/full``.
"""

from __future__ import annotations

import codecs
import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_opened: list[_Pipe | None] = []
"""The pipe of standard output."""


def tolerate_closed_pipes() -> None:
    """Drop output without an error after the reader of a pipe has closed it.

    So a command finishes its work with its usual exit code. `lost_output` reports other lost output.
    """
    sys.stdout, stdout = _tolerant(sys.stdout)
    sys.stderr, _ = _tolerant(sys.stderr)
    _opened[:] = [stdout]


def _tolerant(stream: TextIO) -> tuple[TextIO, _Pipe | None]:
    # A terminal has no reader that closes it; a closed stream is None.
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream, None
    stream.flush()
    pipe = _Pipe(stream.fileno(), "wb", closefd=False)
    tolerant = io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors=_errors(stream),
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return tolerant, pipe


def _errors(stream: io.TextIOWrapper) -> str | None:
    """The error handler for characters that the encoding of ``stream`` lacks: they must not fail."""
    # On Windows a pipe has the system's code page, and this handler, which handles only surrogates. UTF-8 has
    # all other characters, and there surrogates are bytes of file names.
    partial = stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"
    return "backslashreplace" if partial or stream.errors == "strict" else stream.errors


class _Pipe(io.FileIO):
    """A file that drops everything after its reader has closed it, or when its disk is full."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not _is_closed(error):
                self.failure = error
            return memoryview(data).nbytes


def lost_output() -> str | None:
    """Why some standard output was lost, other than by a closed pipe; None if none was."""
    pipe = _opened[0] if _opened else None
    if pipe is None or sys.stdout.closed:
        return None
    sys.stdout.flush()
    return None if pipe.failure is None else pipe.failure.strerror


def _is_closed(error: OSError) -> bool:
    # Windows calls it an invalid argument.
    windows = sys.platform == "win32" and error.errno == errno.EINVAL
    return windows or isinstance(error, BrokenPipeError)

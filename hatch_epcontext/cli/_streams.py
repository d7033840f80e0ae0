"""Standard output and standard error that nobody reads to the end, or that are on a full disk.

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
"""That of standard output."""


def tolerate_closed_pipes() -> None:
    """From now on, what is printed after the reader of a pipe has left is lost, and is no error.

    So a command does its work, and has the exit code that it always has. `lost_output` knows of what
    else can be lost.
    """
    sys.stdout, stdout = _tolerant(sys.stdout)
    sys.stderr, _ = _tolerant(sys.stderr)
    _opened[:] = [stdout]


def _tolerant(stream: TextIO) -> tuple[TextIO, _Pipe | None]:
    # A terminal has no reader that leaves, and a closed stream is None.
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
    """What is printed for characters that the encoding of ``stream`` lacks: they are no reason to fail."""
    # On Windows a pipe has the code page of the system, and this handler, which only knows surrogates. UTF-8
    # has all others, and surrogates are bytes of file names then.
    partial = stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"
    return "backslashreplace" if partial or stream.errors == "strict" else stream.errors


class _Pipe(io.FileIO):
    """A file that takes everything when nobody reads it any more, or when its disk is full."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not _is_closed(error):
                self.failure = error
            return memoryview(data).nbytes


def lost_output() -> str | None:
    """Why some of the standard output is lost although somebody reads it; None if nothing is."""
    pipe = _opened[0] if _opened else None
    if pipe is None or sys.stdout.closed:
        return None
    sys.stdout.flush()
    return None if pipe.failure is None else pipe.failure.strerror


def _is_closed(error: OSError) -> bool:
    # Windows calls it an invalid argument.
    windows = sys.platform == "win32" and error.errno == errno.EINVAL
    return windows or isinstance(error, BrokenPipeError)

"""Standard output and standard error that nobody reads to the end, as in ``epcontext doctor | head``."""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def tolerate_closed_pipes() -> None:
    """From now on, what is printed after the reader of a pipe has left is lost, and is no error.

    So a command does its work, and has the exit code that it always has.
    """
    sys.stdout = _tolerant(sys.stdout)
    sys.stderr = _tolerant(sys.stderr)


def _tolerant(stream: TextIO) -> TextIO:
    # A terminal has no reader that leaves, and a closed stream is None.
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    stream.flush()
    pipe = _Pipe(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    """A file that takes everything when nobody reads it any more."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not _is_closed(error):
                raise
            return memoryview(data).nbytes


def _is_closed(error: OSError) -> bool:
    # Windows calls it an invalid argument.
    windows = sys.platform == "win32" and error.errno == errno.EINVAL
    return windows or isinstance(error, BrokenPipeError)

"""The command line, ``epcontext``: one module for each command, all on the core that the hook uses."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line, or print what it needs."""
    try:
        _run()
    except KeyboardInterrupt:
        # As click ends commands; an interruption can come while click is imported.
        print("Aborted!", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except BrokenPipeError:
        # Nobody reads standard error, to which Python writes at its end what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        sys.exit(1)


def _run() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # On Windows a pipe has the system's code page, which lacks many characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        from hatch_epcontext.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("click", "tomlkit"):
            raise
        print(f'epcontext: {error}. Run: pip install "hatch-epcontext[cli]"', file=sys.stderr)  # noqa: T201
        sys.exit(2)

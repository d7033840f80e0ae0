"""The command line, ``epcontext``: one module for each command, all on the core that the hook uses."""

from __future__ import annotations

import sys

from hatch_epcontext.cli._streams import tolerate_closed_pipes


def main() -> None:
    """Run the command line, or print what it needs."""
    try:
        from hatch_epcontext.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich", "tomlkit"):
            raise
        print(f'epcontext: {error}. Run: pip install "hatch-epcontext[cli]"', file=sys.stderr)  # noqa: T201
        sys.exit(2)
    tolerate_closed_pipes()
    app()

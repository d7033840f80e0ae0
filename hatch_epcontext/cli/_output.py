"""Tables, for a terminal or for a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDTH = 240
"""The number of columns where the output is not a terminal: enough to break no name."""


def table(*columns: str) -> Table:
    """A table with these columns; sizes and counts are aligned to the right."""
    result = Table()
    for column in columns:
        numbers = column in ("size", "files")
        result.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return result


def show(rows: Table) -> None:
    """Print a table."""
    # Names are printed as they are: some look like Rich's markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(rows)

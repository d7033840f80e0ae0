"""Tables, for a terminal or for a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH = 240
"""The number of columns where the output is not a terminal: enough to break no name."""


def table(*columns: str) -> Table:
    """A table with these columns; sizes and counts are aligned to the right."""
    made = Table()
    for column in columns:
        numbers = column in ("size", "files")
        made.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return made


def show(made: Table) -> None:
    """Print a table."""
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(made)

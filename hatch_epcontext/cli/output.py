"""Tables, for a terminal and for what reads them from a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH = 240
"""Columns where there is no terminal, whose width is unknown: no name is to be folded there."""


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

"""Lines and tables for a terminal or a pipe, without control characters from models or EPs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from hatch_epcontext.text import printable

_WIDTH = 240
"""The number of columns if the output is not a terminal: enough to break no name."""


def echo(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print ``text``, which is one line unless ``lines`` is set."""
    click.echo(printable(text, lines=lines), err=err)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; sizes and files are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in columns:
        is_number = column in ("size", "files")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    # Without Rich's markup, because some names look like it.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)

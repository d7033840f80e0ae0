"""What tables of several kinds have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hatch_epcontext.errors import Problem
from hatch_epcontext.structure import show
from hatch_epcontext.tables import NarrowableTable

SOURCE = "source"
"""The name that stands for the source model where others stand for a target."""


def check_name(key: str, name: str) -> Iterator[Problem]:
    """A model's or target's name, which becomes a folder in the wheel."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith("."):
        yield Problem(
            key,
            f"{show(name)} cannot be the name of a folder in the wheel.",
            "Give it a name of letters, digits, '.', '_' and '-', with a letter or digit first.",
        )


def as_name(text: str, filler: str) -> str:
    """``text`` as a name that `check_name` takes, with ``filler`` for each other character."""
    return re.sub(r"[^A-Za-z0-9._-]", filler, text).strip("._-") or "model"


def check_twins(named: Iterable[tuple[str, str]], what: str) -> Iterator[Problem]:
    """Keys and names: no two may be the same, in any case, for they would share a folder."""
    seen: dict[str, tuple[str, str]] = {}
    for key, name in named:
        if (twin := seen.setdefault(name.casefold(), (key, name))) != (key, name):
            yield Problem(
                key,
                f"has the same name as {twin[0]}: {show(name)}.",
                f"Give each {what} a name of its own.",
            )


def check_min_coverage(key: str, table: NarrowableTable) -> Iterator[Problem]:
    """``min-coverage`` in any table that has it."""
    if table.min_coverage is not None and not 0 <= table.min_coverage <= 1:
        yield Problem(f"{key}.min-coverage", f"must be from 0 to 1, and is {table.min_coverage:g}.")

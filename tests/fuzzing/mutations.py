"""Documents that are nearly right: a valid one, with some of its values changed, moved or removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            "",
            ".",
            "..",
            "../x",
            "/etc/passwd",
            "C:\\x",
            "a/b",
            "a\x00b",
            "\x1b[31m",
            "\ud800",
            "<b>",
            "9" * 400,
            "nan",
            "[",
            "*",
        ]
    ),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 10**400]),
    st.floats(),
    TEXTS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""Any plain value."""

_Place = tuple[str | int, ...]


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """``document`` with one to three changes, each at any depth."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(made))
        if not places:
            return draw(VALUES)
        *way, last = draw(st.sampled_from(places))
        table = made
        for part in way:
            table = table[part]
        match draw(st.sampled_from(["replace", "remove", "add", "copy"])):
            case "replace":
                table[last] = draw(VALUES)
            case "remove":
                del table[last]
            case "add" if isinstance(table, dict):
                table[draw(TEXTS)] = draw(VALUES)
            case "add":
                table.append(draw(VALUES))
            case "copy":
                table[last] = copy.deepcopy(_at(made, draw(st.sampled_from(places))))
    return made


def _places(value: Any, way: _Place = ()) -> Iterator[_Place]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, inner in items:
        yield (*way, name)
        yield from _places(inner, (*way, name))


def _at(value: Any, place: _Place) -> Any:
    for part in place:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            # A change has removed it.
            return None
    return value

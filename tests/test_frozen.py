from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import pytest

from hatch_epcontext.frozen import dataclass


@dataclass(frozen=True)
class Place:
    name: str
    sizes: tuple[int, ...] = ()
    note: str = field(default="", compare=False)
    key: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Named(Place):
    other: int = 0


def test_instances_are_equal_by_the_fields_that_are_compared() -> None:
    assert Place("a", (1,)) == Place("a", (1,), note="of the first")
    assert hash(Place("a", (1,))) == hash(Place("a", (1,), note="of the first"))
    assert Place("a") != Place("b")
    assert Place("a", key="x") != Place("a", key="y")
    assert len({Place("a"), Place("a"), Place("a", (2,))}) == 2


def test_instances_of_other_classes_differ() -> None:
    assert Place("a") != Named(name="a")
    assert Named(name="a", other=1) == dataclasses.replace(Named(name="a"), other=1)


def test_what_is_not_shown_is_not_in_the_text() -> None:
    assert repr(Place("a", key="secret")) == "Place(name='a', sizes=(), note='')"
    assert repr(Named(name="a")) == "Named(name='a', sizes=(), note='', other=0)"


@pytest.mark.parametrize(
    ("values", "given"),
    [
        ((), {}),
        (("a", (), "", "", 0), {}),
        (("a",), {"name": "b"}),
        (("a",), {"unknown": 1}),
    ],
)
def test_wrong_fields_are_refused(values: tuple[Any, ...], given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Named(*values, **given)

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, get_type_hints

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.config.tables import RootTable
from hatch_epcontext.frozen import dataclass, types_of
from hatch_epcontext.jobs.search import Search
from hatch_epcontext.worker.requests import ValidateRequest


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


def test_fields_keep_their_annotations() -> None:
    annotations = {item.name: item.type for item in dataclasses.fields(Named)}
    assert annotations == {
        "name": "str",
        "sizes": "tuple[int, ...]",
        "note": "str",
        "key": "str",
        "other": "int",
    }
    assert Named.__annotations__ == {"other": "int"}


@pytest.mark.parametrize("cls", [Named, RootTable, Config, Search, ValidateRequest])
def test_the_types_of_fields_are_those_that_typing_reads(cls: type[Any]) -> None:
    hints = get_type_hints(cls)
    assert types_of(cls) == {item.name: hints[item.name] for item in dataclasses.fields(cls)}

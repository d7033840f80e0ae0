from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from hatch_epcontext.errors import ConfigError
from hatch_epcontext.structure import at, from_json, from_toml, show, suggestion, to_json


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: str = ""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outer:
    how_many: int | Literal["auto"] = "auto"
    seconds: float = 1.0
    switch: bool | None = None
    kind: Literal["a", "b", False] = "a"
    names: tuple[str, ...] = ()
    items: tuple[str | Inner, ...] = ()
    tables: Mapping[str, Inner] = field(default_factory=dict)
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def test_toml_becomes_dataclasses() -> None:
    table = {
        "how-many": 3,
        "seconds": 2,
        "switch": True,
        "kind": False,
        "names": ["x"],
        "items": ["y", {"path": "z", "sizes": {"i": [1, 2]}}],
        "options": {"a": True, "b": 1, "c": 1.5, "d": "text"},
    }
    parsed, problems = from_toml(table, Outer, "tool")
    assert not problems
    assert parsed == Outer(
        how_many=3,
        seconds=2.0,
        switch=True,
        kind=False,
        names=("x",),
        items=("y", Inner(path="z", sizes={"i": (1, 2)})),
        options={"a": True, "b": 1, "c": 1.5, "d": "text"},
    )
    assert parsed.options["a"] is True
    assert type(parsed.options["b"]) is int


@pytest.mark.parametrize(
    ("table", "where", "what"),
    [
        ({"how-many": "many"}, "tool.how-many", 'a whole number or "auto", and is "many"'),
        ({"how-many": True}, "tool.how-many", "and is true"),
        ({"how-many": 1.5}, "tool.how-many", "and is 1.5"),
        ({"seconds": "1"}, "tool.seconds", "must be a number"),
        ({"switch": 1}, "tool.switch", "must be true or false, and is 1"),
        ({"kind": 0}, "tool.kind", '"a" or "b" or false, and is 0'),
        ({"names": "abc"}, "tool.names", 'must be a list, and is "abc"'),
        ({"names": ["a", 2]}, "tool.names[1]", "must be a string, and is 2"),
        ({"items": [3]}, "tool.items[0]", "must be a string or a table"),
        ({"items": [{"sizes": {"i": ["1"]}}]}, "tool.items[0].sizes.i[0]", "must be a whole number"),
        ({"tables": {"x y": {"path": 1}}}, 'tool.tables."x y".path', "must be a string"),
        ({"tables": {"x": 1}}, "tool.tables.x", "must be a table"),
        ({"options": {"a": [1]}}, "tool.options.a", "and is [1]"),
        ({"names": [{}]}, "tool.names[0]", "must be a string, and is {}"),
        ({"how_many": 1}, "tool.how_many", 'not a known key'),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_dotted_key(
    table: dict[str, Any], where: str, what: str
) -> None:
    parsed, (problem,) = from_toml(table, Outer, "tool")
    assert problem.where == where
    assert what in problem.what
    assert isinstance(parsed, Outer)


def test_what_is_wrong_is_left_out_and_the_rest_is_there() -> None:
    table = {"how-many": "x", "names": ["a", 1], "seconds": 5, "items": ["a", 3, {"path": "p"}]}
    parsed, problems = from_toml(table, Outer, "tool")
    assert len(problems) == 3
    assert parsed == Outer(seconds=5.0, items=("a", Inner(), Inner(path="p")))
    assert table["names"] == ["a", 1], "the user's table was changed"


def test_an_unknown_key_has_a_suggestion() -> None:
    _, (problem,) = from_toml({"secnds": 1}, Outer, "tool")
    assert problem.fix.startswith('Did you mean "seconds"? Allowed: how-many,')


def test_what_is_no_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be a table, and is 3"):
        from_toml(3, Outer, "tool")


def test_json_comes_back_as_it_was_and_is_stable() -> None:
    outer = Outer(items=(Inner(path="x"), "y"), tables={"b": Inner(), "a": Inner()})
    text = to_json(outer)
    assert from_json(text, Outer) == outer
    assert text == to_json(from_json(text, Outer))
    assert text.index('"a"') < text.index('"b"')


def test_json_of_another_version_may_have_more_keys_but_not_others() -> None:
    assert from_json('{"path": "x", "new": 1}', Inner) == Inner(path="x")
    with pytest.raises(ValueError, match=r"Inner\.path must be a string"):
        from_json('{"path": 1}', Inner)
    with pytest.raises(ValueError, match="Expecting value"):
        from_json("not json", Inner)


def test_words_of_messages() -> None:
    assert at(3) == "[3]"
    assert at("a-b") == ".a-b"
    assert at("a.b") == '."a.b"'
    assert len(show("x" * 100)) == 60
    assert suggestion("zzz", ["a", "b"]) == "Allowed: a, b."

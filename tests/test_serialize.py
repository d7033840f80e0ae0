from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from hatch_epcontext.errors import Key, Kind, Problem, Setting, collect
from hatch_epcontext.serialize import (
    from_json,
    from_plain,
    from_text,
    from_toml,
    to_json,
    to_plain,
)

TOOL = Key() / "tool"


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
    parsed, problems = collect(from_toml(table, Outer, TOOL))
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
    ("table", "location", "message"),
    [
        ({"how-many": "many"}, "tool.how-many", 'a whole number or "auto", not "many"'),
        ({"how-many": True}, "tool.how-many", "not true"),
        ({"seconds": "1"}, "tool.seconds", "must be a number"),
        ({"switch": 1}, "tool.switch", "must be true or false, not 1"),
        ({"kind": 0}, "tool.kind", '"a" or "b" or false, not 0'),
        ({"names": "abc"}, "tool.names", 'must be a list, not "abc"'),
        ({"names": ["a", 2]}, "tool.names[1]", "must be a string, not 2"),
        ({"items": [3]}, "tool.items[0]", "must be a string or a table"),
        ({"items": [{"sizes": {"i": ["1"]}}]}, "tool.items[0].sizes.i[0]", "must be a whole number"),
        ({"tables": {"x y": {"path": 1}}}, 'tool.tables."x y".path', "must be a string"),
        ({"options": {"a": [1]}}, "tool.options.a", "not [1]"),
        ({"how_many": 1}, "tool.how_many", "not a known key"),
        (3, "tool", "must be a table, not 3"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_reported_with_its_key(table: Any, location: str, message: str) -> None:
    parsed, (problem,) = collect(from_toml(table, Outer, TOOL))
    assert problem.location == str(problem.key) == f"tool.epcontext.{location}"
    assert message in problem.message
    assert isinstance(parsed, Outer)


def test_invalid_parts_are_left_out_and_the_rest_stays() -> None:
    table = {"how-many": "x", "names": ["a", 1], "seconds": 5, "items": ["a", 3, {"path": "p"}]}
    parsed, problems = collect(from_toml(table, Outer, TOOL))
    assert len(problems) == 3
    assert {problem.kind for problem in problems} == {Kind.WRONG_TYPE}
    assert parsed == Outer(seconds=5.0, items=("a", Inner(), Inner(path="p")))
    assert table["names"] == ["a", 1], "the user's table was changed"


def test_an_unknown_key_has_a_suggestion() -> None:
    _, (problem,) = collect(from_toml({"secnds": 1}, Outer, TOOL))
    assert problem.kind is Kind.UNKNOWN_KEY
    assert problem.hint is not None
    assert problem.hint.startswith('Did you mean "seconds"? Allowed: how-many,')


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("2.5", float, 2.5),
        ("auto", int | Literal["auto"], "auto"),
        ("3", int | Literal["auto"], 3),
        ("1", int, 1),
        ("On", bool, True),
        ("no", Literal["auto", False], False),
        ("yes", str, "yes"),
        ("a, b,", tuple[str, ...] | None, ("a", "b")),
    ],
)
def test_text_becomes_a_value(text: str, type_: Any, value: Any) -> None:
    found = from_text(text, type_)
    assert (found, type(found)) == (value, type(value))


def test_text_that_stands_for_no_value_is_an_error_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r'^a whole number or "auto"$'):
        from_text("1.5", int | Literal["auto"])


def test_json_returns_what_was_written_and_is_stable() -> None:
    outer = Outer(items=(Inner(path="x"), "y"), tables={"b": Inner(), "a": Inner()})
    text = to_json(outer)
    assert from_json(text, Outer) == outer
    assert text == to_json(from_json(text, Outer))
    assert text.index('"a"') < text.index('"b"')


@pytest.mark.parametrize(
    "problem",
    [
        Problem(Kind.WORKER_CRASHED, "a -> npu", "crashed.", log="line 1\nline 2"),
        Problem.at(
            Key() / "models" / 0 / "shapes" / "a b",
            Kind.OPEN_DIMENSION,
            "is open.",
            "Fix it.",
            Setting(Key() / "models" / 0 / "shapes", {"a b": [1, 2], "c": []}),
            Setting(Key() / "targets" / "npu" / "embed", value=False),
            Setting(Key() / "output"),
        ),
    ],
)
def test_a_problem_goes_through_json(problem: Problem) -> None:
    found = from_json(to_json(problem), Problem)
    assert found == problem
    assert found.text() == problem.text()


def test_a_problem_of_an_unknown_kind_is_a_value_error() -> None:
    text = to_json(Problem(Kind.NO_DEVICE, "a", "b.")).replace(Kind.NO_DEVICE.id, "EPC999")
    with pytest.raises(ValueError, match="EPC999"):
        from_json(text, Problem)


def test_json_of_another_version_may_have_more_keys_but_not_others() -> None:
    assert from_json('{"path": "x", "new": 1}', Inner) == Inner(path="x")
    with pytest.raises(ValueError, match=r"Inner\.path: must be a string"):
        from_json('{"path": 1}', Inner)
    with pytest.raises(ValueError, match="Expecting value"):
        from_json("not json", Inner)


@dataclass(frozen=True, kw_only=True)
class Needed:
    name: str
    inner: Inner | None = None
    any_value: Any = None


def test_plain_values_are_what_json_has() -> None:
    outer = Outer(names=("x",), items=("y", Inner(path="z", sizes={"i": (1, 2)})))
    plain = to_plain(outer)
    assert plain["items"] == ["y", {"path": "z", "sizes": {"i": [1, 2]}}]
    assert plain == json.loads(to_json(outer))
    assert from_plain(plain, Outer) == outer
    assert to_plain(Needed(name="x", any_value={"b": [1, None]})) == {
        "name": "x",
        "inner": None,
        "any_value": {"b": [1, None]},
    }


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        ({"name": "x", "new": 1, "inner": {"new": 2}}, []),
        ({}, ["Needed.name: is missing."]),
        (
            {"inner": {"path": 1, "sizes": {"a": [1, "2"]}}},
            [
                "Needed.name: is missing.",
                "Needed.inner.path: must be a string, not 1.",
                'Needed.inner.sizes.a.1: must be a whole number, not "2".',
            ],
        ),
        ([], ["Needed: must be a table, not []."]),
    ],
)
def test_each_wrong_place_in_plain_values_has_its_reason(value: Any, reasons: list[str]) -> None:
    if not reasons:
        assert from_plain(value, Needed) == Needed(name="x", inner=Inner())
        return
    with pytest.raises(ValueError, match="Needed") as raised:
        from_plain(value, Needed)
    assert sorted(str(raised.value).split("; ")) == sorted(reasons)


def test_a_table_in_place_of_a_list_of_tables_has_a_hint() -> None:
    _, (found,) = collect(from_toml({"items": {"path": "p"}}, Outer, TOOL))
    assert found.kind is Kind.WRONG_TYPE
    assert found.hint == "A list of tables has two brackets: [[tool.epcontext.tool.items]]."
    _, (found,) = collect(from_toml({"items": 3}, Outer, TOOL))
    assert found.hint is None

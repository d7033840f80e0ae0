"""TOML and JSON <-> frozen dataclasses: strict about types, all problems at once.

Used for ``[tool.epcontext]``, for requests and replies, for the manifest and for the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem
from hatch_epcontext.text import show, suggestion, toml_key

T = TypeVar("T")

_LIST, _TABLE = "a list", "a table"
_LEAVES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}

_SEQUENCES = (tuple, Sequence)

_NOTHING: Any = object()
"""The result for a value that does not fit, and the value of a missing one."""

_Place = tuple["str | int", ...]


class _Wrong(NamedTuple):
    """A value ``found`` at its place that is not ``allowed``, or whose key is not one of the ``known``."""

    place: _Place
    allowed: str
    found: Any
    known: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        if self.known:
            return f"is not a known key. Known: {', '.join(self.known)}."
        if self.found is _NOTHING:
            return "is missing."
        return f"must be {self.allowed}, not {show(self.found)}."


_Read = Callable[[Any, _Place, list[_Wrong]], Any]
"""Reads a value at a place: returns the result, and adds what is wrong to a list."""


class _Style(NamedTuple):
    """The style of tables: the key of a field, and whether other keys are wrong."""

    key_of: Callable[[str], str]
    strict: bool


_TOML = _Style(toml_key, strict=True)
# Other versions of the package read what this one writes: unknown keys are no errors.
_JSON = _Style(str, strict=False)


def describe_type(type_: Any) -> str:
    """A description of the values of this type."""
    if type_ in _LEAVES:
        return _LEAVES[type_]
    if get_origin(type_) is Literal:
        return " or ".join(show(value) for value in get_args(type_))
    if _is_union(type_):
        members = [member for member in get_args(type_) if member is not type(None)]
        return " or ".join(describe_type(member) for member in members)
    return _LIST if get_origin(type_) in _SEQUENCES else _TABLE


def _is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def _reader(type_: Any, style: _Style) -> _Read:
    arguments = get_args(type_)
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return _dataclass_reader(type_, style)
    if _is_union(type_):
        members = [_reader(each, style) for each in arguments if each is not type(None)]
        return _union_reader(type_, members, takes_none=type(None) in arguments)
    if get_origin(type_) in _SEQUENCES:
        return _list_reader(_reader(arguments[0], style))
    if arguments and get_origin(type_) is not Literal:
        return _mapping_reader(_reader(arguments[1], style))
    return _scalar_reader(type_)


def _scalar_reader(type_: Any) -> _Read:
    if type_ is Any:
        return lambda value, _place, _wrong: value
    if type_ is Path:
        return _path_reader(_leaf_reader(str))
    if type_ in _LEAVES:
        return _leaf_reader(type_)
    if isinstance(type_, type) and issubclass(type_, Enum):
        return _choice_reader({each.value: each for each in type_})
    return _choice_reader({each: each for each in get_args(type_) or (None,)})


def _leaf_reader(type_: Any) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        if type_ is float and type(value) is int:
            return float(value)
        if isinstance(value, type_) and (type_ is bool or not isinstance(value, bool)):
            return value
        wrong.append(_Wrong(place, _LEAVES[type_], value))
        return _NOTHING

    return read


def _path_reader(text: _Read) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        found = text(value, place, wrong)
        return found if found is _NOTHING else Path(found)

    return read


def _choice_reader(choices: Mapping[Any, Any]) -> _Read:
    """A reader of ``choices``, each with the result for it."""

    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        for choice, meant in choices.items():
            # `1 == True` in Python, so the type must be equal too.
            if value == choice and type(value) is type(choice):
                return meant
        wrong.append(_Wrong(place, " or ".join(map(show, choices)), value))
        return _NOTHING

    return read


def _union_reader(type_: Any, members: list[_Read], *, takes_none: bool) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        if takes_none and value is None:
            return None
        for member in members:
            inside: list[_Wrong] = []
            found = member(value, place, inside)
            # The member for which a list or a table is meant has problems only inside of it.
            if all(each.place != place for each in inside):
                wrong += inside
                return found
        wrong.append(_Wrong(place, describe_type(type_), value))
        return _NOTHING

    return read


def _only(shape: type, allowed: str, inner: _Read) -> _Read:
    """``inner`` for values of this ``shape``; others are wrong."""

    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        if isinstance(value, shape):
            return inner(value, place, wrong)
        wrong.append(_Wrong(place, allowed, value))
        return _NOTHING

    return read


def _list_reader(item: _Read) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        items = [item(each, (*place, index), wrong) for index, each in enumerate(value)]
        if _NOTHING in items and any(isinstance(each, dict) for each in value):
            # The other tables keep their indices.
            items = [item({}, place, []) if each is _NOTHING else each for each in items]
        return _NOTHING if _NOTHING in items else tuple(items)

    # A string is iterable too, and would become a list of characters.
    return _only(list, _LIST, read)


def _mapping_reader(item: _Read) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        found = {name: item(each, (*place, name), wrong) for name, each in value.items()}
        return {name: each for name, each in found.items() if each is not _NOTHING}

    return _only(dict, _TABLE, read)


@functools.cache
def _dataclass_reader(type_: type[Any], style: _Style) -> _Read:
    hints = get_type_hints(type_)
    fields = {
        style.key_of(field.name): (
            field.name,
            _reader(hints[field.name], style),
            field.default is field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(type_)
    }

    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        given, is_whole = {}, True
        for key, (name, item, is_required) in fields.items():
            if key in value:
                found = item(value[key], (*place, key), wrong)
                if found is not _NOTHING:
                    given[name] = found
                    continue
            elif is_required:
                wrong.append(_Wrong((*place, key), "", _NOTHING))
            is_whole = is_whole and not is_required
        if style.strict:
            unknown = sorted(value.keys() - fields.keys())
            wrong += (_Wrong((*place, key), "", value[key], tuple(fields)) for key in unknown)
        return type_(**given) if is_whole else _NOTHING

    return _only(dict, _TABLE, read)


def from_toml(table: Any, type_: type[T], key: Key) -> Diagnosed[T]:
    """Return ``table``, which is at ``key``, as a ``type_``; yield all wrong types.

    Invalid parts are left out of the result, so that the rest can be checked too; so every field needs a
    default.
    """
    wrong: list[_Wrong] = []
    found = _reader(type_, _TOML)(table, (), wrong)
    for each in wrong:
        place = Key((*key.parts, *each.place))
        if each.known:
            near = suggestion(str(each.place[-1]), sorted(each.known))
            yield Problem.at(place, Kind.UNKNOWN_KEY, "is not a known key.", near)
        else:
            is_table_for_list = each.allowed == _LIST and isinstance(each.found, dict)
            hint = f"A list of tables has two brackets: [[{place}]]." if is_table_for_list else None
            yield Problem.at(place, Kind.WRONG_TYPE, each.reason, hint)
    return type_() if found is _NOTHING else found


def from_text(text: str, type_: Any) -> Any:
    """The value of ``type_`` in ``text``; raises ValueError with the allowed values."""
    for value in (*_scalars(text), text):
        wrong: list[_Wrong] = []
        found = _reader(type_, _TOML)(value, (), wrong)
        if not wrong:
            return found
    raise ValueError(describe_type(type_))


def _scalars(text: str) -> Iterator[int | float]:
    with contextlib.suppress(ValueError):
        yield int(text)
    with contextlib.suppress(ValueError):
        yield float(text)


def from_json(text: str | bytes, type_: type[T]) -> T:
    """The ``type_`` that `to_json` wrote; raises ValueError if the text is not one."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("it has too many levels") from None
    return from_plain(value, type_)


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and the infinities: Python reads them, but other parsers do not."""
    raise ValueError(f"{name} is not a number in JSON")


def from_plain(value: Any, type_: type[T]) -> T:
    """The ``type_`` from plain values, as in JSON; raises ValueError if they do not fit.

    Unknown keys are left out.
    """
    wrong: list[_Wrong] = []
    found: T = _reader(type_, _JSON)(value, (), wrong)
    if wrong:
        places = (".".join((type_.__name__, *map(str, each.place))) for each in wrong)
        reasons = (each.reason for each in wrong)
        raise ValueError("; ".join(map(": ".join, zip(places, reasons, strict=True))))
    return found


def to_plain(value: Any) -> Any:
    """A dataclass as plain values, as in JSON."""
    # First, because most values are.
    if value is None or type(value) in _LEAVES:
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """A dataclass as canonical JSON: sorted keys, two spaces, a final newline.

    Without ``indent`` it is one line, which Python writes much faster.
    """
    # The only control character that JSON does not escape.
    text = json.dumps(to_plain(value), indent=indent, sort_keys=True).replace("\x7f", "\\u007f")
    return text + "\n"

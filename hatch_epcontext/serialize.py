"""TOML and JSON <-> frozen dataclasses: strict about types, all problems at once.

Used for ``[tool.epcontext]``, for requests and replies, for the manifest and for the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Callable, Mapping, Sequence
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


def _reader(type_: Any, is_toml: bool) -> _Read:
    """What reads a ``type_`` from TOML, or from JSON."""
    arguments = get_args(type_)
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return _dataclass_reader(type_, is_toml)
    if _is_union(type_):
        members = [_reader(member, is_toml) for member in arguments if member is not type(None)]
        return _union_reader(type_, members, takes_none=type(None) in arguments)
    if get_origin(type_) in _SEQUENCES:
        return _list_reader(_reader(arguments[0], is_toml))
    if arguments and get_origin(type_) is not Literal:
        return _mapping_reader(_reader(arguments[1], is_toml))
    return _scalar_reader(type_)


def _scalar_reader(type_: Any) -> _Read:
    if type_ is Any:
        return lambda value, _place, _wrong: value
    if type_ is Path or type_ in _LEAVES:
        return _leaf_reader(type_)
    if isinstance(type_, type) and issubclass(type_, Enum):
        return _choice_reader({member.value: member for member in type_})
    return _choice_reader({value: value for value in get_args(type_) or (None,)})


def _leaf_reader(type_: Any) -> _Read:
    plain = str if type_ is Path else type_

    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        if type_ is float and type(value) is int:
            return float(value)
        if isinstance(value, plain) and (type_ is bool or not isinstance(value, bool)):
            return Path(value) if type_ is Path else value
        wrong.append(_Wrong(place, _LEAVES[plain], value))
        return _NOTHING

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
            choice = member(value, place, inside)
            # The member for which a list or a table is meant has problems only inside of it.
            if all(problem.place != place for problem in inside):
                wrong += inside
                return choice
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
        items = [item(plain, (*place, index), wrong) for index, plain in enumerate(value)]
        if _NOTHING in items and any(isinstance(plain, dict) for plain in value):
            # The other tables keep their indices.
            items = [item({}, place, []) if result is _NOTHING else result for result in items]
        return _NOTHING if _NOTHING in items else tuple(items)

    # A string is iterable too, and would become a list of characters.
    return _only(list, _LIST, read)


def _mapping_reader(item: _Read) -> _Read:
    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        items = {name: item(plain, (*place, name), wrong) for name, plain in value.items()}
        return {name: result for name, result in items.items() if result is not _NOTHING}

    return _only(dict, _TABLE, read)


@functools.cache
def _dataclass_reader(type_: type[Any], is_toml: bool) -> _Read:
    hints = get_type_hints(type_)
    fields = {
        toml_key(field.name) if is_toml else field.name: (
            field.name,
            _reader(hints[field.name], is_toml),
            field.default is field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(type_)
    }

    def read(value: Any, place: _Place, wrong: list[_Wrong]) -> Any:
        values, is_whole = {}, True
        for key, (name, item, is_required) in fields.items():
            if key in value:
                member = item(value[key], (*place, key), wrong)
                if member is not _NOTHING:
                    values[name] = member
                    continue
            elif is_required:
                wrong.append(_Wrong((*place, key), "", _NOTHING))
            is_whole = is_whole and not is_required
        # Other versions of the package read the JSON that this one writes.
        if is_toml:
            unknown = sorted(value.keys() - fields.keys())
            wrong += (_Wrong((*place, key), "", value[key], tuple(fields)) for key in unknown)
        return type_(**values) if is_whole else _NOTHING

    return _only(dict, _TABLE, read)


def from_toml(table: Any, type_: type[T], key: Key) -> Diagnosed[T]:
    """Return ``table``, which is at ``key``, as a ``type_``; yield all wrong types.

    Invalid parts are left out of the result, so that the rest can be checked too; so every field needs a
    default.
    """
    wrong: list[_Wrong] = []
    result = _reader(type_, is_toml=True)(table, (), wrong)
    for value in wrong:
        place = Key((*key.parts, *value.place))
        if value.known:
            near = suggestion(str(value.place[-1]), sorted(value.known))
            yield Problem.at(place, Kind.UNKNOWN_KEY, "is not a known key.", near)
        else:
            is_table_for_list = value.allowed == _LIST and isinstance(value.found, dict)
            hint = f"A list of tables has two brackets: [[{place}]]." if is_table_for_list else None
            yield Problem.at(place, Kind.WRONG_TYPE, value.reason, hint)
    return type_() if result is _NOTHING else result


def from_text(text: str, type_: Any) -> Any:
    """The value of ``type_`` in ``text``; raises ValueError with the allowed values."""
    for plain in (int, float, str):
        wrong: list[_Wrong] = []
        with contextlib.suppress(ValueError):
            value = _reader(type_, is_toml=True)(plain(text), (), wrong)
            if not wrong:
                return value
    raise ValueError(describe_type(type_))


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
    result: T = _reader(type_, is_toml=False)(value, (), wrong)
    if wrong:
        places = (".".join((type_.__name__, *map(str, value.place))) for value in wrong)
        reasons = (value.reason for value in wrong)
        raise ValueError("; ".join(map(": ".join, zip(places, reasons, strict=True))))
    return result


@functools.cache
def _field_names(type_: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(type_))


def to_plain(value: Any) -> Any:
    """A dataclass as plain values, as in JSON."""
    # First, because most values are.
    if value is None or type(value) in _LEAVES:
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return to_plain(_unwrapped(value))


def _unwrapped(value: Any) -> Any:
    """What JSON has for ``value``, which it lacks; inner values stay as they are. Raises TypeError."""
    if dataclasses.is_dataclass(value):
        type_: Any = type(value)
        return {name: getattr(value, name) for name in _field_names(type_)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """A dataclass as canonical JSON: sorted keys, two spaces, a final newline.

    Without ``indent`` it is one line, which Python writes much faster.
    """
    text = json.dumps(value, indent=indent, sort_keys=True, default=_unwrapped)
    # The only control character that JSON does not escape.
    return text.replace("\x7f", "\\u007f") + "\n"


def value_sha256(value: Any) -> str:
    """The hex sha256 of a dataclass, or of plain values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_unwrapped)
    return hashlib.sha256(text.encode()).hexdigest()

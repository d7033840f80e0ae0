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
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem
from hatch_epcontext.frozen import types_of
from hatch_epcontext.text import show, suggestion, toml_key

T = TypeVar("T")

_LIST, _TABLE = "a list", "a table"
_LEAVES = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a string",
}

_CONTAINERS = {"list": list, "table": dict, "fields": dict}

_SEQUENCES, _UNIONS = (tuple, Sequence), (Union, types.UnionType)

_NOTHING: Any = object()
"""The result for a value that does not fit, and the value of a missing one."""

_Keys = tuple["str | int", ...]


class _Wrong(NamedTuple):
    """A ``value`` at its ``keys`` that is no ``type``, or whose key is not one of the ``known``."""

    keys: _Keys
    type: Any
    value: Any
    known: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        if self.known:
            return f"is not a known key. Known: {', '.join(self.known)}."
        if self.value is _NOTHING:
            return "is missing."
        return f"must be {describe_type(self.type)}, not {show(self.value)}."


def describe_type(type_: Any) -> str:
    """A description of the values of this type."""
    if type_ in _LEAVES:
        return _LEAVES[type_]
    if get_origin(type_) in _UNIONS:
        members = (member for member in get_args(type_) if member is not type(None))
        return " or ".join(map(describe_type, members))
    if isinstance(type_, type) and issubclass(type_, Enum):
        type_ = Literal[tuple(member.value for member in type_)]
    if get_origin(type_) is Literal:
        return " or ".join(map(show, get_args(type_)))
    return _LIST if get_origin(type_) in _SEQUENCES else _TABLE


class _Schema(NamedTuple):
    """How values of a ``type`` are read.

    ``kind`` says what ``parts`` are: the classes of plain values of a ``"leaf"``, the results of a
    ``"choice"``, the schemas of the members of a ``"union"``, that of all items of a ``"list"`` or a
    ``"table"``, or those of the ``"fields"`` of a dataclass, by key, each with the name of the field and
    whether it is required. With ``"any"`` there are none. ``is_strict``: whether an unknown key is wrong.
    """

    kind: str
    type: Any
    parts: Any
    is_strict: bool = False


def _schema(type_: Any, *, is_toml: bool) -> _Schema:
    """How a ``type_`` is read from TOML, or from JSON."""
    origin, arguments = get_origin(type_), get_args(type_)
    kind: str = "any"
    parts: Any = None
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return _dataclass_schema(type_, is_toml)
    if type_ in _LEAVES:
        kind, parts = "leaf", {float: (float, int), Path: str}.get(type_, type_)
    elif origin in _UNIONS:
        kind, parts = "union", [_schema(member, is_toml=is_toml) for member in arguments]
    elif origin in _SEQUENCES:
        kind, parts = "list", _schema(arguments[0], is_toml=is_toml)
    elif arguments and origin is not Literal:
        kind, parts = "table", _schema(arguments[1], is_toml=is_toml)
    elif isinstance(type_, type) and issubclass(type_, Enum):
        kind, parts = "choice", {member.value: member for member in type_}
    elif type_ is not Any:
        kind, parts = "choice", {value: value for value in arguments or (None,)}
    return _Schema(kind, type_, parts)


@functools.cache
def _dataclass_schema(type_: type[Any], is_toml: bool) -> _Schema:
    types_, missing = types_of(type_), dataclasses.MISSING
    parts = {
        toml_key(field.name) if is_toml else field.name: (
            field.name,
            _schema(types_[field.name], is_toml=is_toml),
            field.default is field.default_factory is missing,
        )
        for field in dataclasses.fields(type_)
    }
    # Other versions of the package read the JSON that this one writes.
    return _Schema("fields", type_, parts, is_strict=is_toml)


def _read(schema: _Schema, value: Any, keys: _Keys, wrong: list[_Wrong]) -> Any:
    """``value``, which is at ``keys``, as its ``schema`` says.

    If it does not fit, the result is `_NOTHING`, and ``wrong`` gets the reason.
    """
    kind, type_, parts, _ = schema
    if kind == "leaf":
        if isinstance(value, parts) and (type_ is bool or not isinstance(value, bool)):
            return value if isinstance(value, type_) else type_(value)
    # A string is iterable too, and would become a list of characters.
    elif isinstance(value, _CONTAINERS.get(kind, ())):
        return _read_inside(schema, value, keys, wrong)
    elif kind == "union":
        for member in parts:
            inside: list[_Wrong] = []
            result = _read(member, value, keys, inside)
            # The member for which a list or a table is meant has problems only inside of it.
            if not inside or all(problem.keys != keys for problem in inside):
                wrong += inside
                return result
    elif kind == "choice":
        for choice, meant in parts.items():
            # `1 == True` in Python, so the type must be equal too.
            if value == choice and type(value) is type(choice):
                return meant
    elif kind == "any":
        return value
    wrong.append(_Wrong(keys, type_, value))
    return _NOTHING


def _read_inside(schema: _Schema, value: Any, keys: _Keys, wrong: list[_Wrong]) -> Any:
    """The list, table or dataclass with the values in ``value``."""
    kind, type_, parts, is_strict = schema
    if kind == "list":
        items = [_read(parts, plain, (*keys, index), wrong) for index, plain in enumerate(value)]
        if _NOTHING in items and any(isinstance(plain, dict) for plain in value):
            # The other tables keep their indices.
            items = [_read(parts, {}, keys, []) if it is _NOTHING else it for it in items]
        return _NOTHING if _NOTHING in items else tuple(items)
    if kind == "table":
        table = {name: _read(parts, item, (*keys, name), wrong) for name, item in value.items()}
        return {name: item for name, item in table.items() if item is not _NOTHING}
    values, is_whole = {}, True
    for key, (name, item, is_required) in parts.items():
        if key in value:
            member = _read(item, value[key], (*keys, key), wrong)
            if member is not _NOTHING:
                values[name] = member
                continue
        elif is_required:
            wrong.append(_Wrong((*keys, key), None, _NOTHING))
        is_whole = is_whole and not is_required
    if is_strict:
        unknown = sorted(value.keys() - parts.keys())
        wrong += (_Wrong((*keys, key), None, value[key], tuple(parts)) for key in unknown)
    return type_(**values) if is_whole else _NOTHING


def from_toml(table: Any, type_: type[T], key: Key) -> Diagnosed[T]:
    """Return ``table``, which is at ``key``, as a ``type_``; yield all wrong types.

    Invalid parts are left out of the result, so that the rest can be checked too; so every field needs a
    default.
    """
    wrong: list[_Wrong] = []
    result = _read(_schema(type_, is_toml=True), table, (), wrong)
    for fault in wrong:
        inner = Key((*key.parts, *fault.keys))
        if fault.known:
            near = suggestion(str(fault.keys[-1]), sorted(fault.known))
            yield Problem.at(inner, Kind.UNKNOWN_KEY, "is not a known key.", near)
        else:
            is_table_for_list = describe_type(fault.type) == _LIST and isinstance(fault.value, dict)
            hint = f"A list of tables has two brackets: [[{inner}]]." if is_table_for_list else None
            yield Problem.at(inner, Kind.WRONG_TYPE, fault.reason, hint)
    return type_() if result is _NOTHING else result


def from_text(text: str, type_: Any) -> Any:
    """The value of ``type_`` in ``text``; raises ValueError with the allowed values.

    A list has commas between its items, and 1, yes and on stand for true.
    """
    for plain in (_switch, int, float, str, _items):
        wrong: list[_Wrong] = []
        with contextlib.suppress(ValueError):
            value = _read(_schema(type_, is_toml=True), plain(text), (), wrong)
            if not wrong:
                return value
    raise ValueError(describe_type(type_))


def _switch(text: str) -> bool:
    switches = dict.fromkeys(("1", "true", "yes", "on"), True)
    switches |= dict.fromkeys(("0", "false", "no", "off"), False)
    if text.lower() not in switches:
        raise ValueError
    return switches[text.lower()]


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def from_json(text: str | bytes, type_: type[T]) -> T:
    """The ``type_`` that `to_json` wrote; raises ValueError if the text is not one."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it has too many levels") from None
    return from_plain(value, type_)


def _reject_constant(name: str) -> None:
    """Raise ValueError for NaN and the infinities: Python reads them, but other parsers do not."""
    raise ValueError(f"{name} is not a number in JSON")


def from_plain(value: Any, type_: type[T]) -> T:
    """The ``type_`` from plain values, as in JSON; raises ValueError if they do not fit.

    Unknown keys are left out.
    """
    wrong: list[_Wrong] = []
    result: T = _read(_schema(type_, is_toml=False), value, (), wrong)
    if wrong:
        names = (".".join((type_.__name__, *map(str, value.keys))) for value in wrong)
        reasons = (value.reason for value in wrong)
        raise ValueError("; ".join(map(": ".join, zip(names, reasons, strict=True))))
    return result


def to_plain(value: Any) -> Any:
    """A dataclass as plain values, as in JSON."""
    return json.loads(json.dumps(value, default=_unwrapped))


def _unwrapped(value: Any) -> Any:
    """What JSON has for ``value``, which it lacks; inner values stay as they are. Raises TypeError."""
    type_: type[Any] = type(value)
    if dataclasses.is_dataclass(type_):
        return {name: getattr(value, name) for name in _field_names(type_)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no spelling in JSON")


@functools.cache
def _field_names(type_: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(type_))


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

"""TOML and JSON <-> frozen dataclasses, with cattrs: strict about types, all problems at once.

Used for ``[tool.epcontext]``, for requests and replies, for the manifest and for the cache.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from cattrs import Converter
from cattrs.cols import (
    homogenous_tuple_structure_factory,
    is_mapping,
    is_sequence,
    mapping_structure_factory,
)
from cattrs.errors import (
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
)
from cattrs.gen import make_dict_structure_fn, override

from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem
from hatch_epcontext.text import show, suggestion, toml_key

T = TypeVar("T")

_LIST = "a list"
_LEAVES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


class _Mismatch(ValueError):
    """A value of another type than its key takes."""

    def __init__(self, allowed: str, found: Any) -> None:
        super().__init__(f"must be {allowed}, not {show(found)}.")
        self.is_table_for_list = allowed == _LIST and isinstance(found, dict)


def describe_type(type_: Any) -> str:
    """What a key of this type takes, in words."""
    if type_ in _LEAVES:
        return _LEAVES[type_]
    if _is_literal(type_):
        return " or ".join(show(value) for value in get_args(type_))
    if _is_union(type_):
        members = [member for member in get_args(type_) if member is not type(None)]
        return " or ".join(describe_type(member) for member in members)
    if is_sequence(type_):
        return _LIST
    return "a table"


def _is_literal(type_: Any) -> bool:
    return get_origin(type_) is Literal


def _is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def _leaf(value: Any, type_: Any) -> Any:
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
        raise _Mismatch(_LEAVES[type_], value)
    return value


def _literal(value: Any, type_: Any) -> Any:
    # `1 == True` in Python, so the type must be equal too.
    if not any(value == choice and type(value) is type(choice) for choice in get_args(type_)):
        raise _Mismatch(describe_type(type_), value)
    return value


def _converter(*, dashes: bool, strict: bool) -> Converter:
    converter = Converter(forbid_extra_keys=strict)

    def union(value: Any, type_: Any) -> Any:
        members = get_args(type_)
        if value is None and type(None) in members:
            return None
        for member in members:
            # A table can only be meant for the member that is a table: report that one's errors.
            if isinstance(value, dict) and dataclasses.is_dataclass(member):
                return converter.structure(value, cast("type", member))
        for member in members:
            if member is type(None) or dataclasses.is_dataclass(member):
                continue
            try:
                return converter.structure(value, member)
            except (_Mismatch, IterableValidationError):
                # Only this member takes a list or a table: its errors have the place inside.
                if (isinstance(value, list) and is_sequence(member)) or (
                    isinstance(value, dict) and is_mapping(member)
                ):
                    raise
        raise _Mismatch(describe_type(type_), value)

    def guarded(factory: Any, shape: type, allowed: str) -> Any:
        def make(type_: Any, *_: Any) -> Any:
            inner = factory(type_, converter)

            def structure(value: Any, type_: Any) -> Any:
                # A string is iterable too, and would become a list of characters.
                if not isinstance(value, shape):
                    raise _Mismatch(allowed, value)
                return inner(value, type_)

            return structure

        return make

    def fields(type_: Any, converter: Converter) -> Any:
        names = {
            f.name: override(rename=toml_key(f.name) if dashes else f.name)
            for f in dataclasses.fields(type_)
        }
        return make_dict_structure_fn(type_, converter, **names)  # type: ignore[arg-type]

    for leaf in _LEAVES:
        converter.register_structure_hook(leaf, _leaf)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_func(_is_union, union)
    converter.register_structure_hook_factory(
        is_sequence, guarded(homogenous_tuple_structure_factory, list, _LIST)
    )
    converter.register_structure_hook_factory(
        is_mapping, guarded(mapping_structure_factory, dict, "a table")
    )
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass, guarded(fields, dict, "a table")
    )
    return converter


_TOML = _converter(dashes=True, strict=True)
# Other versions of the package read what this one writes: unknown keys are no errors.
_JSON = _converter(dashes=False, strict=False)
_STRICT_JSON = _converter(dashes=False, strict=True)

_Place = tuple["str | int", ...]


class InvalidJsonError(ValueError):
    """Values that are not what a type needs; ``reasons`` has a message for each wrong place."""

    def __init__(self, type_name: str, reasons: list[tuple[_Place, str]]) -> None:
        places = (f"{'.'.join((type_name, *map(str, path)))}: {text}" for path, text in reasons)
        super().__init__("; ".join(places))
        self.reasons = reasons


def from_toml(table: Any, type_: type[T], key: Key) -> Diagnosed[T]:
    """Return ``table``, which is at ``key``, as a ``type_``; yield all wrong types.

    Invalid parts are left out of the result, so that the rest can be checked too: every field must
    have a default.
    """
    try:
        return _TOML.structure(table, type_)
    except _Mismatch as error:
        yield from _problems(key, (), error)
        return type_()
    except ClassValidationError as error:
        wrong = list(_flat(error, (), toml_key))
    rest = copy.deepcopy(table)
    for path, _ in wrong:
        _leave_out(rest, path)
    for path, nested in wrong:
        yield from _problems(key, path, nested)
    try:
        return _TOML.structure(rest, type_)
    except ClassValidationError as error:
        # The tables around it are still invalid without it.
        for path, _ in _flat(error, (), toml_key):
            rest.pop(path[0], None)
    return _TOML.structure(rest, type_)


def from_text(text: str, type_: Any) -> Any:
    """The value of ``type_`` that ``text`` is written for; raises ValueError with what is allowed."""
    for value in (*_scalars(text), text):
        try:
            return _TOML.structure(value, type_)
        except _Mismatch:
            continue
    raise ValueError(describe_type(type_))


def _scalars(text: str) -> Iterator[int | float]:
    with contextlib.suppress(ValueError):
        yield int(text)
    with contextlib.suppress(ValueError):
        yield float(text)


def _leave_out(table: Any, path: _Place) -> None:
    """Remove what is at ``path``.

    An item of a list of tables becomes an empty table, so that the others keep their indices; any
    other list is removed as a whole.
    """
    *way, last = path
    for depth, step in enumerate(way):
        if isinstance(table, dict) and step not in table:
            return
        inside = table[step]
        if isinstance(inside, list) and not _has_tables(inside):
            _leave_out(table, path[depth : depth + 1])
            return
        table = inside
    if isinstance(table, list):
        table[cast("int", last)] = {}
    else:
        table.pop(last, None)


def _has_tables(items: list[Any]) -> bool:
    return any(isinstance(item, dict) for item in items)


def _flat(
    error: BaseException, path: _Place, key_of: Callable[[str], str] = str
) -> Iterator[tuple[_Place, BaseException]]:
    """All errors inside ``error``, each with its place; ``key_of`` gives the key of a field."""
    if isinstance(error, ClassValidationError):
        fields, bare = error.group_exceptions()
        for nested, note in fields:
            yield from _flat(nested, (*path, key_of(note.name)), key_of)
    elif isinstance(error, IterableValidationError):
        items, bare = error.group_exceptions()
        for nested, item in items:
            yield from _flat(nested, (*path, item.index), key_of)
    elif isinstance(error, ForbiddenExtraKeysError):
        for extra in sorted(error.extra_fields):
            yield (*path, extra), ForbiddenExtraKeysError(None, error.cl, {extra})
        return
    else:
        yield path, error
        return
    for nested in bare:
        yield from _flat(nested, path, key_of)


def _problems(key: Key, path: _Place, error: BaseException) -> Iterator[Problem]:
    place = Key((*key.parts, *path))
    if isinstance(error, ForbiddenExtraKeysError):
        name = str(path[-1])
        allowed = sorted(toml_key(f.name) for f in dataclasses.fields(error.cl))
        hint = suggestion(name, allowed)
        yield Problem.at(place, Kind.UNKNOWN_KEY, "is not a known key.", hint)
    else:
        hint = None
        if isinstance(error, _Mismatch) and error.is_table_for_list:
            hint = f"A list of tables has two brackets: [[{place}]]."
        yield Problem.at(place, Kind.WRONG_TYPE, str(error), hint)


def from_json(text: str | bytes, type_: type[T]) -> T:
    """The ``type_`` that `to_json` wrote; raises ValueError if the text is not one."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("it has too many levels") from None
    return from_plain(value, type_)


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and the infinities: Python reads them, and other parsers do not."""
    raise ValueError(f"{name} is not a number in JSON")


def from_plain(value: Any, type_: type[T], *, strict: bool = False) -> T:
    """The ``type_`` of plain values, as JSON has them; raises InvalidJsonError if they are not one.

    Unknown keys are left out, or with ``strict`` refused.
    """
    try:
        return (_STRICT_JSON if strict else _JSON).structure(value, type_)
    except (ClassValidationError, _Mismatch) as error:
        reasons = [(path, _reason(nested)) for path, nested in _flat(error, ())]
        raise InvalidJsonError(type_.__name__, reasons) from None


def _reason(error: BaseException) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        allowed = (field.name for field in dataclasses.fields(error.cl))
        return f"is not a known key. Known: {', '.join(allowed)}."
    return "is missing." if isinstance(error, KeyError) else str(error)


def to_plain(value: Any) -> Any:
    """A dataclass as plain values, as JSON has them."""
    # First of all, because most values are.
    if value is None or type(value) in _LEAVES:
        return value
    # Not cattrs, which writes a function for each class: every build writes, and needs each only a few times.
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    return value


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """A dataclass as JSON that is the same for equal values: sorted keys, two spaces, a final newline.

    Without ``indent`` it is one line, which Python writes much faster.
    """
    # The only control character that JSON leaves as it is.
    text = json.dumps(to_plain(value), indent=indent, sort_keys=True).replace("\x7f", "\\u007f")
    return text + "\n"

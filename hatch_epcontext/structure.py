"""TOML and JSON <-> frozen dataclasses, on cattrs: strict about types, all errors at once.

Used for ``[tool.epcontext]``, for what crosses the process border, for the manifest and for the cache.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterator
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
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from hatch_epcontext.errors import ConfigError, Problem

T = TypeVar("T")

_LEAVES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


class Mismatch(ValueError):
    """A value that is not what a key takes."""

    def __init__(self, allowed: str, found: Any) -> None:
        super().__init__(allowed, found)
        self.allowed, self.found = allowed, found


def toml_key(name: str) -> str:
    """The key of a dataclass's field: ``provider_options`` is written ``provider-options``."""
    return name.replace("_", "-")


def at(index: int | str) -> str:
    """The end of a dotted key: ``[0]`` for an item of a list, ``.name`` for one of a table."""
    if isinstance(index, int):
        return f"[{index}]"
    return f".{index}" if re.fullmatch(r"[A-Za-z0-9_-]+", index) else f".{json.dumps(index)}"


def show(value: Any) -> str:
    """``value`` as one would write it, short enough for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def show_size(size: float) -> str:
    """Bytes as one would say them: ``"2.2 MB"``."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def suggestion(name: str, allowed: list[str]) -> str:
    """What to write in place of ``name``: the nearest of ``allowed``, and all of them."""
    near = difflib.get_close_matches(name, allowed, n=1)
    return (f'Did you mean "{near[0]}"? ' if near else "") + f"Allowed: {', '.join(allowed)}."


def described(type_: Any) -> str:
    """What a key of this type takes, in words."""
    if type_ in _LEAVES:
        return _LEAVES[type_]
    if _origin(type_) is Literal:
        values = list(get_args(type_))
        return " or ".join(show(value) for value in values)
    if _is_union(type_):
        members = [member for member in get_args(type_) if member is not type(None)]
        return " or ".join(described(member) for member in members)
    if is_sequence(type_):
        return "a list"
    return "a table"


def _origin(type_: Any) -> Any:
    return get_origin(type_)


def _is_union(type_: Any) -> bool:
    return _origin(type_) in (Union, types.UnionType)


def _leaf(value: Any, type_: Any) -> Any:
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
        raise Mismatch(_LEAVES[type_], value)
    return value


def _literal(value: Any, type_: Any) -> Any:
    # `1 == True` in Python, so the type has to agree as well.
    if not any(value == choice and type(value) is type(choice) for choice in get_args(type_)):
        raise Mismatch(described(type_), value)
    return value


def _converter(*, dashes: bool, strict: bool) -> Converter:
    converter = Converter(forbid_extra_keys=strict)

    def union(value: Any, type_: Any) -> Any:
        members = get_args(type_)
        if value is None and type(None) in members:
            return None
        for member in members:
            # A table can only be meant for the member that is a table: its own errors are the news.
            if isinstance(value, dict) and dataclasses.is_dataclass(member):
                return converter.structure(value, cast("type", member))
        for member in members:
            if member is type(None) or dataclasses.is_dataclass(member):
                continue
            try:
                return converter.structure(value, member)
            except (Mismatch, IterableValidationError):
                if isinstance(value, list) and is_sequence(member):
                    raise
        raise Mismatch(described(type_), value)

    def guarded(factory: Any, shape: type, words: str) -> Any:
        def make(type_: Any, *_: Any) -> Any:
            inner = factory(type_, converter)

            def structure(value: Any, type_: Any) -> Any:
                # A string is iterable too, and would be taken apart into characters.
                if not isinstance(value, shape):
                    raise Mismatch(words, value)
                return inner(value, type_)

            return structure

        return make

    def fields(type_: Any, converter: Converter) -> Any:
        names = {
            f.name: override(rename=toml_key(f.name) if dashes else f.name)
            for f in dataclasses.fields(type_)
        }
        return make_dict_structure_fn(type_, converter, **names)  # type: ignore[arg-type]

    def unfields(type_: Any) -> Any:
        return make_dict_unstructure_fn(type_, converter)

    for leaf in _LEAVES:
        converter.register_structure_hook(leaf, _leaf)
    converter.register_structure_hook_func(lambda t: _origin(t) is Literal, _literal)
    converter.register_structure_hook_func(_is_union, union)
    converter.register_structure_hook_factory(
        is_sequence, guarded(homogenous_tuple_structure_factory, list, "a list")
    )
    converter.register_structure_hook_factory(
        is_mapping, guarded(mapping_structure_factory, dict, "a table")
    )
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass, guarded(fields, dict, "a table")
    )
    converter.register_unstructure_hook_factory(dataclasses.is_dataclass, unfields)
    return converter


_TOML = _converter(dashes=True, strict=True)
# What one version of the package wrote, a newer or older one may read: keys it does not know are not errors.
_JSON = _converter(dashes=False, strict=False)


Place = tuple["str | int", ...]


def dotted(key: str, path: Place) -> str:
    """The dotted key of what lies at ``path`` below ``key``."""
    return key + "".join(map(at, path))


def from_toml(table: Any, type_: type[T], key: str) -> tuple[T, list[Problem]]:
    """``table`` as a ``type_``, and all that is wrong with its types, by dotted key below ``key``.

    What is wrong is left out of the result, so that the rest can be checked too: every field has to
    have a default. Raises ConfigError when ``table`` is not even a table.
    """
    try:
        return _TOML.structure(table, type_), []
    except Mismatch as error:
        raise ConfigError(*(_problem(key, (), error))) from None
    except ClassValidationError as error:
        wrong = list(_flat(error, ()))
    rest = copy.deepcopy(table)
    for path, _ in wrong:
        _leave_out(rest, path)
    problems = [problem for path, error in wrong for problem in _problem(key, path, error)]
    try:
        return _TOML.structure(rest, type_), problems
    except ClassValidationError as error:
        # What stands around it is no better without it.
        for path, _ in _flat(error, ()):
            rest.pop(path[0], None)
    return _TOML.structure(rest, type_), problems


def _leave_out(table: Any, path: Place) -> None:
    """Remove what is at ``path``.

    An item of a list of tables becomes an empty table, so that the others keep their numbers; any other
    list goes as a whole.
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


def _flat(error: BaseException, path: Place) -> Iterator[tuple[Place, BaseException]]:
    """All errors inside ``error``, each with where it is."""
    if isinstance(error, ClassValidationError):
        fields, bare = error.group_exceptions()
        for nested, note in fields:
            yield from _flat(nested, (*path, toml_key(note.name)))
    elif isinstance(error, IterableValidationError):
        items, bare = error.group_exceptions()
        for nested, item in items:
            yield from _flat(nested, (*path, item.index))
    elif isinstance(error, ForbiddenExtraKeysError):
        for extra in sorted(error.extra_fields):
            yield (*path, extra), ForbiddenExtraKeysError(None, error.cl, {extra})
        return
    else:
        yield path, error
        return
    for nested in bare:
        yield from _flat(nested, path)


def _problem(key: str, path: Place, error: BaseException) -> Iterator[Problem]:
    where = dotted(key, path)
    if isinstance(error, ForbiddenExtraKeysError):
        allowed = sorted(toml_key(f.name) for f in dataclasses.fields(error.cl))
        yield Problem(where, "is not a known key.", suggestion(str(path[-1]), allowed))
    elif isinstance(error, Mismatch):
        yield Problem(where, f"must be {error.allowed}, and is {show(error.found)}.")
    elif isinstance(error, KeyError):
        yield Problem(where, "is required, and is not there.")
    else:
        yield Problem(where, str(error))


def from_json(text: str | bytes, type_: type[T]) -> T:
    """The ``type_`` that `to_json` wrote; raises ValueError if the text is not one."""
    try:
        return _JSON.structure(json.loads(text), type_)
    except (ClassValidationError, Mismatch) as error:
        told = [p for path, e in _flat(error, ()) for p in _problem(type_.__name__, path, e)]
        raise ValueError("; ".join(f"{p.where} {p.what}" for p in told)) from None


def to_json(value: Any) -> str:
    """A dataclass as JSON that is the same for equal values: sorted keys, two spaces, a final newline."""
    return json.dumps(_JSON.unstructure(value), indent=2, sort_keys=True) + "\n"

"""Several shapes of one model: each becomes a model of its own, with its shape in the name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hatch_epcontext.config.checks.common import MAX_NAME
from hatch_epcontext.config.settings import Listed, Model, ShapeSet
from hatch_epcontext.config.tables import Dims, ModelTable, Shapes
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.text import file_name, listing, show

_KEYS = ("shapes", "dims")
"""The keys that can be a list of tables."""

_Table = TypeVar("_Table", bound=Mapping[str, Any])


def places(key: Key, value: _Table | tuple[_Table, ...]) -> Iterator[tuple[Key, _Table]]:
    """The tables of ``value``, a table or a list of tables at ``key``, each with its own place."""
    if not isinstance(value, tuple):
        yield key, value
        return
    for index, table in enumerate(value):
        yield key / index, table


def check_shapes(key: Key, table: ModelTable) -> Iterator[Problem]:
    """The lists of shapes in the model's table at ``key``."""
    if all(len(_tables(getattr(table, name))) > 1 for name in _KEYS):
        message = "is a list, and shapes is one too."
        hint = "Keep one list. The other key can be a table, which then applies to all shapes."
        yield Problem.at(key / "dims", Kind.CONFLICTING_KEYS, message, hint)
    for name in _KEYS:
        if isinstance(value := getattr(table, name), tuple):
            yield from _check_list(key / name, value)


def _check_list(key: Key, tables: tuple[Mapping[str, Any], ...]) -> Iterator[Problem]:
    if not tables:
        hint = "Leave the key out if nothing has to be fixed."
        yield Problem.at(key, Kind.INVALID_VALUE, "must have at least one table.", hint)
    for index, table in enumerate(tables):
        if table.keys() != tables[0].keys():
            named, first = (listing(names) if names else "nothing" for names in (table, tables[0]))
            message = f"is for {named}, and the first table for {first}."
            hint = "Name the same ones in each table of the list."
            yield Problem.at(key / index, Kind.INVALID_VALUE, message, hint)
        elif (first_equal := tables.index(table)) < index:
            message = f"is the same as {key / first_equal}: {show(dict(table))}."
            yield Problem.at(key / index, Kind.INVALID_VALUE, message, "Remove one of them.")


def expand(model: Model, table: ModelTable) -> tuple[Model, ...]:
    """``model``, without sizes so far, in all sizes of its ``table``.

    There is one model for each size, with the targets that fix shapes; and for the targets that leave them
    open, a last one with the configured name, whose dummy inputs have the first sizes.
    """
    fixed = tuple(target for target in model.targets if target.settings.static_shapes)
    still_open = tuple(target for target in model.targets if not target.settings.static_shapes)
    forms = tuple(_forms(model, table))
    plain = dataclasses.replace(forms[0], name=model.name, static_shapes=bool(fixed))
    if len(forms) == 1 or not fixed:
        return (plain,)
    targets = tuple(target.name for target in model.targets)
    shape_set = ShapeSet(model.name, tuple(form.name for form in forms), targets)
    members = [dataclasses.replace(form, targets=fixed, shape_set=shape_set) for form in forms]
    if still_open:
        members.append(
            dataclasses.replace(plain, targets=still_open, static_shapes=False, shape_set=shape_set)
        )
    return tuple(members)


def _forms(model: Model, table: ModelTable) -> Iterator[Model]:
    """``model`` in the sizes of its ``table``, in the configured order; several get them in their names."""
    for key, suffix in (("shapes", _suffix_of_shapes), ("dims", _suffix_of_dims)):
        if len(listed := _tables(getattr(table, key))) > 1:
            others = {other: _first(getattr(table, other)) for other in _KEYS if other != key}
            for index, size in enumerate(listed):
                name = f"{model.name}.{suffix(size, tuple(listed[0]))}"
                sizes = {key: size, **others, "listed": Listed(key, index)}
                yield dataclasses.replace(model, name=name, **sizes)
            return
    single = next((key for key in _KEYS if isinstance(getattr(table, key), tuple)), None)
    yield dataclasses.replace(
        model,
        dims=_first(table.dims),
        shapes=_first(table.shapes),
        listed=None if single is None else Listed(single, 0),
    )


def check_name_length(model: Model) -> Iterator[Problem]:
    """A name that is too long with its shape."""
    if model.shape_set is not None and model.listed and len(model.name) > MAX_NAME:
        yield Problem.at(
            model.key / model.listed.name / model.listed.index,
            Kind.INVALID_NAME,
            f"the name with this shape has {len(model.name)} characters, which is too long for folders: "
            f"{show(model.name)}.",
            "Fix named dimensions with a list of dims instead, or fewer of them.",
            Setting(model.key / "dims"),
        )


def _tables(value: _Table | tuple[_Table, ...]) -> tuple[_Table, ...]:
    return value if isinstance(value, tuple) else (value,)


def _first(value: Any) -> Any:
    return next(iter(_tables(value)), {})


def _suffix_of_shapes(shapes: Shapes, order: Sequence[str]) -> str:
    """``"1x3x320x320"``; for several inputs, in the order of the first table, ``"1x128_1x64"``."""
    return "_".join("x".join(map(str, shapes.get(name, ()))) for name in order)


def _suffix_of_dims(dims: Dims, order: Sequence[str]) -> str:
    """``"seq128"``; for several dimensions, in the order of the first table, ``"batch1_seq128"``."""
    return "_".join(f"{file_name(name, '-')}{dims.get(name, '')}" for name in order)

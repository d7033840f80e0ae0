"""The models that a configuration lists: checks without paths, and one model for each of their sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hatch_epcontext.config.genai import stages
from hatch_epcontext.config.location import check_url, file_of, hub_file
from hatch_epcontext.config.settings import Model, ShapeSet
from hatch_epcontext.config.tables import Dims, ModelTable, Shapes
from hatch_epcontext.config.targets import NamedTarget, check_name
from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import file_name, listing, show, suggestion

PIN = "Run: epcontext fetch --pin"
"""The remedy for a location without a commit or a hash."""

_SIZES = ("shapes", "dims")
"""The keys that can be a list of tables."""

_Table = TypeVar("_Table", bound=Mapping[str, Any])


def check_model(key: Key, table: ModelTable) -> Iterator[Problem]:
    """A model's table without its paths, and without keys that depend on its targets."""
    if all(len(_tables(getattr(table, name))) > 1 for name in _SIZES):
        message = "is a list, and shapes is one too."
        hint = "Keep one list. The other key can be a table, which then applies to all shapes."
        yield Problem.at(key / "dims", Kind.CONFLICTING_KEYS, message, hint)
    for name in _SIZES:
        if isinstance(value := getattr(table, name), tuple):
            yield from _check_list(key / name, value)
    if table.cut is not None and not table.cut.inputs and not table.cut.outputs:
        message = "names no tensor."
        hint = "Name the tensors where the part begins, or those where it ends."
        yield Problem.at(key / "cut", Kind.INVALID_VALUE, message, hint)
    elif table.cut is not None and (both := {*table.cut.inputs} & {*table.cut.outputs}):
        message = f"names {listing(map(show, sorted(both)))}, which is one of the inputs too."
        hint = "Nothing is between them: name a tensor after it."
        yield Problem.at(key / "cut" / "outputs", Kind.CONFLICTING_KEYS, message, hint)


def check_location(key: Key, table: ModelTable) -> Iterator[Problem]:
    """``url`` with its keys, or none of them. The path is checked when it is read."""
    if table.url is None:
        for name in ("sha256", "data"):
            if getattr(table, name):
                message = "is for models with a url."
                yield Problem.at(key / name, Kind.NOT_APPLICABLE, message)
        return
    if table.path:
        message = "is set together with path, and a model has one of them."
        yield Problem.at(key / "url", Kind.CONFLICTING_KEYS, message, "Keep one of them.")
    elif check_url(table.url) is not None:
        # That is a problem of the value.
        return
    elif (hub := hub_file(table.url)) is not None and not hub.is_pinned:
        message = f"names no whole commit, and its contents may change: {show(table.url)}."
        yield Problem.at(key / "url", Kind.NOT_PINNED, message, PIN)
    elif table.sha256 is None:
        message = "has no sha256, and its contents may change."
        yield Problem.at(key / "url", Kind.NOT_PINNED, message, PIN)
    elif file_of(table.url) in table.data:
        message = f"{show(file_of(table.url))} is the model itself."
        yield Problem.at(key / "data", Kind.INVALID_VALUE, message, "Its hash belongs in sha256.")


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
    open, a last one with the configured name, whose dummy inputs have the first sizes. A language model has
    its stages instead of sizes.
    """
    if model.genai is not None:
        return stages(model)
    fixed = tuple(target for target in model.targets if target.settings.static_shapes)
    still_open = tuple(target for target in model.targets if not target.settings.static_shapes)
    sized = tuple(_sized(model, table))
    plain = dataclasses.replace(sized[0], name=model.name, static_shapes=bool(fixed))
    if len(sized) == 1 or not fixed:
        return (plain,)
    targets = tuple(target.name for target in model.targets)
    shape_set = ShapeSet(model.name, tuple(member.name for member in sized), targets)
    members = [dataclasses.replace(member, targets=fixed, shape_set=shape_set) for member in sized]
    if still_open:
        members.append(
            dataclasses.replace(plain, targets=still_open, static_shapes=False, shape_set=shape_set)
        )
    return tuple(members)


def _sized(model: Model, table: ModelTable) -> Iterator[Model]:
    """``model`` in the sizes of its ``table``, in the configured order; several get them in their names."""
    for key, suffix in (("shapes", _suffix_of_shapes), ("dims", _suffix_of_dims)):
        if len(listed := _tables(getattr(table, key))) > 1:
            others = {other: _first(getattr(table, other)) for other in _SIZES if other != key}
            for index, size in enumerate(listed):
                name = f"{model.name}.{suffix(size, tuple(listed[0]))}"
                sizes = {key: size, **others, "size_key": model.key / key / index}
                yield dataclasses.replace(model, name=name, **sizes)
            return
    yield dataclasses.replace(model, dims=_first(table.dims), shapes=_first(table.shapes))


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


def check_groups(models: Sequence[Model]) -> Iterator[Problem]:
    """The weight-sharing groups of ``models``."""
    names = {name.casefold() for m in models for name in (m.configured_name, m.name)}
    groups: dict[str, list[Key]] = {}
    for model in models:
        if model.share_weights is not None:
            groups.setdefault(model.share_weights, []).append(model.key / "share-weights")
    for group, keys in groups.items():
        yield from check_name(keys[0], group)
        if group.casefold() in names:
            message = f"{show(group)} is also the name of a model, and both become folders."
            yield Problem.at(keys[0], Kind.DUPLICATE_NAME, message, "Give the group its own name.")
        if len(keys) == 1:
            message = f"no other model is in the group {show(group)}."
            hint = suggestion(group, sorted(groups.keys() - {group}))
            yield Problem.at(keys[0], Kind.INVALID_SHARING, message, hint or None)


def check_sharing(key: Key, targets: Sequence[NamedTarget]) -> Iterator[Problem]:
    """``share-weights`` at ``key``, of a model with ``targets``."""
    if not any(target.provider.shares_weights for target in targets):
        hint = (
            f"Providers that can: {', '.join(n for n, p in PROVIDERS.items() if p.shares_weights)}."
        )
        message = "none of the model's targets has a provider whose contexts can share weights."
        yield Problem.at(key, Kind.NOT_APPLICABLE, message, hint)

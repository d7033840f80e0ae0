"""Checks of ``[[tool.epcontext.models]]`` without its paths, and of the keys of targets that it narrows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hatch_epcontext.config.checks.common import check_name
from hatch_epcontext.config.location import check_url, file_of, hub_file
from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.shapes import check_shapes, places
from hatch_epcontext.config.tables import (
    CutTable,
    ModelTable,
    Shapes,
)
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import show, suggestion

PIN = "Run: epcontext fetch --pin"
"""The remedy for a location without a commit or a hash."""


def check_model(key: Key, table: ModelTable) -> Iterator[Problem]:
    """A model's table without its paths, and without keys that depend on its targets."""
    yield from check_shapes(key, table)
    for place, dims in places(key / "dims", table.dims):
        for name, size in dims.items():
            if size < 1:
                message = f"must be at least 1, not {size}."
                hint = (
                    None
                    if size
                    else "For an input without values, write its whole shape in shapes."
                )
                yield Problem.at(place / name, Kind.INVALID_VALUE, message, hint)
    for place, shapes in places(key / "shapes", table.shapes):
        yield from _check_sizes(place, shapes, table.constants)
    for name, value in table.constants.items():
        if not _is_constant(value):
            message = f"must be a number, true or false, a string or a list, not {show(value)}."
            yield Problem.at(key / "constants" / name, Kind.INVALID_VALUE, message)
    if table.cut is not None:
        yield from _check_cut(key / "cut", table.cut)


def check_location(key: Key, table: ModelTable) -> Iterator[Problem]:
    """``url`` with its keys, or none of them. The path is checked when it is read."""
    if table.url is None:
        for name in ("sha256", "data"):
            if getattr(table, name):
                message = "is for models with a url."
                yield Problem.at(key / name, Kind.NOT_APPLICABLE, message)
        return
    if table.path:
        message = "is set together with path, and a model has one place."
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


def _check_cut(key: Key, cut: CutTable) -> Iterator[Problem]:
    if not cut.inputs and not cut.outputs:
        message = "names no tensor."
        hint = "Name the tensors where the part begins, or those where it ends."
        yield Problem.at(key, Kind.INVALID_VALUE, message, hint, Setting(key / "outputs"))
    for end in ("inputs", "outputs"):
        names = getattr(cut, end)
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            message = f"names {show(name)} twice."
            yield Problem.at(key / end, Kind.INVALID_VALUE, message, "Name each tensor once.")
    for name in cut.inputs:
        if name in cut.outputs:
            message = f"names {show(name)}, which is one of the inputs too."
            hint = "Nothing is between them: name a tensor after it."
            yield Problem.at(key / "outputs", Kind.CONFLICTING_KEYS, message, hint)


def _check_sizes(key: Key, shapes: Shapes, constants: Mapping[str, Any]) -> Iterator[Problem]:
    for name, shape in shapes.items():
        if any(size < 0 for size in shape):
            message = f"must not be negative: {show(list(shape))}."
            yield Problem.at(key / name, Kind.INVALID_VALUE, message)
        if name in constants:
            message = "is frozen in constants, which give it its shape."
            yield Problem.at(key / name, Kind.CONFLICTING_KEYS, message)


def _is_constant(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_constant, value))
    return isinstance(value, str | bool | int | float)


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
            yield Problem.at(
                keys[0],
                Kind.INVALID_SHARING,
                f"no other model is in the group {show(group)}.",
                suggestion(group, sorted(groups.keys() - {group}))
                if len(groups) > 1
                else "A group needs two models or more.",
            )


def check_sharing(key: Key, targets: Sequence[NamedTarget]) -> Iterator[Problem]:
    """``share-weights`` at ``key``, of a model with ``targets``."""
    if any(target.provider.shares_weights for target in targets):
        return
    hint = f"Providers that can: {', '.join(n for n, p in PROVIDERS.items() if p.shares_weights)}."
    settings = tuple(
        Setting(target.key / "allow-unknown-options", True)
        for target in targets
        if target.provider.product == "context"
    )
    if settings:
        hint += "\nIf the EP can, but this package does not know that:"
    yield Problem.at(
        key,
        Kind.NOT_APPLICABLE,
        "none of the model's targets has a provider whose contexts can share weights.",
        hint,
        *settings[:1],
    )

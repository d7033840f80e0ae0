"""Checks of ``[[tool.epcontext.models]]`` without its paths, and of what it narrows of its targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hatch_epcontext.config.checks.common import check_name, check_values
from hatch_epcontext.config.checks.options import is_known_session_option
from hatch_epcontext.config.checks.target import check_narrowable
from hatch_epcontext.config.shapes import check_shapes, places
from hatch_epcontext.config.tables import (
    CutTable,
    ModelTable,
    NarrowableTable,
    Options,
    Shapes,
    TargetToleranceTable,
    ToleranceTable,
    ValidateTable,
)
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import show, suggestion


def check_model(key: Key, table: ModelTable) -> Iterator[Problem]:
    """A model's table without its paths, and without what depends on its targets."""
    yield from check_shapes(key, table)
    for place, dims in places(key / "dims", table.dims):
        for name, size in dims.items():
            if size < 1:
                message = f"must be at least 1, not {size}."
                yield Problem.at(place / name, Kind.INVALID_VALUE, message)
    for place, shapes in places(key / "shapes", table.shapes):
        yield from _check_sizes(place, shapes, table.constants)
    for name, value in table.constants.items():
        if not _is_constant(value):
            yield Problem.at(
                key / "constants" / name,
                Kind.INVALID_VALUE,
                f"must be a number, true or false, a string or a list, not {show(value)}.",
            )
    if table.cut is not None:
        yield from _check_cut(key / "cut", table.cut)
    validate = table.validate
    if isinstance(validate, ValidateTable):
        yield from check_values(key / "validate", validate)
        if isinstance(validate.tolerance, ToleranceTable):
            yield from _check_tolerance(key / "validate" / "tolerance", validate.tolerance)


def _check_tolerance(key: Key, table: TargetToleranceTable) -> Iterator[Problem]:
    yield from check_values(key, table)
    for name, limits in table.outputs.items():
        yield from check_values(key / "outputs" / name, limits)
    for name, own in table.targets.items() if isinstance(table, ToleranceTable) else ():
        yield from _check_tolerance(key / "targets" / name, own)


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
            hint = "Nothing is between them: name a tensor behind it."
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


def check_groups(models: Iterable[tuple[Key, str, str | None]]) -> Iterator[Problem]:
    """Weight-sharing groups; for each model its key, its name and its group."""
    models = list(models)
    names = {name.casefold() for _, name, _ in models}
    groups: dict[str, list[Key]] = {}
    for key, _, group in models:
        if group is not None:
            groups.setdefault(group, []).append(key / "share-weights")
    for group, keys in groups.items():
        yield from check_name(keys[0], group)
        if group.casefold() in names:
            yield Problem.at(
                keys[0],
                Kind.DUPLICATE_NAME,
                f"{show(group)} is also the name of a model, and both become folders.",
                "Give the group its own name.",
            )
        if len(keys) == 1:
            yield Problem.at(
                keys[0],
                Kind.INVALID_SHARING,
                f"no other model is in the group {show(group)}.",
                suggestion(group, sorted(groups.keys() - {group}))
                if len(groups) > 1
                else "A group needs two models or more.",
            )


def applicable(
    table: ModelTable, target: NamedTarget, targets: Sequence[NamedTarget] = ()
) -> ModelTable:
    """``table`` with only those of its narrowed keys that the target's provider has.

    Options that no provider of ``targets`` knows go to the targets that allow unknown ones.
    """
    provider = target.provider
    assert provider is not None
    return dataclasses.replace(
        table,
        provider_options=_of(table.provider_options, target, targets),
        load_options=_of(table.load_options, target, targets),
        session_options=_session_options_of(table.session_options, target, targets),
        device=table.device if table.device in ("any", *provider.devices) else None,
        embed=table.embed if provider.product == "context" else None,
        in_memory=table.in_memory if provider.product == "context" else None,
        recompile=table.recompile if provider.product == "context" and provider.plugin else None,
        profiles=table.profiles if provider.profiles else (),
        device_filter=table.device_filter if provider.plugin else {},
        policy=table.policy if provider.plugin else None,
    )


def check_narrowing(
    key: Key, table: ModelTable, targets: Sequence[NamedTarget]
) -> Iterator[Problem]:
    """What a model narrows, for the providers of all its targets.

    Options that one of them knows are for that one; options that none of them knows are a mistake.
    """
    for target in targets:
        provider, unchecked = target.provider, target.table.allow_unknown_options
        assert provider is not None
        narrowed = applicable(table, target, targets)
        yield from check_narrowable(key, narrowed, provider, target.key, unchecked=unchecked)
    if not targets:
        return
    if table.share_weights is not None:
        yield from _check_sharing(key / "share-weights", targets)
    applied = [applicable(table, target, targets) for target in targets]
    known = {name for one in applied for name in (*one.provider_options, *one.load_options)}
    of_none = NarrowableTable(
        provider_options={n: v for n, v in table.provider_options.items() if n not in known},
        load_options={n: v for n, v in table.load_options.items() if n not in known},
        device=None if any(one.device for one in applied) else table.device,
        recompile=None if any(one.recompile for one in applied) else table.recompile,
        profiles=() if any(one.profiles for one in applied) else table.profiles,
        device_filter={} if any(one.device_filter for one in applied) else table.device_filter,
        policy=None if any(one.policy for one in applied) else table.policy,
    )
    first = targets[0]
    assert first.provider is not None
    yield from check_narrowable(key, of_none, first.provider, first.key, unchecked=False)


def _check_sharing(key: Key, targets: Sequence[NamedTarget]) -> Iterator[Problem]:
    providers = {target.key: target.provider for target in targets if target.provider}
    if any(provider.shares_weights for provider in providers.values()):
        return
    hint = f"Providers that can: {', '.join(n for n, p in PROVIDERS.items() if p.shares_weights)}."
    settings = tuple(
        Setting(target / "allow-unknown-options", True)
        for target, provider in providers.items()
        if provider.product == "context"
    )
    if settings:
        hint += "\nIf the EP can, and this package does not know it:"
    yield Problem.at(
        key,
        Kind.NOT_APPLICABLE,
        "none of the model's targets has a provider whose contexts can share weights.",
        hint,
        *settings[:1],
    )


def _session_options_of(
    options: Options, target: NamedTarget, targets: Sequence[NamedTarget]
) -> Options:
    """Those of a model's session options that are for ``target``: unknown ones go where they pass."""
    if target.table.allow_unknown_options or not any(
        other.table.allow_unknown_options for other in targets
    ):
        return options
    return {name: value for name, value in options.items() if is_known_session_option(name)}


def _of(options: Options, target: NamedTarget, targets: Sequence[NamedTarget]) -> Options:
    """Those of a model's options that are for ``target``."""
    unchecked = target.table.allow_unknown_options

    def is_for(name: str) -> bool:
        if unchecked and not any(_knows(other, name) for other in targets):
            return True
        return _knows(target, name)

    return {name: value for name, value in options.items() if is_for(name)}


def _knows(target: NamedTarget, name: str) -> bool:
    provider = target.provider
    assert provider is not None
    known = (provider.options, provider.deprecated, provider.reserved)
    return provider.any_options or any(name in names for names in known)

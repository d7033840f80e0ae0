"""``[[tool.epcontext.models]]`` but for its paths, and what it narrows of its targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hatch_epcontext.checks.common import check_name
from hatch_epcontext.checks.target import check_narrowable
from hatch_epcontext.errors import Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.structure import at, show, suggestion
from hatch_epcontext.tables import ModelTable, NarrowableTable, Options, ToleranceTable
from hatch_epcontext.targets import NamedTarget


def check_model(key: str, table: ModelTable) -> Iterator[Problem]:
    """A model's table but for its paths and what depends on its targets."""
    for name, size in table.dims.items():
        if size < 1:
            yield Problem(f"{key}.dims{at(name)}", f"must be at least 1, and is {size}.")
    for name, shape in table.shapes.items():
        if any(size < 0 for size in shape):
            yield Problem(
                f"{key}.shapes{at(name)}", f"must not be negative, and is {show(list(shape))}."
            )
        if name in table.constants:
            yield Problem(
                f"{key}.shapes{at(name)}", "is frozen in constants, which gives it its shape."
            )
    for name, value in table.constants.items():
        if not _is_constant(value):
            yield Problem(
                f"{key}.constants{at(name)}",
                f"must be a number, true or false, a string or a list, and is {show(value)}.",
            )
    if isinstance(table.tolerance, ToleranceTable):
        for name, bound in dataclasses.asdict(table.tolerance).items():
            if bound is not None and (bound < 0 or (name == "cosine" and bound > 1)):
                yield Problem(f"{key}.tolerance.{name}", f"is out of range: {bound:g}.")


def _is_constant(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_constant, value))
    return isinstance(value, str | bool | int | float)


def check_groups(models: Iterable[tuple[str, str, str | None]]) -> Iterator[Problem]:
    """Weight-sharing groups; for each model its key, its name and its group."""
    models = list(models)
    names = {name.casefold(): key for key, name, _ in models}
    groups: dict[str, list[str]] = {}
    for key, _, group in models:
        if group is not None:
            groups.setdefault(group, []).append(f"{key}.share-weights")
    for group, keys in groups.items():
        yield from check_name(keys[0], group)
        if group.casefold() in names:
            yield Problem(
                keys[0],
                f"{show(group)} is also the name of {names[group.casefold()]}, and both become folders.",
                "Give the group a name of its own.",
            )
        if len(keys) == 1:
            yield Problem(
                keys[0],
                f"no other model is in the group {show(group)}.",
                suggestion(group, sorted(groups.keys() - {group}))
                if len(groups) > 1
                else "Weights are shared by two models or more.",
            )


def fitting(
    table: ModelTable, target: NamedTarget, targets: Sequence[NamedTarget] = ()
) -> ModelTable:
    """``table`` with those of its narrowed keys alone that the target's provider can have.

    Options that no provider of ``targets`` knows are for those that allow unknown ones.
    """
    provider = target.provider
    assert provider is not None
    return dataclasses.replace(
        table,
        provider_options=_of(table.provider_options, target, targets),
        load_options=_of(table.load_options, target, targets),
        device=table.device if table.device in ("any", *provider.devices) else None,
        embed=table.embed if provider.product == "context" else None,
        in_memory=table.in_memory if provider.product == "context" else None,
        profiles=table.profiles if provider.profiles else (),
        device_filter=table.device_filter if provider.plugin else {},
        policy=table.policy if provider.plugin else None,
    )


def check_narrowing(
    key: str, table: ModelTable, targets: Sequence[NamedTarget]
) -> Iterator[Problem]:
    """What a model narrows, for the providers of all its targets.

    Options that one of them knows are for that one; what none of them has is a mistake.
    """
    for target in targets:
        provider, lax = target.provider, target.table.allow_unknown_options
        assert provider is not None
        yield from check_narrowable(key, fitting(table, target, targets), provider, lax=lax)
    if not targets:
        return
    if table.share_weights is not None and not any(
        target.provider.shares_weights for target in targets if target.provider
    ):
        yield Problem(
            f"{key}.share-weights",
            "none of the model's targets has a provider with which contexts share weights.",
            f"Those that can: {', '.join(n for n, p in PROVIDERS.items() if p.shares_weights)}.",
        )
    fitted = [fitting(table, target, targets) for target in targets]
    taken = {name for one in fitted for name in (*one.provider_options, *one.load_options)}
    of_none = NarrowableTable(
        provider_options={n: v for n, v in table.provider_options.items() if n not in taken},
        load_options={n: v for n, v in table.load_options.items() if n not in taken},
        device=None if any(one.device for one in fitted) else table.device,
        profiles=() if any(one.profiles for one in fitted) else table.profiles,
        device_filter={} if any(one.device_filter for one in fitted) else table.device_filter,
        policy=None if any(one.policy for one in fitted) else table.policy,
    )
    assert targets[0].provider is not None
    yield from check_narrowable(key, of_none, targets[0].provider, lax=False)


def _of(options: Options, target: NamedTarget, targets: Sequence[NamedTarget]) -> Options:
    """Those of a model's options that are for ``target``."""
    lax = target.table.allow_unknown_options

    def is_for(name: str) -> bool:
        if lax and not any(_knows(other, name) for other in targets):
            return True
        return _knows(target, name)

    return {name: value for name, value in options.items() if is_for(name)}


def _knows(target: NamedTarget, name: str) -> bool:
    provider = target.provider
    assert provider is not None
    known = (provider.options, provider.retired, provider.managed)
    return provider.any_options or any(name in names for names in known)

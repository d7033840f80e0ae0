"""What can be wrong with a table although its types are right; each check yields what it finds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag

from hatch_epcontext.errors import Problem
from hatch_epcontext.options import check_options, check_session_options
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.structure import at, show, suggestion, toml_key
from hatch_epcontext.tables import (
    KEY,
    ModelTable,
    NarrowableTable,
    Options,
    ProfileTable,
    RootTable,
    TargetTable,
    ToleranceTable,
)
from hatch_epcontext.targets import NamedTarget

RESERVED = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
"""Hatch's own keys in a hook's table."""

SOURCE = "source"
"""The name that stands for the source model where others stand for a target."""


def check_hook(table: Mapping[str, Any]) -> Iterator[Problem]:
    """The hook's own table, which is Hatch's."""
    for key in table.keys() - RESERVED:
        yield Problem(
            f"tool.hatch.build.targets.wheel.hooks.epcontext{at(key)}",
            "is not one of Hatch's keys for a hook.",
            f"What to build stands in [{KEY}].",
        )


def check_root(table: RootTable) -> Iterator[Problem]:
    """``[tool.epcontext]`` but for its targets and models."""
    yield from _check_coverage(KEY, table)
    if table.jobs != "auto" and table.jobs < 1:
        yield Problem(f"{KEY}.jobs", f"must be at least 1, and is {table.jobs}.")
    if not table.timeout > 0:
        yield Problem(f"{KEY}.timeout", f"must be more than 0 seconds, and is {table.timeout:g}.")
    if table.output is not None and not all(map(str.isidentifier, table.output.split("/"))):
        yield Problem(
            f"{KEY}.output",
            f"must be a package's path in the wheel, and is {show(table.output)}.",
            'Write it like "my_app/epcontext": the app imports it as my_app.epcontext.',
        )
    if table.wheel_tag not in ("auto", "any") and not _is_tag(table.wheel_tag):
        yield Problem(
            f"{KEY}.wheel-tag",
            f"must be a wheel tag, and is {show(table.wheel_tag)}.",
            'Allowed: "auto", "any", or three parts such as "py3-none-win_arm64".',
        )
    if not table.models:
        yield Problem(
            f"{KEY}.models", "is required: the models to build.", 'Such as ["models/name.onnx"].'
        )
    if table.provider is None and not table.targets:
        yield Problem(
            KEY,
            "names no target.",
            f'Add provider = "..." or a table [{KEY}.targets.<name>]. '
            f"Providers: {', '.join(PROVIDERS)}.",
        )
    if table.targets:
        for field in dataclasses.fields(TargetTable):
            empty = {} if field.default is dataclasses.MISSING else field.default
            if field.name != "min_coverage" and getattr(table, field.name) not in (None, empty):
                yield Problem(
                    f"{KEY}.{toml_key(field.name)}",
                    "belongs to a target, and this configuration has [targets].",
                    f"Move it to [{KEY}.targets.<name>].",
                )


def _is_tag(text: str) -> bool:
    try:
        return text.count("-") == 2 and bool(parse_tag(text))
    except ValueError:
        return False


def check_target(target: NamedTarget) -> Iterator[Problem]:
    """A target's table."""
    key, table, provider = target.key, target.table, target.provider
    yield from check_name(key, target.name)
    if target.name == SOURCE:
        yield Problem(key, f'"{SOURCE}" stands for the source model; take another name.')
    if provider is None:
        given = f"{show(table.provider)} is not a provider that exists here."
        yield Problem(
            f"{key}.provider",
            given if table.provider else "is required: the execution provider.",
            suggestion(table.provider, list(PROVIDERS)),
        )
        return
    yield from _check_library(target, provider)
    yield from check_narrowable(key, table, provider, lax=table.allow_unknown_options)
    if table.embed and provider.product != "context":
        yield Problem(f"{key}.embed", f"the {provider.name} provider makes no contexts to embed.")
    if table.virtual_devices and not provider.virtual_devices:
        yield Problem(
            f"{key}.virtual-devices", f"the {provider.name} provider offers no virtual devices."
        )
    for index, platform in enumerate(table.platforms):
        if not re.fullmatch(r"[a-z0-9_]+", platform):
            yield Problem(
                f"{key}.platforms[{index}]",
                f"must be a wheel's platform tag, and is {show(platform)}.",
                'Such as "win_arm64", "manylinux_2_34_aarch64" or "any".',
            )
    for index, requirement in enumerate(table.requirements or ()):
        try:
            Requirement(requirement)
        except InvalidRequirement as error:
            yield Problem(
                f"{key}.requirements[{index}]",
                f"{show(requirement)} is not a requirement: {str(error).splitlines()[0]}.",
            )


def _check_library(target: NamedTarget, provider: Provider) -> Iterator[Problem]:
    key, table = target.key, target.table
    if provider.name == "cpu" and table.library:
        yield Problem(f"{key}.library", "the CPU's execution provider has no library of its own.")
    if provider.needs_library:
        if not table.library:
            yield Problem(
                f"{key}.library",
                "is required: the EP's plugin library.",
                'A package with get_library_path(), such as "my_ep", or the path of the library.',
            )
        if not table.ep_name:
            yield Problem(f"{key}.ep-name", "is required: what ONNX Runtime calls the EP.")
        return
    if table.ep_name is not None:
        yield Problem(
            f"{key}.ep-name",
            f"belongs to the provider plugin; {provider.name} is {provider.ep}.",
        )
    if table.registration_name is not None and not table.library:
        yield Problem(f"{key}.registration-name", "belongs to a library, and there is none here.")


def check_narrowable(
    key: str, table: NarrowableTable, provider: Provider, *, lax: bool
) -> Iterator[Problem]:
    """What a target's and a model's table have in common, for one provider.

    With ``lax`` provider options are not checked.
    """
    if not lax:
        yield from check_options(key, table.provider_options, table.load_options, provider)
    yield from check_session_options(f"{key}.session-options", table.session_options)
    yield from _check_coverage(key, table)
    yield from _check_profiles(key, table, provider)
    yield from _check_choice_of_device(key, table, provider)


def _check_choice_of_device(
    key: str, table: NarrowableTable, provider: Provider
) -> Iterator[Problem]:
    if table.device not in (None, "any", *provider.devices):
        yield Problem(
            f"{key}.device",
            f"the {provider.name} provider does not run on {show(table.device)}.",
            f"Allowed: {', '.join(dict.fromkeys((*provider.devices, 'any')))}.",
        )
    if provider.plugin is None:
        for name in ("device_filter", "policy"):
            if getattr(table, name):
                yield Problem(
                    f"{key}.{toml_key(name)}",
                    f"chooses among the devices of a plugin, and {provider.name} is a part of "
                    "ONNX Runtime.",
                    "Use its option device_id." if "device_id" in provider.options else "",
                )
    elif table.policy and table.device_filter:
        yield Problem(
            f"{key}.policy",
            "and device-filter exclude one another: with a policy ONNX Runtime chooses.",
            "Keep one of them.",
        )


def _check_profiles(key: str, table: NarrowableTable, provider: Provider) -> Iterator[Problem]:
    if not table.profiles:
        return
    if provider.profiles is None:
        yield Problem(
            f"{key}.profiles",
            f"the {provider.name} provider has no optimization profiles.",
            f"Those that have: {', '.join(name for name, p in PROVIDERS.items() if p.profiles)}.",
        )
        return
    if both := sorted(provider.profiles.names & table.provider_options.keys()):
        yield Problem(
            f"{key}.profiles", f"says what provider-options.{both[0]} says.", "Keep one of them."
        )
    inputs = table.profiles[0].keys()
    for index, profile in enumerate(table.profiles):
        where = f"{key}.profiles[{index}]"
        if profile.keys() != inputs:
            yield Problem(
                where,
                f"is about {', '.join(profile) or 'no input'}, "
                f"and the first about {', '.join(inputs) or 'no input'}.",
                "Each profile has to name the same inputs.",
            )
        for name, shapes in profile.items():
            yield from _check_shapes(where + at(name), name, shapes)


def _check_shapes(where: str, name: str, shapes: ProfileTable) -> Iterator[Problem]:
    bounds = {"min": shapes.min, "opt": shapes.opt, "max": shapes.max}
    if missing := [bound for bound, shape in bounds.items() if not shape]:
        yield Problem(f"{where}.{missing[0]}", "is required: a shape, such as [1, 3, 224, 224].")
        return
    if set(name) & set(",:"):
        yield Problem(where, "the EP writes profiles with ',' and ':', which no input may have.")
    if len({len(shape) for shape in bounds.values()}) > 1:
        yield Problem(where, "min, opt and max have different numbers of dimensions.")
        return
    for low, best, high in zip(*bounds.values(), strict=True):
        if not 0 <= low <= best <= high:
            yield Problem(
                where,
                f"min <= opt <= max does not hold: {low}, {best}, {high}.",
                f"min = {list(shapes.min)}, opt = {list(shapes.opt)}, max = {list(shapes.max)}",
            )
            return


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


def _check_coverage(key: str, table: NarrowableTable) -> Iterator[Problem]:
    if table.min_coverage is not None and not 0 <= table.min_coverage <= 1:
        yield Problem(f"{key}.min-coverage", f"must be from 0 to 1, and is {table.min_coverage:g}.")


def check_name(key: str, name: str) -> Iterator[Problem]:
    """A model's or target's name, which becomes a folder in the wheel."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith("."):
        yield Problem(
            key,
            f"{show(name)} cannot be the name of a folder in the wheel.",
            "Give it a name of letters, digits, '.', '_' and '-', with a letter or digit first.",
        )


def check_twins(named: Iterable[tuple[str, str]], what: str) -> Iterator[Problem]:
    """Keys and names: no two may be the same, in any case, for they would share a folder."""
    seen: dict[str, tuple[str, str]] = {}
    for key, name in named:
        if (twin := seen.setdefault(name.casefold(), (key, name))) != (key, name):
            yield Problem(
                key,
                f"has the same name as {twin[0]}: {show(name)}.",
                f"Give each {what} a name of its own.",
            )


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

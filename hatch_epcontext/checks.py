"""What can be wrong with a table although its types are right; each check yields what it finds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
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
    RootTable,
    TargetTable,
    ToleranceTable,
)

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
            if field.name != "min_coverage" and getattr(table, field.name) not in (None, (), {}):
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


def check_target(key: str, name: str, table: TargetTable) -> Iterator[Problem]:
    """A target's table; ``name`` is what it is called."""
    yield from check_name(key, name)
    if name == SOURCE:
        yield Problem(key, f'"{SOURCE}" stands for the source model; take another name.')
    provider = PROVIDERS.get(table.provider)
    if provider is None:
        given = f"{show(table.provider)} is not a provider that exists here."
        yield Problem(
            f"{key}.provider",
            given if table.provider else "is required: the execution provider.",
            suggestion(table.provider, list(PROVIDERS)),
        )
        return
    yield from check_narrowable(key, table, provider)
    if table.embed and provider.product != "context":
        yield Problem(f"{key}.embed", f"the {provider.name} provider makes no contexts to embed.")
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


def check_narrowable(key: str, table: NarrowableTable, provider: Provider) -> Iterator[Problem]:
    """What a target's and a model's table have in common, for one provider."""
    yield from check_options(key, table.provider_options, table.load_options, provider)
    yield from check_session_options(f"{key}.session-options", table.session_options)
    yield from _check_coverage(key, table)
    if table.device not in (None, "any", *provider.devices):
        yield Problem(
            f"{key}.device",
            f"the {provider.name} provider does not run on {show(table.device)}.",
            f"Allowed: {', '.join(provider.devices)}, any.",
        )


def fitting(table: ModelTable, provider: Provider) -> ModelTable:
    """``table`` with those of its narrowed keys alone that ``provider`` can have."""
    return dataclasses.replace(
        table,
        provider_options=_known(table.provider_options, [provider]),
        load_options=_known(table.load_options, [provider]),
        device=table.device if table.device in ("any", *provider.devices) else None,
        embed=table.embed if provider.product == "context" else None,
    )


def check_narrowing(key: str, table: ModelTable, providers: list[Provider]) -> Iterator[Problem]:
    """What a model narrows, for the providers of all its targets.

    Options that one of them knows are for that one; what none of them has is a mistake.
    """
    for provider in providers:
        yield from check_narrowable(key, fitting(table, provider), provider)
    if not providers:
        return
    of_none = NarrowableTable(
        provider_options=_unknown(table.provider_options, providers),
        load_options=_unknown(table.load_options, providers),
        device=None if any(fitting(table, p).device for p in providers) else table.device,
    )
    yield from check_narrowable(key, of_none, providers[0])


def _known(options: Options, providers: list[Provider]) -> Options:
    return {n: value for n, value in options.items() if any(n in p.options for p in providers)}


def _unknown(options: Options, providers: list[Provider]) -> Options:
    known = _known(options, providers)
    return {n: value for n, value in options.items() if n not in known}


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

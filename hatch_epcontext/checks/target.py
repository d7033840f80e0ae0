"""``[tool.epcontext.targets.<name>]``, and what a model's table has in common with it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.checks.common import SOURCE, check_min_coverage, check_name
from hatch_epcontext.errors import Problem
from hatch_epcontext.options import check_options, check_session_options
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.structure import at, show, suggestion, toml_key
from hatch_epcontext.tables import NarrowableTable, ProfileTable
from hatch_epcontext.targets import NamedTarget


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
    if table.embed is True and provider.product != "context":
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
    if table.in_memory:
        yield from _check_in_memory(key, table, provider)
    threshold = table.external_initializers_threshold
    if threshold is not None and threshold < 0:
        yield Problem(
            f"{key}.external-initializers-threshold",
            f"must be at least 0 bytes, and is {threshold}.",
        )
    if threshold is not None and table.external_initializers is False:
        yield Problem(
            f"{key}.external-initializers-threshold",
            "says how large they are, and external-initializers = false keeps them inside.",
        )
    yield from check_min_coverage(key, table)
    yield from _check_profiles(key, table, provider)
    yield from _check_choice_of_device(key, table, provider)


def _check_in_memory(key: str, table: NarrowableTable, provider: Provider) -> Iterator[Problem]:
    where = f"{key}.in-memory"
    if provider.product != "context" or provider.own_context_options is not None:
        yield Problem(where, f"the {provider.name} provider does not compile in memory.")
    if table.embed is False:
        yield Problem(where, "puts the blob inside the context model, and embed is false.")
    if table.external_initializers:
        yield Problem(where, "makes no files, and external-initializers wants one.")


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

"""Checks of a target: ``[tool.epcontext.targets.<name>]``, with the changes of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.config.checks.common import check_name
from hatch_epcontext.config.checks.options import check_options, check_session_options
from hatch_epcontext.config.environ import ALL
from hatch_epcontext.config.tables import ProfileTable, TargetTable
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.providers import PROVIDERS, CompilerLibrary, Provider, find
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.text import listing, show, suggestion


def check_target_name(key: Key, name: str, provider: str) -> Iterator[Problem]:
    """The name of the target at ``key``, and that of its provider."""
    yield from check_name(key, name)
    # On Windows, names that differ only in case share a folder.
    if name.casefold() == SOURCE:
        message = f'"{SOURCE}" is reserved for the source model.'
        yield Problem.at(key, Kind.INVALID_NAME, message, "Choose another name.")
    if name == ALL:
        message = f'"{ALL}" is reserved: HATCH_EPCONTEXT_FROM_CACHE={ALL} means all targets.'
        yield Problem.at(key, Kind.INVALID_NAME, message, "Choose another name.")
    if find(provider) is None:
        kind, message = Kind.UNKNOWN_PROVIDER, f"{show(provider)} is not a known provider."
        if not provider:
            kind, message = Kind.MISSING_KEY, "is required: the execution provider."
        yield Problem.at(key / "provider", kind, message, suggestion(provider, PROVIDERS))


def check_target(target: NamedTarget) -> Iterator[Problem]:
    """A target's table, without its name."""
    key, table, provider = target.key, target.table, target.provider
    yield from _check_library(target)
    yield from _check_compiler(target)
    yield from check_options(key, table.provider_options, table.load_options, target)
    yield from check_session_options(key / "session-options", table.session_options, target)
    if provider.by_library and provider.compiler_library:
        yield from _check_for_library(key, table, provider, provider.compiler_library)
    if table.recompile and (provider.plugin is None or provider.product != "context"):
        message = (
            f"the loader compiles contexts of plugin EPs, and not for the {provider.name} provider."
        )
        yield Problem.at(key / "recompile", Kind.NOT_APPLICABLE, message)
    yield from _check_profiles(key, table, provider)
    yield from _check_device(key, table, provider)
    if table.embed is True and provider.product != "context":
        message = f"the {provider.name} provider has no contexts to embed."
        yield Problem.at(key / "embed", Kind.NOT_APPLICABLE, message)
    if table.virtual_devices and not provider.virtual_devices:
        message = f"the {provider.name} provider offers no virtual devices."
        yield Problem.at(key / "virtual-devices", Kind.NOT_APPLICABLE, message)
    for index, platform in enumerate(table.platforms or ()):
        if not re.fullmatch(r"[a-z0-9_]+", platform):
            message = f"must be the platform tag of a wheel, not {show(platform)}."
            hint = 'For example "win_arm64", "manylinux_2_34_aarch64" or "any".'
            yield Problem.at(key / "platforms" / index, Kind.INVALID_VALUE, message, hint)
    for index, requirement in enumerate(table.requirements or ()):
        try:
            Requirement(requirement)
        except InvalidRequirement as error:
            message = f"{show(requirement)} is not a requirement: {str(error).splitlines()[0]}."
            yield Problem.at(key / "requirements" / index, Kind.INVALID_VALUE, message)


def _check_library(target: NamedTarget) -> Iterator[Problem]:
    key, table, provider = target.key, target.table, target.provider
    if provider.name == "cpu" and table.library:
        message = "the CPU execution provider has no library of its own."
        yield Problem.at(key / "library", Kind.NOT_APPLICABLE, message)
    if provider.needs_library:
        if not table.library:
            message = "is required: the EP's plugin library."
            hint = 'A package with get_library_path(), such as "my_ep", or the path of the library.'
            yield Problem.at(key / "library", Kind.MISSING_KEY, message, hint)
        if not table.ep_name:
            message = "is required: ONNX Runtime's name of the EP."
            yield Problem.at(key / "ep-name", Kind.MISSING_KEY, message)
        return
    if table.ep_name is not None:
        message = f"belongs to the provider plugin; {provider.name} is {provider.ep}."
        yield Problem.at(key / "ep-name", Kind.NOT_APPLICABLE, message)


def _check_compiler(target: NamedTarget) -> Iterator[Problem]:
    gpus, provider = target.table.compute_capabilities, target.provider
    key = target.key / "compute-capabilities"
    if gpus is None:
        return
    if (library := provider.compiler_library) is None:
        message = (
            f"there is no library that compiles for the {provider.name} provider without its EP."
        )
        others = ", ".join(name for name, other in PROVIDERS.items() if other.compiler_library)
        hint = f"Providers with a library: {others}."
        yield Problem.at(key, Kind.NOT_APPLICABLE, message, hint)
        return
    if gpus == ():
        message = "is empty: no GPU would run what is compiled."
        yield Problem.at(key, Kind.INVALID_VALUE, message, 'List GPUs, or set "auto".')
    for index, gpu in enumerate(() if gpus == "auto" else gpus):
        if gpu not in library.capabilities:
            message = f"{show(gpu)} is not a compute capability that the library compiles for."
            hint = f"It has {', '.join(library.capabilities)}."
            yield Problem.at(key / index, Kind.INVALID_VALUE, message, hint)
        elif gpu in gpus[:index]:
            yield Problem.at(key / index, Kind.INVALID_VALUE, f"{show(gpu)} is there twice.")


def _check_for_library(
    key: Key, table: TargetTable, provider: Provider, library: CompilerLibrary
) -> Iterator[Problem]:
    """The keys that the EP has, and the library that compiles instead of it has not."""
    for name in table.provider_options:
        option = provider.options.get(name)
        if option and option.scope != "load" and name not in library.options:
            own = (name for name in library.options if provider.options[name].scope == "compile")
            hint = f"The library has {listing(sorted(own))}."
            if name == "nv_target_sm":
                hint = "List the GPUs in compute-capabilities instead."
            elif provider.profiles and name in provider.profiles.names:
                hint = "Write the shapes into profiles instead."
            message = "is an option of the EP, and the library that compiles does not have it."
            place = key / "provider-options" / name
            yield Problem.at(place, Kind.CONFLICTING_OPTIONS, message, hint)
    if table.optimization in ("extended", "all"):
        message = "is what ONNX Runtime does for its own EPs, and the library compiles without it."
        yield Problem.at(key / "optimization", Kind.NOT_APPLICABLE, message)
    if table.external_initializers:
        message = "is what ONNX Runtime does, and the library compiles without it."
        yield Problem.at(key / "external-initializers", Kind.NOT_APPLICABLE, message)


def _check_device(key: Key, table: TargetTable, provider: Provider) -> Iterator[Problem]:
    if table.device not in (None, "any", *provider.devices):
        message = f"the {provider.name} provider does not run on {show(table.device)}."
        hint = f"Allowed: {', '.join(dict.fromkeys((*provider.devices, 'any')))}."
        yield Problem.at(key / "device", Kind.NOT_APPLICABLE, message, hint)
    if provider.plugin is None:
        if table.device_filter:
            is_part = f"{provider.name} is a part of ONNX Runtime"
            message = f"chooses among the devices of a plugin EP, and {is_part}."
            advice = "Use its option device_id." if "device_id" in provider.options else None
            yield Problem.at(key / "device-filter", Kind.NOT_APPLICABLE, message, advice)
    elif "library_path" in (table.device_filter or ()):
        message = "is a path of this machine, and apps choose by the same properties."
        yield Problem.at(key / "device-filter" / "library_path", Kind.NOT_APPLICABLE, message)


_MAX_SIZE = 2**31 - 1
"""The largest size of a dimension in a profile."""


def _check_profiles(key: Key, table: TargetTable, provider: Provider) -> Iterator[Problem]:
    if not table.profiles:
        return
    key /= "profiles"
    if provider.profiles is None:
        yield Problem.at(
            key,
            Kind.NOT_APPLICABLE,
            f"the {provider.name} provider has no optimization profiles.",
            f"Providers with profiles: {', '.join(n for n, p in PROVIDERS.items() if p.profiles)}.",
        )
        return
    if both := sorted(provider.profiles.names & table.provider_options.keys()):
        message = f"has the same shapes as the provider option {both[0]}."
        yield Problem.at(key, Kind.CONFLICTING_KEYS, message, "Keep one of them.")
    inputs = table.profiles[0].keys()
    for index, profile in enumerate(table.profiles):
        if profile.keys() != inputs:
            named, first = (listing(names) if names else "no input" for names in (profile, inputs))
            message = f"is for {named}, and the first profile for {first}."
            hint = "Name the same inputs in each profile."
            yield Problem.at(key / index, Kind.INVALID_PROFILE, message, hint)
        for name, shapes in profile.items():
            yield from _check_shapes(key / index / name, name, shapes)


def _check_shapes(key: Key, name: str, shapes: ProfileTable) -> Iterator[Problem]:
    bounds = {"min": shapes.min, "opt": shapes.opt, "max": shapes.max}
    if missing := [bound for bound, shape in bounds.items() if not shape]:
        message = "is required: a shape, such as [1, 3, 224, 224]."
        yield Problem.at(key / missing[0], Kind.MISSING_KEY, message)
        return
    if set(name) & set(",:"):
        message = "the input's name contains ',' or ':', which separate the EP's profiles."
        yield Problem.at(key, Kind.INVALID_PROFILE, message)
    if len({len(shape) for shape in bounds.values()}) > 1:
        message = "min, opt and max have different numbers of dimensions."
        yield Problem.at(key, Kind.INVALID_PROFILE, message)
        return
    if max(shapes.max) > _MAX_SIZE:
        message = f"has a size above {_MAX_SIZE}: {list(shapes.max)}."
        yield Problem.at(
            key / "max", Kind.INVALID_PROFILE, message, "Give sizes that inputs can have."
        )
        return
    for low, best, high in zip(*bounds.values(), strict=True):
        if not 0 <= low <= best <= high:
            yield Problem.at(
                key,
                Kind.INVALID_PROFILE,
                f"needs min <= opt <= max, and has {low}, {best}, {high}.",
                f"It has min = {list(shapes.min)}, opt = {list(shapes.opt)}, "
                f"max = {list(shapes.max)}.",
            )
            return

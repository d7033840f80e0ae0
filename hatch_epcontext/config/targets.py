"""A target's table together with its provider, and the checks of both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hatch_epcontext.config.environ import ALL
from hatch_epcontext.config.options import check_options
from hatch_epcontext.config.tables import ProfileTable, TargetTable, declaration_of
from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.files import file_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import PROVIDERS, Plugin, Provider, configured, find
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.system import LIBRARIES
from hatch_epcontext.text import is_device, show, suggestion, toml_key

_MAX = 150
"""The most characters of a name: file names with suffixes then fit every file system."""


def check_name(key: Key, name: str) -> Iterator[Problem]:
    """A model's or target's name, which becomes a folder in the wheel."""
    pattern = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX - 1}}}"
    if not re.fullmatch(pattern, name) or name.endswith(".") or is_device(name):
        message = f"{show(name)} cannot be the name of a folder on every system."
        hint = (
            f"Use at most {_MAX} letters, digits, '.', '_' and '-', with a letter or digit first, and no "
            "name of a device on Windows, such as con or aux."
        )
        yield Problem.at(key, Kind.INVALID_NAME, message, hint)


@dataclass(frozen=True)
class NamedTarget:
    """A target as configured: its name, its key and its provider.

    ``library_sha256``: of its library, if the table has a path.
    """

    name: str
    key: Key
    table: TargetTable
    provider: Provider
    library_sha256: str | None = None


def named_target(name: str, key: Key, table: TargetTable, root: Path) -> NamedTarget | None:
    """The target with its provider, changed by the table's ``library``, ``ep-name`` and so on.

    None if the provider is unknown.
    """
    provider = find(table.provider)
    if provider is None:
        return None
    ep, plugin = provider.ep, provider.plugin
    if table.library or provider.needs_library:
        ep = table.ep_name or ep
        plugin = _plugin(table.library or "", ep, root)
    provider = configured(provider.name, ep, plugin, by_library=table.chip is not None)
    sha256 = None
    if plugin is not None and plugin.path:
        # `Finder.library` reports a missing file, and an impossible name.
        with contextlib.suppress(OSError, ValueError):
            sha256 = file_sha256(Path(plugin.path))
    return NamedTarget(name, key, table, provider, sha256)


def is_path(library: str) -> bool:
    """Whether ``library`` is the path of a file, not the name of a package."""
    return re.fullmatch(r"\w+(\.\w+)*", library) is None or Path(library).suffix in LIBRARIES


def _plugin(library: str, registration_name: str, root: Path) -> Plugin:
    # Without a home folder it stays as it is, and is reported as missing.
    expanded = os.path.expanduser(library)  # noqa: PTH111
    path = str(root / expanded) if library and is_path(library) else ""
    module = "" if path else library
    return Plugin(module, module or "its library", registration_name, path)


def check_target_name(key: Key, name: str, provider: str) -> Iterator[Problem]:
    """The name of the target at ``key``, and that of its provider."""
    yield from check_name(key, name)
    # On Windows, names that differ only in case share a folder.
    if name == ALL or name.casefold() == SOURCE:
        what = "the source model" if name != ALL else f"HATCH_EPCONTEXT_FROM_CACHE={ALL}"
        message = f"{show(name)} is reserved for {what}."
        yield Problem.at(key, Kind.INVALID_NAME, message, "Choose another name.")
    if find(provider) is None:
        kind, message = Kind.UNKNOWN_PROVIDER, f"{show(provider)} is not a known provider."
        if not provider:
            kind, message = Kind.MISSING_KEY, "is required: the execution provider."
        yield Problem.at(key / "provider", kind, message, suggestion(provider, PROVIDERS))


def check_target(target: NamedTarget) -> Iterator[Problem]:
    """A target's table, without its name."""
    key, table, provider = target.key, target.table, target.provider
    for field in dataclasses.fields(table):
        declared = declaration_of(field)
        feature, value = declared.feature, getattr(table, field.name)
        is_missing = value in (None, False, declared.otherwise)
        if feature is None or is_missing or feature.has(provider):
            continue
        others = ", ".join(name for name, other in PROVIDERS.items() if feature.has(other))
        message = f"the {provider.name} provider {feature.lack}."
        own = key / toml_key(field.name)
        yield Problem.at(own, Kind.NOT_APPLICABLE, message, f"For: {others}.")
    if table.chip is not None and provider.chips:
        yield from _check_chips(target)
    yield from check_options(key, table, provider)
    if table.device not in (None, "any", *provider.devices):
        message = f"the {provider.name} provider does not run on {show(table.device)}."
        hint = f"Allowed: {', '.join(dict.fromkeys((*provider.devices, 'any')))}."
        yield Problem.at(key / "device", Kind.NOT_APPLICABLE, message, hint)
    if provider.needs_library:
        needs = {"library": "my_ep", "ep-name": "MyExecutionProvider"}
        for name in (name for name in needs if not getattr(table, name.replace("-", "_"))):
            message = "is required for any other plugin EP."
            hint = f"For example {name} = {show(needs[name])}."
            yield Problem.at(key / name, Kind.MISSING_KEY, message, hint)
    if provider.by_library:
        yield from _check_for_library(target)
    for index, profile in enumerate(table.profiles or ()):
        for name, shapes in profile.items():
            if not _is_profile(name, shapes):
                message = (
                    f"must have shapes of one length with 0 <= min <= opt <= max < {_END}, and no ',' or ':' "
                    f"in the input's name: min {show(shapes.min)}, opt {show(shapes.opt)}, "
                    f"max {show(shapes.max)}."
                )
                yield Problem.at(key / "profiles" / index / name, Kind.INVALID_PROFILE, message)


_END = 2**31
"""The end of the sizes that a dimension in a profile can have."""


def _is_profile(name: str, shapes: ProfileTable) -> bool:
    bounds = shapes.min, shapes.opt, shapes.max
    if not all(bounds):
        # A missing shape is a problem of its own.
        return True
    is_one_length = len(set(map(len, bounds))) == 1
    sizes = zip(*bounds, strict=False)
    fits = all(0 <= low <= best <= high < _END for low, best, high in sizes)
    return is_one_length and fits and not set(name) & set(",:")


def _check_chips(target: NamedTarget) -> Iterator[Problem]:
    """``chip``, and the options that it sets."""
    table, provider, key = target.table, target.provider, target.key / "chip"
    unknown = [name for name in table.chips if name not in provider.chips]
    for name in unknown:
        message = f"{show(name)} is not a chip that the {provider.name} provider knows by name."
        hint = suggestion(name, provider.chips)
        yield Problem.at(key, Kind.INVALID_VALUE, message, hint)
    facts = [tuple(provider.facts_of([name]).items()) for name in table.chips]
    if not unknown and len(facts) != 1 and (len({*facts} - {()}) < len(facts) or not facts):
        message = f"must name different chips, not {show(table.chip)}."
        yield Problem.at(key, Kind.INVALID_VALUE, message)
    for name in provider.facts_of(provider.chips):
        if name in table.provider_options:
            own = target.key / "provider-options" / name
            message = "is set together with chip, which sets it."
            yield Problem.at(own, Kind.CONFLICTING_OPTIONS, message, "Keep one of them.")


def _check_for_library(target: NamedTarget) -> Iterator[Problem]:
    """What the EP and ONNX Runtime have, and the vendor's library has not."""
    key, table, provider = target.key, target.table, target.provider
    library = provider.compiler_library
    assert library is not None, "it compiles"
    for name, value in (
        ("optimization", table.optimization in ("extended", "all")),
        ("external-initializers", table.external_initializers),
    ):
        if value:
            message = "is what ONNX Runtime does, and the library compiles without it."
            yield Problem.at(key / name, Kind.NOT_APPLICABLE, message)
    for name in table.provider_options:
        option = provider.options.get(name)
        if option and option.scope != "load" and name not in library.options:
            message = "is an option of the EP, and the library that compiles does not have it."
            option_key = key / "provider-options" / name
            yield Problem.at(option_key, Kind.CONFLICTING_OPTIONS, message)

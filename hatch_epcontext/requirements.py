"""What the targets need installed: which ONNX Runtime, which packages, and whether they are there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hatch_epcontext.config import Target
from hatch_epcontext.errors import ConfigError, MissingError, Problem, RequirementError
from hatch_epcontext.fingerprint import file_sha256
from hatch_epcontext.providers import FLAVOURS
from hatch_epcontext.tables import KEY

ONNX_RUNTIME = ">=1.23"
"""Older ones have no ModelCompiler that fails when nothing was compiled."""

TOOLS = ("onnx>=1.19", "onnxslim>=0.1.80", "numpy>=2.0")
"""What a worker imports beside ONNX Runtime."""

INSPECTION = (f"{FLAVOURS[0]}{ONNX_RUNTIME}", *TOOLS)
"""What it takes to read models, and compile none."""


def distributions(target: Target) -> frozenset[str]:
    """The distributions whose versions can change what is compiled for ``target``."""
    wanted = target.requirements or target.provider.requirements
    named: set[str] = {canonicalize_name(Requirement(r).name) for r in wanted}
    plugin = target.provider.plugin
    if plugin is not None and plugin.module:
        named |= _owners(plugin.module.split(".")[0])
    return frozenset({*named, *FLAVOURS})


def _owners(package: str) -> set[str]:
    """The installed distributions that have files in the import package ``package``."""
    # `packages_distributions` sees all of them from Python 3.11 on only.
    return {
        canonicalize_name(each.name)
        for each in metadata.distributions()
        if any(file.parts[0] == package for file in each.files or ())
    }


def versions_of(target: Target, there: Mapping[str, str]) -> dict[str, str]:
    """The versions, out of those that are ``there``, of all that ``target`` is compiled with.

    A library that belongs to no distribution counts by its contents.
    """
    named = distributions(target)
    versions = {name: there[name] for name in sorted(named & there.keys())}
    for name in named - there.keys() - frozenset(FLAVOURS):
        if version := installed(name):
            versions[name] = version
    plugin = target.provider.plugin
    if plugin is not None and plugin.path:
        library = Path(plugin.path)
        versions[library.name] = f"sha256:{file_sha256(library)}"
    return versions


def _flavour(targets: Iterable[Target]) -> str:
    """The one ONNX Runtime distribution with which all targets can be built."""
    targets = list(targets)
    possible = [flavour for flavour in FLAVOURS if _serves(flavour, targets)]
    if not possible:
        needs = ", ".join(
            f"{t.name}: {' or '.join(t.provider.flavours)}" for t in targets if t.needs_ep
        )
        raise ConfigError(
            Problem(
                f"{KEY}.targets",
                f"no one ONNX Runtime serves all targets ({needs}).",
                "Build some with HATCH_EPCONTEXT_TARGETS=<these>, which fills the cache, and then all "
                "with HATCH_EPCONTEXT_FROM_CACHE=<these>.",
            )
        )
    # Without isolation one may be there already, and then no other can come beside it.
    if there := [flavour for flavour in possible if installed(flavour)]:
        return there[0]

    def dislike(flavour: str) -> int:
        # Without its own an optimized graph can be made, and not run on its EP.
        wanted = (t.provider.flavours for t in targets if not _unavailable(t))
        return sum(f.index(flavour) if flavour in f else len(FLAVOURS) for f in wanted)

    return min(possible, key=dislike)


def requirements(targets: Iterable[Target]) -> tuple[str, ...]:
    """What a front end is to install for all targets, as requirement strings, with exactly one flavour.

    Raises ConfigError when they cannot be built in one environment.
    """
    # What cannot be installed here is left out, and told when something is to be compiled: an editable
    # install of the source models needs none of it.
    targets = [t for t in targets if not t.from_cache and not (t.needs_ep and _unavailable(t))]
    flavour = _flavour(targets)
    wanted = [
        requirement
        for t in targets
        if not _unavailable(t)
        for requirement in t.requirements or t.provider.requirements
    ]
    named = {canonicalize_name(Requirement(r).name) for r in wanted}
    own = named.intersection(FLAVOURS)
    together = own if len(own) == 1 and _serves(max(own), targets) else own | {flavour}
    for rivals in (frozenset(FLAVOURS), *(group for t in targets for group in t.provider.rivals)):
        clash = sorted((named | together) & rivals)
        if len(clash) > 1:
            raise ConfigError(
                Problem(
                    f"{KEY}: requirements",
                    f"{' and '.join(clash)} cannot be installed together: "
                    "they overwrite one another.",
                    "Build some targets with HATCH_EPCONTEXT_TARGETS=<these>, which fills the cache, "
                    "and then all with HATCH_EPCONTEXT_FROM_CACHE=<these>.",
                )
            )
    base = [] if together & named else [flavour + ONNX_RUNTIME]
    return tuple(dict.fromkeys([*base, *wanted, *TOOLS]))


def _serves(flavour: str, targets: Iterable[Target]) -> bool:
    return all(flavour in t.provider.flavours for t in targets if t.needs_ep)


def _unavailable(target: Target) -> str:
    """Why what ``target`` is compiled with cannot be installed here; "" if it can."""
    if target.requirements is not None:
        return ""
    python = (sys.version_info.major, sys.version_info.minor)
    return target.provider.unavailable(python, sys.platform)


def _check_available(targets: Iterable[Target]) -> None:
    problems = [
        Problem(
            f"{KEY}: target {target.name}",
            f"the {target.provider.name} provider {reason}.",
            "Build elsewhere, or choose other targets with HATCH_EPCONTEXT_TARGETS.",
        )
        for target in targets
        if target.needs_ep and (reason := _unavailable(target))
    ]
    if problems:
        raise RequirementError(*problems)


def check_environment(targets: Iterable[Target], requirements: Iterable[str]) -> Mapping[str, str]:
    """The version of each installed distribution that ``requirements`` names.

    For builds without isolation, where nobody has installed anything. Raises RequirementError when a
    target cannot be built on this machine or something is there twice, and MissingError with the pip
    command when something is missing or too old. Imports none of it.
    """
    targets = [target for target in targets if not target.from_cache]
    _check_available(targets)
    groups = {group for target in targets for group in target.provider.rivals}
    for rivals in (FLAVOURS, *map(sorted, groups)):
        _refuse_rivals([name for name in rivals if installed(name)])
    flavours = [name for name in FLAVOURS if installed(name)]
    serves = {flavour for flavour in FLAVOURS if _serves(flavour, targets)}
    versions: dict[str, str] = {}
    missing = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        name: str = canonicalize_name(requirement.name)
        if name in FLAVOURS and serves.intersection(flavours):
            name = flavours[0]
        version = installed(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append((str(requirement), version))
        else:
            versions[name] = version
    if missing:
        found = "; ".join(
            f"{requirement} ({'is not installed' if version is None else f'{version} is'})"
            for requirement, version in missing
        )
        quoted = " ".join(f'"{requirement}"' for requirement, _ in missing)
        raise MissingError(
            Problem(
                "this environment",
                f"lacks what this takes: {found}.",
                f"Run: {_python()} -m pip install {quoted}",
            )
        )
    return versions


def _refuse_rivals(there: list[str]) -> None:
    if len(there) > 1:
        raise RequirementError(
            Problem(
                "this environment",
                f"{' and '.join(there)} are both installed, and overwrite one another.",
                f"Run: {_python()} -m pip uninstall {' '.join(there)}, "
                "then install the one that is needed.",
            )
        )


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> str:
    return sys.executable or "python"

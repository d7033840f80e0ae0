"""Build requirements of the targets: the ONNX Runtime distribution, other packages, what is installed."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hatch_epcontext.config.location import REQUIREMENTS, SIGNATURES
from hatch_epcontext.config.settings import BuildSettings, Target
from hatch_epcontext.errors import ConfigError, Key, Kind, MissingError, Problem, RequirementError
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.system import pip_install, python
from hatch_epcontext.text import count, hide_credentials, listing

ONNX_RUNTIME = ">=1.23"
"""The ModelCompiler of older releases does not fail when nothing was compiled."""

TOOLS = ("onnx>=1.19", "onnxslim>=0.1.80", "numpy>=2.0")
"""What a worker imports besides ONNX Runtime."""

INSPECTION = (f"{DISTRIBUTIONS[0]}{ONNX_RUNTIME}", *TOOLS)
"""The requirements to read models without compiling any."""

FARM = (*INSPECTION, "distributed>=2025.4")
"""The requirements to read models, and to submit jobs to a dask cluster."""

GENAI = ("onnxruntime-genai", "onnxruntime-genai-cuda", "onnxruntime-genai-directml")
"""The distributions of onnxruntime-genai, which exclude each other; the first one is for the CPU."""

WINDOWS_ML = "windowsml"
"""What apps on Windows may register EPs with."""

_IN_TURN = (
    "Build some targets with HATCH_EPCONTEXT_TARGETS=<names>, which fills the cache, and then all "
    "with HATCH_EPCONTEXT_FROM_CACHE=<names>."
)


@functools.lru_cache
def owners(package: str) -> frozenset[str]:
    """The installed distributions that have files in the import package ``package``."""
    # As text: parsing every RECORD takes half a second in a large environment.
    return frozenset(
        canonicalize_name(distribution.name)
        for distribution in metadata.distributions()
        if f"\n{package}/" in "\n" + (distribution.read_text("RECORD") or "")
    )


def versions_of(target: Target, installed_versions: Mapping[str, str]) -> dict[str, str]:
    """The versions of the distributions that can change what is compiled for ``target``.

    ``installed_versions``: those that are known.
    """
    provider, plugin = target.provider, target.provider.plugin
    if provider.by_library and provider.compiler_library is not None:
        # What was compiled without the EP does not depend on it, but for its plugins.
        module, packages = provider.compiler_library.module, provider.requirements
    else:
        module = plugin.module if plugin else ""
        packages = target.requirements or provider.requirements
    own = owners(module.split(".")[0]) if module else frozenset[str]()
    versions = dict[str, str | None](installed_versions)
    names = own.union(map(_name, packages))
    for name in names.difference(versions, DISTRIBUTIONS):
        versions[name] = installed(name)
    relevant = sorted(names.union(DISTRIBUTIONS))
    return {name: version for name in relevant if (version := versions.get(name))}


def oldest_releases(target: Target) -> dict[str, Version]:
    """The oldest release of each distribution with which apps open what is compiled for ``target``.

    Of ONNX Runtime and the EP's package, also by the names of the distributions that replace these. Empty
    for optimized graphs, which any ONNX Runtime opens that has their operators.
    """
    if target.provider.product != "context":
        return {}
    releases = dict.fromkeys(DISTRIBUTIONS, _oldest_runtime(target))
    if (plugin := target.provider.plugin) is not None:
        package = canonicalize_name(plugin.package)
        groups = PROVIDERS[target.provider.name].conflicts
        names = next((group for group in groups if package in group), {package})
        if bound := max(_bounds_of_ep(target, package), default=None):
            releases |= dict.fromkeys(names, bound)
    return releases


def _oldest_runtime(target: Target) -> Version:
    """The metadata of the EP's package count, where it is installed."""
    names = map(_name, _requirements_of_ep(target))
    own = [text for name in names if installed(name) for text in metadata.requires(name) or ()]
    return max(_lower_bounds((*own, f"{DISTRIBUTIONS[0]}{ONNX_RUNTIME}"), DISTRIBUTIONS))


def _bounds_of_ep(target: Target, package: str) -> Iterator[Version]:
    """The oldest releases of the EP's ``package`` that what is known of it allows."""
    yield from _lower_bounds(_requirements_of_ep(target), [package])
    if version := installed(package):
        # It refuses what a newer minor release compiled: seen with each of onnxruntime-qnn 2.4 to 2.7.
        release = Version(version)
        yield min(Version(f"{release.major}.{release.minor}"), release)


def _requirements_of_ep(target: Target) -> Sequence[str]:
    """What runs the target: not the requirements of a library that compiles for it."""
    own = None if target.provider.by_library else target.requirements
    return own or PROVIDERS[target.provider.name].requirements


def _lower_bounds(requirements: Iterable[str], names: Container[str]) -> Iterator[Version]:
    for requirement in map(Requirement, requirements):
        if canonicalize_name(requirement.name) in names:
            parts = requirement.specifier
            yield from (Version(part.version) for part in parts if part.operator == ">=")


def _most_demanding(targets: Iterable[Target]) -> list[Target]:
    """One target of each name, in the variant with the most requirements: models narrow targets."""
    chosen: dict[str, Target] = {}
    for target in targets:
        chosen[target.name] = max(chosen.get(target.name, target), target, key=_demands)
    return list(chosen.values())


def _demands(target: Target) -> tuple[bool, int]:
    return target.needs_ep, len(target.provider.requirements)


def _distribution(targets: Sequence[Target]) -> str:
    """The ONNX Runtime distribution with which all targets can be built."""
    possible = [name for name in DISTRIBUTIONS if _fits(name, targets)]
    if not possible:
        needs = ", ".join(
            f"{t.name}: {' or '.join(t.provider.distributions)}" for t in targets if t.needs_ep
        )
        message = f"no single ONNX Runtime distribution fits all targets ({needs})."
        raise ConfigError(
            Problem.at(Key() / "targets", Kind.CONFLICTING_REQUIREMENTS, message, _IN_TURN)
        )
    # Without isolation one may already be installed, and two exclude each other.
    if present := [name for name in possible if installed(name)]:
        return present[0]

    def penalty(name: str) -> int:
        # Without its own distribution an EP's optimized graph can be written, but not run on that EP.
        own = (t.provider.distributions for t in targets if not _unavailable(t))
        return sum(d.index(name) if name in d else len(DISTRIBUTIONS) for d in own)

    return min(possible, key=penalty)


def requirements(targets: Iterable[Target]) -> tuple[str, ...]:
    """What a front end installs for all targets, with exactly one ONNX Runtime distribution.

    ``targets`` may have several variants of one target. Raises ConfigError when one environment cannot build
    all of them.
    """
    # What cannot be installed on this machine is left out, and reported before it is compiled: an editable
    # install of the source models needs none of it.
    targets = [
        t
        for t in _most_demanding(targets)
        if not t.from_cache and not (t.needs_ep and _unavailable(t))
    ]
    distribution = _distribution(targets)
    own = [
        requirement
        for t in targets
        if not _unavailable(t)
        for requirement in t.requirements or t.provider.requirements
    ]
    names = {*map(_name, own)}
    runtimes = names.intersection(DISTRIBUTIONS)
    base = [] if runtimes else [distribution + ONNX_RUNTIME]
    if len(runtimes) != 1 or not _fits(max(runtimes), targets):
        names.add(distribution)
    for group in _exclusive(targets):
        if len(clash := sorted(names & group)) > 1:
            message = f"{listing(clash)} cannot be installed together: they overwrite each other."
            raise ConfigError(Problem.at(Key(), Kind.CONFLICTING_REQUIREMENTS, message, _IN_TURN))
    return tuple(dict.fromkeys([*base, *own, *TOOLS]))


def _exclusive(targets: Iterable[Target]) -> list[frozenset[str]]:
    """Sets of distributions of which one environment has at most one: they overwrite each other."""
    groups = {group: None for target in targets for group in target.provider.conflicts}
    return [frozenset(DISTRIBUTIONS), *groups]


def cache_requirements(settings: BuildSettings) -> tuple[str, ...]:
    """What a front end installs for the shared cache, if there is one.

    Not part of `requirements`: without it a build goes on without the shared cache.
    """
    if settings.shared_cache is None:
        return ()
    signed = settings.trust is not None or settings.shared_cache_key is not None
    backend = REQUIREMENTS[settings.shared_cache.partition("://")[0]]
    return (backend, SIGNATURES) if signed else (backend,)


def _fits(distribution: str, targets: Iterable[Target]) -> bool:
    return all(distribution in t.provider.distributions for t in targets if t.needs_ep)


def _unavailable(target: Target) -> str | None:
    """The reason why the packages of ``target`` cannot be installed on this machine, if there is one."""
    if target.requirements is not None:
        return None
    python = (sys.version_info.major, sys.version_info.minor)
    return target.provider.unavailable(python, sys.platform, platform.machine())


def _newer_python(target: Target) -> str | None:
    """How to build with the Python that ``target`` needs, if this one is older."""
    if target.requirements is not None or sys.version_info[:2] >= target.provider.python:
        return None
    version = ".".join(map(str, target.provider.python))
    return (
        f"Build with Python {version} or newer, for example: uv build --python {version} (without it uv "
        "takes the version in .python-version). Or leave the target out."
    )


def _check_available(targets: Iterable[Target]) -> None:
    problems = [
        Problem(
            Kind.UNAVAILABLE_PROVIDER,
            f"target {target.name}",
            f"the {target.provider.name} provider {reason}.",
            _newer_python(target) or "Build on another machine, or leave the target out.",
        )
        for target in targets
        if target.needs_ep and (reason := _unavailable(target))
    ]
    RequirementError.check(problems)


def check_environment(targets: Iterable[Target], requirements: Iterable[str]) -> Mapping[str, str]:
    """The version of each installed distribution that ``requirements`` names.

    For builds without isolation, in which the front end installs nothing. Raises RequirementError when a
    target cannot be built on this machine or two distributions conflict, and MissingError with the pip
    command when something is missing or too old. Imports none of them.
    """
    targets = [target for target in _most_demanding(targets) if not target.from_cache]
    _check_available(targets)
    for group in _exclusive(targets):
        _check_conflicts(sorted(filter(installed, group)))
    present = [name for name in DISTRIBUTIONS if installed(name)]
    fitting = {name for name in DISTRIBUTIONS if _fits(name, targets)}
    versions: dict[str, str] = {}
    missing = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        name: str = canonicalize_name(requirement.name)
        if name in DISTRIBUTIONS and fitting.intersection(present):
            name = present[0]
        version = installed(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append((hide_credentials(str(requirement)), version))
        else:
            versions[name] = version
    if missing:
        states = "; ".join(
            f"{requirement} ({'not installed' if version is None else f'{version} is installed'})"
            for requirement, version in missing
        )
        verb = "is" if len(missing) == 1 else "are"
        install = pip_install(requirement for requirement, _ in missing)
        message = f"{count(len(missing), 'build requirement')} {verb} missing: {states}."
        hint = f"Run: {install}"
        if targets:
            hint += (
                "\nOffline, HATCH_EPCONTEXT_FROM_CACHE=all takes what an earlier build compiled, and needs "
                "no package."
            )
        if len(targets) > 1:
            hint += "\nOr build only targets without these: HATCH_EPCONTEXT_TARGETS=<names>."
        raise MissingError(Problem(Kind.MISSING_REQUIREMENT, "this environment", message, hint))
    return versions


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _check_conflicts(present: list[str]) -> None:
    if len(present) > 1:
        raise RequirementError(
            Problem(
                Kind.CONFLICTING_REQUIREMENTS,
                "this environment",
                f"{listing(present)} are both installed, and overwrite each other.",
                f"Run: {python()} -m pip uninstall {' '.join(present)}, "
                "then install the one that you need.",
            )
        )


def genai_installed() -> str | None:
    """The installed distribution of onnxruntime-genai, or None."""
    return next(filter(installed, GENAI), None)


def genai_requirements() -> tuple[str, ...]:
    """The requirement to open language models, and to compare what they answer."""
    return (f"{genai_installed() or GENAI[0]}>=0.18; python_version >= '3.11'",)


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

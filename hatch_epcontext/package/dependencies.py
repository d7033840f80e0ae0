"""What the app's dependencies must allow: an EP and an ONNX Runtime that open what is shipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hatch_epcontext.config.settings import Target
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.package.external_data import versions
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.text import listing

_MAX_NAMED = 5
"""The most files that a message names."""

_READ_BY_ALL = (8, 17)
"""The IR version and the opset that all releases open that an app may still have, as it documents them."""

_READ_SINCE = (
    *(("1.15", 9, 19), ("1.17", 9, 20), ("1.18", 10, 21), ("1.21", 10, 22)),
    *(("1.23", 11, 23), ("1.24", 13, 25), ("1.25", 13, 26), ("1.32", 14, 28)),
)
"""The newest IR version and opset of the models that each release of ONNX Runtime, and those after it, open:
measured with 1.15 to 1.32.
"""


def check_app(targets: Iterable[Target], dependencies: Iterable[str]) -> None:
    """Raise ConfigError if the app's ``dependencies`` exclude the EPs that run what a library compiles."""
    problems = {}
    for target in targets:
        if (start := _release_of_ep(target)) is None:
            # Nobody knows which EP is of this release of the library.
            continue
        packages = frozenset[str]().union(*PROVIDERS[target.provider.name].conflicts)
        for dependency in map(Requirement, dependencies):
            name = canonicalize_name(dependency.name)
            # Those that it names may be pre-releases, for example.
            named = [part.version for part in dependency.specifier]
            own = [version for version in named if version.startswith(f"{start}.")]
            releases = (f"{start}.{number}" for number in range(100))
            if name in packages and not _allows(dependency, [*own, *releases]):
                release = f"{name}=={start}.*"
                message = f"the project depends on {dependency}, and only {release} runs what is compiled."
                problems[target.name, name] = Problem.at(
                    target.key, Kind.CONFLICTING_REQUIREMENTS, message, f"Depend on {release}."
                )
    if problems:
        raise ConfigError(*problems.values())


def _release_of_ep(target: Target) -> str | None:
    """The release of the EP that runs what the installed library compiles for ``target``, if it is known."""
    library = target.provider.compiler_library if target.provider.by_library else None
    if library is None:
        return None
    release = installed(Requirement(library.requirements[0]).name) or ""
    known = library.ep_versions.items()
    return next((ep for start, ep in known if release.startswith(start)), None)


def too_new_files(folder: Path, files: Iterable[str], dependencies: Iterable[str]) -> Iterator[str]:
    """A warning for each of the app's ``dependencies`` that allows releases that cannot open ``files``.

    These are the files of the package in ``folder``.
    """
    models = [name for name in files if name.endswith(".onnx")]
    needed = {name: _needed_release(folder / name) for name in models}
    for dependency in map(Requirement, dependencies):
        if canonicalize_name(dependency.name) not in DISTRIBUTIONS:
            continue
        wrong = {name: r for name, r in needed.items() if r and _allows(dependency, _before(r))}
        if wrong:
            release = max(wrong.values(), key=Version)
            yield (
                f"the project depends on {dependency}, which allows releases that cannot open "
                f"{listing(sorted(wrong), _MAX_NAMED)}: the IR version or the opset is too new. Depend on "
                f"{dependency.name}>={release}."
            )


def _needed_release(file: Path) -> str | None:
    """The first release of ONNX Runtime that opens ``file``, None if all do that an app may still have.

    For models that are newer than this package: the installed one.
    """
    try:
        ir_version, opset = versions(file)
    except (OSError, ValueError):
        # A source that changes during the build: the wheel's check reports it.
        return None
    if ir_version <= _READ_BY_ALL[0] and opset <= _READ_BY_ALL[1]:
        return None
    known = (name for name, ir, last in _READ_SINCE if ir_version <= ir and opset <= last)
    return next(known, next(filter(None, map(installed, DISTRIBUTIONS)), None))


def _before(release: str) -> Iterator[str]:
    """The releases of ONNX Runtime before ``release``."""
    return (f"1.{minor}.{patch}" for minor in range(Version(release).minor) for patch in range(10))


def _allows(dependency: Requirement, releases: Iterable[str]) -> bool:
    return any(dependency.specifier.contains(release, prereleases=True) for release in releases)

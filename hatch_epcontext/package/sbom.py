"""The wheel's SBOM: a CycloneDX ML-BOM of the models, in ``.dist-info/sboms/`` (PEP 770)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from packaging.version import Version

from hatch_epcontext.errors import ConfigError, Key, KeyNames, Kind, Problem, Setting
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.requirements import installed

FILE = "epcontext.cdx.json"
"""The name of the SBOM. CycloneDX asks for the suffix ``.cdx.json``."""

HATCHLING = Version("1.28")
"""The first hatchling that puts files into ``.dist-info/sboms/``."""

KEY = Key() / "wheel" / "sbom"


@dataclass(frozen=True)
class ProjectMetadata:
    """The project whose wheel it is. ``license``: an SPDX expression, if it has one."""

    name: str
    version: str
    license: str | None


def check(own_files: Collection[str]) -> None:
    """Raise an error if this environment cannot make or ship an SBOM.

    ``own_files``: the paths of the user's own SBOMs, in Hatch's ``sbom-files``. Raises ConfigError for a
    hatchling that is too old, and for a file of the user with the same name.
    """
    found = installed("hatchling")
    if found is not None and Version(found) < HATCHLING:
        message = (
            f"is true, but hatchling {found} cannot put files into .dist-info/sboms/; "
            f"{HATCHLING} and newer can."
        )
        hint = f'Write "hatchling>={HATCHLING}" in requires of [build-system].'
        raise ConfigError(
            Problem.at(KEY, Kind.MISSING_REQUIREMENT, message, hint, Setting(KEY, False))
        )
    for path in own_files:
        if PurePosixPath(path).name.lower() == FILE:
            message = f"is true, and sbom-files of Hatch has a file of the same name: {path}."
            raise ConfigError(Problem.at(KEY, Kind.CONFLICTING_KEYS, message, "Rename it."))


def unlicensed(sources: Iterable[Source], names: KeyNames) -> Iterator[str]:
    """A warning for each model of which no license is known; ``names`` names keys."""
    # The shapes of one model have one file.
    for source in {each.model.configured_name: each for each in sources}.values():
        if not source.license:
            yield (
                f"{names.key(source.model.key)}: no license is known, and the SBOM has none. Set license "
                'in the model\'s table, for example to "Apache-2.0".'
            )

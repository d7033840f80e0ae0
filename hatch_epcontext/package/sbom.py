"""The wheel's SBOM: a CycloneDX ML-BOM of the models, in ``.dist-info/sboms/`` (PEP 770).

It has no times, and its serial number comes from its content: equal builds write equal files. The
library that makes it is imported only inside functions, because few builds need it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name
from packaging.version import Version

import hatch_epcontext
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    Key,
    KeyNames,
    Kind,
    MissingError,
    Problem,
    Setting,
)
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import GENERATOR, Built, Result, Source
from hatch_epcontext.jobs.requirements import SBOM, installed, pip_install
from hatch_epcontext.package import manifest
from hatch_epcontext.system import writing

if TYPE_CHECKING:
    from cyclonedx.model import HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License
    from packageurl import PackageURL

    from hatch_epcontext.package.bundle import Bundle

FILE = "epcontext.cdx.json"
"""The name of the SBOM. CycloneDX asks for the suffix ``.cdx.json``."""

HATCHLING = Version("1.28")
"""The first hatchling that puts files into ``.dist-info/sboms/``."""

KEY = Key() / "wheel" / "sbom"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/hatch-epcontext/hatch-epcontext")
_PREFIX = f"{GENERATOR}:"


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


def unlicensed(result: Result, names: KeyNames) -> Iterator[str]:
    """A warning for each model of which no license is known; ``names`` names keys."""
    for source in _sources(result):
        if not (source.model.license or source.facts.license):
            yield (
                f"{names.key(source.model.key)}: no license is known, and the SBOM has none. Set license "
                'in the model\'s table, for example to "Apache-2.0".'
            )


def write(
    result: Result, made: Bundle, output: PurePosixPath, project: ProjectMetadata, folder: Path
) -> Path:
    """Write the SBOM of the package ``made``, which is at ``output`` in the wheel, into ``folder``.

    Raises BuildError if it does not agree with the schema.
    """
    text = _text(_Document(result, made, output, project).bom())
    file = folder / FILE
    with writing("the SBOM", file):
        file.write_text(text, encoding="utf-8", newline="\n")
    return file


def _text(bom: Bom) -> str:
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    # The library takes the time of the call where it is given none.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.serial_number = uuid.UUID(int=0)
    bom.serial_number = uuid.uuid5(_NAMESPACE, JsonV1Dot6(bom).output_as_string(indent=2))
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    try:
        invalid = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    except MissingOptionalDependencyException:
        message = f"the SBOM cannot be checked without all of {SBOM[0]}."
        hint = f"Run: {pip_install(SBOM)}"
        raise MissingError(Problem.at(KEY, Kind.MISSING_REQUIREMENT, message, hint)) from None
    if invalid is not None:
        message = f"the SBOM does not agree with the schema of CycloneDX: {invalid}."
        raise BuildError(Problem.at(KEY, Kind.INVALID_WHEEL, message))
    return text


def _sources(result: Result) -> Iterable[Source]:
    """One source for each configured model: its shapes are of one file."""
    return {source.model.configured_name: source for source in result.sources}.values()


class _Document:
    """The components of one SBOM, with their references."""

    def __init__(
        self, result: Result, made: Bundle, output: PurePosixPath, project: ProjectMetadata
    ) -> None:
        self._result = result
        self._made = made
        self._output = output
        self._project = project
        self._libraries: dict[str, Component] = {}

    def bom(self) -> Bom:
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentScope, ComponentType

        bom = Bom()
        wheel = self._wheel()
        bom.metadata.component = wheel
        bom.metadata.tools.components.add(
            Component(
                type=ComponentType.APPLICATION,
                name=GENERATOR,
                version=hatch_epcontext.__version__,
                purl=_purl(GENERATOR, hatch_epcontext.__version__),
            )
        )
        models = {
            source.model.configured_name: self._model(source) for source in _sources(self._result)
        }
        artifacts = []
        for built in self._result.built:
            artifact = self._artifact(built)
            names = dict.fromkeys(model.configured_name for model in built.job.models)
            bom.components.add(artifact)
            bom.register_dependency(
                artifact, [*(models[name] for name in names), *self._tools(built)]
            )
            artifacts.append(artifact)
        for component in (*models.values(), *self._libraries.values()):
            bom.components.add(component)
            bom.register_dependency(component)
        shipped = [model for model in models.values() if model.scope is ComponentScope.REQUIRED]
        bom.register_dependency(wheel, [*artifacts, *shipped])
        return bom

    def _wheel(self) -> Component:
        from cyclonedx.model.component import Component, ComponentType

        name, version = self._project.name, self._project.version
        return Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            purl=_purl(name, version),
            bom_ref="wheel",
            licenses=_licenses(self._project.license),
        )

    def _model(self, source: Source) -> Component:
        """The source model; it is required in the wheel only where it is shipped."""
        from cyclonedx.model.component import Component, ComponentScope, ComponentType

        name = source.model.configured_name
        folder = manifest.source_folder(source.model)
        paths = {file: f"{folder}/{file}" for file in source.records}
        shipped = {path for path in paths.values() if path in self._made.files}
        return Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=name,
            bom_ref=f"model:{name}",
            description="The source model.",
            scope=ComponentScope.REQUIRED if shipped else ComponentScope.EXCLUDED,
            hashes=[_sha256(source.records[source.model.path.name])],
            licenses=_licenses(source.model.license or source.facts.license),
            components=[
                self._file(path if path in shipped else file, source.records[file], f"model:{name}")
                for file, path in paths.items()
            ],
        )

    def _artifact(self, built: Built) -> Component:
        from cyclonedx.model.component import Component, ComponentScope, ComponentType

        job = built.job
        reference = f"artifact:{job.folder}"
        licenses = {
            source.model.license or source.facts.license
            for source in self._result.sources
            if source.model.name in {model.name for model in job.models}
        }
        return Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=f"{job.name} for {job.target.name}",
            bom_ref=reference,
            description=f"Compiled from the source model for {job.target.settings.ep}."
            if built.artifact.record.product == "context"
            else f"The optimized graph of the source model for {job.target.settings.ep}.",
            scope=ComponentScope.REQUIRED,
            licenses=_licenses(licenses.pop()) if len(licenses) == 1 else (),
            properties=_properties(built),
            components=[
                self._file(f"{job.folder}/{name}", recorded, reference)
                for name, recorded in built.artifact.record.files.items()
            ],
        )

    def _file(self, path: str, recorded: FileRecord, parent: str) -> Component:
        from cyclonedx.model.component import Component, ComponentType

        in_wheel = path in self._made.files
        return Component(
            type=ComponentType.FILE,
            name=str(self._output / path) if in_wheel else path,
            bom_ref=f"{parent}:{path}",
            hashes=[_sha256(recorded)],
        )

    def _tools(self, built: Built) -> list[Component]:
        """What compiled an artifact: packages, and the SDK inside the EP."""
        found = [
            self._library(name, version, is_package=True)
            for name, version in built.artifact.record.versions.items()
        ]
        for context in built.artifact.record.contexts:
            if context.ep_sdk_version:
                name = f"SDK of {built.job.target.settings.ep}"
                found.append(self._library(name, context.ep_sdk_version, is_package=False))
        return found

    def _library(self, name: str, version: str, *, is_package: bool) -> Component:
        from cyclonedx.model.component import Component, ComponentScope, ComponentType

        reference = f"tool:{name}@{version}"
        if reference not in self._libraries:
            self._libraries[reference] = Component(
                type=ComponentType.LIBRARY,
                name=name,
                version=version,
                purl=_purl(name, version) if is_package else None,
                bom_ref=reference,
                # It compiled the models, and is not in the wheel.
                scope=ComponentScope.EXCLUDED,
            )
        return self._libraries[reference]


def _purl(name: str, version: str) -> PackageURL:
    from packageurl import PackageURL

    return PackageURL("pypi", name=canonicalize_name(name), version=version)


def _sha256(recorded: FileRecord) -> HashType:
    from cyclonedx.model import HashAlgorithm, HashType

    return HashType(alg=HashAlgorithm.SHA_256, content=recorded.sha256)


def _licenses(text: str | None) -> tuple[License, ...]:
    """An SPDX id, an SPDX expression or a name, whichever ``text`` is."""
    from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
    from cyclonedx.spdx import is_supported_id

    if not text:
        return ()
    try:
        expression = canonicalize_license_expression(text)
    except InvalidLicenseExpression:
        return (DisjunctiveLicense(name=text),)
    if is_supported_id(expression):
        return (DisjunctiveLicense(id=expression),)
    return (LicenseExpression(expression),)


def _properties(built: Built) -> list[Property]:
    from cyclonedx.model import Property

    job, record = built.job, built.artifact.record
    settings = job.target.settings
    found: list[tuple[str, str]] = [
        ("target", job.target.name),
        ("provider", job.target.provider.name),
        ("ep", settings.ep),
        ("product", record.product),
    ]
    found += [("platform", platform) for platform in job.target.platforms]
    for context, preparation in zip(record.contexts, record.preparations, strict=True):
        found += [("model-file", context.model_file), ("simplifier", preparation.simplifier)]
        found += [("rewrite", each) for each in preparation.rewrites]
        if preparation.precision:
            found.append(("precision", preparation.precision))
        if context.compatibility:
            found.append(("compatibility", context.compatibility))
        if context.coverage is not None:
            found.append(
                ("coverage", f"{context.coverage.compiled}/{context.coverage.nodes} nodes")
            )
        if (validation := built.validations.get(context.model)) is not None:
            found.append(("validation", validation.label))
    return [Property(name=_PREFIX + name, value=value) for name, value in found]

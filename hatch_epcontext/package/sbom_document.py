"""The text of an SBOM. It imports the library for that, which takes long and which few builds need.

It has no times, and its serial number comes from its content: equal builds write equal files.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from cyclonedx.exception import MissingOptionalDependencyException
from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import is_supported_id
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

import hatch_epcontext
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, MissingError, Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import GENERATOR, Source
from hatch_epcontext.jobs.requirements import SBOM, pip_install
from hatch_epcontext.package.manifest import ModelPackage, Variant, VariantMetadata, source_folders
from hatch_epcontext.package.sbom import FILE, KEY, ProjectMetadata
from hatch_epcontext.system import writing

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/hatch-epcontext/hatch-epcontext")
_PREFIX = f"{GENERATOR}:"


def write(
    sources: Iterable[Source],
    package: ModelPackage,
    output: PurePosixPath,
    project: ProjectMetadata,
    folder: Path,
) -> Path:
    """Write the SBOM of ``package``, which is at ``output`` in the wheel, into ``folder``.

    Raises BuildError if it does not agree with the schema.
    """
    text = _text(_Document(sources, package, output).bom(project))
    file = folder / FILE
    with writing("the SBOM", file):
        file.write_text(text, encoding="utf-8", newline="\n")
    return file


def _text(bom: Bom) -> str:
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


_Contexts = Sequence[tuple[str, Variant, VariantMetadata]]
"""The variants of one artifact, each with the name of its model."""


class _Document:
    """The components of one SBOM, with their references."""

    def __init__(
        self, sources: Iterable[Source], package: ModelPackage, output: PurePosixPath
    ) -> None:
        # The shapes of one model have one file.
        self._sources = {source.model.configured_name: source for source in sources}
        self._folders = source_folders(self._sources.values())
        self._package = package
        self._files = package.files
        self._output = output
        self._libraries: dict[str, Component] = {}

    def bom(self, project: ProjectMetadata) -> Bom:
        bom = Bom()
        wheel = Component(
            type=ComponentType.LIBRARY,
            name=project.name,
            version=project.version,
            purl=_purl(project.name, project.version),
            bom_ref="wheel",
            licenses=_licenses(project.license),
        )
        bom.metadata.component = wheel
        bom.metadata.tools.components.add(
            Component(
                type=ComponentType.APPLICATION,
                name=GENERATOR,
                version=hatch_epcontext.__version__,
                purl=_purl(GENERATOR, hatch_epcontext.__version__),
            )
        )
        models = {name: self._model(name, source) for name, source in self._sources.items()}
        artifacts = []
        for (folder, target), contexts in self._artifacts().items():
            artifact = self._artifact(folder, target, contexts)
            names = dict.fromkeys(name for name, _, _ in contexts)
            bom.components.add(artifact)
            tools = [tool for _, each, about in contexts for tool in self._tools(each, about)]
            bom.register_dependency(artifact, [*(models[name] for name in names), *tools])
            artifacts.append(artifact)
        for component in (*models.values(), *self._libraries.values()):
            bom.components.add(component)
            bom.register_dependency(component)
        shipped = [model for model in models.values() if model.scope is ComponentScope.REQUIRED]
        bom.register_dependency(wheel, [*artifacts, *shipped])
        return bom

    def _artifacts(self) -> dict[tuple[str, str], _Contexts]:
        """The contexts of each artifact, by its folder and its target."""
        found: dict[tuple[str, str], dict[str | None, tuple[str, Variant, VariantMetadata]]] = {}
        for component in self._package.components.values():
            for target, variant in component.variants.items():
                if component.about and (about := variant.about):
                    # Components of several shapes have one context with open shapes.
                    contexts = found.setdefault((variant.directory, target), {})
                    contexts[variant.model_file] = (component.about.model, variant, about)
        return {place: tuple(contexts.values()) for place, contexts in found.items()}

    def _model(self, name: str, source: Source) -> Component:
        """The source model; it is required in the wheel only where it is shipped."""
        folder = self._folders[source.model.name]
        paths = {file: f"{folder}/{file}" for file in source.records}
        shipped = {path for path in paths.values() if path in self._files}
        return Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=name,
            bom_ref=f"model:{name}",
            description="The source model.",
            scope=ComponentScope.REQUIRED
            if paths[source.model.path.name] in shipped
            else ComponentScope.EXCLUDED,
            hashes=[_sha256(source.records[source.model.path.name])],
            purl=_hub_purl(source.model),
            external_references=_references(source.model),
            licenses=_licenses_of(source),
            components=[
                self._file(path if path in shipped else file, source.records[file], f"model:{name}")
                for file, path in paths.items()
            ],
        )

    def _artifact(self, folder: str, target: str, contexts: _Contexts) -> Component:
        reference = f"artifact:{folder}"
        _, variant, about = contexts[0]
        licenses = {_licenses_of(self._sources[name]) for name, _, _ in contexts}
        return Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=f"{PurePosixPath(folder).parent} for {target}",
            bom_ref=reference,
            description=f"Compiled from the source model for {variant.ep}."
            if about.product == "context"
            else f"The optimized graph of the source model for {variant.ep}.",
            scope=ComponentScope.REQUIRED,
            licenses=licenses.pop() if len(licenses) == 1 else (),
            properties=list(_properties(target, contexts)),
            components=[
                self._file(path, recorded, reference)
                for path, recorded in self._files.items()
                if path.startswith(f"{folder}/")
            ],
        )

    def _file(self, path: str, recorded: FileRecord, parent: str) -> Component:
        in_wheel = path in self._files
        return Component(
            type=ComponentType.FILE,
            name=str(self._output / path) if in_wheel else path,
            bom_ref=f"{parent}:{path}",
            hashes=[_sha256(recorded)],
        )

    def _tools(self, variant: Variant, about: VariantMetadata) -> Iterator[Component]:
        """What compiled a variant: packages, and the SDK inside the EP."""
        for name, version in about.compiled_with.items():
            yield self._library(name, version, is_package=True)
        if about.ep_sdk_version:
            yield self._library(f"SDK of {variant.ep}", about.ep_sdk_version, is_package=False)

    def _library(self, name: str, version: str, *, is_package: bool) -> Component:
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
    return PackageURL("pypi", name=canonicalize_name(name), version=version)


def _hub_purl(model: Model) -> PackageURL | None:
    """The package URL of a model on a hub: https://github.com/package-url/purl-spec, ``huggingface``."""
    hub = model.download.hub if model.download else None
    if hub is None:
        return None
    owner, name = hub.repo.split("/")
    return PackageURL("huggingface", owner, name, hub.revision, subpath=hub.path)


def _card(model: Model) -> XsUri | None:
    """The card of a model on a hub, with its license."""
    hub = model.download.hub if model.download else None
    # Where its mirrors are is the business of the machine that builds.
    page = f"https://huggingface.co/{hub.repo}/blob/{hub.revision}/README.md" if hub else None
    return XsUri(page) if page else None


def _references(model: Model) -> Iterator[ExternalReference]:
    if (card := _card(model)) is not None:
        yield ExternalReference(type=ExternalReferenceType.MODEL_CARD, url=card)
    elif model.download is not None and model.download.public:
        url = XsUri(model.download.url)
        yield ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=url)


def _sha256(recorded: FileRecord) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=recorded.sha256)


def _licenses_of(source: Source) -> tuple[License, ...]:
    return _licenses(source.license, _card(source.model))


def _licenses(text: str | None, page: XsUri | None = None) -> tuple[License, ...]:
    """An SPDX id, an SPDX expression or a name, whichever ``text`` is; ``page`` has other terms."""
    if not text:
        return ()
    if page is not None and re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", text):
        return (DisjunctiveLicense(name=text, url=page),)
    try:
        expression = canonicalize_license_expression(text)
    except InvalidLicenseExpression:
        return (DisjunctiveLicense(name=text),)
    if is_supported_id(expression):
        return (DisjunctiveLicense(id=expression),)
    return (LicenseExpression(expression),)


def _properties(target: str, contexts: _Contexts) -> Iterator[Property]:
    _, _, about = contexts[0]
    found = [
        ("target", target),
        ("provider", about.settings.provider),
        ("ep", about.settings.ep),
        ("product", about.product),
        *(("platform", platform) for platform in about.platforms),
    ]
    for _, variant, about in contexts:
        preparation, coverage = about.preparation, about.coverage
        found.append(("model-file", PurePosixPath(variant.model_file or "").name))
        found.append(("simplifier", preparation.simplifier))
        found += [("rewrite", each) for each in preparation.rewrites]
        if preparation.precision:
            found.append(("precision", preparation.precision))
        if variant.compatibility_string:
            found.append(("compatibility", variant.compatibility_string))
        if coverage is not None:
            found.append(("coverage", f"{coverage.compiled}/{coverage.nodes} nodes"))
        found.append(("validation", about.validation.label))
    return (Property(name=_PREFIX + name, value=value) for name, value in found)

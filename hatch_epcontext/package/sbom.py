"""The wheel's SBOM: a CycloneDX ML-BOM of the models, in ``.dist-info/sboms/`` (PEP 770).

It has no times, and its serial number comes from its content: equal builds write equal files.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name
from packaging.version import Version

import hatch_epcontext
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import ConfigError, Key, KeyNames, Kind, Problem, Setting
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import GENERATOR, Source
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.package.manifest import ModelPackage, Variant, VariantMetadata, source_folders
from hatch_epcontext.system import writing

FILE = "epcontext.cdx.json"
"""The name of the SBOM. CycloneDX asks for the suffix ``.cdx.json``."""

HATCHLING = Version("1.28")
"""The first hatchling that puts files into ``.dist-info/sboms/``."""

_KEY = Key() / "wheel" / "sbom"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/hatch-epcontext/hatch-epcontext")

_Json = dict[str, Any]


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
    version = installed("hatchling")
    if version is not None and Version(version) < HATCHLING:
        message = (
            f"is true, but hatchling {version} cannot put files into .dist-info/sboms/; "
            f"{HATCHLING} and newer can."
        )
        hint = f'Write "hatchling>={HATCHLING}" in requires of [build-system].'
        setting = Setting(_KEY, False)
        raise ConfigError(Problem.at(_KEY, Kind.MISSING_REQUIREMENT, message, hint, setting))
    for path in own_files:
        if PurePosixPath(path).name.lower() == FILE:
            message = f"is true, and sbom-files of Hatch has a file of the same name: {path}."
            raise ConfigError(Problem.at(_KEY, Kind.CONFLICTING_KEYS, message, "Rename it."))


def unlicensed(sources: Iterable[Source], names: KeyNames) -> Iterator[str]:
    """A warning for each model of which no license is known; ``names`` names keys."""
    # The shapes of one model have one file.
    for source in {source.model.configured_name: source for source in sources}.values():
        if not source.license:
            yield (
                f"{names.key(source.model.key)}: no license is known, and the SBOM has none. Set license "
                'in the model\'s table, for example to "Apache-2.0".'
            )


def write(
    sources: Iterable[Source],
    package: ModelPackage,
    output: PurePosixPath,
    project: ProjectMetadata,
    folder: Path,
) -> Path:
    """Write the SBOM of ``package``, which is at ``output`` in the wheel, into ``folder``."""
    content = _document(sources, package, output, project)
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(content))}"
    file = folder / FILE
    with writing("the SBOM", file):
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    return file


def _document(
    sources: Iterable[Source],
    package: ModelPackage,
    output: PurePosixPath,
    project: ProjectMetadata,
) -> _Json:
    # The shapes of one model have one file.
    by_name = {source.model.configured_name: source for source in sources}
    folders = source_folders(by_name.values())
    models = [
        _model(source, folders[source.model.name], package, output) for source in by_name.values()
    ]
    needed = {"wheel": [each["bom-ref"] for each in models if each["scope"] == "required"]}
    artifacts = []
    contexts: defaultdict[tuple[str, str], _Contexts] = defaultdict(list)
    for component in package.components.values():
        for target, variant in component.variants.items():
            if variant.about:
                context = component.about.model, variant, variant.about
                contexts[variant.directory, target].append(context)
    for (folder, target), own in contexts.items():
        reference = f"artifact:{folder}"
        _, variant, about = own[0]
        names = dict.fromkeys(name for name, _, _ in own)
        licenses = [_licenses(by_name[name].license, _card(by_name[name].model)) for name in names]
        product = "Compiled from" if about.product == "context" else "The optimized graph of"
        files = {
            path: record for path, record in package.files.items() if path.startswith(f"{folder}/")
        }
        artifacts.append(
            {
                "type": "machine-learning-model",
                "bom-ref": reference,
                "name": f"{PurePosixPath(folder).parent} for {target}",
                "description": f"{product} the source model for {variant.ep}.",
                "scope": "required",
                **(licenses[0] if all(each == licenses[0] for each in licenses) else {}),
                "properties": [*_files(files, output), *_properties(target, own)],
            }
        )
        needed["wheel"].append(reference)
        needed[reference] = [f"model:{name}" for name in names]
    tool = {"type": "application", **_package(GENERATOR, hatch_epcontext.__version__)}
    wheel = {"type": "library", "bom-ref": "wheel", **_package(project.name, project.version)}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": {**wheel, **_licenses(project.license)},
        },
        "components": [*models, *artifacts],
        "dependencies": [
            {"ref": reference, "dependsOn": refs} for reference, refs in needed.items()
        ],
    }


def _model(source: Source, folder: str, package: ModelPackage, output: PurePosixPath) -> _Json:
    """The source model; it is required in the wheel only where it is shipped."""
    model = source.model
    shipped = {f"{folder}/{file}": record for file, record in source.records.items()}
    shipped = {path: record for path, record in shipped.items() if path in package.files}
    files = _files(shipped, output) if shipped else _files(source.records)
    return {
        "type": "machine-learning-model",
        "bom-ref": f"model:{model.configured_name}",
        "name": model.configured_name,
        "description": "The source model.",
        "scope": "required" if f"{folder}/{model.path.name}" in shipped else "excluded",
        "hashes": [{"alg": "SHA-256", "content": source.records[model.path.name].sha256}],
        **_licenses(source.license, _card(model)),
        **_origin(model),
        "properties": list(files),
    }


def _files(files: Mapping[str, FileRecord], folder: PurePosixPath | str = "") -> Iterator[_Json]:
    for path, record in files.items():
        yield _property("file", f"{PurePosixPath(folder, path)} sha256:{record.sha256}")


def _package(name: str, version: str) -> _Json:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    return {"name": name, "version": version, "purl": purl}


_Contexts = list[tuple[str, Variant, VariantMetadata]]
"""The variants of one artifact, each with the name of its model."""


def _card(model: Model) -> str | None:
    """The page of a model on a hub, with its license."""
    hub = model.download.hub if model.download else None
    # Where its mirrors are is the business of the machine that builds.
    return f"https://huggingface.co/{hub.repo}/blob/{hub.revision}/README.md" if hub else None


def _origin(model: Model) -> _Json:
    """The package URL of a model on a hub, and its card; no other location is named.

    The form is that of https://github.com/package-url/purl-spec, ``huggingface``.
    """
    hub = model.download.hub if model.download else None
    if hub is None:
        return {}
    return {
        "purl": f"pkg:huggingface/{hub.repo}@{hub.revision}#{hub.path}",
        "externalReferences": [{"type": "model-card", "url": _card(model)}],
    }


def _licenses(text: str | None, page: str | None = None) -> _Json:
    """An SPDX expression or a name, whichever ``text`` is; ``page`` has other terms."""
    if not text:
        return {}
    if page is not None and re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", text):
        return {"licenses": [{"license": {"name": text, "url": page}}]}
    try:
        return {"licenses": [{"expression": canonicalize_license_expression(text)}]}
    except InvalidLicenseExpression:
        return {"licenses": [{"license": {"name": text}}]}


def _properties(target: str, contexts: _Contexts) -> Iterator[_Json]:
    _, _, about = contexts[0]
    facts = [("target", target), ("provider", about.settings.provider), ("ep", about.settings.ep)]
    for _, variant, about in contexts:
        facts += [("rewrite", name) for name in about.preparation.rewrites]
        if variant.compatibility_string:
            facts.append(("compatibility", variant.compatibility_string))
        if coverage := about.coverage:
            facts.append(("coverage", f"{coverage.compiled}/{coverage.nodes} nodes"))
        facts.append(("validation", about.validation.label))
        tools = {**about.compiled_with, f"SDK of {variant.ep}": about.ep_sdk_version}
        facts += [
            ("compiled-with", f"{name} {version}") for name, version in tools.items() if version
        ]
    return (_property(name, value) for name, value in dict.fromkeys(facts))


def _property(name: str, value: str) -> _Json:
    return {"name": f"{GENERATOR}:{name}", "value": value}

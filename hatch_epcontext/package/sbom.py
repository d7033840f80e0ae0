"""The wheel's SBOM: a CycloneDX ML-BOM of the models, in ``.dist-info/sboms/`` (PEP 770).

It has no times, and its serial number comes from its content: equal builds write equal files. What the
manifest says of an artifact is not repeated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

import hatch_epcontext
from hatch_epcontext.errors import KeyNames
from hatch_epcontext.files import FileRecord
from hatch_epcontext.jobs.artifact import GENERATOR, Source
from hatch_epcontext.package.manifest import ModelPackage, Variant, VariantMetadata, source_folders
from hatch_epcontext.system import writing

FILE = "epcontext.cdx.json"
"""The name of the SBOM. CycloneDX asks for the suffix ``.cdx.json``."""

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/hatch-epcontext/hatch-epcontext")

_Json = dict[str, Any]
Files = Mapping[str, FileRecord]


@dataclass(frozen=True)
class ProjectMetadata:
    """The project whose wheel it is. ``license``: an SPDX expression, if it has one."""

    name: str
    version: str
    license: str | None


def unlicensed(sources: Iterable[Source], names: KeyNames) -> Iterator[str]:
    """A warning for each model of which no license is known; ``names`` names keys."""
    for source in _by_name(sources).values():
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
    staging: Path,
) -> Path:
    """Write the SBOM of ``package``, which is at ``output`` in the wheel, into ``staging``."""
    models = _by_name(sources)
    folders = source_folders(models.values())
    components, needed = list[_Json](), {"wheel": list[str]()}
    for source in models.values():
        folder = PurePosixPath(folders[source.model.name])
        is_shipped = str(folder / source.model.path.name) in package.files
        components.append(_model(source, output / folder if is_shipped else None))
    for name, component in package.components.items():
        source = models[component.about.model]
        for target, variant in component.variants.items():
            if variant.about is not None:
                names = [n for n in package.files if n.startswith(f"{variant.variant_directory}/")]
                files = {str(output / n): package.files[n] for n in names}
                components.append(
                    _artifact(f"{name}/{target}", variant, variant.about, source, files)
                )
                needed[components[-1]["bom-ref"]] = [f"model:{component.about.model}"]
    needed["wheel"] = [part["bom-ref"] for part in components if part["scope"] == "required"]
    tool = {"type": "application", **_package(GENERATOR, hatch_epcontext.__version__)}
    wheel = {"type": "library", "bom-ref": "wheel", **_package(project.name, project.version)}
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": {**wheel, **_licenses(project.license)},
        },
        "components": components,
        "dependencies": [{"ref": part, "dependsOn": parts} for part, parts in needed.items()],
    }
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(content))}"
    file = staging / FILE
    with writing("the SBOM", file):
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    return file


def _by_name(sources: Iterable[Source]) -> dict[str, Source]:
    """One of ``sources`` for each model: the shapes of a model have one file."""
    return {source.model.configured_name: source for source in sources}


def _model(source: Source, folder: PurePosixPath | None) -> _Json:
    """The source model, which is required in the wheel only where it is shipped, in ``folder``."""
    model = source.model
    hub = model.download and model.download.hub
    files = {str((folder or PurePosixPath()) / name): f for name, f in source.records.items()}
    return {
        "type": "machine-learning-model",
        "bom-ref": f"model:{model.configured_name}",
        "name": model.configured_name,
        "description": "The source model.",
        "scope": "required" if folder else "excluded",
        "hashes": [{"alg": "SHA-256", "content": source.records[model.path.name].sha256}],
        **_licenses(source.license),
        # As in https://github.com/package-url/purl-spec. No other location is named.
        **({"purl": f"pkg:huggingface/{hub.repo}@{hub.revision}#{hub.path}"} if hub else {}),
        "properties": _files(files),
    }


def _artifact(
    name: str, variant: Variant, about: VariantMetadata, source: Source, files: Files
) -> _Json:
    """What was compiled of ``source``, with its files and what compiled it."""
    tools = {**about.compiled_with, f"SDK of {variant.ep}": about.ep_sdk_version}
    used = [f"{name} {version}" for name, version in tools.items() if version]
    product = "Compiled from" if about.product == "context" else "The optimized graph of"
    return {
        "type": "machine-learning-model",
        "bom-ref": f"artifact:{name}",
        "name": name,
        "description": f"{product} the source model for {variant.ep}.",
        "scope": "required",
        **_licenses(source.license),
        "properties": [*_files(files), *(_property("compiled-with", tool) for tool in used)],
    }


def _files(files: Files) -> list[_Json]:
    return [_property("file", f"{path} sha256:{file.sha256}") for path, file in files.items()]


def _package(name: str, version: str) -> _Json:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    return {"name": name, "version": version, "purl": purl}


def _licenses(text: str | None) -> _Json:
    """An SPDX expression or a name, whichever ``text`` is."""
    if not text:
        return {}
    try:
        return {"licenses": [{"expression": canonicalize_license_expression(text)}]}
    except InvalidLicenseExpression:
        return {"licenses": [{"license": {"name": text}}]}


def _property(name: str, value: str) -> _Json:
    return {"name": f"{GENERATOR}:{name}", "value": value}

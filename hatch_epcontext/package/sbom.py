"""The wheel's SBOM: a CycloneDX ML-BOM of the models, in ``.dist-info/sboms/`` (PEP 770).

It has no times, and its serial number comes from its content: equal builds write equal files. What the
manifest says of an artifact, such as its files, is not repeated.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

import hatch_epcontext
from hatch_epcontext.config.location import hub_file
from hatch_epcontext.errors import KeyNames
from hatch_epcontext.jobs.artifact import GENERATOR, Source
from hatch_epcontext.package.manifest import ModelPackage, source_folders
from hatch_epcontext.system import writing

FILE = "epcontext.cdx.json"
"""The name of the SBOM. CycloneDX asks for the suffix ``.cdx.json``."""

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/hatch-epcontext/hatch-epcontext")

_Json = dict[str, Any]


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
    project: tuple[str, str, str | None],
    staging: Path,
) -> Path:
    """Write the SBOM of ``package`` into ``staging``.

    ``project``: the name, the version and the license, if it has one, of the wheel.
    """
    models = _by_name(sources)
    folders = source_folders(models.values())
    components, needed = list[_Json](), {"wheel": list[str]()}
    for name, source in models.items():
        shipped = f"{folders[source.model.name]}/{source.model.path.name}" in package.files
        components.append(_model(f"model:{name}", source, "required" if shipped else "excluded"))
    for name, target, variant in package.variants:
        if (about := variant.about) is not None:
            model = package.components[name].about.model
            artifact = _component(f"artifact:{name}/{target}", models[model])
            tools = {**about.compiled_with, f"SDK of {variant.ep}": about.ep_sdk_version}
            artifact["properties"] = [
                {"name": f"{GENERATOR}:compiled-with", "value": f"{tool} {version}"}
                for tool, version in tools.items()
                if version
            ]
            components.append(artifact)
            needed[artifact["bom-ref"]] = [f"model:{model}"]
    needed["wheel"] = [part["bom-ref"] for part in components if part["scope"] == "required"]
    name, version, license_ = project
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    wheel = {"type": "library", "bom-ref": "wheel", "name": name, "version": version, "purl": purl}
    tool = {"type": "application", "name": GENERATOR, "version": hatch_epcontext.__version__}
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": {**wheel, **_licenses(license_)},
        },
        "components": components,
        "dependencies": [{"ref": part, "dependsOn": parts} for part, parts in needed.items()],
    }
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, json.dumps(content))}"
    path = staging / FILE
    with writing("the SBOM", path):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    return path


def _by_name(sources: Iterable[Source]) -> dict[str, Source]:
    """One of ``sources`` for each model: the shapes of a model have one file."""
    return {source.model.configured_name: source for source in sources}


def _model(reference: str, source: Source, scope: str) -> _Json:
    """The source model, with its hash, and its path on the Hugging Face Hub: no other location is named."""
    download = source.model.download
    hub = hub_file(download.url) if download else None
    # As in https://github.com/package-url/purl-spec.
    purl = {"purl": f"pkg:huggingface/{hub.repo}@{hub.revision}#{hub.path}"} if hub else {}
    hashes = [{"alg": "SHA-256", "content": source.records[source.model.path.name].sha256}]
    return {**_component(reference, source), "scope": scope, "hashes": hashes, **purl}


def _component(reference: str, source: Source) -> _Json:
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": reference.partition(":")[2],
        "scope": "required",
        **_licenses(source.license),
    }


def _licenses(text: str | None) -> _Json:
    """An SPDX expression or a name, whichever ``text`` is."""
    if not text:
        return {}
    try:
        return {"licenses": [{"expression": canonicalize_license_expression(text)}]}
    except InvalidLicenseExpression:
        return {"licenses": [{"license": {"name": text}}]}

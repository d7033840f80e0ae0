"""``epcontext.json``: what was compiled from what, for what, with what, and each file's sha256.

Where ONNX Runtime's model packages have a name for a thing, it is used here. No timings, so that two
builds from one cache give the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hatch_epcontext
from hatch_epcontext.artifact import GENERATOR, FileRecord, Preparation, Proof, is_intact
from hatch_epcontext.checks import SOURCE
from hatch_epcontext.protocol import Coverage, TensorFacts
from hatch_epcontext.providers import Device, Plugin, Product
from hatch_epcontext.result import Built, Result, Source

FILE = "epcontext.json"
FORMAT = 1


@dataclass(frozen=True)
class SourceEntry:
    """The source model. ``model_file`` is None when it is not shipped."""

    sha256: str
    model_file: str | None


@dataclass(frozen=True)
class Sharing:
    """A weight-sharing group: its members, and the bytes that they have less than each for itself.

    ``needs_device``: what merely simulates the EP's device cannot open them, and may crash.
    """

    group: str
    members: tuple[str, ...]
    saved: int
    needs_device: bool


@dataclass(frozen=True)
class TargetEntry:
    """One model compiled for one target, with all that the loader needs to open it.

    ``provider_options`` are for loading; ``compiled_for`` are those that it was compiled with.
    """

    target: str
    provider: str
    product: Product
    ep: str
    device: Device
    device_filter: Mapping[str, str]
    policy: str | None
    plugin: Plugin | None
    platforms: tuple[str, ...]
    model_file: str
    compatibility_string: str
    ep_sdk_version: str
    session_options: Mapping[str, str]
    provider_options: Mapping[str, str]
    compiled_for: Mapping[str, str]
    compiled_with: Mapping[str, str]
    preparation: Preparation
    coverage: Coverage | None
    validation: Proof
    sharing: Sharing | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A model: its inputs and outputs as configured, its source, and its targets in order."""

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    source: SourceEntry
    targets: tuple[TargetEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """``files``: all that is ours in the manifest's folder, but for the manifest itself."""

    manifest: int
    generator: str
    models: Mapping[str, ModelEntry]
    files: Mapping[str, FileRecord]

    @property
    def is_ours(self) -> bool:
        return self.generator.split(" ")[0] == GENERATOR


def make(
    result: Result, source_files: Mapping[str, str | None], files: Mapping[str, FileRecord]
) -> Manifest:
    """The manifest of ``result``.

    ``source_files``: for each model the shipped source's path from the manifest's folder, or None.
    """
    return Manifest(
        manifest=FORMAT,
        generator=f"{GENERATOR} {hatch_epcontext.__version__}",
        models={
            source.model.name: _model(source, source_files[source.model.name], result.built)
            for source in result.sources
        },
        files=files,
    )


def _model(source: Source, file: str | None, built: tuple[Built, ...]) -> ModelEntry:
    return ModelEntry(
        inputs=source.facts.inputs,
        outputs=source.facts.outputs,
        source=SourceEntry(source.sha256, file),
        targets=tuple(entry for done in built for entry in _targets(done, source.model.name)),
    )


def _targets(built: Built, model: str) -> list[TargetEntry]:
    target, record = built.job.target, built.artifact.record
    return [
        TargetEntry(
            target=target.name,
            provider=target.provider.name,
            product=record.product,
            ep=target.provider.ep,
            device=target.device,
            device_filter=target.device_filter,
            policy=target.policy,
            plugin=_shipped(target.provider.plugin),
            platforms=target.platforms,
            model_file=f"{built.job.folder}/{context.model_file}",
            compatibility_string=context.compatibility,
            ep_sdk_version=context.ep_sdk_version,
            session_options=target.session_options,
            provider_options=target.load_options,
            compiled_for=target.provider_options,
            compiled_with=record.versions,
            preparation=preparation,
            coverage=context.coverage,
            validation=built.proofs[model],
            sharing=_sharing(built),
        )
        for preparation, context in zip(record.preparations, record.contexts, strict=True)
        if context.model == model
    ]


def _sharing(built: Built) -> Sharing | None:
    job = built.job
    if job.group is None:
        return None
    members = tuple(model.name for model in job.models)
    return Sharing(job.group, members, built.saved, not job.target.provider.loads_shared)


def _shipped(plugin: Plugin | None) -> Plugin | None:
    # A path of the build machine says nothing on another, and two builds are to give the same bytes.
    return dataclasses.replace(plugin, path="") if plugin else None


def artifact_files(result: Result) -> dict[str, FileRecord]:
    """The files of all artifacts as they were recorded, by their path from the manifest's folder."""
    return {
        f"{built.job.folder}/{name}": recorded
        for built in result.built
        for name, recorded in built.artifact.record.files.items()
    }


def changed_files(folder: Path, found: Manifest) -> tuple[str, ...]:
    """The manifest's files that are not in its ``folder`` as it says, sorted."""
    return tuple(
        name
        for name, recorded in sorted(found.files.items())
        if not is_intact(folder, {name: recorded})
    )


def source_folder(model: str) -> str:
    """Where a model's source is shipped, below the manifest's folder."""
    return f"{model}/{SOURCE}"


def loader() -> Path:
    """The module that is shipped beside the manifest, as ``__init__.py``."""
    return Path(hatch_epcontext.__file__).with_name("loader.py")

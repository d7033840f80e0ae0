"""``epcontext.json``: the models, what each target was compiled with, and the sha256 of each file.

Names are those of ONNX Runtime's model packages, where it has one. There are no times in it, so that
two builds from one cache write the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hatch_epcontext
from hatch_epcontext.build.artifact import GENERATOR, Built, Preparation, Result, Source, Validation
from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.files import FileRecord, is_intact
from hatch_epcontext.ipc.protocol import Coverage, TensorFacts
from hatch_epcontext.loader import SOURCE
from hatch_epcontext.providers import Plugin, Product

FILE = "epcontext.json"
FORMAT = 2


@dataclass(frozen=True)
class SourceEntry:
    """The source model. ``model_file`` is None when it is not shipped."""

    sha256: str
    model_file: str | None


@dataclass(frozen=True)
class Sharing:
    """A weight-sharing group and its members.

    ``saved``: the bytes by which the group is smaller than its members compiled alone.
    ``needs_device``: only the EP's own device can open them, because a simulator may crash.
    """

    group: str
    members: tuple[str, ...]
    saved: int
    needs_device: bool


@dataclass(frozen=True)
class TargetEntry:
    """One model compiled for one target, with all that the loader needs to open it.

    ``settings``: how it was compiled; ``load_options``: the provider options for loading.
    ``compiled_with``: the versions of the packages that compiled it.
    """

    target: str
    product: Product
    plugin: Plugin | None
    platforms: tuple[str, ...]
    model_file: str
    compatibility_string: str
    ep_sdk_version: str
    settings: CompileSettings
    load_options: Mapping[str, str]
    compiled_with: Mapping[str, str]
    preparation: Preparation
    coverage: Coverage | None
    validation: Validation
    sharing: Sharing | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A model: its inputs and outputs as configured, its source, and its targets in order."""

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    source: SourceEntry
    targets: tuple[TargetEntry, ...]


@dataclass(frozen=True)
class FileList:
    """The part of a manifest that is the same in all formats.

    ``manifest`` is the format; ``files`` are the files in the manifest's folder that belong to it, all
    but the manifest itself.
    """

    manifest: int
    generator: str
    files: Mapping[str, FileRecord]

    @property
    def is_ours(self) -> bool:
        """Whether this package wrote the manifest."""
        return self.generator.split(" ")[0] == GENERATOR


@dataclass(frozen=True)
class Manifest(FileList):
    """A manifest of the current format, with the models by name."""

    models: Mapping[str, ModelEntry]


def make(
    result: Result, source_files: Mapping[str, str | None], files: Mapping[str, FileRecord]
) -> Manifest:
    """The manifest of ``result``.

    ``source_files``: for each model the path of its shipped source from the manifest's folder, or None.
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
        targets=tuple(entry for each in built for entry in _targets(each, source.model.name)),
    )


def _targets(built: Built, model: str) -> list[TargetEntry]:
    target, record = built.job.target, built.artifact.record
    return [
        TargetEntry(
            target=target.name,
            product=record.product,
            plugin=_shipped(target.provider.plugin),
            platforms=target.platforms,
            model_file=f"{built.job.folder}/{context.model_file}",
            compatibility_string=context.compatibility,
            ep_sdk_version=context.ep_sdk_version,
            settings=target.settings,
            load_options=target.load_options,
            compiled_with=record.versions,
            preparation=preparation,
            coverage=context.coverage,
            validation=built.validations[model],
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
    # A path of the build machine means nothing on another one, and two builds must write the same bytes.
    return dataclasses.replace(plugin, path="") if plugin else None


def artifact_files(result: Result) -> dict[str, FileRecord]:
    """The recorded files of all artifacts, by path from the manifest's folder."""
    return {
        f"{built.job.folder}/{name}": recorded
        for built in result.built
        for name, recorded in built.artifact.record.files.items()
    }


def changed_files(folder: Path, manifest: FileList) -> tuple[str, ...]:
    """The manifest's files that are missing in ``folder`` or differ from their record, sorted."""
    return tuple(
        name
        for name, recorded in sorted(manifest.files.items())
        if not is_intact(folder, {name: recorded})
    )


def source_folder(model: str) -> str:
    """The folder of a model's shipped source, from the manifest's folder."""
    return f"{model}/{SOURCE}"


def loader_file() -> Path:
    """The module that is shipped next to the manifest, as ``__init__.py``."""
    return Path(hatch_epcontext.__file__).with_name("loader.py")

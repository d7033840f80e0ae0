"""The manifest of our packages: a model package with what only we know in its metadata.

Hashes, coverage, validation, settings and versions stand in ``additional_metadata``, below our own
name. There are no times in it, so that two builds from one cache write the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

import hatch_epcontext
from hatch_epcontext.config.settings import CompileSettings, Model
from hatch_epcontext.files import FileRecord, is_intact, read_regular
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Size, TensorFacts
from hatch_epcontext.jobs.artifact import GENERATOR, Built, Preparation, Result, Source, Validation
from hatch_epcontext.loader import CPU_EP, METADATA, PREPARED, SOURCE, USER_CACHE
from hatch_epcontext.package.model_package import (
    FILE,
    Component,
    Layout,
    ModelPackage,
    OrtInfo,
    Variant,
    write,
)
from hatch_epcontext.providers import Plugin, Product, secrets_in
from hatch_epcontext.serialize import from_plain, to_plain
from hatch_epcontext.worker.results import Coverage

T = TypeVar("T")

UNSEALED = "0" * 64
"""Stands in the manifest where `seal` puts the sha256 of its text."""


@dataclass(frozen=True)
class PackageMetadata:
    """``files`` are the files of the package by path, all but the manifest itself.

    ``manifest_sha256``: of the manifest's text, with `UNSEALED` in its place.
    """

    generator: str
    files: Mapping[str, FileRecord]
    manifest_sha256: str = UNSEALED

    @property
    def is_ours(self) -> bool:
        """Whether this package wrote the manifest."""
        return self.generator.split(" ")[0] == GENERATOR


@dataclass(frozen=True)
class Constant:
    """The value of a frozen input, with the dtype and the shape that the model takes."""

    dtype: str
    shape: tuple[Size, ...]
    value: Any


@dataclass(frozen=True)
class ComponentMetadata:
    """A model: the name by which the app loads it, and the hex sha256 of its source.

    ``inputs`` and ``outputs`` are those of the source, with the configured shapes and constants.
    ``constants``: the inputs that the configuration freezes. ``shapes``: in the first component of a
    model with several shapes, the shapes of the inputs of each component, by its name.
    """

    model: str
    source_sha256: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, tuple[Size, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sharing:
    """A weight-sharing group and its members.

    ``saved``: the bytes by which the group is smaller than its members compiled alone.
    """

    group: str
    members: tuple[str, ...]
    saved: int


@dataclass(frozen=True)
class VariantMetadata:
    """One model compiled for one target.

    ``settings``: how it was compiled; ``load_options``: provider options that only the loader
    understands; ``compiled_with``: the versions of the packages that compiled it. ``needs_device``:
    only the EP's own device can open it, because a simulator refuses it or crashes. ``needs_code_page``: on
    Windows the EP crashes where the code page lacks a letter of the path. ``prepared``: the
    path of the prepared model in the variant's folder, if it is shipped. ``secrets``: the provider options
    that the app has to give, because their values are not shipped.
    """

    product: Product
    plugin: Plugin | None
    platforms: tuple[str, ...]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    ep_sdk_version: str
    settings: CompileSettings
    load_options: Mapping[str, str]
    compiled_with: Mapping[str, str]
    preparation: Preparation
    coverage: Coverage | None
    validation: Validation
    needs_device: bool = False
    needs_code_page: bool = False
    prepared: str | None = None
    secrets: tuple[str, ...] = ()
    sharing: Sharing | None = None


@dataclass(frozen=True)
class SourceMetadata:
    """The source model: its inputs, without those that the configuration freezes."""

    inputs: tuple[TensorFacts, ...]
    product: str = field(default=SOURCE)


def ours(metadata: Any, type_: type[T]) -> T | None:
    """Our part of the ``additional_metadata`` of a manifest, a component or a variant.

    None if there is none, or if it is not a ``type_``.
    """
    if not isinstance(metadata, Mapping) or METADATA not in metadata:
        return None
    try:
        return from_plain(metadata[METADATA], type_)
    except ValueError:
        return None


def read_own(folder: Path) -> PackageMetadata | None:
    """The files of the manifest in ``folder``, if there is one and this package wrote it.

    They count also where the rest of the manifest is invalid: a new package replaces it.
    """
    try:
        content = json.loads(read_regular(folder / FILE))
    except (OSError, ValueError, RecursionError):
        return None
    metadata = content.get("additional_metadata") if isinstance(content, dict) else None
    found = ours(metadata, PackageMetadata)
    return found if found and found.is_ours else None


def _metadata(value: Any) -> dict[str, Any]:
    return {METADATA: to_plain(value)}


def make(
    result: Result,
    source_files: Mapping[str, str],
    files: Mapping[str, FileRecord],
    layout: Layout = "portable",
) -> ModelPackage:
    """The package of ``result``.

    ``source_files``: for each model whose source is a variant, the path of the source from the package.
    """
    generator = f"{GENERATOR} {hatch_epcontext.__version__}"
    by_name = {source.model.name: source for source in result.sources}
    return ModelPackage(
        {
            name: _component(source, by_name, source_files.get(name), result.built)
            for name, source in by_name.items()
            if not _is_open_form(source.model)
        },
        layout,
        _metadata(PackageMetadata(generator, files)),
    )


def text(package: ModelPackage) -> str:
    """The manifest of ``package``, sealed: the loader's ``verify`` compares it with its own sha256."""
    return seal(write(package))


def seal(unsealed: str) -> str:
    """The text of a manifest with its sha256 in the place of the last `UNSEALED`."""
    before, _, after = unsealed.rpartition(UNSEALED)
    return f"{before}{hashlib.sha256(unsealed.encode()).hexdigest()}{after}"


def _is_open_form(model: Model) -> bool:
    """Whether the model stands for the targets with open shapes of a model with several shapes.

    It is no component of its own: its variants are part of the component of each shape.
    """
    return model.shape_set is not None and model.name == model.shape_set.name


def _component(
    source: Source, sources: Mapping[str, Source], file: str | None, built: tuple[Built, ...]
) -> Component:
    model, shape_set = source.model, source.model.shape_set
    names = {model.name, model.configured_name}
    order = shape_set.targets if shape_set else tuple(target.name for target in model.targets)
    found = {
        each.job.target.name: _variant(each, name)
        for each in built
        for name in _names(each)
        if name in names
    }
    variants = {name: found[name] for name in order if name in found}
    if file is not None:
        variants[SOURCE] = _source_variant(source, file)
    return Component(variants, _metadata(_about(source, sources)))


def _about(source: Source, sources: Mapping[str, Source]) -> ComponentMetadata:
    model, facts = source.model, source.facts
    members = model.shape_set.members if model.shape_set else ()
    return ComponentMetadata(
        model.configured_name,
        source.sha256,
        facts.inputs,
        facts.outputs,
        {
            each.name: Constant(each.dtype, each.shape, model.constants[each.name])
            for each in facts.constants
        },
        {
            member: {each.name: each.shape for each in sources[member].facts.inputs}
            for member in members
            if model.name == members[0]
        },
    )


def _names(built: Built) -> tuple[str, ...]:
    return tuple(model.name for model in built.job.models)


def _source_variant(source: Source, file: str) -> Variant:
    folder, _, name = file.rpartition("/")
    frozen = {each.name for each in source.facts.constants}
    inputs = tuple(each for each in source.facts.own_inputs if each.name not in frozen)
    return Variant(
        directory=folder,
        ep=CPU_EP,
        ort=OrtInfo(model_file=name),
        metadata=_metadata(SourceMetadata(inputs)),
    )


def _variant(built: Built, model: str) -> Variant:
    job, record = built.job, built.artifact.record
    target, settings = job.target, job.target.settings
    (index,) = (i for i, each in enumerate(record.contexts) if each.model == model)
    context = record.contexts[index]
    only_ours = {n: value for n, value in target.load_options.items() if USER_CACHE in value}
    secrets = secrets_in(target.load_options)
    about = VariantMetadata(
        product=record.product,
        plugin=_shipped(target.provider.plugin),
        platforms=target.platforms,
        inputs=context.inputs,
        outputs=context.outputs,
        ep_sdk_version=context.ep_sdk_version,
        settings=settings,
        load_options=only_ours,
        compiled_with=record.versions,
        # What an EP says when it fails, with paths and numbers, is for the report.
        preparation=dataclasses.replace(record.preparations[index], tried=()),
        coverage=context.coverage,
        validation=built.validations[model],
        prepared=f"{PREPARED}/{model}.onnx" if settings.recompile else None,
        secrets=secrets,
        needs_device=job.needs_device,
        needs_code_page=target.provider.needs_code_page and not settings.embed,
        sharing=_sharing(built),
    )
    return Variant(
        directory=job.folder,
        ep=settings.ep,
        # ONNX Runtime does not select a variant of the CPU EP that names a device.
        device=settings.device if settings.device in ("npu", "gpu") else None,
        compatibility_string=context.compatibility or None,
        ort=OrtInfo(
            model_file=context.model_file,
            session_options={**settings.session_options, **_loading(built)},
            provider_options={
                name: value
                for name, value in target.load_options.items()
                if name not in only_ours and name not in secrets
            },
        ),
        metadata=_metadata(about),
    )


def _loading(built: Built) -> dict[str, str]:
    """The session options that every session of the artifact needs."""
    options = {}
    if built.artifact.record.product == "context":
        # Where the EP does not accept the context: fail, and do not compile on the user's machine.
        options["session.disable_model_compile"] = "1"
    if built.job.group is not None:
        options["ep.share_ep_contexts"] = "1"
    return options


def _sharing(built: Built) -> Sharing | None:
    job = built.job
    if job.group is None:
        return None
    return Sharing(job.group, tuple(model.name for model in job.models), built.saved)


def _shipped(plugin: Plugin | None) -> Plugin | None:
    # A path of the build machine means nothing on another one, and two builds must write the same bytes.
    return dataclasses.replace(plugin, path="") if plugin else None


def artifact_files(result: Result) -> dict[str, FileRecord]:
    """The recorded files of all artifacts, by path from the package."""
    return {
        f"{built.job.folder}/{name}": recorded
        for built in result.built
        for name, recorded in built.artifact.record.files.items()
    }


def changed_files(folder: Path, files: Mapping[str, FileRecord]) -> tuple[str, ...]:
    """Those of ``files`` that are missing in ``folder`` or differ from their record, sorted."""
    return tuple(
        name for name, recorded in sorted(files.items()) if not is_intact(folder, {name: recorded})
    )


def source_folder(model: Model) -> str:
    """The folder of a model's shipped source, from the package; all its shapes have the same."""
    return f"{model.configured_name}/{SOURCE}"

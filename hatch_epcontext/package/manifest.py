"""The manifest of a model package, ONNX Runtime's format: its types, ours of the metadata, and its text.

The format, schema 1.0: ``model_package/README.md`` and
``onnxruntime/core/session/model_package/README.md`` in ONNX Runtime's repository. A package is a folder
with a ``manifest.json``; it has components (models), and each component has variants. What only we know
(hashes, coverage, validation, settings and versions) stands in ``additional_metadata``, below our own name.
There are no times in it, so that two builds of the same sources write the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path, PurePath
from typing import Any, Literal

from hatch_epcontext.config.settings import SYNTHETIC, CompileSettings, Target
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Size, TensorFacts
from hatch_epcontext.jobs.artifact import GENERATED_BY, Built, Result, Source
from hatch_epcontext.jobs.boards import BoardRun
from hatch_epcontext.providers import Plugin, Product
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.shipped import CPU_EP, METADATA, PREPARED, SOURCE, USER_CACHE, Device
from hatch_epcontext.worker.results import Coverage, Preparation, Validation

FILE = "manifest.json"
"""The name of the manifest."""

Layout = Literal["portable", "installed"]
"""``"installed"`` allows absolute paths and ``..``; a portable package can be moved."""

UNSEALED = "0" * 64
"""Stands in the manifest where `seal` puts the sha256 of its text."""


@dataclass(frozen=True)
class PackageMetadata:
    """``files`` are the files of the package by path, all but the manifest itself.

    ``manifest_sha256``: of the manifest's text, with `UNSEALED` instead of it. ``companions``: for the import
    package of each companion, the requirement that installs it, such as ``"my-app[npu]"``.
    """

    generator: str
    files: Mapping[str, FileRecord]
    companions: Mapping[str, str] = field(default_factory=dict)
    manifest_sha256: str = UNSEALED


@dataclass(frozen=True)
class ComponentMetadata:
    """A model: the name by which the app loads it, and the hex sha256 that `Source.identity` is.

    ``inputs`` and ``outputs`` are those of the source, with the configured shapes. ``shapes``: in the first
    component of a model with several shapes, the shapes of the inputs of each component, by its name.
    ``batch``: the axis of the batch, as in `Validation`; a target's own validation here has none.
    ``targets``: in an editable install, the EPs of the configured targets, whether it has them or not.
    ``modules``: if companions have some of its targets, the import package of each target in order; it is
    empty for those in this package. ``dims``, ``fed`` (its shapes) and ``validate``: as the project
    configures the model, without files and the mode.
    """

    model: str
    identity: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    shapes: Mapping[str, Mapping[str, tuple[Size, ...] | None]] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    batch: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    fed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    validate: ValidateTable = ValidateTable()


@dataclass(frozen=True)
class VariantMetadata:
    """One model compiled for one target.

    ``settings``: how it was compiled; ``load_options``: provider options that only the loader
    understands; ``compiled_with``: the versions of the packages that compiled it. ``needs_device``:
    only the EP's own device can open it, because a simulator refuses it or crashes. ``needs_code_page``: on
    Windows the EP crashes where the code page lacks a letter of the path. ``compares``: the loader
    asks the EP whether it can run the context. ``prepared``: the path of the prepared model in the variant's
    folder, if it is shipped, and ``chip_options`` the provider options in ``settings`` that are true only
    of this chip. ``driver_files``: those in which users' systems name chip and driver. ``group``: the name of
    the weight-sharing group.
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
    compares: bool = False
    prepared: str | None = None
    chip_options: tuple[str, ...] = ()
    driver_files: tuple[str, ...] = ()
    group: str | None = None
    boards: tuple[BoardRun, ...] = ()


@dataclass(frozen=True)
class PlainSettings:
    """How an EP runs a model for which nothing was compiled."""

    device: Device | None = None


@dataclass(frozen=True)
class PlainMetadata:
    """A model as it is: the source, or a language model that a target's EP runs, maybe that of ``plugin``."""

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    product: Literal["source"] = "source"
    plugin: Plugin | None = None
    settings: PlainSettings = PlainSettings()


@dataclass(frozen=True, kw_only=True)
class OrtInfo:
    """What ONNX Runtime needs to open a variant.

    ``model_file`` is relative to the variant's directory. Options are those of a session and of the EP.
    """

    model_file: str
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of a component. ``variant_directory`` is relative to the package, with forward slashes."""

    variant_directory: str
    ep: str
    device: Literal["cpu", "gpu", "npu"] | None = None
    compatibility_string: str | None = None
    executor_info: Mapping[str, OrtInfo]
    # Read as what it is by `folder.read`.
    additional_metadata: Mapping[str, Any]

    @property
    def ort(self) -> OrtInfo:
        """What ONNX Runtime needs to open it."""
        return self.executor_info["ort"]

    @property
    def model_file(self) -> str:
        """The model file's path from the package; that of an editable install's source can be absolute."""
        return PurePath(self.variant_directory, self.ort.model_file).as_posix()

    @property
    def facts(self) -> VariantMetadata | PlainMetadata:
        """What only we know."""
        facts: VariantMetadata | PlainMetadata = self.additional_metadata[METADATA]
        return facts

    @property
    def about(self) -> VariantMetadata | None:
        """What only we know of a compiled model; None for a plain one."""
        return self.facts if isinstance(self.facts, VariantMetadata) else None


@dataclass(frozen=True, kw_only=True)
class Component:
    """A model, with its variants in order of preference."""

    variants: Mapping[str, Variant]
    additional_metadata: Mapping[str, ComponentMetadata]

    @property
    def about(self) -> ComponentMetadata:
        """What only we know."""
        return self.additional_metadata[METADATA]


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """A model package, with the keys and in the order of the manifest."""

    schema_version: Literal["1.0"]
    layout: Layout
    components: Mapping[str, Component]
    additional_metadata: Mapping[str, PackageMetadata]

    @property
    def about(self) -> PackageMetadata:
        """What only we know."""
        return self.additional_metadata[METADATA]

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Its files with their records, by path."""
        return self.about.files

    @property
    def variants(self) -> list[tuple[str, str, Variant]]:
        """Its variants, each after the names of its component and of its target."""
        return [
            (name, target, variant)
            for name, component in self.components.items()
            for target, variant in component.variants.items()
        ]

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """The model files, by path, that have no record: the sources of an editable install."""
        files = dict.fromkeys(variant.model_file for _, _, variant in self.variants)
        return tuple(file for file in files if file not in self.files)


def make(
    result: Result,
    source_files: Mapping[str, str],
    files: Mapping[str, FileRecord],
    layout: Layout = "portable",
    companions: Mapping[str, str] | None = None,
) -> ModelPackage:
    """The package of ``result``.

    ``source_files``: for each model whose source is a variant, the path of the source from the package.
    ``companions``: as in `PackageMetadata`; None for a package that needs none.
    """
    sources = {source.model.name: source for source in result.sources}
    components, folders = {}, artifact_folders(result)
    for name, source in sources.items():
        shape_set = source.model.shape_set
        # A model with several shapes is no component itself: each shape has its variants with open shapes.
        if shape_set is None or name != shape_set.name:
            variants = _variants(source, source_files.get(name), result, folders)
            about = _about(source, sources, result.built, layout)
            if companions:
                modules = {
                    target: "" if target in variants else module
                    for target, module in source.model.companion_modules.items()
                }
                about = dataclasses.replace(about, modules=modules)
            components[name] = Component(variants=variants, additional_metadata={METADATA: about})
    return ModelPackage(
        schema_version="1.0",
        layout=layout,
        components=components,
        additional_metadata={METADATA: PackageMetadata(GENERATED_BY, files, companions or {})},
    )


def _variants(
    source: Source, file: str | None, result: Result, folders: Mapping[str, str]
) -> dict[str, Variant]:
    """The variants of a model in the order of its targets; ``file``: where its source is, if it is one.

    ``folders`` are those of `artifact_folders`.
    """
    model, facts, shape_set = source.model, source.facts, source.model.shape_set
    names = {model.name, shape_set.name} if shape_set and shape_set.members else {model.name}
    order = shape_set.targets if shape_set else tuple(target.name for target in model.targets)
    compiled = {
        built.job.target.name: _variant(
            built,
            member.name,
            folders[built.job.folder],
            result.boards.get((model.name, built.job.target.name), ()),
        )
        for built in result.built
        for member in built.job.models
        if member.name in names
    }
    folder, _, name = (file or "").rpartition("/")
    plain = PlainMetadata(facts.own_inputs, facts.own_outputs)
    compiled |= {t.name: _plain_variant(t, folder, name, plain) for t in model.plain_targets}
    variants = {target: compiled[target] for target in order if target in compiled}
    if file is not None and not (model.genai is not None and model.fallback == "none"):
        variants[SOURCE] = Variant(
            variant_directory=folder,
            ep=CPU_EP,
            executor_info={"ort": OrtInfo(model_file=name)},
            additional_metadata={METADATA: plain},
        )
    return variants


def _plain_variant(target: Target, folder: str, file: str, plain: PlainMetadata) -> Variant:
    """The model of a language model's folder, which the EP of ``target`` runs as it is."""
    settings = target.settings
    plain = dataclasses.replace(
        plain, plugin=_shipped_plugin(target), settings=PlainSettings(settings.device)
    )
    return Variant(
        variant_directory=folder,
        ep=settings.ep,
        device=settings.device if settings.device in ("npu", "gpu") else None,
        executor_info={"ort": OrtInfo(model_file=file, provider_options=target.load_options)},
        additional_metadata={METADATA: plain},
    )


def _shipped_plugin(target: Target) -> Plugin | None:
    """The EP's library: a path of the build machine means nothing on another one."""
    plugin = target.provider.plugin
    return dataclasses.replace(plugin, path="") if plugin else None


def _about(
    source: Source, sources: Mapping[str, Source], built: tuple[Built, ...], layout: Layout
) -> ComponentMetadata:
    model, facts = source.model, source.facts
    members = model.shape_set.members if model.shape_set else ()
    # There may be thousands of jobs, and to read the verdicts of all for each model takes minutes.
    validated = (
        job.validated.get(member.name)
        for job in built
        for member in job.job.models
        if member.name == model.name
    )
    return ComponentMetadata(
        (model.genai and model.genai.app_name) or model.configured_name,
        source.identity,
        facts.inputs,
        facts.outputs,
        {
            member: {value.name: value.shape for value in sources[member].facts.inputs}
            for member in members
            if model.name == members[0]
        },
        {target.name: target.settings.ep for target in model.targets}
        if layout == "installed"
        else {},
        next((one.batch for one in validated if one and one.batch), {}),
        dims=model.dims,
        fed=model.shapes,
        validate=_shippable(model.validate),
    )


def _shippable(table: ValidateTable) -> ValidateTable:
    """``table`` without what means nothing on another machine."""
    default = ValidateTable()
    inputs = table.inputs if table.inputs in SYNTHETIC else default.inputs
    return dataclasses.replace(table, mode=default.mode, inputs=inputs)


def _variant(built: Built, model: str, folder: str, boards: tuple[BoardRun, ...]) -> Variant:
    job, record = built.job, built.record
    target, settings = job.target, job.target.settings
    (index,) = (i for i, entry in enumerate(record.contexts) if entry.model == model)
    context = record.contexts[index]
    only_ours, load_options = _split_options(target)
    options = dict(settings.session_options)
    if target.provider.product == "context":
        # Where the EP does not accept the context: fail, and do not compile on the user's machine.
        options["session.disable_model_compile"] = "1"
    if job.group is not None:
        options["ep.share_ep_contexts"] = "1"
    about = VariantMetadata(
        product=target.provider.product,
        plugin=_shipped_plugin(target),
        platforms=target.platforms,
        inputs=context.inputs,
        outputs=context.outputs,
        ep_sdk_version=context.ep_sdk_version,
        settings=settings,
        load_options=only_ours,
        compiled_with=record.versions,
        preparation=record.preparations[index],
        coverage=context.coverage,
        validation=built.validations[model],
        prepared=f"{PREPARED}/{model}.onnx" if settings.recompile else None,
        chip_options=tuple(
            n for n in settings.provider_options if n in target.provider.chip_options
        ),
        driver_files=target.provider.driver_files,
        needs_device=bool(job.reason_not_to_open),
        needs_code_page=target.provider.needs_code_page and not settings.embed,
        compares=target.provider.compares,
        group=job.group,
        boards=boards,
    )
    return Variant(
        variant_directory=folder,
        ep=settings.ep,
        # ONNX Runtime does not select a variant of the CPU EP that names a device.
        device=settings.device if settings.device in ("npu", "gpu") else None,
        compatibility_string=context.compatibility or None,
        executor_info={
            "ort": OrtInfo(
                model_file=context.model_file,
                session_options=options,
                provider_options=load_options,
            )
        },
        additional_metadata={METADATA: about},
    )


def _split_options(target: Target) -> tuple[dict[str, str], dict[str, str]]:
    """The load options that only the loader understands, and the rest."""
    only_ours, rest = dict[str, str](), dict[str, str]()
    for name, value in target.load_options.items():
        is_ours = any(file.is_in({name: value}) for file in target.files) or USER_CACHE in value
        (only_ours if is_ours else rest)[name] = value
    return only_ours, rest


def artifact_folders(result: Result) -> dict[str, str]:
    """The folder of each job's artifact, from the package, by the job's own folder.

    Equal artifacts have one: a model's optimized graph may be the same for several EPs.
    """
    known: dict[object, str] = {}
    folders = {}
    for job, record in ((built.job, built.record) for built in result.built):
        # Files of its options, or of onnxruntime-genai, belong beside it.
        is_lone = job.target.shipped_files or any(model.genai for model in job.models)
        key = job.folder if is_lone else frozenset(record.files.items())
        folders[job.folder] = known.setdefault(key, job.folder)
    return folders


def artifact_files(result: Result) -> dict[str, FileRecord]:
    """The recorded files of all artifacts, by path from the package."""
    folders = artifact_folders(result)
    return {
        f"{folders[built.job.folder]}/{name}": recorded
        for built in result.built
        for name, recorded in built.record.files.items()
    }


def source_folders(sources: Iterable[Source]) -> dict[str, str]:
    """The folder of each model's shipped source, from the package, by the model's name.

    The shapes of a model, and models beside each other that name one file, have the same folder: a file is
    shipped once.
    """
    folders: dict[str, str] = {}
    known: dict[tuple[Path, str], str] = {}
    for source in sources:
        files = [(source.model.path.parent, name) for name in source.records]
        # onnxruntime-genai opens only files below a folder: the contexts of its target are inside.
        folder = source.model.configured_name
        if source.model.genai is None:
            own = f"{folder}/{SOURCE}"
            folder = next((known[file] for file in files if file in known), own)
        folders[source.model.name] = folder
        known |= dict.fromkeys(files, folder)
    return folders


def save(package: ModelPackage, folder: Path) -> Path:
    """Write the manifest of ``package``, sealed: the loader's ``verify`` compares it with its own sha256."""
    file = folder / FILE
    file.write_text(seal(write(package)), encoding="utf-8", newline="\n")
    return file


def seal(unsealed: str) -> str:
    """The text of a manifest with its sha256 instead of the last `UNSEALED`."""
    before, _, after = unsealed.rpartition(UNSEALED)
    return f"{before}{hashlib.sha256(unsealed.encode()).hexdigest()}{after}"


def write(package: ModelPackage) -> str:
    """The text of the manifest of ``package``, the same for equal packages."""
    content = to_plain(package)
    for component in content["components"].values():
        for variant in component["variants"].values():
            for key in ("device", "compatibility_string"):
                # ONNX Runtime rejects null.
                if variant[key] is None:
                    del variant[key]
    # Not sorted: the order of the variants is that of preference.
    return json.dumps(_portable(content), indent=2, allow_nan=False) + "\n"


def _portable(value: Any) -> Any:
    """``value`` as any JSON parser takes it: Python also writes infinities and half characters."""
    if isinstance(value, dict):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return math.copysign(sys.float_info.max, value)
    return value

"""The checked configuration, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config import tables
from hatch_epcontext.config.environ import Environment
from hatch_epcontext.config.genai_config import Genai
from hatch_epcontext.config.location import Download
from hatch_epcontext.errors import Key
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.providers import (
    QUANTIZED,
    Device,
    Plugin,
    Profile,
    Provider,
    Tolerance,
    configured,
)
from hatch_epcontext.shipped import OPTION_FILE

SYNTHETIC = ("ones", "random", "zeros")
"""Names of generated dummy inputs."""


@dataclass(frozen=True)
class OptionFile:
    """A file that the option at ``key`` names, by its absolute ``path``, and that the EP reads.

    ``name`` stands for it in options, behind `OPTION_FILE`: the start of its ``sha256`` and its own name, so
    that the contents are a part of the fingerprint.
    """

    key: Key
    path: str
    name: str
    sha256: str

    @property
    def placeholder(self) -> str:
        """What stands for the path in an option."""
        return f"{OPTION_FILE}/{self.name}"

    def is_in(self, options: Mapping[str, str]) -> bool:
        """Whether one of ``options`` names it by its placeholder."""
        return any(self.placeholder in value for value in options.values())


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Everything that decides how a model is compiled for a target.

    The fingerprint hashes all fields, the request carries them, and the manifest contains them: a new field
    reaches all three. Settings that matter only for loading or checking do not belong here.

    ``library_module`` is the package of the EP's library. ``library_sha256`` replaces the path of a library,
    which differs between machines. With ``static_shapes`` the model's dims and shapes are fixed. With
    ``from_memory`` the compiler reads and writes memory only. ``dequantize``: whether dynamic quantization
    is undone, ``"all"`` for static quantization too, None to undo it only if the EP leaves nodes otherwise.
    ``quantize``: the integers of activations if floats are quantized; the calibration data is the target's.
    """

    provider: str
    ep: str
    library_module: str | None = None
    library_sha256: str | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    session_options: Mapping[str, str] = field(default_factory=dict)
    device: Device
    optimization: tables.Optimization = "basic"
    static_shapes: bool = True
    embed: bool = False
    from_memory: bool = False
    external_initializers: bool = False
    unroll_limit: int = 10_000
    recompile: bool = False
    compile_with: tables.CompileWith = "ep"
    compute_capabilities: tuple[str, ...] = ()
    dequantize: tables.Dequantize | None = None
    quantize: tables.QuantizedType | None = None

    @property
    def changes_precision(self) -> bool:
        """Whether the compiled model computes with other types of numbers than its reference.

        A model whose dynamic quantization is undone is compared with its float form.
        """
        return self.dequantize == "all" or self.quantize is not None


@dataclass(frozen=True)
class Target:
    """What a model is compiled for, by name, with the model's changes and all defaults.

    ``plugin``: the EP's library. ``key`` is that of its table, and ``changes`` has the keys that the model
    changes. ``profiles`` are also in ``settings.provider_options``, in the EP's spelling. With ``from_cache``
    nothing is compiled for the target in this build. ``files``: those that its options name. ``resources``:
    those that a dask worker must have for it. ``calibration``: the absolute path of the calibration inputs,
    empty if models are not quantized. ``companion``: the distribution of the companion wheel with its
    artifacts, if that is not the app's own.
    """

    name: str
    settings: CompileSettings
    plugin: Plugin | None = None
    load_options: Mapping[str, str] = field(default_factory=dict)
    files: tuple[OptionFile, ...] = ()
    key: Key = Key()
    changes: Mapping[str, Key] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    platforms: tuple[str, ...] = ()
    requirements: tuple[str, ...] | None = None
    min_coverage: float = 1.0
    from_cache: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    calibration: str = ""
    companion: str | None = None

    def key_of(self, name: str) -> Key:
        """The key ``name`` where it is written, or belongs."""
        return self.changes.get(name, self.key / name)

    @property
    def shipped_files(self) -> tuple[OptionFile, ...]:
        """Those of ``files`` that apps get, because they count where a model is opened or compiled there."""
        compiled = self.settings.provider_options if self.settings.recompile else {}
        return tuple(
            file for file in self.files if file.is_in(self.load_options) or file.is_in(compiled)
        )

    @property
    def provider(self) -> Provider:
        """What is known of the EP."""
        settings = self.settings
        return configured(
            settings.provider,
            settings.ep,
            self.plugin,
            by_library=settings.compile_with != "ep",
            with_plugins=settings.compile_with == "library-and-plugins",
        )

    @property
    def needs_ep(self) -> bool:
        """Whether the build needs the EP itself: basic optimizations are the same for all EPs."""
        is_optimized_for_it = self.settings.optimization in ("extended", "all")
        return self.provider.product == "context" or is_optimized_for_it


@dataclass(frozen=True)
class ShapeSet:
    """A model with several shapes, which is resolved into one `Model` for each.

    ``name`` is the configured name; ``members`` are the names of the models with fixed shapes, and
    ``targets`` those of all targets of the build, both in the configured order. The stages of a language
    model are no shapes to choose from: they have no members.
    """

    name: str
    members: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A source model, with the targets that this build compiles it for.

    ``path`` is absolute; with a ``cut`` or ``constants`` it is that of the whole model until a build has
    written the model that they make of it; ``origin`` is then that of the whole model. ``key`` is
    that of the model's table or path, and ``size_key`` that of its table in a list of sizes. With
    ``static_shapes`` dims and shapes are fixed in the model; without, they are only the sizes of the dummy
    inputs. ``shape_set``: all shapes of the same model, None for a model with one. ``license``: its SPDX
    license expression. ``validate.inputs`` is one of `SYNTHETIC`, or an absolute path. ``download``: where
    a model comes from that is not in the project; ``path`` is then in the user's cache. ``genai``:
    for a language model in a folder of onnxruntime-genai.
    ``companion``: the distribution of the companion wheel with the source. ``companion_modules``: if there
    are companions, the import package of the one that each of its targets is in, in order and with the
    source; empty for the app's own wheel. ``content``: of a model that the build has written, identifies
    what it was made of. ``defaults``: the inputs that the build has frozen to their default values.
    """

    name: str
    path: Path
    key: Key
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    validate: tables.ValidateTable = tables.ValidateTable()
    targets: tuple[Target, ...] = ()
    static_shapes: bool = True
    size_key: Key | None = None
    share_weights: str | None = None
    shape_set: ShapeSet | None = None
    fallback: tables.Fallback = "auto"
    cut: Cut = Cut()
    license: str | None = None
    download: Download | None = None
    origin: Path | None = None
    genai: Genai | None = None
    companion: str | None = None
    companion_modules: Mapping[str, str] = field(default_factory=dict)
    content: str = ""
    defaults: tuple[str, ...] = ()

    @property
    def listed(self) -> str | None:
        """Which of ``dims`` and ``shapes`` is a list in the configuration; None if neither is."""
        return str(self.size_key.parts[-2]) if self.size_key else None

    def key_of(self, name: str) -> Key:
        """The key of ``dims`` or ``shapes``: that of its table, if they are a list."""
        return self.size_key if self.size_key and self.listed == name else self.key / name

    def on(self, target: Target) -> Model:
        """The model of a job for ``target``."""
        fixed = target.settings.static_shapes
        return dataclasses.replace(self, targets=(), static_shapes=fixed)

    def to_run_on(self, target: Target) -> Model:
        """The model of a job for ``target``, as it is run there.

        If the target's profiles leave shapes open, the inputs have the ``opt`` shapes of the first profile.
        """
        fed = {
            name: tuple(shapes["opt"]) for p in target.profiles[:1] for name, shapes in p.items()
        }
        # All open inputs are in the profile; other sizes may be outside of it.
        dims = {} if fed and not self.static_shapes else self.dims
        return dataclasses.replace(self, dims=dims, shapes={**fed, **self.shapes})

    def is_in(self, companion: str | None) -> bool:
        """Whether one of its targets is in the wheel ``companion``."""
        return any(target.companion == companion for target in self.targets)

    @property
    def configured_name(self) -> str:
        """The name in the configuration, which all shapes of the model share."""
        return self.shape_set.name if self.shape_set else self.name

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage of a language model, of which the build ships the folder."""
        return self.genai is not None and bool(self.genai.stage)

    @property
    def beside(self) -> tuple[str, ...]:
        """The files that are shipped with the model, by their paths in its folder, but external data."""
        return self.genai.beside if self.genai and not self.is_stage else ()

    @property
    def compiled_targets(self) -> tuple[Target, ...]:
        """Those of its targets for which something is compiled.

        Some EPs run the folder of a language model itself.
        """
        return tuple(t for t in self.targets if not (self.genai and t.provider.genai_plain))

    @property
    def plain_targets(self) -> tuple[Target, ...]:
        """Those of its targets whose EP runs the folder itself, but for the CPU."""
        is_whole = self.genai is not None and not self.is_stage
        plain = (t for t in self.targets if t.provider.genai_plain and t.provider.genai_name)
        return tuple(plain) if is_whole else ()

    @property
    def ships_weights(self) -> bool:
        """Whether the whole folder of a language model is shipped: contexts need no weights."""
        if self.genai is None or self.genai.config.cached:
            return True
        return self.fallback != "none" or bool(self.plain_targets)

    @property
    def is_changed(self) -> bool:
        """Whether the configuration makes another model of the file."""
        return bool(self.cut or self.constants)

    @property
    def is_compared(self) -> bool:
        """Whether what is made of the model is compared with the source, which is run on the CPU for that."""
        return self.validate.mode is not False and self.validate.tolerance is not False

    def tolerance_for(self, target: Target) -> Tolerance | None:
        """How far outputs on ``target`` may differ from the CPU EP's; None for no comparison."""
        if self.validate.tolerance is False:
            return None
        tolerance = target.provider.tolerance
        if target.settings.changes_precision:
            snr, cosine = min(tolerance.snr, QUANTIZED.snr), min(tolerance.cosine, QUANTIZED.cosine)
            tolerance = dataclasses.replace(tolerance, snr=snr, cosine=cosine)
        table = self.validate.tolerance or tables.ToleranceTable()
        outputs = {output: limits.limits for output, limits in table.outputs.items()}
        is_fixed = not table.limits.keys().isdisjoint(("snr", "cosine"))
        return dataclasses.replace(tolerance, **table.limits, outputs=outputs, is_fixed=is_fixed)


@dataclass(frozen=True, kw_only=True)
class BuildSettings(tables.BuildTable):
    """``[tool.epcontext.build]`` with the variables that win over it, and with sizes in bytes.

    ``shared_cache`` is None without one, and ``scheduler`` if jobs run on this machine. With
    ``shared_cache_write`` the build writes to it, signed with the private key ``shared_cache_key``.
    """

    memory_limit: int | None = None
    shared_cache_write: bool = False
    shared_cache_key: str | None = field(default=None, repr=False)

    @property
    def trust(self) -> tuple[str, ...] | None:
        """The trusted public keys of the shared cache; None to trust a folder without keys."""
        return self.shared_cache_keys or None


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    ``output`` is None for ``<import package>/epcontext``. ``report`` is the path of the report. ``unused``:
    targets that no model has. ``validated_on``: the reports of boards, a folder or a file.
    """

    root: Path
    models: tuple[Model, ...]
    output: PurePosixPath | None
    editable: tables.Editable
    build: BuildSettings
    wheel: tables.WheelTable
    environment: Environment
    report: Path | None
    unused: tuple[Key, ...] = ()
    validated_on: Path | None = None

    @property
    def on_this_machine(self) -> Config:
        """The same configuration with all jobs on this machine."""
        return dataclasses.replace(self, build=dataclasses.replace(self.build, scheduler=None))

    @property
    def companions(self) -> Mapping[str, Key]:
        """The distributions of all companion wheels, each with a key that names it."""
        named = [(t.companion, t.key_of("companion")) for m in self.models for t in m.targets]
        named += ((m.companion, m.key / "fallback" / "companion") for m in self.models)
        return {name: key for name, key in named if name is not None}

    def of_wheel(self, companion: str | None = None) -> Config:
        """The configuration for what is in the app's own wheel, or in the wheel ``companion``."""
        models = []
        # Contexts of a language model need files of its folder.
        folders = {m.configured_name for m in self.models if m.is_stage and m.is_in(companion)}
        for model in self.models:
            targets = tuple(t for t in model.targets if t.companion == companion)
            fallback: tables.Fallback = model.fallback if companion is None else "none"
            if model.companion is not None:
                fallback = "source" if model.companion == companion else "none"
            if companion is None or targets or fallback != "none" or model.name in folders:
                models.append(dataclasses.replace(model, targets=targets, fallback=fallback))
        wheel = self.wheel if companion is None else dataclasses.replace(self.wheel, tag="auto")
        return dataclasses.replace(self, models=tuple(models), wheel=wheel)

    @property
    def compiled_targets(self) -> tuple[Target, ...]:
        """Those of `targets` that are compiled, and the CPU: a build needs their packages."""
        return tuple(
            target
            for model in self.models
            for target in model.targets
            if target not in model.plain_targets
        )

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets of all models, each as narrowed by its model: names repeat."""
        return tuple(target for model in self.models for target in model.targets)

"""The checked configuration, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

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
    secrets_in,
)

Optimization = Literal["none", "basic", "extended", "all"]
Policy = Literal[
    "default",
    "prefer-cpu",
    "prefer-npu",
    "prefer-gpu",
    "max-performance",
    "max-efficiency",
    "min-overall-power",
]
Fallback = Literal["auto", "source", "none"]
Editable = Literal["source", "compile", "skip"]
ValidationMode = Literal["auto", "require", "structure", False]
Trust = Literal["signed", "all"]
ExecutorName = Literal["local", "dask"]
Verification = Literal["record", "full"]
Dequantize = Literal["all"] | bool
QuantizedType = Literal["uint8", "int8", "uint16", "int16"]

CREDENTIALS = frozenset(
    {
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
        "HATCH_EPCONTEXT_CACHE_KEY",
    }
)
"""The variables with credentials of the shared cache: they are never printed, and no worker gets them."""

SYNTHETIC = ("ones", "random", "zeros")
"""Dummy inputs that are generated, and need no file."""


@dataclass(frozen=True)
class Quantize:
    """How a float model is quantized: the integers of its activations and of its weights."""

    activation: QuantizedType = "uint16"
    weight: QuantizedType = "uint8"
    per_channel: bool = False


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Everything that decides how a model is compiled for a target.

    The fingerprint hashes all fields, the request carries them, and the manifest writes them: a
    field that is added here reaches all three. What counts only for loading or checking stays out.

    ``library_module`` is the package of the EP's library. ``library_sha256`` replaces the path of a
    library, which differs between machines. With ``static_shapes`` the model's dims and shapes are
    fixed. ``external_initializers``: bytes from which an initializer outside the contexts goes into
    a file of its own, or None. ``dequantize``: whether dynamic quantization is undone, ``"all"`` for static
    quantization too. ``quantize``: how floats are quantized, or None; the calibration data is the target's.
    """

    provider: str
    ep: str
    registration_name: str | None = None
    library_module: str | None = None
    library_sha256: str | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    session_options: Mapping[str, str] = field(default_factory=dict)
    device: Device
    device_filter: Mapping[str, str] = field(default_factory=dict)
    policy: Policy | None = None
    virtual_devices: bool = False
    optimization: Optimization = "basic"
    static_shapes: bool = True
    embed: bool = False
    in_memory: bool = False
    external_initializers: int | None = None
    unroll_limit: int = 5000
    recompile: bool = False
    dequantize: Dequantize = False
    quantize: Quantize | None = None

    @property
    def changes_precision(self) -> bool:
        """Whether what is compiled computes with other types of numbers than the source."""
        return bool(self.dequantize) or self.quantize is not None


@dataclass(frozen=True)
class Target:
    """A named place that a model is compiled for, with what the model narrows and all defaults.

    ``plugin``: the EP's library. ``key`` is the place of the optimization profiles in the configuration;
    they are also in ``settings.provider_options``, as the EP wants them. With ``from_cache`` nothing is
    compiled for the target in this build. ``resources`` are those that a dask worker must have for it.
    ``calibration``: the absolute path of the inputs for which models are quantized, empty if they are not.
    ``unchecked``: whether the EP may be newer than what this package knows of it.
    """

    name: str
    settings: CompileSettings
    plugin: Plugin | None = None
    load_options: Mapping[str, str] = field(default_factory=dict)
    key: Key = Key()
    profiles: tuple[Profile, ...] = ()
    platforms: tuple[str, ...] = ()
    requirements: tuple[str, ...] | None = None
    min_coverage: float = 1.0
    from_cache: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    calibration: str = ""
    unchecked: bool = False

    @property
    def provider(self) -> Provider:
        """What is known of the EP."""
        settings = self.settings
        return configured(settings.provider, settings.ep, self.plugin, unchecked=self.unchecked)

    @property
    def has_secrets(self) -> bool:
        """Whether an option is a secret, whose value is in an environment variable."""
        return bool(secrets_in(self.settings.provider_options) or secrets_in(self.load_options))

    @property
    def needs_ep(self) -> bool:
        """Whether the build needs the EP itself: basic optimizations are the same for all EPs."""
        return self.provider.product == "context" or self.settings.optimization in (
            "extended",
            "all",
        )


@dataclass(frozen=True)
class GivenLimits:
    """``limits`` of a `Tolerance` by name that differ from the provider's: of all targets or of one, and of
    all outputs or of one.
    """

    limits: Mapping[str, float]
    target: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class ValidateSettings:
    """How a model is validated.

    ``inputs`` is one of `SYNTHETIC`, or an absolute path. ``tolerance`` has the limits that differ
    from the provider's, those of single targets last; None means that nothing is compared. ``timeout``:
    seconds for one run. ``states``: inputs, each with the output that is fed to it in the next step.
    """

    mode: ValidationMode = "auto"
    inputs: str = "random"
    tolerance: tuple[GivenLimits, ...] | None = ()
    timeout: float = 600.0
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """A table in a list: the key with the list (``"dims"`` or ``"shapes"``), and the table's index."""

    name: str
    index: int


@dataclass(frozen=True)
class ShapeSet:
    """A model that is configured with several shapes, and resolved into one `Model` for each.

    ``name`` is the configured name; ``members`` are the names of the models with fixed shapes, and
    ``targets`` those of all targets of the build, both in the configured order.
    """

    name: str
    members: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """A source model, with the targets that this build compiles it for.

    ``path`` is absolute; with a ``cut`` it is that of the whole model until a build has made the cut one.
    ``key`` is the model's place in the configuration, and ``listed`` that of its sizes, if they are in a
    list. With ``static_shapes`` dims and shapes are fixed in the model; without, they are only the sizes of
    the dummy inputs. ``shape_set`` is the one of all shapes of the same model, None for a model that is not
    resolved into several. ``license``: its SPDX license expression.
    """

    name: str
    path: Path
    key: Key
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    validate: ValidateSettings = ValidateSettings()
    targets: tuple[Target, ...] = ()
    static_shapes: bool = True
    listed: Listed | None = None
    share_weights: str | None = None
    shape_set: ShapeSet | None = None
    fallback: Fallback = "auto"
    cut: Cut = Cut()
    license: str | None = None

    def place(self, name: str) -> Key:
        """The place of ``dims`` or ``shapes`` in the configuration: of its table in a list, if it has one."""
        if self.listed is not None and self.listed.name == name:
            return self.key / name / self.listed.index
        return self.key / name

    def on(self, target: Target) -> Model:
        """The model as requests carry it that compile it for ``target``."""
        fixed = target.settings.static_shapes
        return dataclasses.replace(self, targets=(), static_shapes=fixed)

    def to_run_on(self, target: Target) -> Model:
        """The model as requests carry it that run it on ``target``.

        Where the target's profiles leave shapes open, the inputs have the shapes that the first profile is
        optimized for.
        """
        fed = {
            name: tuple(shapes["opt"]) for p in target.profiles[:1] for name, shapes in p.items()
        }
        found = self.on(target)
        # All open inputs are in the profile, and sizes that are not fixed may be outside of it.
        dims = {} if fed and not found.static_shapes else found.dims
        return dataclasses.replace(found, dims=dims, shapes={**fed, **found.shapes})

    @property
    def configured_name(self) -> str:
        """The name in the configuration, which all shapes of the model have in common."""
        return self.shape_set.name if self.shape_set else self.name

    def has_other_limits(self, target: Target) -> bool:
        """Whether limits for ``target`` are not those of all targets: it has some, or there are others."""
        given = self.validate.tolerance or ()
        return len(self.targets) > 1 or any(each.target == target.name for each in given)

    def tolerance_for(self, target: Target) -> Tolerance | None:
        """How far outputs on ``target`` may differ from the CPU EP's; None for no comparison."""
        if self.validate.tolerance is None:
            return None
        tolerance = target.provider.tolerance
        if target.settings.changes_precision:
            snr, cosine = min(tolerance.snr, QUANTIZED.snr), min(tolerance.cosine, QUANTIZED.cosine)
            tolerance = dataclasses.replace(tolerance, snr=snr, cosine=cosine)
        limits: dict[str, Any] = {}
        outputs: dict[str, dict[str, float]] = {}
        for given in self.validate.tolerance:
            if given.target in (None, target.name):
                own = limits if given.output is None else outputs.setdefault(given.output, {})
                own.update(given.limits)
        return dataclasses.replace(tolerance, **limits, outputs=outputs)


@dataclass(frozen=True)
class BuildSettings:
    """How a build runs.

    ``jobs``: jobs at once, None for as many as the machine can do. ``timeout``: seconds for each worker;
    ``memory_limit``: its bytes of memory. With ``fail_fast`` the first failed job ends the build.
    ``cache`` is the URL of the shared cache, which ``cache_write`` lets the build write to. ``cache_keys``:
    the public keys of those whose documents in it are used, or None for everybody's; ``cache_key`` is the
    private key that signs what the build writes. ``cache_timeout``: seconds that the build waits for it.
    ``scheduler``: the address of the dask scheduler that jobs are given to; None to run them on this machine.
    """

    jobs: int | None
    timeout: float
    memory_limit: int | None = None
    fail_fast: bool = False
    cache: str | None = None
    cache_write: bool = False
    cache_keys: tuple[str, ...] | None = ()
    cache_key: str | None = field(default=None, repr=False)
    cache_timeout: float = 20.0
    scheduler: str | None = None


@dataclass(frozen=True)
class WheelSettings:
    """The wheel's tag (``"auto"``, ``"any"`` or a tag), its largest size in bytes, its verification, and
    whether it contains an SBOM.
    """

    tag: str
    max_size: int | None
    verify: Verification = "record"
    sbom: bool = False


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    ``output`` is None for ``<import package>/epcontext``. With ``only_from_cache`` the build compiles nothing
    and needs no packages. ``report`` is the path of the HTML report. ``progress``: whether the hook prints
    lines about steps that take long.
    ``overrides`` are the environment variables that won over TOML.
    """

    root: Path
    models: tuple[Model, ...]
    output: PurePosixPath | None
    editable: Editable
    build: BuildSettings
    wheel: WheelSettings
    cache_dir: Path | None
    use_cache: bool
    only_from_cache: bool
    report: Path | None
    overrides: tuple[str, ...]
    progress: bool = True

    @property
    def on_this_machine(self) -> Config:
        """The same configuration with all jobs on this machine."""
        return dataclasses.replace(self, build=dataclasses.replace(self.build, scheduler=None))

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets of all models, each as its model narrows it: names repeat."""
        return tuple(target for model in self.models for target in model.targets)

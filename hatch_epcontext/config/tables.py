"""The tables of ``[tool.epcontext]`` as users write them: what declares the keys."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Literal

from hatch_epcontext.config.location import PUBLIC, check_cache_url, check_url, key_bytes
from hatch_epcontext.files import is_portable, is_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Device, OptionValue, Provider
from hatch_epcontext.text import parse_size

Optimization = Literal["none", "basic", "extended", "all"]
CompileWith = Literal["ep", "library", "library-and-plugins"]
Fallback = Literal["auto", "source", "none"]
Editable = Literal["source", "compile", "skip"]
ValidationMode = Literal["auto", "require", "structure", False]
Dequantize = Literal["all"] | bool
QuantizedType = Literal["uint8", "int8", "uint16", "int16"]

Options = Mapping[str, OptionValue]
Dims = Mapping[str, int]
Shapes = Mapping[str, tuple[int, ...]]
Check = Callable[[Any], str | None]
"""A description of valid values; None for a valid one."""


@dataclass(frozen=True)
class Feature:
    """What a key of a target needs of its provider: which one ``has`` it, and what the others ``lack``."""

    lack: str
    has: Callable[[Provider], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is declared of a key beside its type and its default; ``doc`` is its documentation.

    ``otherwise`` is the value of a target's key that is missing; ``when_missing`` describes it if it depends
    on other things. ``check`` is one of the value, and ``items`` one of each text and number in a list or
    table. The key is an error for providers without the ``feature``. With ``is_secret`` no message shows an
    invalid value, which may contain a password, and an empty environment variable is the value None. The
    default of a ``required`` key stands for a missing value. Without ``has_variable`` no environment variable
    wins over the key of ``build`` or ``wheel``.
    """

    doc: str
    otherwise: Any = None
    when_missing: str = ""
    check: Check | None = None
    items: Check | None = None
    feature: Feature | None = None
    is_secret: bool = False
    required: bool = False
    has_variable: bool = True


def declare(doc: str, default: Any = None, **declared: Any) -> Any:
    """A key with its `Declaration`; the default of a table is a function that makes it."""
    declaration = Declaration(doc=doc, **declared)
    metadata, shown = {"declaration": declaration}, not declaration.is_secret
    if callable(default):
        return field(default_factory=default, repr=shown, metadata=metadata)
    return field(default=default, repr=shown, metadata=metadata)


def declaration_of(key: dataclasses.Field[Any]) -> Declaration:
    """What `declare` got for the ``key``."""
    declaration: Declaration = key.metadata["declaration"]
    return declaration


def must_be(allowed: str, is_valid: Callable[[Any], object]) -> Check:
    """A check that describes valid values as ``allowed``."""
    return lambda value: None if is_valid(value) else allowed


def readable_by(read: Callable[[Any], object]) -> Check:
    """A check of what ``read`` accepts: it raises ValueError with a description of valid values."""

    def check(value: Any) -> str | None:
        try:
            read(value)
        except ValueError as allowed:
            return str(allowed)
        return None

    return check


_COUNT = must_be("at least 1", lambda value: value == "auto" or value >= 1)
# onnxruntime-genai crashes with a window of one token.
_CHUNK = must_be("at least 2", lambda value: value >= 2)
_SECONDS = must_be("a number of seconds above 0", lambda value: 0 < value < math.inf)
_SHARE = must_be("from 0 to 1", lambda value: 0 <= value <= 1)
_DECIBELS = must_be("from -200 to 200 decibels", lambda value: -200 <= value <= 200)
_NODES = must_be("at least 0 nodes", lambda value: value >= 0)
_LIMIT = must_be("at least 0", lambda value: 0 <= value < math.inf)
_AMOUNT = must_be("a number above 0", lambda value: 0 < value < math.inf)
_SIZE = must_be("at least 1", lambda value: value >= 1)
_SIZE_OF_INPUT = must_be("at least 0", lambda value: value >= 0)
_DISTINCT = must_be("different names", lambda value: len(set(value)) == len(value))
_PLATFORM = must_be(
    'the platform tag of a wheel, such as "win_arm64" or "manylinux_2_34_aarch64"',
    lambda value: re.fullmatch(r"[a-z0-9_]+", value),
)
_DISTRIBUTION = must_be(
    "the normalized name of a distribution, of small letters, digits and single hyphens after a letter, "
    'such as "my-app-models-npu"',
    lambda value: re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", value),
)
_PACKAGE = must_be(
    'the path of a package in the wheel, such as "my_app/epcontext"',
    lambda value: all(map(str.isidentifier, value.split("/"))),
)
_CONSTANTS = must_be(
    "numbers, true or false, strings, or lists of them, by input",
    lambda value: all(map(_is_constant, value.values())),
)


def _is_constant(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_constant, value))
    return isinstance(value, str | bool | int | float)


def _requirement(value: str) -> str | None:
    # Imported here, because workers read these tables too.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(value)
    except InvalidRequirement as error:
        return f"a requirement of a package ({str(error).splitlines()[0]})"
    return None


_ADDRESS = must_be(
    'the address of a scheduler without a user and a password, such as "tcp://host:8786" (TLS certificates '
    "come from dask's configuration)",
    lambda value: re.fullmatch(r"[a-z]+://(\[[^]@]+\]|[^\s@:\[\]/]+)(:\d+)?(/[^\s@]*)?", value),
)
_BACKEND = must_be(
    'a module, or a module and an object, such as "flit_core.buildapi"',
    lambda value: (
        all(name.isidentifier() for name in re.split(r"[.:]", value)) and value.count(":") < 2
    ),
)
_FOLDER = must_be("a folder inside the project", lambda value: value == "." or is_portable(value))
_sha256 = must_be("64 hexadecimal digits in lower case", is_sha256)
_data = must_be(
    "names of files beside the model, each with 64 hexadecimal digits",
    lambda value: all(is_portable(name) and is_sha256(digest) for name, digest in value.items()),
)


def _ranges(value: Mapping[str, tuple[float, ...]]) -> str | None:
    for numbers in value.values():
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] > numbers[1]:
            return "the smallest and the largest value of each input, such as [0, 999]"
    return None


def _license(value: str) -> str | None:
    # Imported here: few configurations have a license, and the list of licenses is long.
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        canonicalize_license_expression(value)
    except InvalidLicenseExpression:
        return 'an SPDX license expression, such as "Apache-2.0" or "LicenseRef-Proprietary"'
    return None


def _wheel_tag(value: str) -> str | None:
    if value == "auto":
        return None
    # Imported here, because workers read these tables too.
    from packaging.tags import parse_tag

    try:
        valid = value.count("-") == 2 and bool(parse_tag(value))
    except ValueError:
        valid = False
    return None if valid else '"auto", or a wheel tag such as "py3-none-win_arm64"'


@dataclass(frozen=True, kw_only=True)
class ProfileTable:
    """The shapes of one input in one optimization profile."""

    min: tuple[int, ...] = declare("The smallest shape.", (), required=True)
    opt: tuple[int, ...] = declare("The shape to optimize for.", (), required=True)
    max: tuple[int, ...] = declare("The largest shape.", (), required=True)


@dataclass(frozen=True, kw_only=True)
class FallbackTable:
    """``fallback`` of a source model that a companion wheel contains."""

    companion: str = declare(
        "The companion wheel with the source model: the name of its distribution.",
        "",
        required=True,
        check=_DISTRIBUTION,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeTable:
    """``quantize`` of a target or a model."""

    inputs: str = declare(
        "Typical inputs: a folder with an `.npz` for each sample, or one `.npz` with all samples along the "
        "first axis.",
        "",
        required=True,
    )
    activation: QuantizedType | None = declare(
        "The integers of activations; those of weights are `uint8`.",
        when_missing="`uint16`, and `uint8` for OpenVINO",
    )


@dataclass(frozen=True, kw_only=True)
class LimitsTable:
    """How far an output may differ from the CPU's."""

    snr: float | None = declare(
        "The smallest signal-to-noise ratio, in decibels: 20 is an error of a tenth.",
        when_missing="the provider's",
        check=_DECIBELS,
    )
    cosine: float | None = declare(
        "The smallest cosine similarity.", when_missing="the provider's", check=_SHARE
    )
    atol: float | None = declare(
        "The largest difference of any value; with `rtol`, `|out - ref| <= atol + rtol * |ref|`.",
        when_missing="no limit",
        check=_LIMIT,
    )
    rtol: float | None = declare(
        "The largest difference relative to the reference.", when_missing="no limit", check=_LIMIT
    )

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits that the configuration sets, by name."""
        limits = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(LimitsTable)
        }
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, kw_only=True)
class ToleranceTable(LimitsTable):
    """How far outputs may differ from the CPU's."""

    outputs: Mapping[str, LimitsTable] = declare("Limits of their own for outputs, by name.", dict)


@dataclass(frozen=True, kw_only=True)
class TargetTable:
    """``[tool.epcontext.targets.<name>]``, and the changes of a model: None and empty values are missing."""

    provider: str = declare(
        "The execution provider: its name in `docs/providers.md`, or ONNX Runtime's name.",
        "",
        required=True,
    )
    path: str = declare(
        "Only in a model's table: the folder of a language model for this target, instead of the model's "
        "own: see `docs/language-models.md#a-folder-for-each-target`.",
        "",
        when_missing="the model's own",
    )
    provider_options: Options = declare(
        "Options of the execution provider, listed in `docs/providers.md`: checked by name and "
        "value.",
        dict,
    )
    session_options: Options = declare(
        "ONNX Runtime's session options, for compiling and loading.", dict
    )
    load_options: Options = declare(
        "Provider options for the loader only; `{user-cache}` is a folder that it creates.", dict
    )
    chip: str | tuple[str, ...] | None = declare(
        "The chip to compile for (QNN, TensorRT RTX), or several of one context: names in "
        "`docs/providers.md#chips`. TensorRT RTX then needs no GPU, and takes compute capabilities and "
        '`"auto"` too: see `docs/targets.md#tensorrt-rtx-without-a-gpu`.',
        when_missing="none in particular (QNN), or the GPU that the EP finds",
        feature=Feature("has no chips with names", lambda p: p.chips),
    )
    device: Device | None = declare(
        "The device to compile for, which the loader must find.",
        when_missing="the provider's default",
    )
    profiles: tuple[Mapping[str, ProfileTable], ...] | None = declare(
        "Optimization profiles (TensorRT, TensorRT RTX), each with `min`, `opt` and `max` shapes by "
        "input.",
        feature=Feature("has no optimization profiles", lambda p: p.profiles is not None),
    )
    optimization: Optimization | None = declare(
        "ONNX Runtime's graph optimization before partitioning.", otherwise="basic"
    )
    embed: bool | None = declare(
        "Put the compiled blob into the context model, and not beside it, as large models need.",
        otherwise=False,
        feature=Feature("has no contexts to embed", lambda p: p.product == "context"),
    )
    external_initializers: bool | None = declare(
        "Keep weights of contexts or an optimized graph, from 1024 bytes each, in a file of their own.",
        otherwise=False,
    )
    static_shapes: bool | None = declare(
        "Fix the model's dimensions to `dims` and `shapes`: see `docs/shapes.md`.",
        when_missing="by provider and device",
    )
    unroll_limit: int | None = declare(
        "The most nodes of a graph whose loops and recurrent layers are unrolled, `0` for no unrolling: "
        "see `docs/what-compiles.md#rewrites`.",
        otherwise=10_000,
        check=_NODES,
    )
    recompile: bool | None = declare(
        "Ship the prepared model too, which `load(..., recompile=True)` compiles on the user's machine.",
        otherwise=False,
        feature=Feature(
            "has no contexts that the loader can compile",
            lambda p: p.plugin is not None and p.product == "context",
        ),
    )
    dequantize: Dequantize | None = declare(
        'Undo dynamic quantization, with `"all"` static too: see `docs/shapes.md#undo-a-quantization`.',
        when_missing="only if nodes are left to the CPU otherwise",
    )
    quantize: QuantizeTable | Literal[False] | None = declare(
        "Quantize a model of floats: see `docs/shapes.md#quantize-a-model`.",
        when_missing="not quantized",
    )
    min_coverage: float | None = declare(
        "Fail if less than this share of a model's nodes is compiled, or taken by an EP that "
        "compiles on the user's machine.",
        otherwise=1.0,
        check=_SHARE,
    )
    platforms: tuple[str, ...] | None = declare(
        "Wheel platform tags that this target is for, such as `win_arm64`.",
        when_missing="any",
        items=_PLATFORM,
    )
    companion: str | None = declare(
        "The companion wheel with what is compiled for this target: the name of its distribution, which an "
        "extra of the app pins: see `docs/companions.md`.",
        when_missing="the app's own wheel",
        check=_DISTRIBUTION,
    )
    requirements: tuple[str, ...] | None = declare(
        "Packages to install for compiling, instead of the provider's own.",
        when_missing="the provider's",
        items=_requirement,
    )
    resources: Mapping[str, float] | None = declare(
        "Resources of the dask workers that may compile for this target: see `docs/ci.md#a-cluster`.",
        items=_AMOUNT,
    )
    allow_unknown_options: bool | None = declare(
        "Do not check provider options and names of session options, for an EP or ONNX Runtime that is newer "
        "than this package.",
        otherwise=False,
    )
    library: str | None = declare(
        "The EP's library: a package with `get_library_path()`, or a path.",
        when_missing="the provider's",
        feature=Feature("has no library of its own", lambda p: p.devices != ("cpu",)),
    )
    ep_name: str | None = declare(
        "ONNX Runtime's name of the EP, for the provider `plugin`: its library is registered under it.",
        feature=Feature("has a name already", lambda p: p.needs_library),
    )

    @property
    def chips(self) -> tuple[str, ...]:
        """The names in ``chip``."""
        return (self.chip,) if isinstance(self.chip, str) else self.chip or ()


@dataclass(frozen=True, kw_only=True)
class ValidateTable:
    """``validate`` of a model; only the mode may replace it."""

    mode: ValidationMode = declare(
        "`auto` runs the artifact where the provider can; `require` fails where it cannot; "
        "`structure` checks the files only; `false` runs nothing, not even on the CPU.",
        "auto",
    )
    inputs: str = declare(
        "Dummy inputs: `random` (seeded), `ones`, `zeros`, an `.npz`, or a folder with one for each sample: "
        "see `docs/validation.md#your-own-inputs`.",
        "random",
    )
    tolerance: ToleranceTable | Literal[False] | None = declare(
        "How far outputs may differ from the CPU's; `false` for no comparison.",
        when_missing="the provider's",
    )
    states: Mapping[str, str] = declare(
        "The states of a recurrent model: inputs, each with the output that is its next value.",
        dict,
        when_missing="the states of LSTM, GRU and RNN layers",
    )
    ranges: Mapping[str, tuple[float, ...]] = declare(
        "The smallest and the largest value that the app gives inputs, such as `user = [0, 999]`: all dummy "
        "inputs are inside. Real `inputs` win.",
        dict,
        check=_ranges,
        when_missing="what the graph and the type allow",
    )


@dataclass(frozen=True, kw_only=True)
class CutTable:
    """``cut`` of a model: the part that is kept. At least one of the keys is needed."""

    inputs: tuple[str, ...] = declare(
        "The tensors where it begins, by name.",
        (),
        check=_DISTINCT,
        when_missing="those inputs of the model that it needs",
    )
    outputs: tuple[str, ...] = declare(
        "The tensors where it ends, by name.",
        (),
        when_missing="all outputs of the model",
        check=_DISTINCT,
    )


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """``[[tool.epcontext.models]]``."""

    path: str = declare(
        "The ONNX file, relative to `pyproject.toml`, or a language model's folder: see "
        "`docs/language-models.md`. Either `path` or `url` is required.",
        "",
    )
    url: str | None = declare(
        "Where the model is downloaded from, instead of `path`: `hf://` or `https://`. `epcontext fetch "
        "--pin` fixes its contents: see `docs/builds.md#models-from-elsewhere`.",
        check=check_url,
        is_secret=True,
    )
    sha256: str | None = declare(
        "The SHA-256 of the file at `url`, in hexadecimal digits.", check=_sha256
    )
    data: Mapping[str, str] = declare(
        "The SHA-256 of each file of its external data, by its name beside the model.",
        dict,
        check=_data,
    )
    name: str | None = declare(
        "The name by which the app loads it.", when_missing="the file's stem"
    )
    targets: tuple[str, ...] | Mapping[str, TargetTable | Literal[False]] | None = declare(
        "A list of names, or a table with what the model changes of some targets, and `false` for those that "
        "it leaves out: see `docs/targets.md#a-target-of-a-model`.",
        when_missing="all",
    )
    fallback: Fallback | FallbackTable | None = declare(
        "As `fallback` of the root, for this model.", when_missing="that of the root"
    )
    share_weights: str | Literal[False] | None = declare(
        "The name of a group that shares one sidecar: see `docs/targets.md#models-that-share-weights`. For a "
        "language model `false`: its stages share none, and a simulator opens them."
    )
    dims: Dims | tuple[Dims, ...] = declare(
        "Sizes of open dimensions, by name; or a list of such tables: see `docs/shapes.md`.",
        dict,
        items=_SIZE,
    )
    shapes: Shapes | tuple[Shapes, ...] = declare(
        "Whole shapes, by input; or a list of such tables.", dict, items=_SIZE_OF_INPUT
    )
    constants: Mapping[str, Any] = declare(
        "Inputs frozen to a value, by input; the dtype is the model's.", dict, check=_CONSTANTS
    )
    cut: CutTable | None = declare(
        "Keep only the part of the graph between these tensors: see `docs/shapes.md#a-part-of-a-model`.",
        when_missing="the whole graph",
    )
    context_length: int | None = declare(
        "Of a language model: the most tokens of a prompt and its answer.",
        when_missing="that of `genai_config.json`; required for QNN",
        check=_COUNT,
    )
    chunk: int = declare(
        "Of a language model: how many tokens of a prompt an NPU takes at once.", 64, check=_CHUNK
    )
    license: str | None = declare(
        "The model's license as an SPDX expression, for the SBOM.",
        when_missing="that of the file's metadata",
        check=_license,
    )
    validate: ValidateTable | ValidationMode = declare(
        "How the artifact is validated: only the mode, or a table.", "auto"
    )


@dataclass(frozen=True, kw_only=True)
class BuildTable:
    """``[tool.epcontext.build]``. The variable ``HATCH_EPCONTEXT_<KEY>`` wins over each key."""

    jobs: int | Literal["auto"] = declare(
        "Jobs at once, the largest models first; `auto` is as many as cores and free memory allow.",
        "auto",
        check=_COUNT,
    )
    timeout: float = declare("Seconds for one worker.", 1800.0, check=_SECONDS)
    memory_limit: int | str | None = declare(
        'Memory for one worker: bytes, or a size such as `"8 GB"`. Not on macOS.',
        when_missing="no limit",
        check=readable_by(parse_size),
    )
    shared_cache: str | None = declare(
        "The URL of a cache that teams and CI share (`s3://`, `gs://`, `az://`, `file://`, `https://`): see "
        "`docs/ci.md#a-shared-cache`.",
        check=check_cache_url,
        is_secret=True,
    )
    shared_cache_keys: tuple[str, ...] = declare(
        "The public keys: builds use only what one of them signed.",
        (),
        items=readable_by(partial(key_bytes, PUBLIC)),
    )
    scheduler: str | None = declare(
        'A dask cluster that runs the jobs, such as `"tcp://host:8786"`: see `docs/ci.md#a-cluster`.',
        when_missing="jobs run here",
        check=_ADDRESS,
        is_secret=True,
    )
    backend: str | None = declare(
        'The build back end that `build-backend = "hatch_epcontext.backend"` calls, such as '
        '`"setuptools.build_meta"`: see `docs/adopting.md#with-any-other-build-back-end`.',
        check=_BACKEND,
        has_variable=False,
    )
    backend_path: tuple[str, ...] = declare(
        "Folders of the project with `backend`, as `backend-path` in `[build-system]`.",
        (),
        items=_FOLDER,
        has_variable=False,
    )


@dataclass(frozen=True, kw_only=True)
class WheelTable:
    """``[tool.epcontext.wheel]``. The variable ``HATCH_EPCONTEXT_<KEY>`` wins over each key."""

    tag: str = declare(
        "A tag such as `py3-none-win_arm64`; `auto` joins the `platforms` of all targets, and leaves the tag "
        "to Hatch if one has none.",
        "auto",
        check=_wheel_tag,
    )
    sbom: bool = declare(
        "Write a CycloneDX SBOM of the models into the wheel: see `docs/model-package.md#the-sbom`.",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class RootTable:
    """``[tool.epcontext]``."""

    models: tuple[str | ModelTable, ...] = declare("Paths, globs or tables.", (), required=True)
    targets: Mapping[str, TargetTable] = declare(
        "What to compile for, by name.", dict, required=True
    )
    output: str | None = declare(
        "The package's folder in the wheel.",
        when_missing="`<import package>/epcontext`",
        check=_PACKAGE,
    )
    fallback: Fallback | FallbackTable = declare(
        "Whether the source model is shipped too: `auto` if no target in the wheel runs on every machine, as "
        '`cpu` does, `source` always, `none` never, `{ companion = "my-app-models-cpu" }` in that wheel: see '
        "`docs/companions.md`.",
        "auto",
    )
    editable: Editable = declare(
        "What `pip install -e` installs: source models, compiled ones, or none.", "source"
    )
    validated_on: str | None = declare(
        "A folder of the project with reports of `epcontext validate --report`, or one report: see "
        "`docs/validation.md#reports-in-a-build`.",
        when_missing="none",
    )
    build: BuildTable = declare("How the build runs.", BuildTable)
    wheel: WheelTable = declare("The wheel.", WheelTable)


Faults = Iterator[tuple[tuple[str | int, ...], str, Any]]
"""For each invalid value its keys, a description of valid ones, and the value; None for a missing one."""


def faults_of_key(key: dataclasses.Field[Any], value: Any) -> Faults:
    """What the key declares to be invalid in its ``value``."""
    declared = declaration_of(key)
    check, items = declared.check, declared.items
    if value is not None and check is not None and (allowed := check(value)):
        yield (), allowed, value
    if items is not None:
        for keys, item in _items(value, ()):
            if allowed := items(item):
                yield keys, allowed, item


def _items(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each text and number in lists and tables."""
    if isinstance(value, Mapping | tuple):
        inside = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in inside:
            yield from _items(item, (*keys, name))
    elif value is not None:
        yield keys, value

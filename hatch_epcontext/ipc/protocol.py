"""The process border: one request in, one reply out, both JSON files.

Paths are absolute. Shapes are lists of sizes; an open dimension is its name, or None if it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from hatch_epcontext.config.settings import CompileSettings, Listed
from hatch_epcontext.errors import Key, Problem
from hatch_epcontext.providers import Plugin, Product, Profile, Tolerance

Size = int | str | None
ReplyT = TypeVar("ReplyT")

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes that a protobuf file can have, and so an ONNX file without its external data."""

REQUESTS: dict[str, type[Request[Any]]] = {}
"""The requests by their action."""


class Request(Generic[ReplyT]):
    """A request that a worker answers with a `ReplyT`.

    A subclass names its action, which is also the module of `hatch_epcontext.worker` whose
    ``handle`` answers it.
    """

    action: ClassVar[str]
    reply_type: ClassVar[type[Any]]

    def __init_subclass__(cls, action: str) -> None:
        super().__init_subclass__()
        (base,) = (each for each in vars(cls)["__orig_bases__"] if get_args(each))
        cls.action, (cls.reply_type,) = action, get_args(base)
        REQUESTS[action] = cls


@dataclass(frozen=True)
class TensorFacts:
    """An input or output: ``dtype`` is NumPy's name (``"float32"``), or ONNX's where NumPy has none."""

    name: str
    dtype: str
    shape: tuple[Size, ...]

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of ``shape`` fits: an open dimension takes any size."""
        return len(shape) == len(self.shape) and all(
            not isinstance(size, int) or size == given
            for given, size in zip(shape, self.shape, strict=True)
        )

    @property
    def is_fixed(self) -> bool:
        """Whether no dimension is open."""
        return all(isinstance(size, int) for size in self.shape)

    @property
    def shape_text(self) -> str:
        """The shape for a message, such as ``"batch x 3 x ?"``."""
        return " x ".join("?" if size is None else str(size) for size in self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """A source model, what its configuration fixes, and its dummy inputs; ``key`` is its place there.

    With ``static_shapes`` dims and shapes are fixed in the model; without, they are only the sizes of
    the dummy inputs. ``listed`` is their place in a list, if they are in one.
    """

    name: str
    path: str
    key: Key
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "random"
    static_shapes: bool = True
    listed: Listed | None = None

    def place(self, name: str) -> Key:
        """The place of ``dims`` or ``shapes`` in the configuration: of its table in a list, if it has one."""
        if self.listed is not None and self.listed.name == name:
            return self.key / name / self.listed.index
        return self.key / name


@dataclass(frozen=True)
class ModelFacts:
    """Facts of an ONNX file: inputs and outputs with what the configuration fixes, and the files that
    hold its external data, relative to its folder, with forward slashes.

    ``own_inputs`` are those of the file itself; ``constants`` are the values that the configuration
    gives inputs, each with its dtype and shape.
    """

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    external_data: tuple[str, ...]
    own_inputs: tuple[TensorFacts, ...] = ()
    constants: tuple[TensorFacts, ...] = ()


@dataclass(frozen=True)
class TargetSpec:
    """What a worker needs to know of a target: its settings, and where the EP's library is."""

    name: str
    settings: CompileSettings
    plugin: Plugin | None
    load_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """A node that no context covers, and the reason, if it is known."""

    name: str
    op: str
    reason: str | None = None


class CoverageStatus(Enum):
    """Whether a context model leaves nodes to the CPU."""

    WHOLE = "whole"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Coverage:
    """How many of the prepared graph's ``nodes`` are inside the ``partitions`` EPContext nodes."""

    nodes: int
    compiled: int
    partitions: int
    uncovered: tuple[NodeFacts, ...] = ()

    @property
    def share(self) -> float:
        """The part of the nodes that is compiled, from 0 to 1."""
        return self.compiled / self.nodes if self.nodes else 0.0

    @property
    def status(self) -> CoverageStatus:
        """Whether nodes are left to the CPU."""
        return CoverageStatus.PARTIAL if self.uncovered else CoverageStatus.WHOLE


@dataclass(frozen=True)
class Context:
    """One model of an artifact. ``coverage`` is None for an optimized graph, which has no contexts."""

    model: str
    model_file: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    coverage: Coverage | None = None
    compatibility: str = ""
    ep_sdk_version: str = ""


@dataclass(frozen=True)
class CheckReply:
    models: tuple[ModelFacts, ...]


@dataclass(frozen=True)
class ModelProfiles:
    """Optimization profiles for ``model``; ``key`` is their place in the configuration.

    ``static_shapes``: whether the target that has them fixes dims and shapes.
    """

    model: str
    key: Key
    profiles: tuple[Profile, ...]
    static_shapes: bool = True


@dataclass(frozen=True)
class CheckRequest(Request[CheckReply], action="check"):
    """Read the models, and check that they fit their configuration.

    ``static``: the names of models whose shapes must be fixed, each with the EP that needs it; ``left_open``:
    those that get such an EP, although their target leaves shapes open. ``profiles``: the optimization
    profiles that must fit the models' inputs.
    """

    models: tuple[ModelSpec, ...]
    static: Mapping[str, str]
    profiles: tuple[ModelProfiles, ...] = ()
    left_open: Mapping[str, str] = field(default_factory=dict)


Simplifier = Literal["onnxruntime", "onnxslim", "none"]

SIMPLIFIERS: tuple[Simplifier, ...] = ("onnxruntime", "onnxslim", "none")
"""The libraries that simplify a graph, in the order in which they are tried.

ONNX Runtime is the most reliable: of the 1441 of ONNX's own test models that ONNX Runtime 1.31 can
run, its basic optimizations broke none, and onnxslim 0.1 about a hundred. But it crashes on some
models with constant conditions, which onnxslim takes.
"""


@dataclass(frozen=True)
class PrepareReply:
    """The absolute path of the prepared model, its nodes, and those of the source with its shapes.

    ``control_flow``: operators of the prepared model that choose or repeat other graphs.
    ``bounds``: for inputs that are indices, the number of things that they choose from. ``reference``: the
    absolute path of the outputs of the source model on the CPU, if they were compared and fit into a file.
    """

    path: str
    nodes_before: int
    nodes: int
    control_flow: tuple[str, ...]
    bounds: Mapping[str, int] = field(default_factory=dict)
    reference: str | None = None


@dataclass(frozen=True)
class PrepareRequest(Request[PrepareReply], action="prepare"):
    """Fix and simplify a model into ``folder``, which exists and is empty.

    With ``compare`` the result is compared with the source on the CPU.
    """

    model: ModelSpec
    simplifier: Simplifier
    folder: str
    compare: bool


@dataclass(frozen=True)
class CompileReply:
    product: Product
    contexts: tuple[Context, ...]
    seconds: float


@dataclass(frozen=True)
class CompileRequest(Request[CompileReply], action="compile"):
    """Compile a job's prepared models into ``folder``, which exists and is empty.

    Several models are compiled in order, in one process, and share one sidecar.
    """

    models: tuple[ModelSpec, ...]
    prepared: tuple[str, ...]
    target: TargetSpec
    folder: str


@dataclass(frozen=True)
class CompileBytesReply:
    """The size of the context model in bytes."""

    size: int


@dataclass(frozen=True)
class CompileBytesRequest(Request[CompileBytesReply], action="compile_bytes"):
    """Compile the ONNX file ``model`` from memory to memory, and write the context model to ``result``.

    ``data``: the files of its external data, by the location that the model has for each.
    """

    model: str
    data: Mapping[str, str]
    target: TargetSpec
    result: str


@dataclass(frozen=True)
class Agreement:
    """How near one output is to the CPU EP's: the largest absolute difference and the cosine similarity.

    ``cosine`` is None for an output so near to zero that its direction is only rounding.
    """

    output: str
    max_abs: float
    cosine: float | None


@dataclass(frozen=True)
class ValidateReply:
    """``agreements`` is empty where nothing was compared; ``load``: seconds to open the context's file,
    when the EP's libraries are loaded already.

    ``unavailable`` is the reason why an optimized graph ran on the CPU EP instead of its own; None
    where the target's EP ran the artifact.
    """

    agreements: tuple[Agreement, ...]
    unavailable: str | None = None
    load: float | None = None


@dataclass(frozen=True)
class ValidateRequest(Request[ValidateReply], action="validate"):
    """Load and run ``context`` (in ``folder``, a moved copy of the artifact) on dummy inputs, and
    compare with the CPU EP on the source model unless ``tolerance`` is None.

    ``sharing``: all members of the context's weight-sharing group, in order; empty without a group.
    ``has_source``: whether ``model`` is the source; if not, there is nothing to compare with.
    ``reference``: the source model's outputs on the same inputs, if a `PrepareReply` has them.
    """

    model: ModelSpec
    target: TargetSpec
    product: Product
    context: Context
    folder: str
    tolerance: Tolerance | None
    sharing: tuple[Context, ...] = ()
    has_source: bool = True
    reference: str | None = None


@dataclass(frozen=True)
class OpenReply:
    """Seconds to open the model and for the first inference, and the peak of memory after opening in
    bytes; None where the system does not report it.
    """

    load: float
    first: float
    memory: int | None


@dataclass(frozen=True)
class OpenRequest(Request[OpenReply], action="open"):
    """Open the model at ``path`` on ``target``, from a ``buffer`` or from disk, and run it once.

    ``product`` is None for a prepared source model. ``inputs`` are the model's, ``model`` describes
    the dummy inputs, and ``bounds`` are those of its indices.
    """

    path: str
    target: TargetSpec
    product: Product | None
    buffer: bool
    model: ModelSpec
    inputs: tuple[TensorFacts, ...]
    bounds: Mapping[str, int]


@dataclass(frozen=True)
class ContextFacts:
    """One EPContext node as it is written.

    ``sidecar`` is None where the blob is inside the model, or in another node. ``size`` is that of
    the sidecar or the embedded blob; ``sha256`` is the sidecar's, and None where the file is missing.
    """

    node: str
    source: str
    partition: str
    ep_sdk_version: str
    main: bool
    sidecar: str | None
    size: int
    sha256: str | None


@dataclass(frozen=True)
class InspectReply:
    """Facts of an ONNX file. ``operators``: how many of each there are, without contexts;
    ``external_data``: its files, and ``outside`` those outside of its folder; ``compatibility``:
    the compatibility string by EP.
    """

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    opsets: Mapping[str, int]
    operators: Mapping[str, int]
    contexts: tuple[ContextFacts, ...]
    external_data: tuple[str, ...]
    outside: tuple[str, ...]
    compatibility: Mapping[str, str]


@dataclass(frozen=True)
class InspectRequest(Request[InspectReply], action="inspect"):
    """Read the ONNX file at ``path``, compiled or not."""

    path: str


@dataclass(frozen=True)
class DevicesReply:
    """The ``devices`` of an EP on this machine in words, or the ``reason`` why there are none."""

    devices: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True)
class DevicesRequest(Request[DevicesReply], action="devices"):
    """Load the library of a provider, by its name, and list its devices."""

    provider: str


@dataclass(frozen=True)
class Refusal:
    """The answer instead of a reply; a problem with an empty location is about the request."""

    problems: tuple[Problem, ...]


DONE = 0
REFUSED = 3
"""The worker's exit code when the model or its configuration is invalid."""
FAILED = 4
"""The worker's exit code when ONNX Runtime or the EP failed: its log may have more."""
VERBOSE = "--verbose"
"""The worker's argument when ONNX Runtime prints its whole log."""
MEMORY_LIMIT = "--memory-limit="
"""The beginning of the worker's argument with the bytes of memory that it may use."""

"""What crosses the process border: one request in, one reply out, both JSON files.

Paths are absolute. Shapes are lists of sizes; an open dimension is its name, or None if it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hatch_epcontext.errors import Problem
from hatch_epcontext.providers import Plugin, Product, Profile, Tolerance

Size = int | str | None

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes that a file of protobuf's can have, and so an ONNX file without its external data."""


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
    def words(self) -> str:
        """The shape as a message has it, such as ``"batch x 3 x ?"``."""
        return " x ".join("?" if size is None else str(size) for size in self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """A source model, what its configuration freezes, and its dummy inputs; ``key`` is where it stands."""

    name: str
    path: str
    key: str
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "random"


@dataclass(frozen=True)
class ModelFacts:
    """What an ONNX file says: inputs and outputs as they will be once dims, shapes and constants are
    fixed, and the files that hold its external data, relative to its folder, with forward slashes.
    """

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    external_data: tuple[str, ...]


@dataclass(frozen=True)
class TargetSpec:
    """What a worker needs to know of a target."""

    name: str
    provider: str
    ep: str
    plugin: Plugin | None
    provider_options: Mapping[str, str]
    session_options: Mapping[str, str]
    load_options: Mapping[str, str]
    device: Literal["npu", "gpu", "cpu", "any"]
    device_filter: Mapping[str, str]
    policy: str | None
    virtual_devices: bool
    optimization: Literal["none", "basic", "extended", "all"]
    embed: bool
    in_memory: bool = False
    external_initializers: int | None = None


@dataclass(frozen=True)
class NodeFacts:
    """A node that was left to the CPU, and why, if that is known."""

    name: str
    op: str
    reason: str = ""


@dataclass(frozen=True)
class Coverage:
    """How many of the prepared graph's ``nodes`` are inside the ``partitions`` EPContext nodes."""

    nodes: int
    compiled: int
    partitions: int
    left: tuple[NodeFacts, ...] = ()

    @property
    def share(self) -> float:
        return self.compiled / self.nodes if self.nodes else 0.0


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
class InspectReply:
    models: tuple[ModelFacts, ...]


@dataclass(frozen=True)
class ModelProfiles:
    """Optimization profiles for ``model``; ``key`` is where they stand in the configuration."""

    model: str
    key: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class InspectRequest:
    """Read the models and say what is wrong with them. ``static``: names of those whose shapes must be
    fixed, each with the provider that needs it; ``profiles``: what has to fit their inputs.
    """

    models: tuple[ModelSpec, ...]
    static: Mapping[str, str]
    profiles: tuple[ModelProfiles, ...] = ()

    action: ClassVar[str] = "inspect"
    reply: ClassVar[type] = InspectReply


Folding = Literal["onnxruntime", "onnxslim", "none"]
"""Ways of preparing a model, from the strongest to the gentlest, by the library that folds its graph.

The first is the most reliable: of the 1441 of ONNX's own test models that ONNX Runtime 1.31 can run at
all, its basic optimizations broke none, and onnxslim 0.1 about a hundred. But they crash on some models
with constant conditions, which onnxslim takes.
"""

FOLDINGS: tuple[Folding, ...] = ("onnxruntime", "onnxslim", "none")


@dataclass(frozen=True)
class PrepareReply:
    """The prepared model, absolute; its nodes and those of the source with its shapes fixed.

    ``control_flow``: operators of the prepared one that choose or repeat other graphs.
    """

    path: str
    nodes_before: int
    nodes: int
    control_flow: tuple[str, ...]
    bounds: Mapping[str, int] = field(default_factory=dict)
    """For inputs that choose among things by an index: how many there are."""


@dataclass(frozen=True)
class PrepareRequest:
    """Fix and fold a model into ``folder``, which exists and is empty.

    What comes out is compared with the source on the CPU if ``compare``.
    """

    model: ModelSpec
    folding: Folding
    folder: str
    compare: bool

    action: ClassVar[str] = "prepare"
    reply: ClassVar[type] = PrepareReply


@dataclass(frozen=True)
class CompileReply:
    product: Product
    contexts: tuple[Context, ...]
    seconds: float


@dataclass(frozen=True)
class CompileRequest:
    """Compile a job's prepared models into ``folder``, which exists and is empty.

    Several models are compiled in order, in one process, and share one sidecar.
    """

    models: tuple[ModelSpec, ...]
    prepared: tuple[str, ...]
    target: TargetSpec
    folder: str

    action: ClassVar[str] = "compile"
    reply: ClassVar[type] = CompileReply


@dataclass(frozen=True)
class Agreement:
    """How near one output is to the CPU EP's: the largest absolute difference and the cosine similarity.

    ``cosine`` is None for an output that is so near to zero that its direction is rounding.
    """

    output: str
    max_abs: float
    cosine: float | None


@dataclass(frozen=True)
class ValidateReply:
    """``agreements`` is empty when nothing was to be compared.

    ``absent`` says why the target's EP has no device here, and "" when it ran the artifact; then an
    optimized graph was run on the CPU EP, and a context was not run at all.
    """

    agreements: tuple[Agreement, ...]
    absent: str = ""


@dataclass(frozen=True)
class ValidateRequest:
    """Load and run ``context`` (in ``folder``, a moved copy of the artifact) on dummy inputs, and
    compare with the CPU EP on the source model unless ``tolerance`` is None.
    """

    model: ModelSpec
    target: TargetSpec
    product: Product
    context: Context
    folder: str
    tolerance: Tolerance | None
    sharing: tuple[Context, ...] = ()
    """All members of the context's weight-sharing group, in order; empty if it is in none."""
    has_source: bool = True
    """Whether ``model`` is the source; if not, there is nothing to compare with."""

    action: ClassVar[str] = "validate"
    reply: ClassVar[type] = ValidateReply


@dataclass(frozen=True)
class MeasureReply:
    """Seconds that a session on the target took to open, in one process, one after the other."""

    load_source: float
    load_context: float


@dataclass(frozen=True)
class MeasureRequest:
    """Open the prepared model and ``context`` (in ``folder``) on the target."""

    prepared: str
    target: TargetSpec
    product: Product
    context: Context
    folder: str

    action: ClassVar[str] = "measure"
    reply: ClassVar[type] = MeasureReply


@dataclass(frozen=True)
class OpenReply:
    """Seconds for opening and for the first inference, and the peak of memory after opening in bytes.

    ``memory`` is None where the system does not tell.
    """

    load: float
    first: float
    memory: int | None


@dataclass(frozen=True)
class OpenRequest:
    """Open the model at ``path`` on ``target``, from a ``buffer`` or from disk, and run it once.

    ``product`` is None for a prepared source model. ``inputs`` are those of the model, ``model`` says
    what to feed, and ``bounds`` are those of its indices.
    """

    path: str
    target: TargetSpec
    product: Product | None
    buffer: bool
    model: ModelSpec
    inputs: tuple[TensorFacts, ...]
    bounds: Mapping[str, int]

    action: ClassVar[str] = "open"
    reply: ClassVar[type] = OpenReply


@dataclass(frozen=True)
class ContextFacts:
    """One EPContext node, as it is written.

    ``sidecar`` is "" where the blob is inside, or in another node; ``size`` and ``sha256`` are the
    sidecar's, and "" where that is not there, or the size of the blob inside.
    """

    node: str
    source: str
    partition: str
    ep_sdk_version: str
    main: bool
    sidecar: str
    size: int
    sha256: str


@dataclass(frozen=True)
class DescribeReply:
    """What an ONNX file says. ``operators``: how many of each there are, contexts excepted;
    ``external_data``: its files, and ``outside`` those that lead out of its folder; ``compatibility``:
    by EP.
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
class DescribeRequest:
    """Read the ONNX file at ``path``, whoever made it."""

    path: str

    action: ClassVar[str] = "describe"
    reply: ClassVar[type] = DescribeReply


@dataclass(frozen=True)
class SurveyReply:
    """What this machine has for one EP: its ``devices`` in words, and if there are none ``why``."""

    devices: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class SurveyRequest:
    """Load the library of a provider, by name, and list its devices."""

    provider: str

    action: ClassVar[str] = "survey"
    reply: ClassVar[type] = SurveyReply


@dataclass(frozen=True)
class Refusal:
    """The answer in place of a reply; a problem without a place is about the request as a whole."""

    problems: tuple[Problem, ...]


Request = (
    InspectRequest
    | PrepareRequest
    | CompileRequest
    | ValidateRequest
    | MeasureRequest
    | OpenRequest
    | DescribeRequest
    | SurveyRequest
)
REQUESTS = {
    request.action: request
    for request in (
        InspectRequest,
        PrepareRequest,
        CompileRequest,
        ValidateRequest,
        MeasureRequest,
        OpenRequest,
        DescribeRequest,
        SurveyRequest,
    )
}

DONE = 0
REFUSED = 3
"""The worker's exit code when the model or its configuration is at fault."""
FAILED = 4
"""The worker's exit code when ONNX Runtime or the EP failed: its log may say more."""
VERBOSE = "--verbose"
"""The worker's last argument when all is to be told that ONNX Runtime has to say."""

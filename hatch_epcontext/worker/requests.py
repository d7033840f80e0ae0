"""The process border: the requests to workers and their replies, each one line of JSON (see `protocol`).

What they carry is in `results`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar, get_args

from hatch_epcontext.config.genai_config import Genai
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.config.tables import Dequantize, QuantizedType
from hatch_epcontext.errors import Key, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Declined, Range, TensorFacts
from hatch_epcontext.graph.number_format import RewriteName
from hatch_epcontext.graph.operators import StaticFormat
from hatch_epcontext.providers import Plugin, Tolerance
from hatch_epcontext.worker.results import (
    Answer,
    Context,
    ModelFacts,
    Nearness,
    Preparation,
    Simplifier,
    Validated,
)

ReplyT = TypeVar("ReplyT")

REQUESTS: dict[str, type[WorkerRequest[Any]]] = {}
"""The requests by their action."""


class WorkerRequest(Generic[ReplyT]):
    """A request that a worker answers with a `ReplyT`.

    A subclass names its action, which is also the module of `hatch_epcontext.worker.actions` whose
    ``handle`` answers it, and the field ``fills`` with the folder that this writes into.
    """

    action: ClassVar[str]
    fills: ClassVar[str]
    reply_type: ClassVar[type[Any]]

    def __init_subclass__(cls, action: str, fills: str = "") -> None:
        super().__init_subclass__()
        (base,) = (base for base in vars(cls)["__orig_bases__"] if get_args(base))
        cls.action, cls.fills, (cls.reply_type,) = action, fills, get_args(base)
        REQUESTS[action] = cls


@dataclass(frozen=True)
class CutReply:
    """``files``: the written model and its external data, by name in the folder; ``data``: the files of the
    external data of the whole model, by name in its own.
    """

    files: tuple[str, ...]
    data: tuple[str, ...]


@dataclass(frozen=True)
class CutRequest(WorkerRequest[CutReply], action="cut", fills="folder"):
    """Write the part of ``model`` that is kept, with its constants, into ``folder``, which is empty.

    ``with_defaults``: whether inputs with a default value become constants too.
    """

    model: Model
    folder: str
    with_defaults: bool = False


@dataclass(frozen=True)
class CheckRequest(WorkerRequest[tuple[ModelFacts, ...]], action="check"):
    """Read the models, and check that they fit their configuration and can be compiled for their targets."""

    models: tuple[Model, ...]


@dataclass(frozen=True)
class Prepared:
    """A prepared model, and its absolute path.

    ``ranges``: those of the inputs, if dummy inputs are random. ``reference``: the absolute path of the file
    with the outputs of the source model on the CPU, if they were compared and fit into one. ``applicable``:
    the rewrites for a number format that may change it; ``unrolls``: whether it has loops or layers that are
    unrolled. ``changed``: whether the request that made it changed the model. ``dropped``: the rewrites that
    this left out because they were wrong, each with the reason; ``declined``: why others left nodes as
    they are. ``quantized``: the format of its static quantization.
    """

    preparation: Preparation
    path: str
    ranges: Mapping[str, Range] = field(default_factory=dict)
    reference: str | None = None
    applicable: tuple[RewriteName, ...] = ()
    unrolls: bool = True
    changed: bool = True
    dropped: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()
    quantized: StaticFormat | None = None


@dataclass(frozen=True)
class PrepareRequest(WorkerRequest[Prepared], action="prepare", fills="folder"):
    """Fix and simplify a model into ``folder``, which exists and is empty.

    With ``compare`` the result is compared with the source on the CPU, whose outputs are in the file
    ``reference``, if an earlier `Prepared` has one. ``dequantize`` and ``quantize``, with the data in the
    file ``calibration``: as in `CompileSettings`; then the result may differ by ``tolerance``. Without
    ``fuse`` nothing is folded into the weights of convolutions. ``emulated``: whether a validation emulates a
    number format on the samples of the reference, for which it has more of them.
    """

    model: Model
    simplifier: Simplifier
    folder: str
    compare: bool
    reference: str | None = None
    dequantize: Dequantize | None = None
    quantize: QuantizedType | None = None
    calibration: str = ""
    tolerance: Tolerance | None = None
    fuse: bool = True
    emulated: bool = True


@dataclass(frozen=True)
class RewriteRequest(WorkerRequest[Prepared], action="rewrite", fills="folder"):
    """Rewrite the model ``before``, which was made of ``model``, for an EP.

    ``nodes``: the names of those to change, which the EP does not compile, or computes wrong; None for all.
    What a rewrite adds may be changed too. The result is simplified with ``simplify``, and compared with the
    source on the CPU if ``before`` has a reference. ``folder`` exists and is empty. ``tolerance``: how far it
    may differ if its numbers were changed before. With an ``unroll_limit`` loops and layers of known length
    are unrolled instead, up to that many nodes. With ``corrections``, the ids of rewrites for accuracy, only
    these are applied. ``faults``: those that the EP needs in any number format. With ``leaves`` the ``nodes``
    become such that the EP leaves them to the CPU.
    """

    model: Model
    before: Prepared
    nodes: tuple[str, ...] | None
    folder: str
    simplify: bool
    tolerance: Tolerance | None = None
    unroll_limit: int | None = None
    corrections: tuple[RewriteName, ...] = ()
    faults: tuple[RewriteName, ...] = ()
    leaves: bool = False


@dataclass(frozen=True)
class CompileReply:
    contexts: tuple[Context, ...]
    seconds: float


@dataclass(frozen=True)
class CompileRequest(WorkerRequest[CompileReply], action="compile", fills="folder"):
    """Compile a job's prepared models into ``folder``, which exists and is empty.

    Several models are compiled in order, in one process, and share one sidecar. ``buffers``, if given: files
    of the external data of one model, which is compiled from memory to memory and not read back, by the
    location that the model has for each.
    """

    models: tuple[Model, ...]
    prepared: tuple[str, ...]
    target: Target
    folder: str
    buffers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ValidateRequest(WorkerRequest[Validated], action="validate"):
    """Load and run ``context`` (in ``folder``, away from where it was compiled) on dummy inputs, and
    compare with the ``reference`` unless ``tolerance`` is None.

    ``sharing``: all members of the context's weight-sharing group, in order; empty without a group.
    ``reference`` and ``ranges``: those of a `Prepared` of the same source and inputs, if there is one.
    ``prepared``: the absolute path of the model that was compiled, if it is to be emulated. ``to_beat``: how
    near another recipe is, which wins unless this one is nearer. ``is_brief``: whether the target runs one
    sample of a large model instead of two. ``core``: the number of the core to stay on, as others need the
    other ones; None for all.
    """

    model: Model
    target: Target
    context: Context
    folder: str
    tolerance: Tolerance | None
    sharing: tuple[Context, ...] = ()
    reference: str | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    prepared: str | None = None
    to_beat: Nearness | None = None
    is_brief: bool = False
    core: int | None = None


@dataclass(frozen=True)
class ConverseRequest(WorkerRequest[tuple[Answer, ...]], action="converse"):
    """Answer prompts with the language model ``genai`` in ``folder``, a copy with what was compiled.

    ``overlay``: of its genai_config.json, with which it runs that on the EP in the library ``plugin``.
    """

    folder: str
    genai: Genai
    overlay: str
    plugin: Plugin


@dataclass(frozen=True)
class OpenFolderRequest(WorkerRequest[str], action="open_folder"):
    """Read the ``files`` of ``folder``, that of the language model ``genai``, and let it answer on the CPU.

    The reply: what apps lack, or why it was not opened; empty for nothing. ``key``: that of the folder.
    ``runs``: whether it has to answer, or only its tokenizer is read.
    """

    folder: str
    files: tuple[str, ...]
    genai: Genai
    key: Key
    runs: bool


@dataclass(frozen=True)
class TimeOpeningReply:
    """Seconds to open the model, for the first inference, and for each one after the warm-up.

    ``simulated``: whether a simulator stood in for the target's device.
    """

    load: float
    first: float
    later: tuple[float, ...]
    simulated: bool


@dataclass(frozen=True)
class TimeOpeningRequest(WorkerRequest[TimeOpeningReply], action="time_opening"):
    """Open the model at ``path`` on ``target``, run it once, and after a warm-up ``runs`` times.

    ``target`` is None for the source model on the CPU; ``compiled``: whether the model is its artifact;
    ``from_buffer``: whether it is opened from bytes that were read before. On a simulator it runs once.
    ``inputs`` are the model's, and ``model`` describes the dummy inputs, which are within ``ranges``.
    """

    path: str
    target: Target | None
    compiled: bool
    from_buffer: bool
    model: Model
    inputs: tuple[TensorFacts, ...]
    ranges: Mapping[str, Range]
    runs: int


@dataclass(frozen=True)
class ContextFacts:
    """One EPContext node.

    ``sidecar``: None if the blob is inside the model, or in another node.
    ``size``: that of the sidecar or of the embedded blob; ``header``: its first 64 bytes in hexadecimal.
    ``sha256``: that of the sidecar; None if the file is missing.
    """

    node: str
    source: str
    partition: str
    ep_sdk_version: str
    main: bool
    sidecar: str | None
    size: int
    header: str
    sha256: str | None


@dataclass(frozen=True)
class InspectReply:
    """Facts of an ONNX file.

    ``operators``: how many of each there are, without contexts.
    ``external_data``: its files; ``outside``: those outside its folder.
    ``compatibility``: the compatibility string by EP.
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
class InspectRequest(WorkerRequest[InspectReply], action="inspect"):
    """Read the ONNX file at ``path``, compiled or not."""

    path: str


@dataclass(frozen=True)
class SuggestedConstant:
    """An input that can be a constant; ``needed``: whether it chooses between graphs inside the model."""

    input: str
    value: int
    note: str
    needed: bool = False


@dataclass(frozen=True)
class SuggestReply:
    """The axes of open batches of a model's inputs, by their names, and the inputs that can be constants."""

    batches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: tuple[SuggestedConstant, ...] = ()


@dataclass(frozen=True)
class SuggestRequest(WorkerRequest[SuggestReply], action="suggest"):
    """Suggest a configuration for the ONNX file at ``path``."""

    path: str


@dataclass(frozen=True)
class EpDevice:
    """A device that ``ep`` offers. ``kind``: ``"cpu"``, ``"gpu"`` or ``"npu"``; ``text``: a description.

    ``vendor`` and ``metadata`` are those of the hardware and the EP; ``hardware``: the numbers of the vendor
    and the device on PCI, or 0. ``incompatible``: of the compatibility strings that were asked for, those of
    contexts that it cannot run, as the EP says.
    """

    ep: str
    kind: str
    text: str
    vendor: str = ""
    hardware: tuple[int, int] = (0, 0)
    metadata: Mapping[str, str] = field(default_factory=dict)
    incompatible: tuple[str, ...] = ()


@dataclass(frozen=True)
class Devices:
    """What an EP's library offers on this machine, and the ``reason`` why it offers nothing, or why it cannot
    compile although it offers something.

    ``is_all``: whether an app that registers the library itself finds no other devices.
    """

    devices: tuple[EpDevice, ...] = ()
    reason: str | None = None
    is_all: bool = False


@dataclass(frozen=True)
class Runtime:
    """The ONNX Runtime that is installed: its version, and the EPs that are part of it.

    ``lists_devices``: whether it has plugin EPs, whose devices it lists.
    """

    version: str
    eps: tuple[str, ...]
    lists_devices: bool


@dataclass(frozen=True)
class DevicesReply:
    """ONNX Runtime, and the devices of each provider that was asked for."""

    runtime: Runtime
    devices: Mapping[str, Devices]


@dataclass(frozen=True)
class DevicesRequest(WorkerRequest[DevicesReply], action="devices"):
    """Load the libraries of ``providers``, by their names, and list their devices.

    ``compatibility``: the strings of contexts, by provider, about which its EP is asked.
    """

    providers: tuple[str, ...]
    compatibility: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LibraryRequest(WorkerRequest[Mapping[str, Devices]], action="library"):
    """Load the unknown library of an EP, at its ``path`` or in its package ``module``, and list its devices.

    The key of the reply is the name under which it was registered.
    """

    path: str = ""
    module: str = ""


@dataclass(frozen=True)
class Trial:
    """What an EP does with a small model, on one device.

    ``opset``: the newest one with which it compiles that into an EP context; None if it compiles none, for
    the ``reason``. ``runs``: whether a session then runs the whole model on the EP all the same.
    """

    opset: int | None = None
    reason: str = ""
    runs: bool = False


@dataclass(frozen=True)
class TrialRequest(WorkerRequest[Trial], action="trial"):
    """Compile a small model with the library of ``plugin``, on the device at this position of those that it
    offers, with the EP's ``options``.
    """

    plugin: Plugin
    device: int
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The answer to a request that failed: the name of the error's class, and its problems.

    A problem with an empty location is about the request.
    """

    error: str
    problems: tuple[Problem, ...]

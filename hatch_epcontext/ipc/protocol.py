"""The process border: one request in, one reply out, both JSON files.

What they carry is in `facts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

from hatch_epcontext.errors import Key, Problem
from hatch_epcontext.ipc.facts import (
    Agreement,
    Context,
    ModelFacts,
    ModelSpec,
    NodeFacts,
    Simplifier,
    TargetSpec,
    TensorFacts,
)
from hatch_epcontext.providers import Product, Profile, Tolerance
from hatch_epcontext.text import count

ReplyT = TypeVar("ReplyT")

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

    def misfit(self, reply: ReplyT) -> str | None:
        """Why ``reply``, which has the right type, cannot be the answer to this request; None if it can."""
        return None


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
class ContextTarget:
    """A target that compiles ``model`` into contexts, by its name, its ``provider`` and its place.

    ``min_coverage``: the part of the nodes that must be inside contexts, from 0 to 1.
    """

    model: str
    target: str
    provider: str
    key: Key
    min_coverage: float


@dataclass(frozen=True)
class CheckRequest(Request[CheckReply], action="check"):
    """Read the models, and check that they fit their configuration.

    ``static``: the names of models whose shapes must be fixed, each with the EP that needs it; ``left_open``:
    those that get such an EP, although their target leaves shapes open. ``profiles``: the optimization
    profiles that must fit the models' inputs. ``contexts``: the targets whose EP must be able to compile
    the models.
    """

    models: tuple[ModelSpec, ...]
    static: Mapping[str, str]
    profiles: tuple[ModelProfiles, ...] = ()
    left_open: Mapping[str, str] = field(default_factory=dict)
    contexts: tuple[ContextTarget, ...] = ()

    def misfit(self, reply: CheckReply) -> str | None:
        if len(reply.models) == len(self.models):
            return None
        return f"it is about {count(len(reply.models), 'model')} instead of {len(self.models)}"


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

    def misfit(self, reply: PrepareReply) -> str | None:
        return _misfit_files(self.folder, filter(None, (reply.path, reply.reference)))


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

    def misfit(self, reply: CompileReply) -> str | None:
        found = [context.model for context in reply.contexts]
        if found != [model.name for model in self.models]:
            return "it is about other models"
        files = (str(Path(self.folder, context.model_file)) for context in reply.contexts)
        return _misfit_files(self.folder, files)


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
class PreviewReply:
    """What is known of a model and a target before anything is compiled.

    ``nodes``: the number of nodes that depend on the values of inputs; ``refused``: those of them that the
    EP leaves to the CPU, as far as the package knows. ``problems``: why a build would refuse the model, and
    what to set.
    """

    nodes: int
    refused: tuple[NodeFacts, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class PreviewRequest(Request[PreviewReply], action="preview"):
    """Find what the EP of ``target`` cannot compile of ``model``, from its file alone."""

    model: ModelSpec
    target: ContextTarget


@dataclass(frozen=True)
class AskReply:
    """The number of ``nodes`` of the optimized graph, and those that the EP itself refuses."""

    nodes: int
    refused: tuple[NodeFacts, ...]


@dataclass(frozen=True)
class AskRequest(Request[AskReply], action="ask"):
    """Ask the EP of ``target`` which nodes of ``model`` it refuses, and compile nothing.

    ``folder`` exists and is empty.
    """

    model: ModelSpec
    target: TargetSpec
    folder: str


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


def _misfit_files(folder: str, paths: Iterable[str]) -> str | None:
    """Why the files ``paths`` cannot be those that a worker wrote into ``folder``; None if they can."""
    for path in paths:
        try:
            inside = Path(path).resolve(strict=True).is_relative_to(Path(folder).resolve())
        except (OSError, ValueError):
            inside = False
        if not inside:
            return f"it names {path[:200]!r}, which is no file in the folder of the step"
    return None


DONE = 0
REFUSED = 3
"""The worker's exit code when the model or its configuration is invalid."""
FAILED = 4
"""The worker's exit code when ONNX Runtime or the EP failed: its log may have more."""
VERBOSE = "--verbose"
"""The worker's argument when ONNX Runtime prints its whole log."""
END_WITH_INPUT = "--end-with-input"
"""The worker's argument when it must end, with all that it started, at the end of its standard input."""
MEMORY_LIMIT = "--memory-limit="
"""The beginning of the worker's argument with the bytes of memory that it may use."""

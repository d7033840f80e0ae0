"""Compile and optimize models with ONNX Runtime, and explain its errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import (
    BuildError,
    EpcontextError,
    Key,
    Kind,
    LibraryError,
    ModelError,
    Problem,
    RefusedError,
    Setting,
    UnavailableError,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.bodies import keep_weights, move_weights, remove_readers
from hatch_epcontext.graph.builder import renamed, restore_inlined
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.providers import Provider, missing
from hatch_epcontext.worker.reasons import refused_nodes
from hatch_epcontext.worker.session import (
    LEVELS,
    MIN_EXTERNAL,
    cpu_options,
    near,
    open_session,
    options,
)
from hatch_epcontext.worker.source import on_conditions

_CHANGE = "Change the model there, or keep only the part before or after it with cut (not tried)."


def compile_context(
    prepared: Path,
    result: Path,
    target: Target,
    session_options: Mapping[str, str] | None = None,
    model: Model | None = None,
) -> None:
    """Compile ``prepared`` into the context model ``result``, with its sidecars beside it.

    ``session_options`` are added to the target's; ``model``: the source model, for advice. Raises BuildError
    with an explanation of the EP's error, if there is one.
    """
    provider = target.provider
    key = None if model is None else model.key
    refused = partial(refused_nodes, prepared, target)
    with explaining(provider, lambda: _graph(prepared), key, refused):
        try:
            _compile(prepared, result, target, session_options or {})
        except Exception as error:
            if not (
                _BODY.search(str(error))
                and _compile_with_bodies(prepared, result, target, session_options or {})
            ):
                raise
    if not result.is_file():
        raise _nothing_compiled(provider, _graph(prepared), key, refused)


def _compile(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> None:
    provider = target.provider
    if target.settings.from_memory:
        loaded = onnx.load(prepared, load_external_data=False)
        data = {
            name: (prepared.parent / name).read_bytes()
            for name in external_data(loaded, prepared, prepared.name)
        }
        result.write_bytes(compile_buffers(prepared.read_bytes(), data, target, session_options))
    elif own := provider.own_context_options(near(result), target.settings.embed):
        provider_options = {**target.settings.provider_options, **own}
        _with_session(prepared, options(target, provider_options, session_options), target)
    else:
        _with_model_compiler(prepared, result, target, session_options)


def _compile_with_bodies(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> bool:
    """Compile ``prepared``, whose bodies of control flow lose weights otherwise; False if they read none."""
    model = onnx.load(prepared, load_external_data=False)
    if not (readers := keep_weights(model)):
        return False
    # Beside the external data, under a name that is the same in all builds: an EP may write it.
    kept = prepared.with_name(f"{prepared.stem}.bodies.onnx")
    with temp_dir(prepared.parent) as folder:
        onnx.save(model, folder / kept.name)
        (folder / kept.name).replace(kept)
    _compile(kept, result, target, session_options)
    if result.is_file():
        context = onnx.load(result, load_external_data=False)
        remove_readers(context, readers)
        onnx.save(context, result)
    return True


_BODY = re.compile("topologically sorted|in-memory address marker")
"""ONNX Runtime's errors about weights of inner graphs that it lost, or cannot write: see `bodies`."""


def compile_buffers(
    model: bytes,
    data: Mapping[str, bytes],
    target: Target,
    session_options: Mapping[str, str] | None = None,
) -> bytes:
    """Return the context model of ``model``, an ONNX file's contents, with the compiled blob inside.

    ``data``: the contents of its external data files, by their locations in the model. ``session_options``
    are added to the target's.
    """
    result = options(target, target.settings.provider_options, session_options)
    if data:
        result.add_external_initializers_from_files_in_memory(
            list(data), list(data.values()), [len(contents) for contents in data.values()]
        )
    compiler = ort.ModelCompiler(
        result,
        model,
        # Embedded: ONNX Runtime would otherwise write a sidecar beside the source model.
        embed_compiled_data_into_model=True,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        graph_optimization_level=LEVELS[target.settings.optimization],
    )
    compiled: bytes = compiler.compile_to_bytes()
    return compiled


_FUSIONS = ("ConvAddFusion", "ConvBNFusion", "ConvMulFusion")
"""ONNX Runtime's names of the optimizers that fold other nodes into the weights of convolutions."""

_INSERTED = "InsertedPrecisionFreeCast_"
"""The prefix of the float32 form of a float16 value. ONNX Runtime uses it in each graph and optimization, and
refuses its own result if two names are equal."""


def optimize(
    source: Path,
    result: Path,
    level: str,
    target: Target | None = None,
    *,
    fuse: bool = True,
) -> ort.InferenceSession:
    """Write ``source`` to ``result`` as ONNX Runtime optimizes it for the EP of ``target``.

    Returns a session that runs the same graph. Without ``target`` it is optimized for no EP. ``level``:
    ``"none"`` or ``"basic"``, which are the same for all EPs and need only the CPU's; ``"extended"`` or
    ``"all"``, which insert operators that only that EP can run. External data stays external. Without
    ``fuse`` nothing is folded into the weights of convolutions. For EPs that do not compute float16,
    values of float16 become float32 between casts. Raises UnavailableError when the EP is needed and
    unavailable.
    """
    portable = target is None or level in ("none", "basic")
    if target is None or portable:
        session_options = cpu_options()
    else:
        session_options = options(target, target.settings.provider_options)
    session_options.graph_optimization_level = LEVELS[level]
    if not fuse:
        session_options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(_FUSIONS)
        )
    model = onnx.load(source, load_external_data=False)
    data = None
    if (target and target.settings.external_initializers) or external_data(
        model, source, source.name
    ):
        data = f"{result.stem}.data"
    keep_float16 = target is None or target.provider.computes_float16
    if portable and keep_float16 and graph.has_float16(model):
        _optimize_for_no_ep(source, result, level, session_options, data)
        restored = restore_inlined(model.graph, onnx.load(result, load_external_data=False))
        onnx.save(restored, result)
        _move_external(result, data)
        return open_session(result, session_options)
    session_options.optimized_model_filepath = near(result)
    if data is not None:
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", data
        )
    session = open_session(source, session_options)
    if _INSERTED.encode() in result.read_bytes():
        onnx.save(renamed(onnx.load(result, load_external_data=False), _INSERTED), result)
    _move_external(result, data)
    return session


def load_named(path: Path) -> onnx.ModelProto:
    """Load the model at ``path`` without its external data, and write it again if its nodes need names.

    An EP reports the nodes that it refuses by their names, which those that ONNX Runtime puts in the place of
    a function may lack.
    """
    model = onnx.load(path, load_external_data=False)
    if graph.name_nodes(model.graph):
        onnx.save(model, path)
    return model


def _move_external(result: Path, data: str | None) -> None:
    """Move the external tensors of bodies to the main graph of ``result``.

    In bodies ONNX Runtime refuses data with several hard links, which installers and caches make.
    """
    if data is None:
        return
    model = onnx.load(result, load_external_data=False)
    if move_weights(model):
        onnx.save(model, result)


def _optimize_for_no_ep(
    source: Path,
    result: Path,
    level: str,
    session_options: ort.SessionOptions,
    data: str | None,
) -> None:
    """Write ``source`` to ``result`` before ONNX Runtime inserts the casts that the CPU's kernels need.

    A session writes the graph after that; for an EP that compiles nothing its compiler writes it before.
    """
    compiler = ort.ModelCompiler(
        session_options,
        near(source),
        external_initializers_file_path=data,
        external_initializers_size_threshold=MIN_EXTERNAL,
        graph_optimization_level=LEVELS[level],
    )
    compiler.compile_to_file(near(result))


@contextlib.contextmanager
def explaining(
    provider: Provider,
    graph_of: Callable[[], onnx.GraphProto],
    key: Key | None = None,
    refused: Callable[[], str] = str,
) -> Iterator[None]:
    """Raise BuildError with an explanation instead of an error of ONNX Runtime or the EP.

    An error without a known explanation stays as it is. ``graph_of`` reads the graph that is compiled, and
    ``key`` is its model's place in the configuration, if it has one. ``refused`` says which nodes the EP
    refuses.
    """
    try:
        yield
    except EpcontextError:
        raise
    except Exception as error:
        explanation = _explanation(str(error), provider, graph_of(), key, refused)
        if explanation is None:
            raise
        raise explanation from error


def _with_model_compiler(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> None:
    settings = target.settings
    compiler = ort.ModelCompiler(
        options(target, settings.provider_options, session_options),
        near(prepared),
        embed_compiled_data_into_model=settings.embed,
        # Relative to the context model; ONNX Runtime accepts no other path.
        external_initializers_file_path=result.with_suffix(".data").name
        if settings.external_initializers
        else None,
        external_initializers_size_threshold=MIN_EXTERNAL,
        # By default it would write a plain copy of the model, and report success.
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        # By default it optimizes nothing, and EPs leave most real models to the CPU.
        graph_optimization_level=LEVELS[settings.optimization],
    )
    compiler.compile_to_file(near(result))


def _with_session(prepared: Path, session_options: ort.SessionOptions, target: Target) -> None:
    """Open a session whose EP itself writes the context model; no error if it compiles nothing."""
    session_options.graph_optimization_level = LEVELS[target.settings.optimization]
    open_session(prepared, session_options)


def _graph(prepared: Path) -> onnx.GraphProto:
    return onnx.load(prepared, load_external_data=False).graph


def _explanation(
    message: str,
    provider: Provider,
    source: onnx.GraphProto,
    key: Key | None,
    refused: Callable[[], str],
) -> BuildError | None:
    """The meaning of an error of ONNX Runtime or the EP; None if it is unknown."""
    if "Unable to compile any nodes" in message:
        return _nothing_compiled(provider, source, key, refused)
    if "NULL EPContext node" in message:
        message = (
            f"{provider.ep} compiled the model, but returns no EP contexts: it cannot compile ahead "
            "of time."
        )
        hint = (
            "Ship the source model, or its optimized graph with the cpu provider (not tried). This EP then "
            "compiles it on the user's machine."
        )
        return RefusedError(Problem(Kind.NOTHING_COMPILED, "", message, hint))
    if "unsupported with shared EP context" in message:
        message = f"{provider.ep} does not compile contexts for several chips that share weights."
        hint = "Give each chip a target of its own, or remove share-weights (not tried)."
        return ModelError(Problem(Kind.NOT_SHARED, "", message, hint))
    if library := missing(message):
        message = f"{provider.ep} cannot compile, because {library} is missing."
        return UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, library.advice))
    return _refused_graph(message, provider, source, key, refused)


def _refused_graph(
    message: str,
    provider: Provider,
    source: onnx.GraphProto,
    key: Key | None,
    refused: Callable[[], str],
) -> LibraryError | None:
    """The error of a graph that ONNX Runtime or the EP's compiler refuses, if a node is known."""
    settings: tuple[Setting, ...] = ()
    if words := provider.error_in_words(message):
        hint = _CHANGE
        if decides := on_conditions(source, key):
            # The node may be in a branch that never runs.
            hint, settings = f"{decides[0]} Or: {hint[0].lower()}{hint[1:]}", decides[1]
        return LibraryError(Problem(Kind.COMPILE_FAILED, "", words, hint, settings=settings))
    if nodes := refused():
        # The nodes that it leaves to the CPU may cause the failure, as by a type that they pass to the rest.
        reason = message.rsplit(" : ", 1)[-1].strip().rstrip(".")
        words = f"{provider.ep} failed: {reason}. {nodes}"
        return LibraryError(Problem(Kind.COMPILE_FAILED, "", words, _CHANGE))
    return None


def _nothing_compiled(
    provider: Provider,
    source: onnx.GraphProto,
    key: Key | None,
    refused: Callable[[], str],
) -> RefusedError:
    message = f"{provider.ep} compiled no node of the model."
    hint = (
        "Check that the target names a chip that the EP supports, and that the EP has the model's "
        "operators."
    )
    settings: tuple[Setting, ...] = ()
    if not Scope(source).counted:
        message += " None of them depends on an input: ONNX Runtime computes them all beforehand."
        hint = "Ship their results: the provider cpu stores them in its model."
    elif control := graph.control_flow(source):
        message += f" It has {' and '.join(control)}, which few EPs compile."
        hint, settings = on_conditions(source, key) or ("Remove them from the model.", ())
    if nodes := refused():
        message += f" {nodes}"
        if not settings:
            # If the EP gives reasons for its nodes, the chip is not the cause.
            hint = "Change the model at these nodes."
    return RefusedError(Problem(Kind.NOTHING_COMPILED, "", message, hint, settings=settings))

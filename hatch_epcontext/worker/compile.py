"""Prepared model -> artifact, and what the result says of itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, EpcontextError, Problem
from hatch_epcontext.protocol import (
    CompileReply,
    CompileRequest,
    TargetSpec,
)
from hatch_epcontext.providers import Provider, missing
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.readback import read_context, read_optimized
from hatch_epcontext.worker.session import LEVELS, open_session, options, provider_of


def compile_job(request: CompileRequest) -> CompileReply:
    """Compile the request's models into its folder, and read back what was made.

    Raises BuildError when the EP does not deliver what was asked for: no node compiled, another EP's
    context, another chip, a sidecar that is not there.
    """
    start = time.monotonic()
    provider, folder = provider_of(request.target), Path(request.folder)
    if len(request.models) > 1:
        from hatch_epcontext.worker.sharing import compile_group

        return CompileReply(provider.product, compile_group(request), time.monotonic() - start)
    contexts = []
    for spec, path in zip(request.models, request.prepared, strict=True):
        prepared = Path(path)
        result = folder / provider.result_file(spec.name)
        if provider.product == "context":
            compile_context(prepared, result, request.target)
            contexts.append(read_context(spec.name, prepared, result, request.target))
        else:
            optimize(prepared, result, request.target.optimization, request.target)
            contexts.append(read_optimized(spec.name, result))
    return CompileReply(provider.product, tuple(contexts), time.monotonic() - start)


def compile_context(
    prepared: Path,
    result: Path,
    target: TargetSpec,
    session_options: Mapping[str, str] | None = None,
) -> None:
    """Compile ``prepared`` into the context model ``result`` and what belongs beside it.

    ``session_options`` are more than the target's. Raises BuildError with what an error of the EP means.
    """
    provider = provider_of(target)
    try:
        if target.in_memory:
            data = {
                name: (prepared.parent / name).read_bytes()
                for name in graph.external_data(
                    onnx.load(prepared, load_external_data=False), prepared.parent, prepared.name
                )
            }
            result.write_bytes(compile_buffers(prepared.read_bytes(), data, target))
        elif provider.own_context_options is None:
            _with_model_compiler(prepared, result, target, session_options or {})
        else:
            own = provider.own_context_options(str(result), target.embed)
            _with_session(prepared, options(target, {**target.provider_options, **own}), target)
    except EpcontextError:
        raise
    except Exception as error:
        if (problem := explained(str(error), provider, _graph(prepared))) is None:
            raise
        raise BuildError(problem) from error
    if not result.is_file():
        raise BuildError(_nothing_compiled(provider, _graph(prepared)))


def compile_buffers(model: bytes, data: Mapping[str, bytes], target: TargetSpec) -> bytes:
    """The context model of ``model``, an ONNX file's contents, with the compiled blob inside.

    ``data``: the contents of the files of its external data, by the location that the model has.
    """
    session_options = options(target, target.provider_options)
    if data:
        session_options.add_external_initializers_from_files_in_memory(
            list(data), list(data.values()), [len(contents) for contents in data.values()]
        )
    compiler = ort.ModelCompiler(
        session_options,
        model,
        # To memory, with a sidecar: ONNX Runtime would drop that beside the source model.
        embed_compiled_data_into_model=True,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        graph_optimization_level=LEVELS[target.optimization],
    )
    compiled: bytes = compiler.compile_to_bytes()
    return compiled


def _with_model_compiler(
    prepared: Path, result: Path, target: TargetSpec, session_options: Mapping[str, str]
) -> None:
    external = target.external_initializers
    compiler = ort.ModelCompiler(
        options(target, target.provider_options, session_options),
        str(prepared),
        embed_compiled_data_into_model=target.embed,
        # Relative, and so beside the context model; ONNX Runtime takes no other.
        external_initializers_file_path=None
        if external is None
        else result.with_suffix(".data").name,
        external_initializers_size_threshold=external or 0,
        # By default it would write a plain copy of the model, and call that a success.
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        # By default it optimizes nothing, and EPs leave most real models to the CPU.
        graph_optimization_level=LEVELS[target.optimization],
    )
    compiler.compile_to_file(str(result))


def _with_session(prepared: Path, session_options: ort.SessionOptions, target: TargetSpec) -> None:
    """Open a session whose EP writes the context model by itself; without a word if it compiles nothing."""
    session_options.graph_optimization_level = LEVELS[target.optimization]
    open_session(prepared, session_options)


def _graph(prepared: Path) -> onnx.GraphProto:
    return onnx.load(prepared, load_external_data=False).graph


def explained(message: str, provider: Provider, compiled: onnx.GraphProto) -> Problem | None:
    """What an error of ONNX Runtime or the EP means, where that is known."""
    if "Unable to compile any nodes" in message:
        return _nothing_compiled(provider, compiled)
    if "NULL EPContext node" in message:
        return Problem(
            "",
            f"{provider.ep} compiled the model, and returns no EP contexts: it cannot compile ahead "
            "of time.",
            "Ship the source model, or its optimized graph with the cpu provider, for this EP to "
            "compile on the user's machine.",
        )
    if lacking := missing(message):
        name, supplier = lacking
        return Problem(
            "",
            f"{provider.ep} cannot compile, because {name} is not on this machine.",
            f"Install {supplier or 'what brings it'}.",
        )
    return None


def _nothing_compiled(provider: Provider, compiled: onnx.GraphProto) -> Problem:
    control = graph.control_flow(compiled)
    inside = f" It has {' and '.join(control)}, which few EPs compile." if control else ""
    return Problem(
        "",
        f"{provider.ep} compiled no node of the model.{inside}",
        "Freeze with constants what they depend on, or take them out of the model."
        if control
        else "See that its provider-options name a chip that it knows, and that it has the "
        "model's operators.",
    )

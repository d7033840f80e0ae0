"""Prepared model -> artifact, and what the result says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, EpcontextError, ModelError, Problem
from hatch_epcontext.protocol import (
    PROTOBUF_LIMIT,
    CompileReply,
    CompileRequest,
    Context,
    Coverage,
    NodeFacts,
    TargetSpec,
)
from hatch_epcontext.providers import Provider, missing
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.session import LEVELS, open_session, options, provider_of

_COMPATIBILITY = "ep_compatibility_info."


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
        if provider.product == "context":
            result = folder / f"{spec.name}_ctx.onnx"
            compile_context(prepared, result, request.target)
            contexts.append(read_context(spec.name, prepared, result, request.target))
        else:
            result = folder / f"{spec.name}_optimized.onnx"
            optimize(prepared, result, request.target.optimization, request.target)
            contexts.append(_read_optimized(spec.name, result))
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


def _read_optimized(name: str, result: Path) -> Context:
    model = onnx.load(result, load_external_data=False)
    return Context(
        model=name,
        model_file=result.name,
        inputs=tuple(map(graph.facts, graph.inputs(model.graph))),
        outputs=tuple(map(graph.facts, model.graph.output)),
    )


def read_context(name: str, prepared: Path, result: Path, target: TargetSpec) -> Context:
    """What the context model ``result`` of ``prepared`` says of itself.

    Raises BuildError when it is not what was asked for.
    """
    provider = provider_of(target)
    source = onnx.load(prepared, load_external_data=False)
    model = onnx.load(result, load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    compatibility = metadata.get(_COMPATIBILITY + provider.ep, "")
    contexts = [node for node in graph.nodes(model.graph) if node.op_type == graph.CONTEXT_OP]
    problems = [
        *_wrong_contexts(contexts, result, provider),
        *_wrong_chip(compatibility, contexts, provider, target),
        *_wrong_embedding(contexts, result, provider, target),
    ]
    if problems:
        raise BuildError(*problems)
    _check_data(model, result, provider)
    left = [n for n in graph.compute_nodes(model.graph) if n.op_type != graph.CONTEXT_OP]
    total = len(graph.compute_nodes(source.graph))
    opened = _opened(source) if left else frozenset()
    return Context(
        model=name,
        model_file=result.name,
        inputs=tuple(map(graph.facts, graph.inputs(model.graph))),
        outputs=tuple(map(graph.facts, model.graph.output)),
        coverage=Coverage(
            nodes=total,
            compiled=max(total - len(left), 0),
            partitions=len(contexts),
            left=tuple(_left(node, opened) for node in left),
        ),
        compatibility=compatibility,
        ep_sdk_version=_text(contexts[0], "ep_sdk_version"),
    )


def _opened(prepared: onnx.ModelProto) -> frozenset[str]:
    """The values whose shapes are known only when the model runs, although its inputs are fixed."""
    inferred = onnx.shape_inference.infer_shapes(prepared, data_prop=True).graph
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return frozenset(
        value.name
        for value in values
        if not all(isinstance(size, int) for size in graph.facts(value).shape)
    )


def _left(node: onnx.NodeProto, opened: frozenset[str]) -> NodeFacts:
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if still := sorted(opened.intersection(node.input)):
        return NodeFacts(node.name, op, f"the shape of {still[0]!r} depends on the data")
    if still := sorted(opened.intersection(node.output)):
        return NodeFacts(node.name, op, f"the shape of its output {still[0]!r} depends on the data")
    return NodeFacts(node.name, op)


def _wrong_contexts(
    contexts: list[onnx.NodeProto], result: Path, provider: Provider
) -> Iterator[Problem]:
    if not contexts:
        yield Problem("", f"{provider.ep} wrote a model without a single EPContext node.")
    for node in contexts:
        if (source := _text(node, "source")) != provider.ep:
            yield Problem(
                "", f"the EPContext node {node.name} was made by {source!r}, not by {provider.ep}."
            )
        # Where the attributes are absent the operator's defaults hold: main and embedded.
        if (
            graph.attribute(node, "main_context", 1) != 1
            or graph.attribute(node, "embed_mode", 1) != 0
        ):
            continue
        sidecar = _text(node, "ep_cache_context")
        if not graph.stays_inside(result.parent, sidecar):
            yield Problem(
                "", f"the EPContext node {node.name} names a file elsewhere: {sidecar!r}."
            )
        elif not (result.parent / sidecar).is_file():
            yield Problem(
                "", f"the EPContext node {node.name} names {sidecar!r}, which is not there."
            )


def _wrong_chip(
    compatibility: str, contexts: list[onnx.NodeProto], provider: Provider, target: TargetSpec
) -> Iterator[Problem]:
    asked = {**target.device_filter, **target.provider_options}
    # Nodes that only refer to another's context need not say what made it.
    versions = dict.fromkeys(filter(None, (_text(node, "ep_sdk_version") for node in contexts)))
    for version in versions or ("",):
        if wrong := provider.disagreement(compatibility, version, asked):
            yield Problem(
                f"target {target.name}",
                f"{provider.ep} did not compile for what was asked: {wrong}.",
                f"It says of the result: {compatibility}",
            )


def _check_data(model: onnx.ModelProto, result: Path, provider: Provider) -> None:
    try:
        graph.external_data(model, result.parent, result.name)
    except ModelError as error:
        raise BuildError(
            *(
                Problem(
                    problem.where,
                    f"{provider.ep} left tensors where the source model has them: {problem.what}",
                    "Set external-initializers = true, which gives them a file of their own.",
                )
                for problem in error.problems
            )
        ) from error


def _wrong_embedding(
    contexts: list[onnx.NodeProto], result: Path, provider: Provider, target: TargetSpec
) -> Iterator[Problem]:
    if target.embed and provider.embeds_one and len(contexts) > 1:
        yield Problem(
            "",
            f"the model became {len(contexts)} contexts, and {provider.ep} loads only one where they "
            "are embedded.",
            "Leave embed out: their blobs are then in a file beside the context model.",
        )
    if result.stat().st_size > PROTOBUF_LIMIT:
        yield Problem(
            "",
            f"{result.name} has {result.stat().st_size / 2**30:.1f} GiB, and no ONNX file can be larger "
            "than 2 GiB.",
            "Leave embed out." if target.embed else "Set external-initializers = true.",
        )


def _text(node: onnx.NodeProto, name: str) -> str:
    return bytes(graph.attribute(node, name, b"")).decode("utf-8", "replace")

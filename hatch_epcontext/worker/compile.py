"""Prepared model -> artifact, and what the result says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.protocol import (
    CompileReply,
    CompileRequest,
    Context,
    Coverage,
    NodeFacts,
    TargetSpec,
)
from hatch_epcontext.providers import Provider
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.session import LEVELS, options, provider_of

_COMPATIBILITY = "ep_compatibility_info."


def compile_job(request: CompileRequest) -> CompileReply:
    """Compile the request's models into its folder, and read back what was made.

    Raises BuildError when the EP does not deliver what was asked for: no node compiled, another EP's
    context, another chip, a sidecar that is not there.
    """
    start = time.monotonic()
    provider, folder = provider_of(request.target), Path(request.folder)
    contexts = []
    for spec, path in zip(request.models, request.prepared, strict=True):
        prepared = Path(path)
        if provider.product == "context":
            result = folder / f"{spec.name}_ctx.onnx"
            _compile(prepared, result, request.target)
            contexts.append(_read_context(spec.name, prepared, result, request.target))
        else:
            result = folder / f"{spec.name}_optimized.onnx"
            optimize(prepared, result, request.target.optimization)
            contexts.append(_read_optimized(spec.name, result))
    return CompileReply(provider.product, tuple(contexts), time.monotonic() - start)


def _compile(prepared: Path, result: Path, target: TargetSpec) -> None:
    provider = provider_of(target)
    compiler = ort.ModelCompiler(
        options(target, target.provider_options),
        str(prepared),
        embed_compiled_data_into_model=target.embed,
        # By default it would write a plain copy of the model, and call that a success.
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        # By default it optimizes nothing, and EPs leave most real models to the CPU.
        graph_optimization_level=LEVELS[target.optimization],
    )
    try:
        compiler.compile_to_file(str(result))
    except Exception as error:
        if "Unable to compile any nodes" not in str(error):
            raise
        control = graph.control_flow(onnx.load(prepared, load_external_data=False).graph)
        inside = f" It has {' and '.join(control)}, which few EPs compile." if control else ""
        raise BuildError(
            Problem(
                "",
                f"{provider.ep} compiled no node of the model.{inside}",
                "Freeze with constants what they depend on, or take them out of the model."
                if control
                else "See that its provider-options name a chip that it knows, and that it has the "
                "model's operators.",
            )
        ) from error


def _read_optimized(name: str, result: Path) -> Context:
    model = onnx.load(result, load_external_data=False)
    return Context(
        model=name,
        model_file=result.name,
        inputs=tuple(map(graph.facts, graph.inputs(model.graph))),
        outputs=tuple(map(graph.facts, model.graph.output)),
    )


def _read_context(name: str, prepared: Path, result: Path, target: TargetSpec) -> Context:
    provider = provider_of(target)
    source = onnx.load(prepared, load_external_data=False)
    model = onnx.load(result, load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    compatibility = metadata.get(_COMPATIBILITY + provider.ep, "")
    contexts = [node for node in graph.nodes(model.graph) if node.op_type == graph.CONTEXT_OP]
    problems = [
        *_wrong_contexts(contexts, result, provider),
        *_wrong_chip(compatibility, provider, target),
    ]
    if problems:
        raise BuildError(*problems)
    graph.external_data(model, result.parent, result.name)
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


def _wrong_chip(compatibility: str, provider: Provider, target: TargetSpec) -> Iterator[Problem]:
    if wrong := provider.disagreement(compatibility, target.provider_options):
        yield Problem(
            f"target {target.name}",
            f"{provider.ep} did not compile for what was asked: {wrong}.",
            f"It says of the result: {compatibility}",
        )


def _text(node: onnx.NodeProto, name: str) -> str:
    return bytes(graph.attribute(node, name, b"")).decode("utf-8", "replace")

"""What was compiled is read back: whose contexts they are, for what, their files, and what was left over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import (
    PROTOBUF_LIMIT,
    Context,
    Coverage,
    NodeFacts,
    TargetSpec,
)
from hatch_epcontext.providers import Provider
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.describe import COMPATIBILITY
from hatch_epcontext.worker.session import provider_of


def read_optimized(name: str, result: Path) -> Context:
    """What the optimized graph ``result`` says of itself."""
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
    compatibility = metadata.get(COMPATIBILITY + provider.ep, "")
    contexts = graph.contexts(model.graph)
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
        ep_sdk_version=graph.text(contexts[0], "ep_sdk_version"),
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
    op = graph.operator(node)
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
        if (source := graph.text(node, "source")) != provider.ep:
            yield Problem(
                "", f"the EPContext node {node.name} was made by {source!r}, not by {provider.ep}."
            )
        if graph.is_embedded(node) or not graph.is_main(node):
            continue
        sidecar = graph.text(node, "ep_cache_context")
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
    versions = (graph.text(node, "ep_sdk_version") for node in contexts)
    for wrong in provider.disagreements(compatibility, versions, asked):
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

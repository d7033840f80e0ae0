"""Read a compiled model back: its contexts, their EP, chip and sidecars, and the uncovered nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Kind, ModelError, Problem, RefusedError, Setting
from hatch_epcontext.graph import graph, inference, operators
from hatch_epcontext.graph.external import external_data, stays_inside
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT, NodeFacts
from hatch_epcontext.graph.reading import load
from hatch_epcontext.providers import Provider
from hatch_epcontext.worker.reasons import ask, with_reasons
from hatch_epcontext.worker.results import Context, Coverage


def read_optimized(name: str, result: Path, provider: Provider) -> Context:
    """Return the facts of the optimized graph ``result``, and which of its nodes ``provider`` takes.

    Raises RefusedError if it takes none.
    """
    model = load(result, result.name)
    coverage = None
    if provider.operators is not None:
        nodes = graph.compute_nodes(model.graph)
        left = [node for node in nodes if graph.operator(node) not in provider.operators]
        if len(left) == len(nodes):
            message = f"{provider.ep} takes none of the nodes."
            raise RefusedError(Problem(Kind.NOTHING_COMPILED, "", message))
        uncovered = tuple(NodeFacts(node.name, graph.operator(node)) for node in left)
        coverage = Coverage(len(nodes), len(nodes) - len(left), 0, uncovered)
    return Context(
        model=name,
        model_file=result.name,
        inputs=graph.input_facts(model.graph),
        outputs=graph.output_facts(model.graph),
        coverage=coverage,
    )


def read_context(model: Model, prepared: Path, result: Path, target: Target) -> Context:
    """Return the facts of the context model ``result``, which was compiled from ``prepared``, with reasons.

    Raises RefusedError when it does not fit the target, and ModelError when it is too large for a file.
    """
    provider = target.provider
    if result.stat().st_size > PROTOBUF_LIMIT:
        raise ModelError(_too_large(result, model, target))
    try:
        return _read_context(model, prepared, result, target, provider)
    except ModelError as error:
        # A fault in the EP's output is not a fault of the model.
        problems = (
            Problem(Kind.WRONG_RESULT, "", f"{provider.ep} wrote {result.name}: {problem.message}")
            for problem in error.problems
        )
        raise RefusedError(*problems) from error


def _read_context(
    model: Model, prepared: Path, result: Path, target: Target, provider: Provider
) -> Context:
    source = onnx.load(prepared, load_external_data=False)
    onnx_model = load(result)
    compatibility = graph.compatibility(onnx_model).get(provider.ep, "")
    contexts = graph.contexts(onnx_model.graph)
    problems = [
        *_wrong_contexts(contexts, result, provider),
        *_wrong_chip(compatibility, contexts, provider, target),
        *_not_embeddable(contexts, model, provider, target),
    ]
    RefusedError.check(problems)
    _check_data(onnx_model, result, model, provider)
    uncovered = [n for n in graph.compute_nodes(onnx_model.graph) if n.op_type != graph.CONTEXT_OP]
    total = len(graph.compute_nodes(source.graph))
    fixed = all(tensor.is_fixed for tensor in graph.input_facts(source.graph))
    open_values = _open_values(source) if uncovered and fixed else frozenset()
    lacking = _lacking_ends(onnx_model.graph, provider)
    facts = tuple(
        replace(
            _node_facts(node, open_values),
            waived=graph.operator(node) in provider.waived
            or not lacking.get(node.op_type, frozenset()).isdisjoint((*node.input, *node.output)),
        )
        for node in uncovered
    )
    if facts:
        logged = ask(prepared, target)
        facts = with_reasons(facts, logged, source.graph, onnx_model.graph, provider)
    return Context(
        model=model.name,
        model_file=result.name,
        inputs=graph.input_facts(onnx_model.graph),
        outputs=graph.output_facts(onnx_model.graph),
        coverage=Coverage(
            nodes=total,
            compiled=max(total - len(uncovered), 0),
            partitions=len(contexts),
            uncovered=facts,
            waived=sum(node.waived for node in facts),
        ),
        compatibility=compatibility,
        ep_sdk_version=graph.text(contexts[0], "ep_sdk_version"),
    )


def _open_values(prepared: onnx.ModelProto) -> frozenset[str]:
    """Return the values whose shapes are known only at run time, although the inputs' are fixed."""
    inferred = inference.inferred(prepared)
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    return frozenset(value.name for value in values if not graph.facts(value).is_fixed)


def _lacking_ends(main: onnx.GraphProto, provider: Provider) -> Mapping[str, frozenset[str]]:
    """The inputs and outputs that the EP does not take, by the operator with which the CPU changes them.

    It casts those of types that the EP lacks, such as float64, and reshapes those of many dimensions.
    """
    ends = (*graph.input_facts(main), *graph.output_facts(main))
    most = provider.max_rank
    typed = frozenset(end.name for end in ends if end.dtype in provider.lacks_dtypes)
    high = frozenset(end.name for end in ends if most is not None and len(end.sizes) > most)
    return {"Cast": typed, **dict.fromkeys(operators.RESHAPING, high)}


def _node_facts(node: onnx.NodeProto, open_values: frozenset[str]) -> NodeFacts:
    op = graph.operator(node)
    if names := sorted(open_values.intersection(node.input)):
        return NodeFacts(node.name, op, f"the shape of {names[0]!r} depends on the data", True)
    if names := sorted(open_values.intersection(node.output)):
        reason = f"the shape of its output {names[0]!r} depends on the data"
        return NodeFacts(node.name, op, reason, True)
    return NodeFacts(node.name, op)


def _wrong_contexts(
    contexts: list[onnx.NodeProto], result: Path, provider: Provider
) -> Iterator[Problem]:
    if not contexts:
        yield Problem(
            Kind.NOTHING_COMPILED, "", f"{provider.ep} wrote a model without an EPContext node."
        )
    for node in contexts:
        if not provider.reads(source := graph.text(node, "source")):
            message = (
                f"the EPContext node {node.name!r} was written by {source!r}, not by {provider.ep}."
            )
            yield Problem(Kind.WRONG_RESULT, "", message)
        if not graph.is_main(node):
            continue
        wrong = None
        if graph.is_embedded(node):
            wrong = None if graph.blob(node, "ep_cache_context") else "has an empty context"
        elif not stays_inside(result, sidecar := graph.text(node, "ep_cache_context")):
            wrong = f"names a file outside the artifact: {sidecar!r}"
        elif not (result.parent / sidecar).is_file():
            wrong = f"names {sidecar!r}, which is missing"
        elif not (result.parent / sidecar).stat().st_size:
            wrong = f"names {sidecar!r}, which is empty"
        if wrong:
            yield Problem(Kind.WRONG_RESULT, "", f"the EPContext node {node.name!r} {wrong}.")


def _wrong_chip(
    compatibility: str, contexts: list[onnx.NodeProto], provider: Provider, target: Target
) -> Iterator[Problem]:
    options = target.settings.provider_options
    versions = (graph.text(node, "ep_sdk_version") for node in contexts)
    for difference in provider.disagreements(compatibility, versions, options):
        message = (
            f"{provider.ep} did not compile for the target's options: {difference}.\n"
            f"The compatibility string of the result is {compatibility or 'missing'}."
        )
        yield Problem(Kind.WRONG_RESULT, "", message)
    marks = provider.several_chips
    if marks is None or len(provider.per_chip(options)) < 2:
        return
    for node in contexts:
        if graph.attribute(node, marks, 0) != 1:
            message = (
                f"the target names several chips, and the EPContext node {node.name!r} is for one: its "
                f"attribute {marks} is not 1."
            )
            yield Problem(Kind.WRONG_RESULT, "", message)


def _check_data(
    onnx_model: onnx.ModelProto, result: Path, model: Model, provider: Provider
) -> None:
    try:
        external_data(onnx_model, result, result.name)
    except ModelError as error:
        start = f"{provider.ep} left tensors in the source model's external data"
        hint = "Give them a file of their own (not tried)."
        settings = (Setting(model.key / "external-initializers", True),)
        kind = Kind.WRONG_RESULT
        problems = (
            Problem(kind, p.location, f"{start}: {p.message}", hint, settings=settings)
            for p in error.problems
        )
        raise RefusedError(*problems) from error


def _not_embeddable(
    contexts: list[onnx.NodeProto], model: Model, provider: Provider, target: Target
) -> Iterator[Problem]:
    if target.settings.embed and provider.embeds_one and len(contexts) > 1:
        yield Problem(
            Kind.NOT_EMBEDDABLE,
            "",
            f"the model became {len(contexts)} contexts, and {provider.ep} loads only one that is "
            "embedded.",
            "Put the blobs into a file beside the context model (not tried).",
            settings=(Setting(model.key / "embed", False),),
        )


def _too_large(result: Path, model: Model, target: Target) -> Problem:
    name = "embed" if target.settings.embed else "external-initializers"
    return Problem(
        Kind.TOO_LARGE,
        "",
        f"{result.name} has {result.stat().st_size / 2**30:.1f} GiB, but an ONNX file cannot be larger than "
        "2 GiB.",
        "Give the blob, or large weights, a file of their own (not tried).",
        settings=(Setting(model.key / name, name != "embed"),),
    )

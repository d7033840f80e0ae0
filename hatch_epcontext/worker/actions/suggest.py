"""Suggest which open dimensions of a model are batches, and constants, from its graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from hatch_epcontext.graph import graph, inference, reading
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.conventions import is_batch, is_length_name
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.worker.requests import SuggestedConstant, SuggestReply, SuggestRequest
from hatch_epcontext.worker.states import first_states


def handle(request: SuggestRequest) -> SuggestReply:
    """Return what is known of the request's model.

    Raises ModelError when the file is not an ONNX model.
    """
    model = reading.load(Path(request.path))
    batches = _batches(model)
    for value in graph.inputs(model.graph):
        for axis in batches.get(value.name, ()):
            value.type.tensor_type.shape.dim[axis].dim_value = 1
    return SuggestReply(batches, tuple(_constants(model)))


def _batches(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """The axes of open batches of the inputs of ``model``."""
    inputs, states = graph.input_facts(model.graph), first_states(model.graph)

    def axes(facts: TensorFacts) -> Iterator[int]:
        for axis, size in enumerate(facts.sizes):
            if not isinstance(size, int) and is_batch(facts, axis, is_state=facts.name in states):
                yield axis

    # A name has one size in the whole model.
    names = {facts.sizes[axis] for facts in inputs for axis in axes(facts)} - {None}
    return {
        facts.name: tuple(
            axis for axis, size in enumerate(facts.sizes) if size in names or axis in axes(facts)
        )
        for facts in inputs
    }


def _constants(model: onnx.ModelProto) -> Iterator[SuggestedConstant]:
    """The inputs that can be constants, with their values: lengths, and inputs that choose a branch."""
    inputs = graph.input_facts(model.graph)
    ranges = input_ranges(inference.inferred(model), inputs)
    scope = Scope(model.graph, nested=True)
    conditions = [graph.operand(node, 0) for node in scope.nodes if node.op_type == "If"]
    deciding = scope.needed_values(conditions)
    for facts in inputs:
        if "int" not in facts.dtype or facts.shape not in ((), (1,)):
            continue
        range_ = ranges[facts.name]
        if is_length_name(facts.name) or (range_.usual is not None and range_.low == 1):
            if range_.usual is not None and all(other.is_fixed for other in inputs):
                note = "the length, if it never changes"
                yield SuggestedConstant(facts.name, int(range_.usual), note)
        elif range_.known and range_.low == range_.high:
            note = "the value with which the graph compares it"
            yield SuggestedConstant(
                facts.name, int(range_.low), note, needed=facts.name in deciding
            )

"""Suggest sizes for a model's open dimensions, and constants, from its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from hatch_epcontext.graph import graph, reading
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.conventions import DimensionKind, dimension_kind, is_length_name
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.worker.requests import (
    OpenSize,
    SuggestedConstant,
    SuggestReply,
    SuggestRequest,
)
from hatch_epcontext.worker.states import first_states

_NOTES: Mapping[DimensionKind, str] = {
    "batch": "1 is a guess",
    "height": "how high are the images?",
    "width": "how wide are the images?",
    "length": "how long is it?",
}

_Dim = str | tuple[str, int]
"""An open dimension: its name, which has one size in the whole model, or an input and its axis."""


def handle(request: SuggestRequest) -> SuggestReply:
    """Return what is known of the request's model.

    Raises ModelError when the file is not an ONNX model.
    """
    model = reading.load(Path(request.path))
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    kinds = _kinds(model, inputs)
    suggestions = tuple(
        OpenSize(
            facts.name,
            axis,
            1 if kinds[dim] == "batch" else None,
            _NOTES.get(kinds[dim], "which size?"),
        )
        for facts in inputs
        for axis, dim in _open(facts)
    )
    _fix_batches(model, kinds)
    return SuggestReply(suggestions, tuple(_constants(model)))


def _open(facts: TensorFacts) -> Iterator[tuple[int, _Dim]]:
    """The axis of each open dimension of an input."""
    for axis, size in enumerate(facts.sizes):
        if not isinstance(size, int):
            yield axis, size or (facts.name, axis)


def _kinds(model: onnx.ModelProto, inputs: Sequence[TensorFacts]) -> dict[_Dim, DimensionKind]:
    states = first_states(model.graph)
    kinds: dict[_Dim, DimensionKind] = {}
    for facts in inputs:
        for axis, dim in _open(facts):
            kind = dimension_kind(facts, axis, is_state=facts.name in states)
            if kind == "batch" or dim not in kinds:
                kinds[dim] = kind
    return kinds


def _fix_batches(model: onnx.ModelProto, kinds: Mapping[_Dim, DimensionKind]) -> None:
    """Fix the batches of the inputs of ``model`` to 1, in place."""
    for value in graph.inputs(model.graph):
        for axis, dim in _open(graph.facts(value)):
            if kinds[dim] == "batch":
                value.type.tensor_type.shape.dim[axis].dim_value = 1


def _constants(model: onnx.ModelProto) -> Iterator[SuggestedConstant]:
    """The inputs that can be constants, with their values: lengths, and inputs that choose a branch."""
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    ranges = input_ranges(graph.inferred(model), inputs)
    scope = Scope(model.graph, nested=True)
    conditions = [graph.operand(node, 0) for node in scope.nodes if node.op_type == "If"]
    deciding = scope.ancestors(conditions)
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

"""Suggest sizes for a model's open dimensions, and constants, from its graph and its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

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

_QUESTIONS: Mapping[DimensionKind, str] = {
    "height": "how high are the images?",
    "width": "how wide are the images?",
    "length": "how long is it?",
}
_SIDE_KEYS = ("imgsz", "image_size", "img_size", "input_size")

_Dim = str | tuple[str, int]
"""An open dimension: its name, which has one size in the whole model, or an input and its axis."""

_Sizes = dict[_Dim, tuple[int, str]]
"""The sizes of dimensions, each with its origin."""


def handle(request: SuggestRequest) -> SuggestReply:
    """Return what is known of the request's model.

    Raises ModelError when the file is not an ONNX model.
    """
    model = reading.load(Path(request.path))
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    kinds, metadata = _kinds(model, inputs), _metadata(model)
    sizes: _Sizes = {dim: (1, "1 is a guess") for dim, kind in kinds.items() if kind == "batch"}
    for facts in inputs:
        for axis, dim in _open(facts):
            size = _size(facts, axis, kinds[dim], metadata)
            if _is_int(size) and 0 < size < 2**31:
                sizes[dim] = size, "from the metadata of the file"
    suggestions = tuple(
        OpenSize(
            facts.name, axis, *sizes.get(dim, (None, _QUESTIONS.get(kinds[dim], "which size?")))
        )
        for facts in inputs
        for axis, dim in _open(facts)
    )
    _fix(model, sizes)
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


def _metadata(model: onnx.ModelProto) -> dict[str, Any]:
    """The metadata of the file, including the contents of JSON objects, with keys in lower case."""
    metadata: dict[str, Any] = {}
    for entry in model.metadata_props:
        try:
            value = json.loads(entry.value)
        except (ValueError, RecursionError):
            continue
        inner = value.items() if isinstance(value, dict) else [(entry.key, value)]
        metadata.update((str(key).lower(), inner_value) for key, inner_value in inner)
    return metadata


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(
    facts: TensorFacts, axis: int, kind: DimensionKind, metadata: Mapping[str, Any]
) -> object:
    """A size in the metadata: of images, under a dimension's name, or in a whole shape."""
    sizes = [metadata.get(str(facts.sizes[axis]).lower())]
    shapes = (metadata.get(key) for key in (f"{facts.name}_shape".lower(), "input_shape", "shape"))
    sizes += [s[axis] for s in shapes if isinstance(s, list) and len(s) == len(facts.sizes)]
    if kind in ("height", "width"):
        sides = next((metadata[key] for key in _SIDE_KEYS if key in metadata), None)
        both = sides if isinstance(sides, list) and len(sides) == 2 else [sides, sides]
        sizes.append(both[kind == "width"])
    return next(filter(None, sizes), None)


def _fix(model: onnx.ModelProto, sizes: _Sizes) -> None:
    """Fix the known sizes of the inputs of ``model``, in place."""
    for value in graph.inputs(model.graph):
        for axis, dim in _open(graph.facts(value)):
            if dim in sizes:
                value.type.tensor_type.shape.dim[axis].dim_value = sizes[dim][0]


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

"""Suggest sizes for a model's open dimensions, and constants, from its graph and its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import onnx

from hatch_epcontext.graph import graph, reading
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.kinds import DimensionKind, dimension_kind, is_length_name
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.worker.requests import (
    OpenSize,
    SuggestedConstant,
    SuggestReply,
    SuggestRequest,
)
from hatch_epcontext.worker.states import first_states

_MAX_HALVED = 512
"""The largest product of strides that is suggested as a factor of sizes."""

_QUESTIONS: Mapping[DimensionKind, str] = {
    "height": "how high are the images?",
    "width": "how wide are the images?",
    "length": "how long is it?",
}
_SIDE_KEYS = ("imgsz", "image_size", "img_size", "input_size")
_RATE_KEYS = ("sample_rate", "sampling_rate", "samplerate", "sr")

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
    for each in inputs:
        for axis, dim in _open(each):
            given = _given(each, axis, kinds[dim], metadata)
            if _is_int(given) and 0 < given < 2**31:
                sizes[dim] = given, "from the metadata of the file"
    factors: Mapping[DimensionKind, int] = {
        "height": _factor(model, inputs, -2),
        "width": _factor(model, inputs, -1),
    }
    hints = {side: f"Multiples of {f} fit, others may not" for side, f in factors.items() if f > 1}
    if _is_int(rate := next((metadata[key] for key in _RATE_KEYS if key in metadata), None)):
        hints["length"] = f"The file names a sample rate of {rate}"

    def question(kind: DimensionKind) -> str:
        return f"{_QUESTIONS.get(kind, 'which size?')} {hints.get(kind, '')}".strip()

    found = (
        OpenSize(each.name, axis, *sizes.get(dim, (None, question(kinds[dim]))))
        for each in inputs
        for axis, dim in _open(each)
    )
    return SuggestReply(tuple(found), tuple(_constants(model, _sized(inputs, sizes))))


def _open(facts: TensorFacts) -> Iterator[tuple[int, _Dim]]:
    """The axis of each open dimension of an input."""
    for axis, size in enumerate(facts.sizes):
        if not isinstance(size, int):
            yield axis, size or (facts.name, axis)


def _kinds(model: onnx.ModelProto, inputs: Sequence[TensorFacts]) -> dict[_Dim, DimensionKind]:
    states = first_states(model.graph)
    kinds: dict[_Dim, DimensionKind] = {}
    for each in inputs:
        for axis, dim in _open(each):
            kind = dimension_kind(each, axis, is_state=each.name in states)
            if kind == "batch" or dim not in kinds:
                kinds[dim] = kind
    return kinds


def _metadata(model: onnx.ModelProto) -> dict[str, Any]:
    """The metadata of the file, including the contents of JSON objects, with keys in lower case."""
    found: dict[str, Any] = {}
    for entry in model.metadata_props:
        try:
            value = json.loads(entry.value)
        except (ValueError, RecursionError):
            continue
        inner = value.items() if isinstance(value, dict) else [(entry.key, value)]
        found.update((str(key).lower(), each) for key, each in inner)
    return found


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _given(
    facts: TensorFacts, axis: int, kind: DimensionKind, metadata: Mapping[str, Any]
) -> object:
    """The sizes in the metadata: of images, under a dimension's name, or as a whole shape."""
    found = [metadata.get(str(facts.sizes[axis]).lower())]
    shapes = (metadata.get(key) for key in (f"{facts.name}_shape".lower(), "input_shape", "shape"))
    found += [s[axis] for s in shapes if isinstance(s, list) and len(s) == len(facts.sizes)]
    if kind in ("height", "width"):
        sides = next((metadata[key] for key in _SIDE_KEYS if key in metadata), None)
        both = sides if isinstance(sides, list) and len(sides) == 2 else [sides, sides]
        found.append(both[kind == "width"])
    return next(filter(None, found), None)


def _factor(model: onnx.ModelProto, inputs: Sequence[TensorFacts], axis: int) -> int:
    """The divisor of sizes in the graph: the largest product of strides along ``axis``, -1 or -2."""
    products = {each.name: 1 for each in inputs}
    for node in model.graph.node:
        before = max((products.get(name, 1) for name in node.input), default=1)
        if node.op_type in ("Conv", "MaxPool", "AveragePool", "ConvInteger", "QLinearConv"):
            strides = graph.attribute(node, "strides", None)
            stride = strides[axis] if isinstance(strides, list) and len(strides) == 2 else 1
            before *= max(stride, 1) if isinstance(stride, int) else 1
        elif node.op_type in ("Resize", "Upsample", "ConvTranspose", "DepthToSpace"):
            before = 1
        if 1 < before <= _MAX_HALVED:
            products.update(dict.fromkeys(node.output, before))
    return max(products.values(), default=1)


def _sized(inputs: Sequence[TensorFacts], sizes: _Sizes) -> list[TensorFacts]:
    """``inputs`` with the known sizes."""
    found = []
    for each in inputs:
        known = {axis: sizes[dim][0] for axis, dim in _open(each) if dim in sizes}
        shape = tuple(known.get(axis, size) for axis, size in enumerate(each.sizes))
        found.append(replace(each, shape=shape) if shape else each)
    return found


def _constants(
    model: onnx.ModelProto, inputs: Sequence[TensorFacts]
) -> Iterator[SuggestedConstant]:
    """The inputs that can be constants, with their values: lengths, and inputs that choose a branch."""
    ranges, scope = input_ranges(model, inputs), Scope(model.graph, nested=True)
    conditions = [graph.operand(node, 0) for node in scope.nodes if node.op_type == "If"]
    deciding = scope.ancestors(conditions)
    for each in inputs:
        if "int" not in each.dtype or each.shape not in ((), (1,)):
            continue
        range_ = ranges[each.name]
        if is_length_name(each.name) or (range_.usual is not None and range_.low == 1):
            if range_.usual is not None and all(other.is_fixed for other in inputs):
                note = "the length, if it never changes"
                yield SuggestedConstant(each.name, int(range_.usual), note)
        elif range_.known and range_.low == range_.high:
            note = "the value with which the graph compares it"
            yield SuggestedConstant(each.name, int(range_.low), note, needed=each.name in deciding)

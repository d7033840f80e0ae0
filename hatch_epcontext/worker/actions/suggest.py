"""Suggest sizes for a model's open dimensions, and constants, from its graph and its metadata."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph import graph, reading
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.values.kinds import DimensionKind, dimension_kind, is_length_name
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.text import listing
from hatch_epcontext.worker.comparison.states import first_states
from hatch_epcontext.worker.dummy.given import shapes_in
from hatch_epcontext.worker.dummy.inputs import dummy_inputs
from hatch_epcontext.worker.requests import (
    OpenSize,
    SuggestedConstant,
    SuggestReply,
    SuggestRequest,
)
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import run

_SIDES = (
    *(224, 640, 32, 48, 64, 96, 112, 128, 160, 192, 227, 240, 256, 288, 299, 300, 320, 336, 384),
    *(416, 448, 480, 512, 518, 560, 768, 800, 1024, 28),
)
_LENGTHS = (
    *(16, 20, 33, 128, 512, 8, 10, 24, 30, 32, 40, 48, 50, 60, 64, 76, 77, 80, 96, 98, 100, 101),
    *(160, 197, 200, 240, 250, 256, 300, 320, 384, 400, 480, 500, 576, 600, 640, 768, 800, 1000),
    *(1024, 1280, 1500, 1536, 1760, 1920, 2000, 2048, 3000, 4000, 4096, 8000, 12800, 16000, 32000),
)
"""Common sizes; the first ones quickly show whether a graph accepts any size."""

_MAX_SIZES = 3
"""The number of accepted sizes after which a graph counts as accepting any."""

_BASE = 64
"""A size for the other dimensions, if no size is known that the graph accepts."""

_SECONDS = 20.0
"""Seconds for trying sizes, and for one run."""

_MAX_MODEL = 100_000_000
"""Bytes of a model beyond which no sizes are tried."""

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
    """Return what is known of the request's model; sizes are tried only if the request allows it.

    Raises ModelError when the file is not an ONNX model.
    """
    path = Path(request.path)
    model = reading.load(path, "")
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
    of_lengths: list[str] = []
    if request.run and sizes.keys() < kinds.keys() and path.stat().st_size <= _MAX_MODEL:
        fitting = _try_sizes(_SizeTrial(path, model, inputs, sizes), kinds, factors)
        if fitting:
            of_lengths = [f"For example {listing(map(str, fitting))} fit, but not all others"]
    if _is_int(rate := next((metadata[key] for key in _RATE_KEYS if key in metadata), None)):
        of_lengths.append(f"The file names a sample rate of {rate}")
    hints["length"] = ". ".join(of_lengths)

    def question(kind: DimensionKind) -> str:
        return f"{_QUESTIONS.get(kind, 'which size?')} {hints.get(kind, '')}".strip()

    found = (
        OpenSize(each.name, axis, *sizes.get(dim, (None, question(kinds[dim]))))
        for each in inputs
        for axis, dim in _open(each)
    )
    return SuggestReply(
        tuple(found),
        tuple(_constants(model, _sized(inputs, sizes))),
        {path: shapes for path in request.samples if (shapes := shapes_in(Path(path), inputs))},
    )


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


class _SizeTrial:
    """Runs a model on the CPU with dummy inputs, within a time limit; ``sizes``: the known sizes."""

    def __init__(
        self, path: Path, model: onnx.ModelProto, inputs: Sequence[TensorFacts], sizes: _Sizes
    ) -> None:
        self.sizes = sizes
        self._model, self._inputs, self._named = model, inputs, Model("model", path, Key(()))
        self._end = time.monotonic() + _SECONDS
        self._session: ort.InferenceSession | None = None
        with contextlib.suppress(Exception):
            self._session = open_session(path, cpu_options())

    @property
    def is_over(self) -> bool:
        return self._session is None or time.monotonic() >= self._end

    def takes(self, others: Mapping[_Dim, int]) -> bool:
        """Whether the model also runs with the sizes ``others``; False after the time limit."""
        left = self._end - time.monotonic()
        if self._session is None or left <= 0:
            return False
        with contextlib.suppress(Exception):
            tried = {dim: (size, "") for dim, size in others.items()}
            inputs = _sized(self._inputs, {**tried, **self.sizes})
            feeds = dummy_inputs(inputs, self._named, input_ranges(self._model, inputs))
            run(self._session, feeds, left)
            return True
        return False


def _try_sizes(
    trial: _SizeTrial, kinds: Mapping[_Dim, DimensionKind], factors: Mapping[DimensionKind, int]
) -> list[int]:
    """Add to ``trial`` the sizes without which the model does not run on the CPU.

    Returns sizes with which it runs, if it fails with others. ``factors``: the graph's divisors of sides.
    """
    unknown = {dim: kind for dim, kind in kinds.items() if dim not in trial.sizes}
    # Multiples of the factors, so that the graph can refuse only the side that is tried.
    usual = {dim: -(-_BASE // f) * f for dim in unknown if (f := factors.get(unknown[dim], 1))}
    found: _Sizes = {}
    for dim, kind in unknown.items():
        factor = factors.get(kind, 1)
        same = [each for each in unknown if unknown[each] == kind]
        fits = (
            trial.takes({**usual, **dict.fromkeys(same, factor * times)}) for times in (1, 2, 3)
        )
        if factor > 1 and next(fits) and not any(fits):
            found[dim] = factor, f"{factor} is its only multiple that the graph accepts"
    if trial.is_over:
        return []
    trial.sizes.update(found)
    unknown = {dim: kind for dim, kind in unknown.items() if dim not in found}
    is_image = not {"height", "width"}.isdisjoint(unknown.values())
    taken: list[int] = []
    refused = 0
    for size in (_SIDES if is_image else _LENGTHS) if unknown else ():
        if trial.is_over or len(taken) == _MAX_SIZES:
            break
        if trial.takes(dict.fromkeys(unknown, size)):
            taken.append(size)
        else:
            refused += 1
    if len(taken) == 1 and not trial.is_over:
        note = f"{taken[0]} is the only size found that the graph accepts"
        trial.sizes.update(dict.fromkeys(unknown, (taken[0], note)))
        return []
    return sorted(taken) if refused else []


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

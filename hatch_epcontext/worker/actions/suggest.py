"""Suggest sizes for a model's open dimensions, and constants, from its graph and its metadata."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph import graph, reading
from hatch_epcontext.graph.facts import Size, TensorFacts
from hatch_epcontext.graph.values.forms import Forms, LinearForm, follow
from hatch_epcontext.graph.values.kinds import DimensionKind, dimension_kind, is_length_name
from hatch_epcontext.graph.values.known import Known
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.text import listing
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
"""Sizes that are in use; the first ones show quickly whether a graph takes any size."""

_ENOUGH = 3
"""Sizes that a graph takes, after which it is said to take any."""

_BASE = 64
"""A size for the other dimensions, where none is known that the graph takes."""

_SECONDS = 20.0
"""Seconds for trying sizes, and for one run."""

_LARGEST = 100_000_000
"""Bytes of a model beyond which no sizes are tried."""

_MAX_HALVED = 512
"""The largest product of strides that is suggested as a factor of sizes."""

_UNKNOWN: Mapping[DimensionKind, str] = {
    "batch": "which size?",
    "height": "how high are the images?",
    "width": "how wide are the images?",
    "length": "how long is it?",
    "other": "which size?",
}


_Place = tuple[str, int]
"""The name of an input, and an axis of it."""

_Sizes = dict[_Place, tuple[int, str]]
"""The size of each place, and where it comes from."""


def handle(request: SuggestRequest) -> SuggestReply:
    """Return what can be said of the request's model; sizes are only tried if that is wanted.

    Raises ModelError when the file is no ONNX model.
    """
    path = Path(request.path)
    model = reading.load(path, "")
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    states = _states(model, inputs)
    kinds = {
        (each.name, axis): dimension_kind(each, axis, is_state=each.name in states)
        for each in inputs
        for axis, size in enumerate(each.shape)
        if not isinstance(size, int)
    }
    sizes = _with_same_names(inputs, _from_metadata(model, inputs, kinds))
    guessed: _Sizes = {
        place: (1, "1 is a guess") for place, kind in kinds.items() if kind == "batch"
    }
    sizes = {**_with_same_names(inputs, guessed), **sizes}
    factors: dict[DimensionKind, int] = {
        "height": _factor(model, inputs, -2),
        "width": _factor(model, inputs, -1),
    }
    fitting: list[int] = []
    if request.run and path.stat().st_size <= _LARGEST:
        tried, fitting = _tried(path, model, inputs, kinds, sizes, factors)
        sizes = {**tried, **sizes}
    hints = {"length": _length_hints(fitting, _sample_rate(model))}
    hints |= {
        side: [f"Multiples of {factor} fit, others may not"]
        for side, factor in factors.items()
        if factor > 1
    }
    found = (
        OpenSize(*place, *sizes.get(place, (None, _question(kind, hints.get(kind, [])))))
        for place, kind in kinds.items()
    )
    return SuggestReply(tuple(found), tuple(_constants(model, _sized(inputs, sizes))))


def _forms(inputs: Sequence[TensorFacts]) -> Forms:
    return {each.name: (LinearForm(((each.name, (1.0, 1.0)),)),) for each in inputs}


def _states(model: onnx.ModelProto, inputs: Sequence[TensorFacts]) -> set[str]:
    """The inputs that are states of recurrent layers."""
    forms = _forms(inputs)
    found = set()
    for node in follow(model.graph, forms, Known(model, inputs)):
        if node.op_type in ("LSTM", "GRU", "RNN"):
            for name in node.input[5:7]:
                found |= {each for form in forms.get(name, ()) for each, _ in form.scales}
    return found


def _with_same_names(inputs: Sequence[TensorFacts], sizes: _Sizes) -> _Sizes:
    """``sizes``, and those of all dimensions that have the name of one in it."""
    shapes = {each.name: each.shape for each in inputs}
    by_name = {shapes[name][axis]: size for (name, axis), size in sizes.items()}
    same = {
        (each.name, axis): by_name[dim]
        for each in inputs
        for axis, dim in enumerate(each.shape)
        if isinstance(dim, str) and dim in by_name
    }
    return {**same, **sizes}


def _metadata(model: onnx.ModelProto) -> dict[str, Any]:
    """The metadata of the file, also what is in JSON objects; keys are in lower case."""
    found: dict[str, Any] = {}
    for entry in model.metadata_props:
        try:
            value = json.loads(entry.value)
        except (ValueError, RecursionError):
            continue
        inner = value.items() if isinstance(value, dict) else [(entry.key, value)]
        found.update((str(key).lower(), each) for key, each in inner)
    return found


_SIDE_KEYS = ("imgsz", "image_size", "img_size", "input_size")

_RATE_KEYS = ("sample_rate", "sampling_rate", "samplerate", "sr")


def _from_metadata(
    model: onnx.ModelProto,
    inputs: Sequence[TensorFacts],
    kinds: Mapping[_Place, DimensionKind],
) -> _Sizes:
    """The sizes that stand in the metadata: of images, under a dimension's name, or as a whole shape."""
    metadata = _metadata(model)
    found: _Sizes = {}
    shapes = {each.name: each.shape for each in inputs}
    sides = next((metadata[key] for key in _SIDE_KEYS if key in metadata), None)
    for (name, axis), kind in kinds.items():
        dim = shapes[name][axis]
        given: object = metadata.get(dim.lower()) if isinstance(dim, str) else None
        for key in (f"{name}_shape".lower(), "input_shape", "shape"):
            shape = metadata.get(key)
            if isinstance(shape, list) and len(shape) == len(shapes[name]):
                given = given or shape[axis]
        if kind in ("height", "width"):
            both = sides if isinstance(sides, list) and len(sides) == 2 else [sides, sides]
            given = given or both[kind == "width"]
        if isinstance(given, int) and not isinstance(given, bool) and 0 < given < 2**31:
            found[name, axis] = given, "from the metadata of the file"
    return found


def _sample_rate(model: onnx.ModelProto) -> int | None:
    metadata = _metadata(model)
    rate = next((metadata[key] for key in _RATE_KEYS if key in metadata), None)
    return rate if isinstance(rate, int) and not isinstance(rate, bool) else None


def _length_hints(fitting: Sequence[int], rate: int | None) -> list[str]:
    hints = []
    if fitting:
        hints.append(f"For example {listing(map(str, sorted(fitting)))} fit, and not all others do")
    if rate:
        hints.append(f"The file names a sample rate of {rate}")
    return hints


def _question(kind: DimensionKind, hints: Sequence[str]) -> str:
    return " ".join([_UNKNOWN[kind], ". ".join(hints)]).strip()


def _factor(model: onnx.ModelProto, inputs: Sequence[TensorFacts], axis: int) -> int:
    """By what the graph divides sizes: the largest product of strides along ``axis``, -1 or -2."""
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
    def size(each: TensorFacts, axis: int, given: Size) -> Size:
        return given if isinstance(given, int) else sizes.get((each.name, axis), (given,))[0]

    return [
        replace(each, shape=tuple(size(each, axis, given) for axis, given in enumerate(each.shape)))
        for each in inputs
    ]


def _tried(
    path: Path,
    model: onnx.ModelProto,
    inputs: Sequence[TensorFacts],
    kinds: Mapping[_Place, DimensionKind],
    sizes: _Sizes,
    factors: Mapping[DimensionKind, int],
) -> tuple[_Sizes, list[int]]:
    """The sizes of what ``sizes`` does not have, as far as the model runs on the CPU with only one of them.

    Also some with which it runs, if it does not with others. ``factors``: by what the graph divides sides.
    """
    still_open = [place for place in kinds if place not in sizes]
    if not still_open:
        return {}, []
    trial = _Trial(path, model)
    found = _only_multiples(trial, inputs, kinds, sizes, factors)
    sizes = {**found, **sizes}
    still_open = [place for place in still_open if place not in found]
    is_image = any(kinds[place] in ("height", "width") for place in still_open)
    taken: list[int] = []
    refused = 0
    for number in _SIDES if is_image else _LENGTHS:
        if not still_open or trial.is_over or len(taken) == _ENOUGH:
            break
        if trial.takes(_sized(inputs, {**sizes, **_all_of(still_open, number)})):
            taken.append(number)
        else:
            refused += 1
    if len(taken) == 1 and not trial.is_over:
        note = f"{taken[0]} is the only size found that the graph takes"
        return {**found, **dict.fromkeys(still_open, (taken[0], note))}, []
    return found, (taken if refused else [])


def _all_of(places: Sequence[_Place], size: int) -> _Sizes:
    return dict.fromkeys(places, (size, ""))


def _only_multiples(
    trial: _Trial,
    inputs: Sequence[TensorFacts],
    kinds: Mapping[_Place, DimensionKind],
    sizes: _Sizes,
    factors: Mapping[DimensionKind, int],
) -> _Sizes:
    """The sides of images of which the graph takes only one multiple of what it divides them by."""
    still_open = [place for place in kinds if place not in sizes]
    # Multiples of the factors, so that only the side that is tried can be what the graph refuses.
    usual = {
        place: (-(-_BASE // f) * f, "")
        for place in still_open
        if (f := factors.get(kinds[place], 1))
    }
    found: _Sizes = {}
    for place in still_open:
        kind, factor = kinds[place], factors.get(kinds[place], 1)
        same = [each for each in still_open if kinds[each] == kind]
        tried = (
            _sized(inputs, {**sizes, **usual, **_all_of(same, factor * times)})
            for times in (1, 2, 3)
        )
        if factor > 1 and trial.takes(next(tried)) and not any(map(trial.takes, tried)):
            found[place] = factor, f"{factor} is the only multiple of it that the graph takes"
    return {} if trial.is_over else found


class _Trial:
    """Runs a model on the CPU with dummy inputs of several sizes, until its time is over."""

    def __init__(self, path: Path, model: onnx.ModelProto) -> None:
        self._end = time.monotonic() + _SECONDS
        self._model = model
        self._spec = Model("model", path, Key(()))
        self._session: ort.InferenceSession | None = None
        with contextlib.suppress(Exception):
            self._session = open_session(path, cpu_options())

    @property
    def is_over(self) -> bool:
        return self._session is None or time.monotonic() >= self._end

    def takes(self, inputs: Sequence[TensorFacts]) -> bool:
        """Whether the model runs with ``inputs``; False also when the time is over."""
        left = self._end - time.monotonic()
        if self._session is None or left <= 0:
            return False
        with contextlib.suppress(Exception):
            feeds = dummy_inputs(inputs, self._spec, input_ranges(self._model, inputs))
            run(self._session, feeds, left)
            return True
        return False


def _constants(
    model: onnx.ModelProto, inputs: Sequence[TensorFacts]
) -> Iterator[SuggestedConstant]:
    """The inputs that can be constants: numbers with a usual value, and those that choose a branch."""
    ranges = input_ranges(model, inputs)
    deciding = _deciding(model)
    for each in inputs:
        if "int" not in each.dtype or any(size != 1 for size in each.shape) or len(each.shape) > 1:
            continue
        range_ = ranges[each.name]
        if is_length_name(each.name) or (range_.usual is not None and range_.low == 1):
            known = all(isinstance(s, int) for other in inputs for s in other.shape)
            value = int(range_.usual) if known and range_.usual is not None else None
            yield SuggestedConstant(each.name, value, "the length, if it never changes")
        elif range_.known and range_.low == range_.high:
            note = "the value with which the graph compares it"
            yield SuggestedConstant(each.name, int(range_.low), note, needed=each.name in deciding)
        else:
            yield SuggestedConstant(each.name, None, "for an input that never changes")


def _deciding(model: onnx.ModelProto) -> set[str]:
    """What the conditions of ``model``, which choose between graphs, are computed from."""
    producers = {output: node for node in graph.nodes(model.graph) for output in node.output}
    waiting = [
        node.input[0] for node in graph.nodes(model.graph) if node.op_type == "If" and node.input
    ]
    found = set(waiting)
    while waiting:
        node = producers.get(waiting.pop())
        for name in node.input if node is not None else ():
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found

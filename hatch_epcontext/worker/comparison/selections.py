"""Selections in a model: rows by a TopK or a NonMaxSuppression, such as the boxes of a detector, and classes
by an ArgMax.

Rows are compared as a set; and one whose score is about that of the last row may be another. A class with the
largest score is compared by its score in the source model.

Rounding changes which boxes of a NonMaxSuppression overlap too much, and with one of them all that follow.
So its inputs are compared with the CPU's; and from these inputs it must select what the CPU selects from the
same ones. Inside a context its inputs are unknown: then its results must be the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Array, Arrays, Numbers
from hatch_epcontext.graph.parts import Part, extract
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.measures import MANY, TINY, Aligned
from hatch_epcontext.worker.comparison.rows import (
    LOST,
    Choice,
    Columns,
    Rows,
    floor_of,
)
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.session import cpu_options, open_session, set_model_path

_SAME_NUMBERS = operators.RESHAPING | {"Cast", "Add", "Sub"}
"""Operators after which classes are still the same ones, also if they are counted from 1."""

_MOVED = operators.RESHAPING | {"Cast"}
"""Operators after which values are still the same."""

_SAME_ORDER = operators.RESHAPING | {"Cast", "Exp", "Sigmoid", "Sqrt"}
"""Operators after which the largest scores are still the largest."""

_WHOLE = frozenset({"Ceil", "Floor", "Mod", "Round"})
"""Operators whose results are whole numbers, also those of floats."""

_MAX_ROWS = 2**11
"""The most rows of which the nearest are found."""

_MAX_REST = 2**24
"""The most bytes of the rest of a model that is kept with the reference."""


@dataclass(frozen=True)
class Rest:
    """The part of a model from each NonMaxSuppression on: its ``outputs``, and the serialized ``model``.

    ``reads``: the values that it reads; ``shapes``: those that depend on no data.
    """

    reads: tuple[str, ...]
    shapes: tuple[str, ...]
    outputs: tuple[str, ...]
    model: bytes

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model that it reads."""
        return frozenset((*self.reads, *self.shapes))

    def outputs_of(self, own: Arrays, candidates: Arrays) -> dict[str, Array]:
        """Its outputs for ``own`` values in place of the ``candidates``; none if some are missing."""
        if not self.values <= candidates.keys() or not own.keys() >= set(self.reads):
            return {}
        feeds: dict[str, Array] = {name: candidates[name] for name in self.shapes}
        feeds |= {name: own[name].astype(candidates[name].dtype) for name in self.reads}
        return run(_opened(self.model), feeds)


@lru_cache(maxsize=2)
def _opened(model: bytes) -> ort.InferenceSession:
    return open_session(model, cpu_options())


@dataclass(frozen=True)
class Selections:
    """The columns of the rows that each TopK of a model selects (``rows``), and the outputs that are choices;
    the part from a NonMaxSuppression on (``rest``), and the columns of its outputs (``suppressed``).
    """

    rows: tuple[tuple[Columns, ...], ...] = ()
    choices: Mapping[str, Choice] = field(default_factory=dict)
    rest: Rest | None = None
    suppressed: tuple[Columns, ...] = ()

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model with which outputs are compared."""
        names = {columns.values for group in self.rows for columns in group}
        names |= {choice.candidates for choice in self.choices.values()}
        return frozenset(names - {""}).union(self.rest.values if self.rest else ())

    @property
    def reads(self) -> tuple[str, ...]:
        """The values inside the model that are compared like outputs."""
        return self.rest.reads if self.rest else ()


def selections(model: onnx.ModelProto) -> Selections:
    """The selections of ``model``, without rows that it selects in another way than detectors."""
    if not any(
        node.op_type in ("TopK", "NonMaxSuppression", "ArgMax", "ArgMin")
        for node in model.graph.node
    ):
        return Selections()
    scope = Scope.of(model)
    rest = rest_of(model, scope)
    outputs = [value.name for value in model.graph.output]
    finder = _SelectionFinder(scope, [*dict.fromkeys((*outputs, *(rest.reads if rest else ())))])
    suppressed = tuple(finder.suppressed(rest.outputs)) if rest else ()
    return Selections(tuple(finder.rows()), dict(finder.choices()), rest, suppressed)


class _SelectionFinder:
    """Finds what selects the values called ``outputs``."""

    def __init__(self, scope: Scope, outputs: Sequence[str]) -> None:
        self._scope, self._outputs = scope, outputs

    def choices(self) -> Iterator[tuple[str, Choice]]:
        for output in self._outputs:
            if choice := self._choice(self._scope.origin(output, _SAME_NUMBERS)):
                yield output, choice

    def suppressed(self, outputs: Sequence[str]) -> Iterator[Columns]:
        """The columns of ``outputs`` of a NonMaxSuppression: only the number of its rows is open."""
        for output in outputs:
            sizes = self._scope.sizes(output) or ()
            axis = sizes.index(None) if None in sizes else max(len(sizes) - 2, 0)
            yield from (
                replace(columns, axis=axis) for columns, _ in self._columns(output) if sizes
            )

    def rows(self) -> Iterator[tuple[Columns, ...]]:
        waiting = [pair for output in self._outputs for pair in self._columns(output)]
        # The last TopK before rows has selected them.
        for node in reversed([node for node in self._scope.nodes if node.op_type == "TopK"]):
            is_sorted, is_largest = (graph.number(node, key, 1) for key in ("sorted", "largest"))
            above = {name: self._scope.needed_values([name]) for _, name in waiting}
            behind = [pair for pair in waiting if {*node.output}.intersection(above[pair[1]])]
            waiting = [pair for pair in waiting if pair not in behind]
            columns = tuple(
                replace(
                    columns,
                    axis=axis,
                    is_score=self._is_score(name, node),
                    is_sorted=bool(is_sorted),
                    is_least=not is_largest,
                )
                for columns, name in behind
                if (axis := self._axis(columns.output, node)) is not None
            )
            if any(span.is_score for span in columns):
                yield columns

    def _axis(self, output: str, node: onnx.NodeProto) -> int | None:
        """The axis of ``output`` with the rows that the TopK ``node`` selects; None if it has none."""
        selected, sizes = self._scope.sizes(node.output[0]), self._scope.sizes(output) or ()
        if not selected or graph.number(node, "axis", -1) not in (-1, len(selected) - 1):
            return None
        batch = [size for size in selected[:-1] if size != 1]
        axes = (axis for axis, size in enumerate(sizes) if size == selected[-1])
        return next((axis for axis in axes if [s for s in sizes[:axis] if s != 1] == batch), None)

    def _columns(self, output: str) -> Iterator[tuple[Columns, str]]:
        """The columns of ``output``, each with the value that it contains."""
        parts = self._joined(output)
        widths = [(self._scope.sizes(part) or (None,))[-1] for part in parts]
        if widths.count(None) > 1 or len(parts) == 1:
            parts, widths = [output], [None]
        start = 0
        for index, (name, width) in enumerate(zip(parts, widths, strict=True)):
            # Columns behind those of unknown width are counted from the end.
            behind = sum(other or 0 for other in widths[index + 1 :])
            stop = -behind if width is None else start + width
            is_whole, values = self._is_whole(name), self._gathered(name)
            yield Columns(output, 0, start, stop or None, is_whole=is_whole, values=values), name
            start = stop

    def _joined(self, name: str) -> list[str]:
        """The values that a Concat along the last axis joins in the value ``name``; else itself."""
        origin = self._scope.origin(name, _MOVED)
        node, sizes, joined = self._scope.maker(origin), *map(self._scope.sizes, (name, origin))
        if (
            node is None
            or node.op_type != "Concat"
            or not (sizes and joined and sizes[-1] == joined[-1])
            or graph.number(node, "axis", 0) not in (-1, len(joined) - 1)
        ):
            return [name]
        return [part for operand in node.input for part in self._joined(operand)]

    def _is_whole(self, name: str) -> bool:
        """Whether the value ``name`` has whole numbers, such as classes."""
        origin = self._scope.origin(name, _SAME_NUMBERS)
        node, dtype = self._scope.maker(origin), self._scope.dtype(origin)
        is_whole = dtype is not None and dtype.kind in "iub"
        return is_whole or (node is not None and node.op_type in _WHOLE)

    def _gathered(self, name: str) -> str:
        """The value from which the rows of the value ``name`` are gathered; empty if they are not."""
        values = ""
        while (node := self._scope.maker(self._scope.origin(name, _MOVED))) is not None:
            if node.op_type not in operators.GATHERS:
                break
            name = values = node.input[0]
        return values

    def _is_score(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether the value ``name`` has the scores by which the TopK ``node`` selects."""
        origin = self._scope.origin(name, _SAME_ORDER)
        maker = self._scope.maker(origin)
        if maker is not None and maker.op_type in operators.GATHERS:
            origins = (self._scope.origin(gathered.input[0], _MOVED) for gathered in (maker, node))
            return len(set(origins)) == 1
        return origin == node.output[0]

    def _choice(self, name: str) -> Choice | None:
        node = self._scope.maker(name)
        if node is None or node.op_type not in ("ArgMax", "ArgMin"):
            return None
        if self._scope.maker(node.input[0]) is None:
            return None
        is_least = node.op_type == "ArgMin"
        return Choice(node.input[0], graph.number(node, "axis", 0), is_least)


def select(
    selections: Selections,
    outputs: Arrays,
    expected: Arrays,
    candidates: Arrays,
    unit: float,
    elsewhere: Sequence[Arrays] = (),
) -> dict[str, Aligned]:
    """``outputs`` beside what to compare them with; the source has ``expected``.

    ``candidates``: its values inside the model. ``unit``: that of the limits. ``elsewhere``: the source's
    outputs for other inputs.
    """
    rest = selections.rest
    if rest is not None and (same := rest.outputs_of(outputs, candidates)):
        expected = {**{name: candidates[name] for name in rest.reads}, **expected, **same}
    result = {
        name: Aligned(own, expected[name]) for name, own in outputs.items() if name in expected
    }
    outputs = {
        name: aligned.output
        for name, aligned in result.items()
        if aligned.output.shape == aligned.reference.shape and aligned.output.dtype.kind in "biuf"
    }
    for span in selections.suppressed:
        # One wrong row among many is wrong.
        if (own := outputs.get(span.output)) is not None and own.size:
            rows = Rows([span], expected)
            rows.put(result, rows.of(expected), rows.noise(rows.of(outputs), rows.of(expected)))
    if rest is not None:
        outputs = {name: own for name, own in outputs.items() if name not in rest.outputs}
    for group in selections.rows:
        columns = [span for span in group if span.output in outputs]
        sizes = {span.of(outputs).shape[:2] for span in columns}
        # Without the scores nothing says which rows may be others.
        if (
            any(span.is_score for span in columns)
            and len(sizes) == 1
            and 0 < max(sizes)[1] <= _MAX_ROWS
        ):
            rows = Rows(columns, expected, unit, elsewhere)
            rows.put(result, *_compare_rows(rows, outputs, expected, candidates))
    for name, choice in selections.choices.items():
        if name in outputs and result[name].rows is None:
            own = outputs[name]
            noise = _noise_of_choices(choice, own, expected[name], candidates, unit)
            if noise is not None:
                # As with slices, one in so many may have any error.
                noise[np.argsort(-noise)[: len(noise) // MANY]] = 0.0
                result[name].reference = own
                result[name].add(noise.reshape(-1, own.shape[-1] if own.shape else 1))
    return result


def _compare_rows(
    rows: Rows,
    outputs: Arrays,
    expected: Arrays,
    candidates: Arrays,
) -> tuple[Numbers, Numbers]:
    """The values to compare the rows of ``outputs`` with, and their noise."""
    score = next(number for number, span in enumerate(rows.columns) if span.is_score)
    own, ref = rows.of(outputs), rows.of(expected)
    _, values, noise = rows.match(own, ref)
    # A row with about the score of the last one may be another, if it is one of the source's candidates.
    ends = ref.copy()
    last = rows.split(ends)[score]
    last[...] = (np.max if rows.columns[score].is_least else np.min)(last, axis=1, keepdims=True)
    at_end = np.maximum(rows.noise(own, ends)[score], rows.noise(values, ends)[score])
    others, is_known = rows.among(own, candidates)
    apart, worst = np.maximum(rows.noise(own, others), at_end), noise.max(axis=0)
    # A copy of another row is none, unless the source has copies.
    is_copy = _are_copies(own) > _are_copies(ref).any(axis=1, keepdims=True)
    is_other = np.asarray((apart.max(axis=0) < worst) & ~is_copy, bool)
    if not is_known:
        # Nothing shows which rows are candidates, but those that are the same.
        lost = (is_other & (worst >= LOST)).sum(axis=1, keepdims=True)
        is_other &= lost <= (own.shape[1] + 1) // 2
    values, noise = np.where(is_other[..., None], others, values), np.where(is_other, apart, noise)
    if rows.columns[score].is_sorted:
        by_place = rows.noise(own, ref)[score]
        is_farther = by_place > noise[score]
        rows.split(values)[score][is_farther] = rows.split(ref)[score][is_farther]
        noise[score] = np.maximum(noise[score], by_place)
    return values, noise


def _are_copies(rows: Numbers) -> NDArray[np.bool_]:
    """Which of the rows, batch x rows, are equal to an earlier one."""
    are_copies = np.ones(rows.shape[:2], bool)
    for index, some in enumerate(rows):
        are_copies[index, np.unique(some, axis=0, return_index=True)[1]] = False
    return are_copies


def _noise_of_choices(
    choice: Choice, own: Array, ref: Array, candidates: Arrays, unit: float
) -> Numbers | None:
    """By how much the scores of ``own`` classes are below the best ones; ``ref``: the source's classes.

    None if these are not the ones with the best scores.
    """
    if choice.candidates not in candidates:
        return None
    table = _below_the_best(choice, candidates[choice.candidates], unit)
    if not 0 < len(table) == own.size:
        return None
    first = np.median(np.asarray(ref, np.float64).ravel() - table.argmin(axis=1))

    def noise_of(values: Array) -> Numbers:
        numbers = np.rint(np.nan_to_num(np.asarray(values, np.float64).ravel()) - first)
        is_known = (numbers >= 0) & (numbers < table.shape[1])
        noise = table[np.arange(len(table)), np.where(is_known, numbers, 0).astype(int)]
        return np.where(is_known, noise, 1 / TINY)

    # A Cast may have lost some of the indices.
    return None if noise_of(ref).max() > LOST else noise_of(own)


def _below_the_best(choice: Choice, candidates: Array, unit: float) -> Numbers:
    """The noise of choosing each candidate: how much it is below the best, places x indices."""
    scores = np.asarray(candidates, np.float64)
    finite = scores[np.isfinite(scores)]
    low, high = finite.min(initial=0), finite.max(initial=0)
    floor = floor_of(scores, unit)
    scores = np.nan_to_num(scores, nan=low, posinf=high, neginf=low) * (-1 if choice.least else 1)
    table = np.moveaxis(scores, choice.axis, -1).reshape(-1, scores.shape[choice.axis])
    signal = max(float(table.var(axis=1).mean()), floor**2, TINY) if table.size else 1.0
    return np.asarray((table.max(axis=1, keepdims=True) - table) ** 2 / signal)


def rest_of(model: onnx.ModelProto, scope: Scope) -> Rest | None:
    """The part of ``model``, whose values ``scope`` knows, from its NonMaxSuppression on.

    None without one, or if that part reads inputs of the model, is large, or reads values of unknown types.
    """
    suppressed = _suppressed(scope)
    outputs = [value for value in model.graph.output if value.name in suppressed]
    inputs = {value.name for value in graph.inputs(model.graph)}
    nodes = sorted({scope.makers[name] for name in suppressed})
    read = dict.fromkeys(name for index in nodes for name in scope.reads[index])
    read = {
        name: scope.types.get(name)
        for name in read
        if name not in suppressed and inputs.intersection(scope.needed_values([name]))
    }
    types = {name: type_ for name, type_ in read.items() if type_ is not None}
    if not outputs or not types or len(types) < len(read) or not inputs.isdisjoint(read):
        return None
    names = tuple(value.name for value in outputs)
    part = Part(
        tuple(read), names, tuple(sorted(scope.needed_nodes(names, lambda name: name not in read)))
    )
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    ends = {value.name: value for value in outputs}
    extract(rest, part, ends | {name: helper.make_value_info(name, types[name]) for name in read})
    is_apart = any(
        tensor.data_location == TensorProto.EXTERNAL for tensor in graph.stored_tensors(rest.graph)
    )
    if is_apart or rest.ByteSize() > _MAX_REST:
        return None
    shapes = tuple(name for name in read if not scope.varies([name]))
    reads = tuple(name for name in read if name not in shapes)
    return Rest(reads, shapes, names, rest.SerializeToString())


def _suppressed(scope: Scope) -> set[str]:
    """The values that depend on what a NonMaxSuppression selects."""
    names: set[str] = set()
    for node, reads in zip(scope.nodes, scope.reads, strict=True):
        if node.op_type == "NonMaxSuppression" or not names.isdisjoint(reads):
            names.update(name for name in node.output if name)
    return names


def open_with_reads(path: Path, rest: Rest, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session of the model in the file ``path``, which also returns the values that ``rest`` reads."""
    set_model_path(path, options)
    model = with_reads(onnx.load(path, load_external_data=False), rest)
    return open_session(model.SerializeToString(), options)


def with_reads(model: onnx.ModelProto, rest: Rest | None) -> onnx.ModelProto:
    """``model`` with the values that ``rest`` reads as outputs, if nodes compute all of them."""
    results = {name for node in model.graph.node for name in node.output}
    reads = rest.reads if rest is not None and results.issuperset(rest.reads) else ()
    return graph.with_outputs(model, reads)

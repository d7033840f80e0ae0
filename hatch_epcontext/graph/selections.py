"""Selections in a model: rows by a TopK or a NonMaxSuppression, such as the boxes of a detector, and classes
by an ArgMax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.dtypes import Arrays, Numbers
from hatch_epcontext.graph.parts import Part, extract
from hatch_epcontext.graph.scope import Scope

_SAME_NUMBERS = operators.RESHAPING | {"Cast", "Add", "Sub"}
"""Operators after which classes are still the same ones, also if they are counted from 1."""

_MOVED = operators.RESHAPING | {"Cast"}
"""Operators after which values are still the same."""

_SAME_ORDER = operators.RESHAPING | {"Cast", "Exp", "Sigmoid", "Sqrt"}
"""Operators after which the largest scores are still the largest."""

_WHOLE = frozenset({"Ceil", "Floor", "Mod", "Round"})
"""Operators whose results are whole numbers, also those of floats."""

_NEARLY = 2.0**-20
"""The difference of equal values, relative to them: another order of additions makes it."""

_ROWWISE = operators.ELEMENTWISE | operators.RESHAPING | operators.GATHERS | {"Concat"}
"""Operators whose result has a row for each index in an operand."""

_MAX_PICKS = 4
"""The most selections of what a TopK has selected that are followed: detectors have one or two."""

_MAX_WAYS = 2**12
"""The most values, each by one order of selections, that are followed: where sums join what is selected with
what is not, their number grows with the fourth power of the graph's length.
"""

_MAX_REST = 2**24
"""The most bytes of the rest of a model that is kept with the reference."""


@dataclass(frozen=True)
class Choice:
    """Indices of the largest ``candidates``, a value inside the model, along ``axis``; with ``least`` of the
    smallest. They may be counted from another number than 0.
    """

    candidates: str
    axis: int = 0
    least: bool = False


@dataclass(frozen=True)
class Pick:
    """Of ``data`` a TopK, a GatherElements or, with ``is_whole``, a Gather takes those with these ``indices``
    along ``axis``.
    """

    data: str
    indices: str
    axis: int
    is_whole: bool = False

    def of(self, marks: NDArray[np.bool_], arrays: Arrays) -> NDArray[np.bool_]:
        """Which values are taken of the marked rows of the data in ``arrays``."""
        wide, indices = (
            spread(marks, arrays[self.data].shape),
            arrays[self.indices].astype(np.int64),
        )
        if self.is_whole:
            return np.take(wide, indices, self.axis)
        # Along other axes there may be fewer indices than values.
        kept = [slice(size) for size in indices.shape]
        kept[self.axis] = slice(None)
        return np.take_along_axis(wide[tuple(kept)], indices, self.axis)


@dataclass(frozen=True)
class Ties:
    """The ``candidates`` of which a TopK returns the values ``selected`` along ``axis``, and their indices:
    of equal ones it may be any. ``picks``: how some of what is made of these are selected in turn.
    """

    candidates: str
    selected: str
    axis: int = -1
    picks: tuple[Pick, ...] = ()

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model."""
        picked = (name for pick in self.picks for name in (pick.data, pick.indices))
        return frozenset((self.candidates, self.selected, *picked))

    def of(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Which of the selected values in ``arrays`` equal another candidate, in the shape of these, or of
        what was picked of them.
        """
        are_tied = self._selected(arrays)
        for pick in self.picks:
            are_tied = pick.of(are_tied, arrays)
        return are_tied

    def _selected(self, arrays: Arrays) -> NDArray[np.bool_]:
        every, some = (
            np.moveaxis(np.asarray(arrays[name], np.float64), self.axis, -1)
            for name in (self.candidates, self.selected)
        )
        apart = np.where(np.isfinite(some), _NEARLY * np.abs(some), 0.0)
        are_tied = np.zeros(some.shape, bool)
        # In order: a comparison of each with each takes gigabytes for a heat map.
        for index in np.ndindex(some.shape[:-1]):
            ordered = np.sort(every[index])
            first = np.searchsorted(ordered, some[index] - apart[index], "left")
            last = np.searchsorted(ordered, some[index] + apart[index], "right")
            are_tied[index] = last - first > 1
        return np.moveaxis(are_tied, -1, self.axis)


def spread(rows: NDArray[np.bool_], shape: Sequence[int]) -> NDArray[np.bool_]:
    """Which values of ``shape`` belong to one of the ``rows``, which its first axes have; none of another."""
    sizes, more = ([size for size in one if size != 1] for one in (rows.shape, shape))
    if more[: len(sizes)] != sizes:
        return np.zeros(shape, bool)
    wide = rows.reshape(*sizes, *[1] * (len(more) - len(sizes)))
    return np.broadcast_to(wide, more).reshape(shape)


@dataclass(frozen=True)
class Columns:
    """Columns of ``output``, whose rows are along ``axis``: from ``start`` to ``stop`` along its last axis.

    ``is_score``: the scores by which the rows are selected; with ``is_sorted`` in their order, with
    ``is_least`` the smallest. ``is_whole``: whole numbers, equal or not.
    ``values``: the value inside the model of which they are rows, if they are gathered.
    """

    output: str
    axis: int = 0
    start: int = 0
    stop: int | None = None
    is_score: bool = False
    is_sorted: bool = True
    is_least: bool = False
    is_whole: bool = False
    values: str = ""

    def of(self, arrays: Arrays) -> Numbers:
        """These columns in ``arrays``: batch x rows x columns."""
        part = arrays[self.output][..., self.start : self.stop]
        before, behind = part.shape[: self.axis], part.shape[self.axis + 1 :]
        shape = (math.prod(before), part.shape[self.axis], math.prod(behind))
        return np.asarray(part, np.float64).reshape(shape)


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


@dataclass(frozen=True)
class Selections:
    """The columns of the rows that each TopK of a model selects (``rows``), and the outputs that are choices;
    the part from a NonMaxSuppression on (``rest``), and the columns of its outputs (``suppressed``); and
    other outputs that are made of the indices of TopKs, with the ties of each (``ties``).
    """

    rows: tuple[tuple[Columns, ...], ...] = ()
    choices: Mapping[str, Choice] = field(default_factory=dict)
    rest: Rest | None = None
    suppressed: tuple[Columns, ...] = ()
    ties: Mapping[str, Sequence[Ties]] = field(default_factory=dict)

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model with which outputs are compared."""
        names = {columns.values for group in self.rows for columns in group}
        names |= {choice.candidates for choice in self.choices.values()}
        names |= {
            name for several in self.ties.values() for ties in several for name in ties.values
        }
        return frozenset(names - {""}).union(self.rest.values if self.rest else ())

    @property
    def reads(self) -> tuple[str, ...]:
        """The values inside the model that are compared like outputs."""
        return self.rest.reads if self.rest else ()


def find_selections(model: onnx.ModelProto) -> Selections:
    """The selections of ``model``, without rows that it selects in another way than detectors."""
    selecting = {"TopK", "NonMaxSuppression", "ArgMax", "ArgMin"}
    if selecting.isdisjoint(node.op_type for node in model.graph.node):
        return Selections()
    scope = Scope.of(model)
    rest = _rest_of(model, scope)
    outputs = [value.name for value in model.graph.output]
    finder = _Finder(scope, [*dict.fromkeys((*outputs, *(rest.reads if rest else ())))])
    suppressed = tuple(finder.suppressed(rest.outputs)) if rest else ()
    rows = tuple(finder.rows())
    others = [
        name for name in outputs if all(span.output != name for group in rows for span in group)
    ]
    ties = {} if rest else finder.ties(others)
    return Selections(rows, dict(finder.choices()), rest, suppressed, ties)


def _keeps_rows(node: onnx.NodeProto, name: str) -> bool:
    """Whether the results of ``node`` have the rows of ``name``, which are not what it gathers from."""
    is_table = node.op_type in operators.GATHERS and name == node.input[0]
    return graph.operator(node) in _ROWWISE and not is_table


class _Finder:
    """Finds what selects the values called ``outputs``."""

    def __init__(self, scope: Scope, outputs: Sequence[str]) -> None:
        self._scope, self._outputs = scope, outputs

    def choices(self) -> Iterator[tuple[str, Choice]]:
        for output in self._outputs:
            if choice := self._choice(self._scope.origin(output, _SAME_NUMBERS)):
                yield output, choice

    def ties(self, outputs: Sequence[str]) -> dict[str, list[Ties]]:
        """Those of ``outputs`` that are made of the indices by which TopKs select computed values."""
        found: dict[str, list[Ties]] = {}
        for node in self._scope.nodes:
            if node.op_type == "TopK" and self._scope.maker(node.input[0]) is not None:
                ties = Ties(node.input[0], node.output[0], graph.number(node, "axis", -1))
                for name, picks in self._behind(node.output[1]):
                    if name in outputs:
                        found.setdefault(name, []).append(replace(ties, picks=picks))
        return found

    def _behind(self, indices: str) -> Iterator[tuple[str, tuple[Pick, ...]]]:
        """The values that are made of the ``indices`` of a TopK, with how they are picked on the way."""
        waiting: list[tuple[str, tuple[Pick, ...]]] = [(indices, ())]
        seen = set[tuple[str, tuple[Pick, ...]]]()
        while waiting and len(seen) < _MAX_WAYS:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            yield value
            name, picks = value
            for reader in self._scope.nodes_reading(name):
                if _keeps_rows(reader, name):
                    waiting.append((reader.output[0], picks))
                elif len(picks) < _MAX_PICKS and (pick := self._pick(reader, name)) is not None:
                    waiting += ((output, (*picks, pick)) for output in reader.output)

    def _pick(self, node: onnx.NodeProto, data: str) -> Pick | None:
        """What ``node`` picks of ``data``; None if it reads them in another way, or picks for the app."""
        if node.op_type == "TopK":
            return Pick(data, node.output[1], graph.number(node, "axis", -1))
        is_pick = node.op_type in ("Gather", "GatherElements") and data == node.input[0]
        if not is_pick or self._scope.maker(node.input[1]) is None:
            return None
        axis, is_whole = graph.number(node, "axis", 0), node.op_type == "Gather"
        return Pick(data, node.input[1], axis, is_whole)

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
        node, sizes = self._scope.maker(origin, "Concat"), self._scope.sizes(name)
        joined = self._scope.sizes(origin)
        if (
            node is None
            or not (sizes and joined and sizes[-1] == joined[-1])
            or graph.number(node, "axis", 0) not in (-1, len(joined) - 1)
        ):
            return [name]
        return [part for operand in node.input for part in self._joined(operand)]

    def _is_whole(self, name: str) -> bool:
        """Whether the value ``name`` has whole numbers, such as classes."""
        origin = self._scope.origin(name, _SAME_NUMBERS)
        is_whole = self._scope.kind(origin) in ("i", "u", "b")
        return is_whole or self._scope.maker(origin, *_WHOLE) is not None

    def _gathered(self, name: str) -> str:
        """The value from which the rows of the value ``name`` are gathered; empty if they are not."""
        values, gathers = "", operators.GATHERS
        while (node := self._scope.maker(self._scope.origin(name, _MOVED), *gathers)) is not None:
            name = values = node.input[0]
        return values

    def _is_score(self, name: str, node: onnx.NodeProto) -> bool:
        """Whether the value ``name`` has the scores by which the TopK ``node`` selects."""
        origin = self._scope.origin(name, _SAME_ORDER)
        if (gather := self._scope.maker(origin, *operators.GATHERS)) is not None:
            origins = (self._scope.origin(source.input[0], _MOVED) for source in (gather, node))
            return len(set(origins)) == 1
        return origin == node.output[0]

    def _choice(self, name: str) -> Choice | None:
        node = self._scope.maker(name, "ArgMax", "ArgMin")
        if node is None or self._scope.maker(node.input[0]) is None:
            return None
        is_least = node.op_type == "ArgMin"
        return Choice(node.input[0], graph.number(node, "axis", 0), is_least)


def _rest_of(model: onnx.ModelProto, scope: Scope) -> Rest | None:
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
    is_apart = any(map(graph.is_external, graph.stored_tensors(rest.graph)))
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


def with_reads(model: onnx.ModelProto, rest: Rest | None) -> onnx.ModelProto:
    """``model`` with the values that ``rest`` reads as outputs, if nodes compute all of them."""
    results = {name for node in model.graph.node for name in node.output}
    reads = rest.reads if rest is not None and results.issuperset(rest.reads) else ()
    return graph.with_outputs(model, reads)

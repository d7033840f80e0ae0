"""What a model selects: rows by a TopK, such as the boxes of a detector, and classes by an ArgMax.

Rows with nearly the same scores change places with the rounding, and the last ones are others. So each row is
compared with the candidate that it is, among all from which the TopK of the source model selects. The class
with the largest score is compared by its score in the source model: one with nearly the same is as right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.measures import LARGEST, MANY, Numbers

_PASSING = graph.RESHAPING | {"Cast"}
"""Operators that pass on values in the same order."""

_GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})

_REMAINDERS = frozenset({"Mod", "Sub"})
"""Operators that make the class of a row from its number among all classes of all rows."""

_CHOOSING = ("ArgMax", "ArgMin")

_TINY = 1e-30
"""Instead of a signal of nothing."""


@dataclass(frozen=True)
class Columns:
    """Columns of ``output`` along its last axis from ``start`` to ``stop``; all values where that is None.

    ``values``: the value inside the model whose rows, along ``axis``, they are; empty for scores and classes.
    """

    output: str
    start: int = 0
    stop: int | None = None
    values: str = ""
    axis: int = 0

    def of(self, array: Array, batch: int, kept: int) -> Numbers:
        """These columns of ``array``: batch x kept x columns."""
        chosen = array if self.stop is None else array[..., self.start : self.stop]
        return np.asarray(chosen, np.float64).reshape(batch, kept, -1)

    def put(self, array: Array, values: Array) -> None:
        """Replace these columns of ``array`` by ``values``."""
        chosen = array if self.stop is None else array[..., self.start : self.stop]
        chosen[...] = values.reshape(chosen.shape).astype(array.dtype)


@dataclass(frozen=True)
class Selection:
    """Outputs whose rows a TopK selected by their ``score``.

    ``candidates``: the value inside the model with the scores of all candidates. ``classes``: the classes of
    the rows, None where they have none. ``rows``: what else they have.
    """

    score: Columns
    candidates: str
    classes: Columns | None = None
    rows: tuple[Columns, ...] = ()

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model that are compared with."""
        return frozenset([self.candidates, *(each.values for each in self.rows)])


@dataclass(frozen=True)
class Choice:
    """An ``output`` of the numbers of the largest of the ``candidates``, a value inside the model, along
    ``axis``; with ``least`` of the smallest.
    """

    output: str
    candidates: str
    axis: int = 0
    least: bool = False


@dataclass(frozen=True)
class Selections:
    """The rows and the numbers that a model selects."""

    rows: tuple[Selection, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model that are compared with."""
        return frozenset(each.candidates for each in self.choices).union(
            *(each.values for each in self.rows)
        )


@dataclass
class Selected:
    """What is to be compared where something was selected: ``wanted``, with the rows of the candidates, and
    for outputs the ratio of signal to noise of each row in decibels: batch x rows.
    """

    wanted: dict[str, Array]
    rows: dict[str, Numbers] = field(default_factory=dict)


def selections(model: onnx.ModelProto) -> Selections:
    """The selections of ``model``, without rows that it selects in other ways than detectors do."""
    if not any(node.op_type in ("TopK", *_CHOOSING) for node in model.graph.node):
        return Selections()
    finder = _Finder(model)
    return Selections(tuple(finder.rows()), tuple(finder.choices()))


@dataclass(frozen=True)
class _Gathered:
    """The rows of ``values`` along ``axis`` whose indices come from a TopK."""

    values: str
    axis: int


class _Finder:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._scope = Scope.of(model)
        self._outputs = [value.name for value in model.graph.output]
        self._nodes = [node for node in model.graph.node if node.op_type == "TopK"]
        self._indices = {node.output[1] for node in self._nodes if len(node.output) > 1}

    def choices(self) -> Iterator[Choice]:
        for output in self._outputs:
            node = self._scope.maker(self._origin(output))
            if node is not None and node.op_type in _CHOOSING and self._scope.maker(node.input[0]):
                axis = graph.number(node, "axis", 0)
                yield Choice(output, node.input[0], axis, node.op_type == "ArgMin")

    def rows(self) -> Iterator[Selection]:
        pieces = {output: list(self._pieces(output)) for output in self._outputs}
        for node in self._nodes:
            found = [self._selection(node, each) for each in pieces.values()]
            score = next((each[0] for each in found if each and each[0]), None)
            if score is None:
                continue
            classes = [each[1] for each in found if each and each[1]]
            rows = [columns for each in found if each for columns in each[2]]
            scores = self._gathered(node.input[0])
            candidates = scores.values if scores else self._origin(node.input[0])
            if len(classes) <= 1:
                first = classes[0] if classes else None
                yield Selection(score, candidates, first, tuple(rows))

    def _pieces(self, output: str) -> Iterator[tuple[Columns, str]]:
        """The columns of ``output``, each with the value that they are."""
        origin = self._origin(output)
        node = self._scope.maker(origin)
        last = len(self._scope.sizes(origin) or ()) - 1
        if (
            node is None
            or node.op_type != "Concat"
            or graph.number(node, "axis", 0) not in (-1, last)
        ):
            yield Columns(output), output
            return
        start = 0
        for name in node.input:
            sizes = self._scope.sizes(name)
            if not sizes or sizes[-1] is None:
                return
            yield Columns(output, start, start + sizes[-1]), name
            start += sizes[-1]

    def _selection(
        self, node: onnx.NodeProto, pieces: Sequence[tuple[Columns, str]]
    ) -> tuple[Columns | None, Columns | None, list[Columns]] | None:
        """The score, the classes and the rows among ``pieces`` of an output; None if there is more in it."""
        score = classes = None
        rows = []
        for columns, name in pieces:
            origin = self._origin(name)
            maker = self._scope.maker(origin)
            if origin == node.output[0]:
                score = columns
            elif node.output[1] not in self._scope.ancestors([origin]):
                return None
            elif gathered := self._gathered(origin):
                where = (columns.output, columns.start, columns.stop)
                rows.append(Columns(*where, gathered.values, gathered.axis))
            elif origin == node.output[1] or (maker is not None and maker.op_type in _REMAINDERS):
                classes = columns
            else:
                return None
        return score, classes, rows

    def _origin(self, name: str) -> str:
        """The value that has the values of ``name`` in the same order, before it is reshaped."""
        while (node := self._scope.maker(name)) is not None and node.op_type in _PASSING:
            name = node.input[0]
        return name

    def _gathered(self, name: str) -> _Gathered | None:
        """What the value ``name`` is gathered from, before any TopK."""
        node = self._scope.maker(self._origin(name))
        if node is None or node.op_type not in _GATHERS:
            return None
        data, indices = graph.operands(node, 2)
        if self._indices.isdisjoint(self._scope.ancestors([indices])):
            return None
        if (earlier := self._gathered(data)) is not None:
            return earlier
        if not self._indices.isdisjoint(self._scope.ancestors([data])):
            return None
        axis = graph.number(node, "axis", 0)
        if node.op_type == "GatherND":
            sizes = self._scope.sizes(indices)
            if not sizes or sizes[-1] is None:
                return None
            axis = graph.number(node, "batch_dims", 0) + sizes[-1] - 1
        return _Gathered(data, axis)


def select(
    found: Selections,
    outputs: Arrays,
    wanted: Arrays,
    candidates: Arrays,
    unit: float,
) -> Selected:
    """What to compare ``outputs`` with, where the source model has ``wanted`` and, inside it, ``candidates``.

    ``unit``: that of the limits. The rows of what cannot be compared so stay where they are.
    """
    result = Selected(dict(wanted))
    for choice in found.choices:
        if choice.output in wanted and choice.output in outputs and choice.candidates in candidates:
            _choose(choice, outputs[choice.output], result, candidates[choice.candidates])
    for each in found.rows:
        names = {each.score.output, *(rows.output for rows in each.rows)}
        names |= {each.classes.output} if each.classes else set()
        if each.values <= candidates.keys() and all(
            name in wanted and name in outputs and outputs[name].shape == wanted[name].shape
            for name in names
        ):
            result.wanted |= {name: wanted[name].copy() for name in names}
            _select(each, outputs, result, candidates, unit)
    return result


def _choose(choice: Choice, own: Array, result: Selected, candidates: Array) -> None:
    scores = np.nan_to_num(np.asarray(candidates, np.float64)) * (-1 if choice.least else 1)
    table = np.moveaxis(scores, choice.axis, -1).reshape(-1, scores.shape[choice.axis])
    numbers = own.ravel().astype(np.int64)
    if not 0 < len(table) == own.size or own.shape != result.wanted[choice.output].shape:
        return
    its = table[np.arange(len(table)), np.clip(numbers, 0, table.shape[1] - 1)]
    noise = (table.max(axis=1) - its) ** 2 / max(float(table.var(axis=1).mean()), _TINY)
    noise[(numbers < 0) | (numbers >= table.shape[1])] = 1 / _TINY
    # As of slices, one of so many may be anything.
    noise[np.argsort(-noise)[: len(noise) // MANY]] = 0.0
    with np.errstate(divide="ignore"):
        ratios = -10 * np.log10(np.minimum(noise, 1 / _TINY))
    result.rows[choice.output] = ratios.reshape(-1, own.shape[-1] if own.shape else 1)


def _select(
    selection: Selection, outputs: Arrays, result: Selected, candidates: Arrays, unit: float
) -> None:
    scores = _numbers(candidates[selection.candidates])
    tables = [_table(_numbers(candidates[each.values]), each.axis) for each in selection.rows]
    # Without other columns the number of a value is its class: all are candidates of one row.
    batch, count = tables[0].shape[:2] if tables else (math.prod(scores.shape[:-1]), 1)
    columns = (selection.score, *selection.rows)
    size = _size(selection.score, outputs[selection.score.output])
    widths = [1, *(table.shape[2] for table in tables)]
    fits = (
        batch * count * size > 0
        and all(table.shape[:2] == (batch, count) for table in tables)
        and scores.size % (batch * count) == size % batch == 0
        and all(
            _size(each, outputs[each.output]) == size * width
            for each, width in zip(columns, widths, strict=True)
        )
    )
    if not fits:
        return
    kept = size // batch
    tables.insert(0, _by_row(scores, batch, count))
    own = [each.of(outputs[each.output], batch, kept) for each in columns]
    by_place = [each.of(result.wanted[each.output], batch, kept) for each in columns]
    numbers = None
    if selection.classes is not None:
        classes = selection.classes.of(outputs[selection.classes.output], batch, kept)[..., 0]
        most = tables[0].shape[2] if tables[0].shape[2] > 1 else count
        numbers = np.clip(np.rint(np.nan_to_num(classes)), 0, most - 1).astype(int)
        selection.classes.put(result.wanted[selection.classes.output], numbers)
    # Between 0 and 1 they are behind a Sigmoid or a Softmax.
    finite = tables[0][np.isfinite(tables[0])]
    largest = float(np.abs(finite).max(initial=0))
    floor = unit if largest <= 1 and finite.min(initial=0) >= 0 else LARGEST * largest
    signals = np.array([max(float(np.mean(each**2)), _TINY) for each in by_place])
    signals[0] = max(signals[0], floor**2)
    noise = np.empty((len(columns), batch, kept))
    for index in range(batch):
        own_here, tables_here = [each[index] for each in own], [each[index] for each in tables]
        found = _match(
            own_here, tables_here, numbers if numbers is None else numbers[index], signals
        )
        chosen, score, noise[:, index] = found
        # A score must be that of its row, and in its place: the one that is farther counts.
        place = by_place[0][index]
        is_farther = np.abs(score - own_here[0][:, 0]) > np.abs(place - own_here[0])[:, 0]
        place[is_farther, 0] = score[is_farther]
        for each, table in zip(by_place[1:], tables_here[1:], strict=True):
            each[index] = table[chosen]
    noise[0] = np.maximum(noise[0], (by_place[0] - own[0])[..., 0] ** 2 / signals[0])
    decibels = -10 * np.log10(np.clip(noise, _TINY, 1 / _TINY))
    for column, values, ratios in zip(columns, by_place, decibels, strict=True):
        column.put(result.wanted[column.output], values)
        known = result.rows.get(column.output, ratios)
        result.rows[column.output] = np.minimum(known, ratios)


def _match(
    own: Sequence[Numbers], tables: Sequence[Numbers], numbers: Array | None, signals: Numbers
) -> tuple[Array, Numbers, Numbers]:
    """For each row of ``own`` the nearest candidate that no other row is: its row, its score, and its noise
    in each of ``own``, relative to ``signals``.

    ``own`` are the scores and the other columns, rows x columns; ``tables`` those of the candidates, in which
    scores are candidates x classes. ``numbers``: the classes of the rows, or without classes the candidates.
    """
    scores, *others = tables
    each = np.arange(len(scores))
    free = np.ones(scores.shape, bool)
    found = np.zeros(len(own[0]), int)
    score = np.zeros(len(found))
    noise = np.zeros((len(own), len(found)))
    for place in range(len(found)):
        wanted = own[0][place, 0]
        usable = free
        if numbers is not None and scores.shape[1] > 1:
            column = np.full(len(scores), numbers[place])
        else:
            if numbers is not None:
                usable = free & (each == numbers[place])[:, None]
            column = np.abs(np.where(usable, scores, np.inf) - wanted).argmin(axis=1)
        its = np.where(usable[each, column], scores[each, column], np.inf)
        parts = [(its - wanted) ** 2]
        parts += [
            ((table - row[place]) ** 2).mean(axis=1)
            for table, row in zip(others, own[1:], strict=True)
        ]
        ratios = np.stack(parts) / signals[:, None]
        row = int(ratios.sum(axis=0).argmin())
        free[row, column[row]] = False
        found[place], score[place], noise[:, place] = row, its[row], ratios[:, row]
    return found, score, noise


def _numbers(array: Array) -> Numbers:
    """``array`` as numbers; what is not finite is no candidate."""
    numbers = np.asarray(array, np.float64)
    return np.where(np.isfinite(numbers), numbers, np.inf)


def _size(columns: Columns, array: Array) -> int:
    return array.size if columns.stop is None else array[..., columns.start : columns.stop].size


def _table(array: Numbers, axis: int) -> Numbers:
    """``array`` as batch x rows x values, with its rows along ``axis``."""
    own = axis % array.ndim
    before, behind = array.shape[:own], array.shape[own + 1 :]
    return array.reshape(math.prod(before), array.shape[own], math.prod(behind))


def _by_row(scores: Numbers, batch: int, count: int) -> Numbers:
    """``scores`` as batch x rows x classes; the classes may come first."""
    table = scores.reshape(batch, count, -1)
    if scores.shape[-1] == count and table.shape[2] > 1:
        table = table.reshape(batch, -1, count).swapaxes(1, 2)
    return table

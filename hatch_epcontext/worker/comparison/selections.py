"""Selections in a model: rows by a TopK, such as the boxes of a detector, and classes by an ArgMax.

Rounding swaps rows with nearly the same scores, and replaces the last ones. So each row is compared with its
own candidate, among all from which the TopK of the source model selects. A class with the largest score, also
that of a row, is compared by its score in the source model: a class with nearly the same score is as right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.measures import MANY, SIGNAL_PART, Numbers
from hatch_epcontext.worker.comparison.suppression import Rest, rest_of

_REMAINDERS = frozenset({"Mod", "Sub"})
"""Operators that compute the class of a row from its index among all classes of all rows."""

_CHOOSING = ("ArgMax", "ArgMin")

_TINY = 1e-30
"""The signal of zeros."""


@dataclass(frozen=True)
class IndexOutput:
    """An ``output`` of the indices of the largest ``candidates``, a value inside the model, along ``axis``;
    with ``least`` of the smallest. Each index is multiplied by ``scale``, and ``offset`` is added.
    """

    output: str
    candidates: str
    axis: int = 0
    least: bool = False
    scale: float = 1.0
    offset: float = 0.0

    def values(self, numbers: Array) -> Numbers:
        """The output's values for the indices ``numbers``."""
        return np.asarray(numbers, np.float64) * self.scale + self.offset


@dataclass(frozen=True)
class Columns:
    """Columns of ``output`` along its last axis from ``start`` to ``stop``; all values if that is None.

    ``values``: the value inside the model whose rows, along ``axis``, they are; empty for scores and classes.
    ``choice``: the scores whose largest these classes are, if they are classes.
    """

    output: str
    start: int = 0
    stop: int | None = None
    values: str = ""
    axis: int = 0
    choice: IndexOutput | None = None

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
    the rows, None if they have none. ``rows``: their other columns.
    """

    score: Columns
    candidates: str
    classes: Columns | None = None
    rows: tuple[Columns, ...] = ()

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model that outputs are compared with."""
        chosen = (each.choice.candidates for each in self.rows if each.choice)
        return frozenset([self.candidates, *(each.values for each in self.rows), *chosen])


@dataclass(frozen=True)
class Selections:
    """The rows and the indices that a model selects, and the part after a NonMaxSuppression."""

    rows: tuple[Selection, ...] = ()
    choices: tuple[IndexOutput, ...] = ()
    rest: Rest | None = None

    @property
    def values(self) -> frozenset[str]:
        """The values inside the model that outputs are compared with."""
        return frozenset(each.candidates for each in self.choices).union(
            *(each.values for each in self.rows), self.rest.values if self.rest else ()
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The values inside the model that are compared like outputs."""
        return self.rest.reads if self.rest else ()


@dataclass
class Selected:
    """The values to compare after a selection: ``wanted``, with the rows of the candidates; and for outputs
    the signal-to-noise ratio of each row in decibels, batch x rows.
    """

    wanted: dict[str, Array]
    rows: dict[str, Numbers] = field(default_factory=dict)


def selections(model: onnx.ModelProto) -> Selections:
    """The selections of ``model``, without rows that it selects in another way than detectors."""
    operators = {node.op_type for node in model.graph.node}
    if operators.isdisjoint(("TopK", "NonMaxSuppression", *_CHOOSING)):
        return Selections()
    rest = rest_of(model) if "NonMaxSuppression" in operators else None
    finder = _SelectionFinder(model, rest)
    return Selections(tuple(finder.rows()), tuple(finder.choices()), rest)


@dataclass(frozen=True)
class _Gathered:
    """The rows of ``values`` along ``axis`` whose indices come from a TopK."""

    values: str
    axis: int


class _SelectionFinder:
    def __init__(self, model: onnx.ModelProto, rest: Rest | None) -> None:
        self._scope = Scope.of(model)
        outputs = [value.name for value in model.graph.output]
        self._outputs = list(dict.fromkeys((*outputs, *(rest.reads if rest else ()))))
        self._nodes = [node for node in model.graph.node if node.op_type == "TopK"]
        self._indices = {node.output[1] for node in self._nodes if len(node.output) > 1}

    def choices(self) -> Iterator[IndexOutput]:
        for output in self._outputs:
            if (choice := self._choice(output, *self._scaled(output))) is not None:
                yield choice

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
        """The columns of ``output``, each with the value that it contains."""
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
        """The score, the classes and the rows among ``pieces`` of an output; None if it has anything else."""
        score = classes = None
        rows = []
        for columns, name in pieces:
            origin = self._origin(name)
            maker = self._scope.maker(origin)
            number, scale, offset = self._scaled(name)
            if origin == node.output[0]:
                score = columns
            elif node.output[1] not in self._scope.ancestors([origin]):
                return None
            elif (gathered := self._gathered(number)) is not None:
                made, its_scale, its_offset = self._scaled(gathered.values)
                by = (scale * its_scale, scale * its_offset + offset)
                choice = self._choice(columns.output, made, *by)
                if choice is None and number != origin:
                    return None
                rows.append(
                    replace(columns, values=gathered.values, axis=gathered.axis, choice=choice)
                )
            elif origin == node.output[1] or (maker is not None and maker.op_type in _REMAINDERS):
                classes = columns
            else:
                return None
        return score, classes, rows

    def _origin(self, name: str) -> str:
        """The value with the values of ``name`` in the same order, before any reshaping."""
        return self._scope.origin(name, operators.RESHAPING | {"Cast"})

    def _scaled(self, name: str) -> tuple[str, float, float]:
        """The value from which ``name`` is made by one factor and one summand, with these two."""
        scale, offset = 1.0, 0.0
        while (node := self._scope.maker(name := self._origin(name))) is not None:
            if node.op_type not in ("Add", "Mul", "Sub"):
                break
            known = [self._scope.constant(each) for each in node.input]
            one = next((each for each in known if each is not None and each.size == 1), None)
            if one is None:
                break
            name, number = node.input[0 if known[0] is None else 1], float(one.item())
            if node.op_type == "Mul":
                scale *= number
            elif node.op_type == "Add":
                offset += scale * number
            else:
                sign = 1.0 if known[0] is None else -1.0
                offset, scale = offset - sign * scale * number, sign * scale
        return name, scale, offset

    def _choice(self, output: str, name: str, scale: float, offset: float) -> IndexOutput | None:
        """``output``, the value ``name`` times ``scale`` plus ``offset``; None if it is something else."""
        node = self._scope.maker(name)
        if node is None or node.op_type not in _CHOOSING or not self._scope.maker(node.input[0]):
            return None
        least, axis = node.op_type == "ArgMin", graph.number(node, "axis", 0)
        return IndexOutput(output, node.input[0], axis, least, scale, offset) if scale else None

    def _gathered(self, name: str) -> _Gathered | None:
        """The source from which the value ``name`` is gathered, before any TopK."""
        node = self._scope.maker(self._origin(name))
        if node is None or node.op_type not in operators.GATHERS:
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
    """The values to compare ``outputs`` with; the source model has ``wanted`` and, inside it, ``candidates``.

    ``unit``: that of the limits. Rows without candidates stay where they are.
    """
    result = Selected(dict(wanted))
    if found.rest is not None and (made := found.rest.outputs_of(outputs, candidates)):
        result.wanted |= {name: candidates[name] for name in found.reads if name not in wanted}
        result.wanted |= made
        for name in made.keys() & outputs.keys():
            if (ratios := _ratios(outputs[name], made[name])) is not None:
                result.rows[name] = ratios
        wanted = {name: array for name, array in result.wanted.items() if name not in made}
    for choice in found.choices:
        if choice.output in wanted and choice.output in outputs and choice.candidates in candidates:
            _choose(choice, outputs[choice.output], result, candidates[choice.candidates], unit)
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


def _ratios(own: Array, wanted: Array) -> Numbers | None:
    """How near each row of ``own`` is to ``wanted`` in decibels, batch x rows; integers are equal or not."""
    if own.shape != wanted.shape or not own.size or own.dtype.kind not in "fiu":
        return None
    shape = (-1, *own.shape[-2:]) if own.ndim > 1 else (1, own.size, 1)
    its, ref = (_finite(each).reshape(shape) for each in (own, wanted))
    if own.dtype.kind != "f":
        return _decibels((its != ref).any(axis=2) / _TINY)
    signal = np.maximum(
        (ref**2).mean(axis=(0, 1)), max((SIGNAL_PART * np.abs(ref).max()) ** 2, _TINY)
    )
    return _decibels(((its - ref) ** 2 / signal).max(axis=2))


def _finite(array: Array) -> Numbers:
    return np.nan_to_num(np.asarray(array, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


_LOST = 0.01
"""The noise of the CPU's own choices above which they are not indices of candidates."""


def _choose(
    choice: IndexOutput, own: Array, result: Selected, candidates: Array, unit: float
) -> None:
    wanted = result.wanted[choice.output]
    table = _below_the_best(choice, candidates, unit)
    if not 0 < len(table) == own.size or own.shape != wanted.shape:
        return
    places = np.arange(len(table))
    right, best = _by_number(choice, wanted, table)
    if right[places, best.ravel()].max() > _LOST:
        # Not the indices themselves: a Cast after them may lose some.
        return
    table, numbers = _by_number(choice, own, table)
    result.wanted[choice.output] = choice.values(numbers).astype(wanted.dtype)
    noise = table[places, numbers.ravel()]
    # As with slices, one in so many may have any error.
    noise[np.argsort(-noise)[: len(noise) // MANY]] = 0.0
    rows = own.shape[-1] if own.shape else 1
    result.rows[choice.output] = _decibels(noise).reshape(-1, rows)


def _below_the_best(choice: IndexOutput, candidates: Array, unit: float) -> Numbers:
    """The noise of choosing each candidate: how much it is below the best, places x indices."""
    scores = np.asarray(candidates, np.float64)
    finite = scores[np.isfinite(scores)]
    low, high = finite.min(initial=0), finite.max(initial=0)
    floor = _floor(scores, unit)
    scores = np.nan_to_num(scores, nan=low, posinf=high, neginf=low) * (-1 if choice.least else 1)
    table = np.moveaxis(scores, choice.axis, -1).reshape(-1, scores.shape[choice.axis])
    signal = max(float(table.var(axis=1).mean()), floor**2, _TINY) if table.size else 1.0
    found: Numbers = (table.max(axis=1, keepdims=True) - table) ** 2 / signal
    return found


def _by_number(choice: IndexOutput, own: Array, table: Numbers) -> tuple[Numbers, Array]:
    """``table`` with a column for invalid indices, and the columns that ``own`` chooses."""
    values = np.nan_to_num(np.asarray(own, np.float64))
    numbers = np.rint((values - choice.offset) / choice.scale)
    count = table.shape[1]
    known = (numbers >= 0) & (numbers < count)
    more = np.full((len(table), 1), 1 / _TINY)
    return np.hstack([table, more]), np.where(known, numbers, count).astype(int)


def _floor(scores: Numbers, unit: float) -> float:
    """The floor of the signal: scores between 0 and 1 come from a Sigmoid or a Softmax."""
    finite = scores[np.isfinite(scores)]
    largest = float(np.abs(finite).max(initial=0))
    return unit if largest <= 1 and finite.min(initial=0) >= 0 else SIGNAL_PART * largest


def _decibels(noise: Numbers) -> Numbers:
    found: Numbers = -10 * np.log10(np.clip(noise, _TINY, 1 / _TINY))
    return found


def _select(
    selection: Selection, outputs: Arrays, result: Selected, candidates: Arrays, unit: float
) -> None:
    scores = _numbers(candidates[selection.candidates])
    tables = [_table(_numbers(candidates[each.values]), each.axis) for each in selection.rows]
    # Without other columns the index of a value is its class: all are candidates of one row.
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
    signals = np.array([max(float(np.mean(each**2)), _TINY) for each in by_place])
    signals[0] = max(signals[0], _floor(tables[0], unit) ** 2)
    # A class is compared by its score: classes with nearly the same score are as right.
    by_score: dict[int, tuple[Numbers, Array]] = {}
    for index, column in enumerate(columns):
        if column.choice is not None:
            below = _below_the_best(column.choice, candidates[column.choice.candidates], unit)
            if len(below) != batch * count:
                return
            below, chosen = _by_number(column.choice, own[index], below)
            by_score[index] = below.reshape(batch, count, -1), chosen[..., 0]
            by_place[index][...] = column.choice.values(chosen)
            signals[index] = 1.0
    noise = np.empty((len(columns), batch, kept))
    for index in range(batch):
        own_here, tables_here = [each[index] for each in own], [each[index] for each in tables]
        known = {each: below[index][:, its[index]] for each, (below, its) in by_score.items()}
        found = _match(
            own_here, tables_here, numbers if numbers is None else numbers[index], signals, known
        )
        chosen, score, noise[:, index] = found
        # A score must fit both its row and its place: the larger error counts.
        place = by_place[0][index]
        is_farther = np.abs(score - own_here[0][:, 0]) > np.abs(place - own_here[0])[:, 0]
        place[is_farther, 0] = score[is_farther]
        for number in {*range(1, len(columns))} - by_score.keys():
            by_place[number][index] = tables_here[number][chosen]
    noise[0] = np.maximum(noise[0], (by_place[0] - own[0])[..., 0] ** 2 / signals[0])
    for column, values, ratios in zip(columns, by_place, _decibels(noise), strict=True):
        column.put(result.wanted[column.output], values)
        worst = result.rows.get(column.output, ratios)
        result.rows[column.output] = np.minimum(worst, ratios)


def _match(
    own: Sequence[Numbers],
    tables: Sequence[Numbers],
    numbers: Array | None,
    signals: Numbers,
    known: Mapping[int, Numbers],
) -> tuple[Array, Numbers, Numbers]:
    """For each row of ``own`` the nearest candidate that no other row has: its row, its score, and its noise
    in each of ``own``, relative to ``signals``.

    ``own`` are the scores and the other columns, rows x columns; ``tables`` those of the candidates, in which
    scores are candidates x classes. ``numbers``: the classes of the rows, or without classes the candidates.
    ``known``: the noise of columns whose noise is not a distance, candidates x rows.
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
            known[index][:, place] if index in known else ((table - row[place]) ** 2).mean(axis=1)
            for index, (table, row) in enumerate(zip(others, own[1:], strict=True), 1)
        ]
        ratios = np.stack(parts) / signals[:, None]
        row = int(ratios.sum(axis=0).argmin())
        free[row, column[row]] = False
        found[place], score[place], noise[:, place] = row, its[row], ratios[:, row]
    return found, score, noise


def _numbers(array: Array) -> Numbers:
    """``array`` as numbers; a value that is not finite is no candidate."""
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

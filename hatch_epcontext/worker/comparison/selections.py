"""Compare what models select: rows as a set, and classes by their scores.

A row whose score is about that of the last one may be another. A class with the largest score is compared by
its score in the source model.

Rounding changes which boxes of a NonMaxSuppression overlap too much, and with one of them all that follow.
So its inputs are compared with the CPU's; and from these inputs it must select what the CPU selects from the
same ones. Inside a context its inputs are unknown: then its results must be the CPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.graph.dtypes import Array, Arrays, Numbers
from hatch_epcontext.graph.selections import Choice, Rest, Selections, spread, with_reads
from hatch_epcontext.worker.comparison.measures import MANY, TINY, Aligned
from hatch_epcontext.worker.comparison.rows import LOST, Rows, floor_of
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.session import cpu_options, open_session, set_model_path

_MAX_ROWS = 2**11
"""The most rows of which the nearest are found."""


@lru_cache(maxsize=2)
def _opened(model: bytes) -> ort.InferenceSession:
    return open_session(model, cpu_options())


def _outputs_of(rest: Rest, own: Arrays, candidates: Arrays) -> dict[str, Array]:
    """The outputs of ``rest`` for ``own`` values instead of the ``candidates``; none if some are missing."""
    if not rest.values <= candidates.keys() or not own.keys() >= set(rest.reads):
        return {}
    feeds: dict[str, Array] = {name: candidates[name] for name in rest.shapes}
    feeds |= {name: own[name].astype(candidates[name].dtype) for name in rest.reads}
    return run(_opened(rest.model), feeds)


def align(
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
    if rest is not None and (same := _outputs_of(rest, outputs, candidates)):
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
        has_scores = any(span.is_score for span in columns)
        if has_scores and len(sizes) == 1 and 0 < max(sizes)[1] <= _MAX_ROWS:
            rows = Rows(columns, expected, unit, elsewhere)
            rows.put(result, *_compare_rows(rows, outputs, expected, candidates))
    for name, ties in selections.ties.items():
        for one in ties:
            if name in outputs and candidates.keys() >= one.values:
                are_tied = spread(one.of(candidates), outputs[name].shape)
                result[name].output = np.where(are_tied, expected[name], result[name].output)
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
    rows: Rows, outputs: Arrays, expected: Arrays, candidates: Arrays
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
        by_index = rows.noise(own, ref)[score]
        is_farther = by_index > noise[score]
        rows.split(values)[score][is_farther] = rows.split(ref)[score][is_farther]
        noise[score] = np.maximum(noise[score], by_index)
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
    """The noise of choosing each candidate: how much it is below the best, positions x indices."""
    scores = np.asarray(candidates, np.float64)
    finite = scores[np.isfinite(scores)]
    low, high = finite.min(initial=0), finite.max(initial=0)
    floor = floor_of(scores, unit)
    scores = np.nan_to_num(scores, nan=low, posinf=high, neginf=low) * (-1 if choice.least else 1)
    table = np.moveaxis(scores, choice.axis, -1).reshape(-1, scores.shape[choice.axis])
    signal = max(float(table.var(axis=1).mean()), floor**2, TINY) if table.size else 1.0
    return np.asarray((table.max(axis=1, keepdims=True) - table) ** 2 / signal)


def open_with_reads(path: Path, rest: Rest, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session of the model in the file ``path``, which also returns the values that ``rest`` reads."""
    set_model_path(path, options)
    model = with_reads(onnx.load(path, load_external_data=False), rest)
    return open_session(model.SerializeToString(), options)

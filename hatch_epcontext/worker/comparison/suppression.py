"""Compares models with a NonMaxSuppression.

Rounding changes which boxes overlap too much, and with one of them all that follow. So its inputs are
compared with the CPU's; and from these inputs it must select what the CPU selects from the same ones.
Inside a context its inputs are unknown: then only rows may be others that a little noise changes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.arrays import Array, Arrays, is_float
from hatch_epcontext.graph.parts import Part, extract
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.comparison.rows import LOST, WRONG, Columns, Rows, Selected
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import run

_NOISE = 0.01
"""The noise of values that agree well, as a part of their size."""

_NOISY_RUNS = 8

_MAX_REST = 2**24
"""The most bytes of the rest of a model that is kept with the reference."""


@dataclass(frozen=True)
class Rest:
    """The part of a model from each NonMaxSuppression on: its ``outputs``, and ``model`` in base64.

    ``reads``: the values that it reads; ``shapes``: those that depend on no data.
    """

    reads: tuple[str, ...]
    shapes: tuple[str, ...]
    outputs: tuple[str, ...]
    model: str

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

    def outputs_with_noise(self, candidates: Arrays) -> Iterator[dict[str, Array]]:
        """Its outputs for ``candidates`` with a little noise: rows come and go that are at a limit."""
        rng = np.random.default_rng(0)
        for _ in range(_NOISY_RUNS):
            own = dict(candidates)
            for name in self.reads:
                if is_float((array := candidates[name]).dtype):
                    noise = rng.standard_normal(array.shape) * np.sqrt(
                        np.mean(np.square(array, dtype=np.float64))
                    )
                    own[name] = array + _NOISE * noise
            yield self.outputs_of(own, candidates)


@lru_cache(maxsize=2)
def _opened(model: str) -> ort.InferenceSession:
    return open_session(base64.b64decode(model), cpu_options())


def compare_possible(
    columns: Sequence[Columns], outputs: Arrays, result: Selected, runs: Sequence[Arrays]
) -> None:
    """Compare the rows of ``outputs`` with those of the first of ``runs``, as a set.

    Rows that another one lacks may be missing, and rows that it adds may be there.
    """
    first, *others = runs
    result.wanted |= {name: first[name] for name in first.keys() & result.wanted.keys()}
    groups: dict[tuple[int, ...], list[Columns]] = {}
    for its in columns:
        if its.output in outputs and outputs[its.output].dtype.kind in "biuf":
            sizes = [its.of(arrays).shape[:2] for arrays in (outputs, first)]
            # The rows of several samples are not counted apart.
            if all(map(all, sizes)) and (sizes[0][0] == 1 or len(set(sizes)) == 1):
                groups.setdefault((*sizes[0], *sizes[1]), []).append(its)
    for group in groups.values():
        rows = Rows(group, first)
        own, possible = rows.of(outputs), rows.of(first)
        is_needed = np.ones(possible.shape[:2], bool)
        for other in others if len(own) == 1 else ():
            places, _, noise = rows.match(rows.of(other), rows.of(first))
            is_same = np.asarray(noise.max(axis=0).ravel() < LOST, bool)
            is_needed &= np.isin(np.arange(is_needed.size), places.ravel()[is_same])
            possible = np.concatenate([possible, rows.of(other)[:, ~is_same]], axis=1)
        places, values, noise = rows.match(own, possible)
        for index, needed in enumerate(is_needed):
            if not set(np.flatnonzero(needed)) <= set(places[index]):
                # The row that is the farthest from any is in the place of the missing one.
                noise[:, index, noise[:, index].max(axis=0).argmax()] = WRONG
        rows.put(result, outputs, values, noise)


def rest_of(model: onnx.ModelProto) -> Rest | None:
    """The part of ``model`` from its NonMaxSuppression on.

    None without one, or if that part reads inputs of the model, is large, or reads values of unknown types.
    """
    scope = Scope.of(model)
    made = _made(scope)
    outputs = [value for value in model.graph.output if value.name in made]
    inputs = {value.name for value in graph.inputs(model.graph)}
    read = dict.fromkeys(
        name for i in sorted({scope.makers[each] for each in made}) for name in scope.reads[i]
    )
    read = dict.fromkeys(
        name for name in read if name not in made and inputs.intersection(scope.ancestors([name]))
    )
    types = {name: type_ for name in read if (type_ := scope.types.get(name)) is not None}
    if not outputs or not types or len(types) < len(read) or not inputs.isdisjoint(read):
        return None
    names = tuple(value.name for value in outputs)
    part = Part(
        tuple(read), names, tuple(sorted(scope.above(names, lambda name: name not in read)))
    )
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    ends = {value.name: value for value in outputs}
    extract(rest, part, ends | {name: helper.make_value_info(name, types[name]) for name in read})
    is_apart = any(
        each.data_location == TensorProto.EXTERNAL for each in graph.stored_tensors(rest.graph)
    )
    if is_apart or rest.ByteSize() > _MAX_REST:
        return None
    flow = Scope(model.graph)
    shapes = tuple(name for name in read if not flow.depends([name]))
    reads = tuple(name for name in read if name not in shapes)
    return Rest(reads, shapes, names, base64.b64encode(rest.SerializeToString()).decode())


def _made(scope: Scope) -> set[str]:
    """The values that depend on what a NonMaxSuppression selects."""
    made: set[str] = set()
    for node, reads in zip(scope.nodes, scope.reads, strict=True):
        if node.op_type == "NonMaxSuppression" or not made.isdisjoint(reads):
            made.update(name for name in node.output if name)
    return made


def expose_reads(model: onnx.ModelProto, rest: Rest) -> None:
    """Make the values that ``rest`` reads outputs of ``model``, in place, if nodes compute all of them."""
    made = {name for node in model.graph.node for name in node.output}
    own = {value.name for value in model.graph.output}
    if made.issuperset(rest.reads):
        more = (onnx.ValueInfoProto(name=name) for name in rest.reads if name not in own)
        model.graph.output.extend(more)

# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Runs a model with inputs of each size that was compiled, for ``runner(...)`` of the loader beside it.

A copy of ``hatch_epcontext/_runner.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hatch_epcontext.loader import Request, TargetAttempt, Variant


class Runner:
    """Runs a model as an InferenceSession does, on the first target that has the size of the inputs.

    A batch is split into batches that were compiled, if the build has proven that its rows are independent.
    Nothing is padded: what fits no compiled size runs where sizes are open, as in the source model.
    """

    def __init__(
        self,
        loader: Any,
        name: str,
        candidates: Sequence[tuple[list[Variant], Any]],
        request: Request,
    ) -> None:
        self._loader, self._name, self._request = loader, name, request
        self._candidates = candidates
        self._lock, self._runs = threading.Lock(), Counter[str]()
        # Of targets that are compiled for other sizes than were fed: how often, and the first of these.
        self._others, self._sizes = Counter[str](), dict[str, str]()
        self._opened: dict[tuple[int, Any], tuple[TargetAttempt, Any]] = {}
        # The axis of the batch in each input and output; empty if it is not split.
        batches = (variant.batch for variants, _ in candidates for variant in variants)
        self._axes: Mapping[str, Mapping[str, int]] = next(filter(None, batches), {})
        sessions = (self._open(variants[0], method) for variants, method in candidates)
        if (first := next(filter(None, sessions), None)) is None:
            message = f"the model {name!r} cannot be opened on this machine:"
            raise loader.LoadError(message, self.explain())
        self._first: Any = first

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """The outputs with these names, or all. Raises LoadError for a size that no target has."""
        import numpy as np

        values = {n: v.numpy() if hasattr(v, "numpy") else v for n, v in feeds.items()}
        arrays = {name: np.asarray(value) for name, value in values.items()}
        names = output_names or [value.name for value in self._first.get_outputs()]
        axes = {n: axis for n, axis in self._axes.get("inputs", {}).items() if n in arrays}
        batches = {arrays[n].shape[axis] for n, axis in axes.items() if axis < arrays[n].ndim}
        # Without a batch, or with one that is broadcast, all is one row.
        axes, total = (axes, *batches) if len(batches) == 1 else ({}, 1)
        parts, start = list[list[Any]](), 0
        while start < total or not parts:
            variant, session, rows = self._choose(arrays, axes, total - start)
            if rows < total:
                part = range(start, start + rows)
                values |= {name: arrays[name].take(part, axis) for name, axis in axes.items()}
            parts.append(session.run(names, values, run_options))
            start += rows
            with self._lock:
                self._runs[variant.target] += 1
        if len(parts) == 1:
            return parts[0]
        outputs = zip(names, zip(*parts, strict=True), strict=True)
        return [np.concatenate(arrays, self._axes["outputs"][name]) for name, arrays in outputs]

    def get_inputs(self) -> list[SimpleNamespace]:
        """The inputs: ``name``, ``type`` and ``shape``, with None for the sizes that can vary."""
        return [self._value(value, "inputs") for value in self._first.get_inputs()]

    def get_outputs(self) -> list[SimpleNamespace]:
        """The outputs, as `get_inputs`."""
        return [self._value(value, "outputs") for value in self._first.get_outputs()]

    def explain(self) -> list[TargetAttempt]:
        """What was opened, or failed to open, each with its reason and the number of its runs."""
        with self._lock:
            attempts = dict.fromkeys(attempt for attempt, _ in self._opened.values())
            runs = {a: f", runs: {self._runs[a.target]}" for a in attempts if a.outcome == "opened"}
            for attempt in runs:
                if number := self._others[attempt.target]:
                    runs[attempt] += f", of other sizes: {number} ({self._sizes[attempt.target]})"
        return [a._replace(reason=f"{a.reason}{runs.get(a, '')}") for a in attempts]

    def _value(self, value: Any, kind: str) -> SimpleNamespace:
        variants = [v for variants, _ in self._candidates for v in variants]
        shapes = [getattr(variant, kind).get(value.name) or value.shape for variant in variants]
        batch = self._axes.get(kind, {}).get(value.name)
        shape = [
            sizes[0] if len({*sizes}) == 1 and axis != batch else None
            for axis, sizes in enumerate(zip(*shapes, strict=False))
        ]
        return SimpleNamespace(name=value.name, type=value.type, shape=shape)

    def _choose(
        self, arrays: Mapping[str, Any], axes: Mapping[str, int], rows: int
    ) -> tuple[Variant, Any, int]:
        """What runs next: the variant, its session, and how many of the ``rows`` that are left it takes."""
        others = dict[str, str]()
        for variants, method in self._candidates:
            fitting = [(variant, _rows(variant, arrays, axes, rows)) for variant in variants]
            for variant, number in sorted(fitting, key=lambda pair: -pair[1]):
                if number >= 0 and (session := self._open(variant, method)):
                    self._warn(others, variant.target)
                    return variant, session, number
            if rows and all(number < 0 for _, number in fitting):
                others[variants[0].target] = _sizes(variants, arrays)
        sizes = "; ".join(map(": ".join, others.items()))
        message = f"no target of {self._name!r} takes these sizes ({sizes}):"
        raise self._loader.LoadError(message, self.explain())

    def _warn(self, others: Mapping[str, str], target: str) -> None:
        with self._lock:
            new = {other: sizes for other, sizes in others.items() if other not in self._sizes}
            self._sizes |= new
            self._others.update(others.keys())
        if new:
            because = "because others have other sizes"
            message = f"{self._name!r} runs on {target}, {because} ({'; '.join(map(': '.join, new.items()))})"
            # In the line of the app that called `run`.
            warnings.warn(message, stacklevel=4)

    def _open(self, variant: Variant, method: Any) -> Any:
        key = id(variant), method
        with self._lock:
            if key not in self._opened:
                attempt, session = self._loader.open_variant(method, [variant], self._request)
                level = "warning" if attempt.outcome == "failed" else "info"
                self._loader.log(level, f"{self._name} on {attempt}")
                self._opened[key] = attempt, session
            return self._opened[key][1]


def _rows(variant: Variant, arrays: Mapping[str, Any], axes: Mapping[str, int], rows: int) -> int:
    """How many of the ``rows`` that are left one run of ``variant`` takes; -1 if the sizes do not fit."""
    number = rows
    for name, array in arrays.items():
        for axis, size in enumerate(variant.inputs.get(name) or ()):
            needed = (rows,) if axis == axes.get(name) else array.shape[axis : axis + 1]
            if isinstance(size, int) and needed != (size,):
                if axis != axes.get(name) or not 0 < size < rows:
                    return -1
                number = size
    return number


def _sizes(variants: Sequence[Variant], arrays: Mapping[str, Any]) -> str:
    """The shapes that were fed to the inputs of which ``variants`` take no such size, and those they take."""
    fed = {name: [*array.shape] for name, array in arrays.items()}
    every = [
        {
            name: sizes
            for name, sizes in variant.inputs.items()
            for axis, size in enumerate(sizes or () if name in fed else ())
            if isinstance(size, int) and fed[name][axis : axis + 1] != [size]
        }
        for variant in variants
    ]
    names = {name: fed[name] for inputs in every for name in inputs}
    return f"fed {names}, compiled {' or '.join(dict.fromkeys(map(str, every)))}"

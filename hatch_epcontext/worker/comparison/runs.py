"""Runs of a model on samples, and the reference that they make: what it is, how it is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, ModelError, Problem, Setting
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.serialize import from_plain, to_plain
from hatch_epcontext.worker.comparison.measures import Nature
from hatch_epcontext.worker.facts import Magnitude
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.tensors import TooSlowError, run


@dataclass(frozen=True)
class Run:
    """One sample and the source's outputs. With several steps, states are fed back: ``feeds`` has them in the
    first step only.

    ``bounded`` and ``is_extreme``: see `Sample`. ``on_target``: whether the compiled model is run on it too.
    """

    name: str
    feeds: tuple[Arrays, ...]
    outputs: tuple[Arrays, ...]
    bounded: bool
    on_target: bool
    is_extreme: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of the source model: its ``states``, the ``natures`` of its outputs, those that depend on
    chance (``random``), those whose reference proves nothing with the reason (``inconclusive``), the integer
    inputs that nothing bounds (``guessed``), and values that come near float16's limit (``large``).
    """

    states: Mapping[str, str] = field(default_factory=dict)
    natures: Mapping[str, Nature] = field(default_factory=dict)
    random: tuple[str, ...] = ()
    inconclusive: Mapping[str, str] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()
    large: tuple[Magnitude, ...] = ()


@dataclass(frozen=True)
class Reference:
    """The source model's outputs for each of its samples."""

    runs: tuple[Run, ...]
    facts: Facts

    @property
    def feeds(self) -> Arrays:
        """The first sample."""
        return self.runs[0].feeds[0]

    def others(self, output: str) -> list[Array]:
        """The values of ``output`` for all samples whose inputs are within what the graph bounds."""
        return values_of(output, (each for each in self.runs if not each.is_extreme))


def values_of(output: str, runs: Iterable[Run]) -> list[Array]:
    """The values of ``output`` in all steps of ``runs``."""
    return [outputs[output] for each in runs for outputs in each.outputs if output in outputs]


def run_steps(
    session: ort.InferenceSession,
    feeds: Sequence[Arrays],
    states: Mapping[str, str],
    spec: Model,
    what: str,
    more: str = "",
) -> Iterator[dict[str, Array]]:
    """Yield the outputs of each step of ``session``, with its own ``states``; raises as `run_model` does."""
    outputs: dict[str, Array] = {}
    for each in feeds:
        own = {first: outputs[last] for first, last in states.items() if last in outputs}
        outputs = run_model(session, {**each, **own}, spec, what, more)
        yield outputs


def run_model(
    session: ort.InferenceSession, feeds: Arrays, spec: Model, what: str, more: str = ""
) -> dict[str, Array]:
    """Return the outputs of ``session``, which runs the model ``what``, or something made of it.

    Raises ModelError when that takes longer than the model's timeout; ``more`` is added to the message.
    """
    step(f"running {what}")
    try:
        return run(session, feeds, spec.validate.timeout)
    except TooSlowError:
        raise ModelError(
            Problem.at(
                spec.key,
                Kind.RUN_TIMEOUT,
                f"running {what} was stopped after {spec.validate.timeout:g} seconds{more}.",
                "Give it smaller inputs, or more time.",
                Setting(spec.key / "validate" / "timeout", round(2 * spec.validate.timeout, 3)),
            )
        ) from None


def for_other_numbers(expected: Reference) -> Reference:
    """Return ``expected`` for a model that computes with other numbers than the source, quantized or not.

    A quantizer measures the values that there are: it cannot be near on constants, where there is nothing to
    measure. So only the first sample is compared, and the steps of a recurrent model. What is large inside
    the source is not inside the model.
    """
    runs = tuple(
        replace(each, on_target=each.on_target and (index == 0 or len(each.feeds) > 1))
        for index, each in enumerate(expected.runs)
    )
    return Reference(runs, replace(expected.facts, large=()))


_FLAGS = ("bounded", "on_target", "is_extreme")
"""The fields of a `Run` that a file has as they are."""


def write_reference(found: Reference, path: Path) -> str | None:
    """Write ``found`` to ``path``; returns it, or None for dtypes that NumPy's format does not have."""
    arrays: dict[str, Array] = {}
    # Not in the names of the arrays, which cannot be as long as those of tensors.
    names: dict[str, int] = {}
    runs: list[dict[str, Any]] = []
    for number, each in enumerate(found.runs):
        steps = zip(each.feeds, each.outputs, strict=True)
        for index, (feeds, outputs) in enumerate(steps):
            for kind, tensors in (("in", feeds), ("out", outputs)):
                for name, array in tensors.items():
                    place = names.setdefault(name, len(names))
                    arrays[f"{number}.{index}.{kind}.{place}"] = array
        flags = {name: getattr(each, name) for name in _FLAGS}
        runs.append({"name": each.name, "steps": len(each.feeds), **flags})
    if not all(array.dtype.isbuiltin == 1 and array.dtype.kind != "O" for array in arrays.values()):
        return None
    text = json.dumps({"runs": runs, "names": list(names), "facts": to_plain(found.facts)})
    arrays["facts"] = np.frombuffer(text.encode(), np.uint8)
    np.savez(path, allow_pickle=False, **arrays)
    return str(path)


def read_reference(path: str) -> Reference:
    """Return what `write_reference` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        plain = json.loads(arrays["facts"].tobytes())
        runs = []
        for number, each in enumerate(plain["runs"]):
            feeds, outputs = (
                tuple(
                    _named(arrays, f"{number}.{index}.{kind}.", plain["names"])
                    for index in range(each["steps"])
                )
                for kind in ("in", "out")
            )
            flags = {name: each[name] for name in _FLAGS}
            runs.append(Run(each["name"], feeds, outputs, **flags))
        return Reference(tuple(runs), from_plain(plain["facts"], Facts))


def _named(arrays: Any, prefix: str, names: Sequence[str]) -> dict[str, Array]:
    found = (name for name in arrays.files if name.startswith(prefix))
    return {names[int(name.removeprefix(prefix))]: arrays[name] for name in found}

"""Runs of a model on samples, and the reference that they make: what it is, how it is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, ModelError, Problem, Setting
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.number_format import NumberFormat
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

    Of dynamically quantized models: ``float_form_db``, the decibels by which the integers differ from the
    float form, if that is the reference; ``noise``, those by which outputs differ after other rounding.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    natures: Mapping[str, Nature] = field(default_factory=dict)
    random: tuple[str, ...] = ()
    inconclusive: Mapping[str, str] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()
    large: tuple[Magnitude, ...] = ()
    float_form_db: float | None = None
    noise: Mapping[str, float] = field(default_factory=dict)


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
    model: Model,
    what: str,
    more: str = "",
) -> Iterator[dict[str, Array]]:
    """Yield the outputs of each step of ``session``, with its own ``states``; raises as `run_model` does."""
    outputs: dict[str, Array] = {}
    for each in feeds:
        own = {first: outputs[last] for first, last in states.items() if last in outputs}
        outputs = run_model(session, {**each, **own}, model, what, more)
        yield outputs


def run_model(
    session: ort.InferenceSession, feeds: Arrays, model: Model, what: str, more: str = ""
) -> dict[str, Array]:
    """Return the outputs of ``session``, which runs the model ``what``, or something made of it.

    Raises ModelError when that takes longer than the model's timeout; ``more`` is added to the message.
    """
    step(f"running {what}")
    try:
        return run(session, feeds, model.validate.timeout)
    except TooSlowError:
        raise ModelError(
            Problem.at(
                model.key,
                Kind.RUN_TIMEOUT,
                f"running {what} was stopped after {model.validate.timeout:g} seconds{more}.",
                "Give it smaller inputs, or more time.",
                Setting(model.key / "validate" / "timeout", round(2 * model.validate.timeout, 3)),
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


def for_format(expected: Reference, format_: NumberFormat | None) -> Reference:
    """Return ``expected`` for what computes in ``format_``: only float16 has a limit that is near."""
    if format_ is not None and format_.name == "float16":
        return expected
    return Reference(expected.runs, replace(expected.facts, large=()))


_FLAGS = ("bounded", "on_target", "is_extreme")
"""The fields of a `Run` that a file has as they are."""


def write_reference(found: Reference, path: Path) -> str | None:
    """Write ``found`` to ``path``; returns it, or None for dtypes that only Python knows.

    A line of JSON names the arrays, whose bytes follow: NumPy's own format takes longer than a small model.
    """
    arrays: list[Array] = []

    def listed(tensors: Arrays) -> dict[str, Any]:
        arrays.extend(tensors.values())
        return {name: [array.dtype.str, array.shape] for name, array in tensors.items()}

    runs = [
        {
            "name": each.name,
            "feeds": [listed(step) for step in each.feeds],
            "outputs": [listed(step) for step in each.outputs],
            **{name: getattr(each, name) for name in _FLAGS},
        }
        for each in found.runs
    ]
    if not all(array.dtype.isbuiltin == 1 and array.dtype.kind != "O" for array in arrays):
        return None
    text = json.dumps({"runs": runs, "facts": to_plain(found.facts)})
    with path.open("wb") as file:
        file.write(text.encode() + b"\n")
        file.writelines(array.tobytes() for array in arrays)
    return str(path)


def read_reference(path: str) -> Reference:
    """Return what `write_reference` wrote."""
    with Path(path).open("rb") as file:
        plain = json.loads(file.readline())

        def read(listed: Mapping[str, Any]) -> dict[str, Array]:
            return {name: _read_array(file, *each) for name, each in listed.items()}

        runs = tuple(
            Run(
                each["name"],
                tuple(map(read, each["feeds"])),
                tuple(map(read, each["outputs"])),
                **{name: each[name] for name in _FLAGS},
            )
            for each in plain["runs"]
        )
    return Reference(runs, from_plain(plain["facts"], Facts))


def _read_array(file: IO[bytes], dtype: str, shape: Sequence[int]) -> Array:
    type_ = np.dtype(dtype)
    data = bytearray(file.read(math.prod(shape) * type_.itemsize))
    array: Array = np.frombuffer(data, type_).reshape(shape)
    return array

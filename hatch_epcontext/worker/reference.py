"""The outputs of the source model on the CPU EP, with which everything is compared."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Kind, ModelError, Problem, Setting
from hatch_epcontext.ipc.facts import Agreement, ModelSpec
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.conditions import advice
from hatch_epcontext.worker.inputs import constant
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.step import step
from hatch_epcontext.worker.tensors import (
    Array,
    Arrays,
    TooSlowError,
    compare,
    refuse_not_finite,
    run,
    within,
)


def reference(spec: ModelSpec, feeds: Arrays) -> dict[str, Array]:
    """Return the outputs of the source model on the CPU, with its constants fed as inputs.

    Raises ModelError when the source model cannot be run.
    """
    source = onnx.load(spec.path, load_external_data=False)
    frozen = {
        value.name: constant(spec, graph.facts(value))
        for value in graph.inputs(source.graph)
        if value.name in spec.constants
    }
    step("opening the source model on the CPU")
    start = time.monotonic()
    try:
        session = open_session(Path(spec.path), cpu_options())
        opened = f"; opening it took {time.monotonic() - start:.1f} s"
        return run_model(session, {**feeds, **frozen}, spec, "the source model on the CPU", opened)
    except ModelError:
        raise
    except Exception as error:
        hint, settings = (not spec.constants and advice(source.graph, spec.key)) or ("", ())
        raise ModelError(
            Problem.at(
                spec.key,
                Kind.SOURCE_FAILED,
                f"the source model itself cannot be run on the CPU: {error}",
                f"{hint}\nGive inputs that the model takes, or switch off the comparison.".strip(),
                *settings,
                Setting(spec.key / "validate" / "inputs"),
                Setting(spec.key / "validate" / "tolerance", False),
            )
        ) from error


def run_model(
    session: ort.InferenceSession, feeds: Arrays, spec: ModelSpec, what: str, more: str = ""
) -> dict[str, Array]:
    """Return the outputs of ``session``, which runs the model ``what``, or something made of it.

    Raises ModelError when that takes longer than the model's timeout; ``more`` is added to the message.
    """
    step(f"running {what}")
    try:
        return run(session, feeds, spec.timeout)
    except TooSlowError:
        raise ModelError(
            Problem.at(
                spec.key,
                Kind.RUN_TIMEOUT,
                f"running {what} was stopped after {spec.timeout:g} seconds{more}.",
                "Give it smaller inputs, or more time.",
                Setting(spec.key / "validate" / "timeout", round(2 * spec.timeout, 3)),
            )
        ) from None


def write_reference(outputs: Arrays, path: Path) -> str | None:
    """Write ``outputs`` to ``path``; returns it, or None for dtypes that NumPy's format does not have."""
    if not all(
        array.dtype.isbuiltin == 1 and array.dtype.kind != "O" for array in outputs.values()
    ):
        return None
    np.savez(path, allow_pickle=False, **{f"_{name}": array for name, array in outputs.items()})
    return str(path)


def read_reference(path: str) -> dict[str, Array]:
    """Return the outputs that `write_reference` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name.removeprefix("_"): arrays[name] for name in arrays.files}


def check_outputs(
    outputs: Arrays, expected: Arrays, tolerance: Tolerance, spec: ModelSpec, reference_name: str
) -> tuple[Agreement, ...]:
    """Compare ``outputs`` with ``expected``, which messages call ``reference_name`` ("the CPU's").

    Raises BuildError when an output has NaN or Inf where ``expected`` has none, or leaves the tolerance.
    """
    step(f"comparing the outputs with {reference_name}")
    refuse_not_finite(outputs, expected)
    agreements = []
    problems = []
    for name, output in outputs.items():
        if name not in expected:
            continue
        agreement = compare(name, output, expected[name], tolerance)
        agreements.append(agreement)
        if not within(output, expected[name], agreement, tolerance):
            problems.append(
                Problem(
                    Kind.OUTPUT_DIFFERS,
                    "",
                    f"the output {name!r} differs from {reference_name}: the largest difference is "
                    f"{agreement.max_abs:.3g} with {_cosine(agreement)} (allowed: atol "
                    f"{tolerance.atol:g}, rtol {tolerance.rtol:g}, cosine {tolerance.cosine:g}).",
                    "Find the cause, or allow more if the difference is acceptable.",
                    settings=(Setting(spec.key / "validate" / "tolerance"),),
                )
            )
    if problems:
        raise BuildError(*problems)
    return tuple(agreements)


def _cosine(agreement: Agreement) -> str:
    if agreement.cosine is None:
        return "no cosine, because the output is almost zero"
    return f"a cosine of {agreement.cosine:.5f}"

"""What the CPU EP answers for the source model: the measure of everything that is made of it."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import Agreement, ModelSpec
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.inputs import constant
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import (
    Array,
    Arrays,
    compare,
    refuse_not_finite,
    run,
    within,
)


def reference(spec: ModelSpec, feeds: Arrays) -> dict[str, Array]:
    """The outputs of the source model on the CPU, with its constants fed as what they are.

    Raises ModelError when the source itself cannot be run.
    """
    source = onnx.load(spec.path, load_external_data=False)
    frozen = {
        value.name: constant(spec, value)
        for value in graph.inputs(source.graph)
        if value.name in spec.constants
    }
    try:
        return run(open_session(Path(spec.path), cpu_options()), {**feeds, **frozen})
    except Exception as error:
        raise ModelError(
            Problem(
                spec.key,
                f"the source model itself cannot be run on the CPU: {error}",
                "Give it inputs that it takes, or compare with nothing: tolerance = false.",
            )
        ) from error


def check_outputs(
    outputs: Arrays, expected: Arrays, tolerance: Tolerance, spec: ModelSpec, whose: str
) -> tuple[Agreement, ...]:
    """How near ``outputs`` are to those that are ``expected`` of ``whose``.

    Raises BuildError when one has NaN or Inf where the other has not, or leaves the tolerance.
    """
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
                    "",
                    f"the output {name!r} disagrees with {whose}: the largest difference is "
                    f"{agreement.max_abs:.3g}, {_cosine(agreement)} "
                    f"(allowed: atol {tolerance.atol:g}, rtol {tolerance.rtol:g}, cosine at least "
                    f"{tolerance.cosine:g}).",
                    f"If that is good enough, say so in {spec.key}.tolerance.",
                )
            )
    if problems:
        raise BuildError(*problems)
    return tuple(agreements)


def _cosine(agreement: Agreement) -> str:
    if agreement.cosine is None:
        return "and it is all but zero"
    return f"the cosine similarity {agreement.cosine:.5f}"

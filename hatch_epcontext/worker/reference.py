"""What the CPU EP answers for the source model: the measure of everything that is made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import Agreement, ModelSpec
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import (
    Array,
    Arrays,
    compare,
    numpy_dtype,
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


def constant(spec: ModelSpec, value: onnx.ValueInfoProto) -> Array:
    """The constant of ``spec`` for an input, of its dtype, and of its rank if it is a single number.

    Raises TypeError, ValueError or OverflowError when it does not fit the dtype.
    """
    facts = graph.facts(value)
    array: Array = np.asarray(spec.constants[value.name], dtype=numpy_dtype(facts.dtype))
    if len(facts.shape) != array.ndim and array.size == 1:
        array = array.reshape([1] * len(facts.shape))
    return array


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


def optimize(source: Path, result: Path, level: ort.GraphOptimizationLevel) -> None:
    """Write ``source`` after ONNX Runtime's optimizations of that level for the CPU to ``result``."""
    session_options = cpu_options()
    session_options.graph_optimization_level = level
    session_options.optimized_model_filepath = str(result)
    model = onnx.load(source, load_external_data=False)
    if graph.external_data(model, source.parent, source.name):
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{result.stem}.data"
        )
    open_session(source, session_options)

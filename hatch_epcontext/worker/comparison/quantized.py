"""The reference of a dynamically quantized model, whose integers on the CPU are noisy themselves.

If its quantization is undone, the float form is the reference, and says how far the integers are from it. If
not, the smallest rounding error can change the integers: no limit is stricter than what such errors explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph.arrays import Array, Arrays
from hatch_epcontext.graph.dequantize import dequantize, is_noisy
from hatch_epcontext.graph.external import load_whole, save_whole
from hatch_epcontext.providers import QUANTIZED, Tolerance
from hatch_epcontext.worker.comparison.compare import refuse_differences
from hatch_epcontext.worker.comparison.measures import Comparison, compare, other_shape
from hatch_epcontext.worker.comparison.reference import reference
from hatch_epcontext.worker.comparison.run_errors import source_failed
from hatch_epcontext.worker.comparison.runs import Facts, Reference, for_other_numbers, run_steps
from hatch_epcontext.worker.configured import fix_inputs
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.session import cpu_options, open_session

_ROUNDING = 2.0**-20
"""The relative errors whose effect on the integers is measured, as float32 sums have them."""

_MARGIN = 6.0
"""Decibels by which other rounding errors may have a larger effect than the measured ones."""

_FEW = 16

_EQUAL = 150.0
"""Decibels of outputs that are equal, or nearly so."""

_NO_LIMITS = Tolerance(snr=1000, cosine=1)

_SOURCE = "the source model on the CPU"


def write_float_form(source: Path, result: Path, *, static: bool = False) -> int:
    """Write the model at ``source`` to ``result`` without dynamic quantization; with ``static`` without any.

    Returns the number of operators undone; if that is 0, nothing is written.
    """
    step("undoing the quantization of the model")
    onnx_model = load_whole(source)
    if undone := dequantize(onnx_model, static=static):
        save_whole(onnx_model, result)
    return undone


def source_reference(model: Model, fixed: onnx.ModelProto, *, dequantized: bool) -> Reference:
    """The reference of ``model`` for an earlier artifact; ``fixed``: as for `reference`.

    ``dequantized``: whether its dynamic quantization was undone. Raises BuildError and ModelError as
    `float_form_reference` does.
    """
    if not is_noisy(onnx.load(model.path, load_external_data=False)):
        return reference(model, fixed)
    whole = load_whole(model.path)
    fix_inputs(whole, model)
    with temp_dir() as folder:
        integers, floats = folder / "integers.onnx", folder / "floats.onnx"
        save_whole(whole, integers)
        if dequantized and write_float_form(integers, floats):
            return float_form_reference(model, integers, floats)
        return with_noise(model, integers, reference(model, fixed))


def float_form_reference(model: Model, integers: Path, floats: Path) -> Reference:
    """Run the float form at ``floats`` of the model at ``integers``; in both, shapes and constants are fixed.

    Raises BuildError when an output has another shape than the source's, and ModelError when the model cannot
    be run.
    """
    float_form = onnx.load(floats, load_external_data=False)
    expected = reference(model, float_form, floats)
    try:
        session = open_session(integers, cpu_options())
        compared = _compare(model, session, for_other_numbers(expected))
        ratios = [each.agreement.snr for each in compared]
    except (BuildError, ModelError):
        raise
    except Exception as error:
        source = onnx.load(integers, load_external_data=False)
        raise ModelError(source_failed(model, source, error)) from error
    decibels = min([_EQUAL, *(each for each in ratios if each is not None)])
    expected = replace(expected, facts=replace(expected.facts, float_form_db=decibels))
    return with_noise(model, floats, expected) if is_noisy(float_form) else expected


def with_noise(model: Model, path: Path, expected: Reference) -> Reference:
    """``expected``, the reference of the quantized model at ``path``, with its noise."""
    step("measuring the noise of the source model")
    rng = np.random.default_rng(0)
    onnx_model = load_whole(path)
    round_weights(onnx_model, rng)
    runs = []
    for each in expected.runs:
        feeds = ({n: _rounded(array, rng) for n, array in fed.items()} for fed in each.feeds)
        runs.append(replace(each, feeds=tuple(feeds)))
    noise: dict[str, float] = {}
    with temp_dir() as folder:
        save_whole(onnx_model, folder / "rounded.onnx")
        session = open_session(folder / "rounded.onnx", cpu_options())
        for found in _compare(model, session, Reference(tuple(runs), expected.facts)):
            name = found.agreement.output
            noise[name] = min(noise.get(name, _EQUAL), found.needed.get("snr", _EQUAL))
        # Windows does not remove open files.
        del session
    return Reference(expected.runs, replace(expected.facts, noise=noise))


def round_weights(onnx_model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Add rounding errors to the weights of a model, as from sums in another order, in place."""
    for tensor in onnx_model.graph.initializer:
        # A few numbers may be sizes, such as those of a Resize, which must not change.
        if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) > _FEW:
            rounded = _rounded(numpy_helper.to_array(tensor), rng)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))


def _rounded(array: Array, rng: np.random.Generator) -> Array:
    """``array`` with rounding errors, if it is float32."""
    if array.dtype != np.float32:
        return array
    errors = _ROUNDING * rng.choice((-1.0, 1.0), array.shape)
    rounded: Array = (np.asarray(array, np.float64) * (1 + errors)).astype(np.float32)
    return rounded


def within_noise(limits: Tolerance, facts: Facts, default: Tolerance | None = None) -> Tolerance:
    """``limits``, relaxed to what the noise of the source explains.

    Limits that are not ``default``, or are an output's own, are the user's choice, and stay.
    """
    outputs, usual = dict(limits.outputs), default or limits
    for name, decibels in facts.noise.items():
        snr = round(max(decibels - _MARGIN, QUANTIZED.snr), 1)
        own = {}
        if limits.snr == usual.snr:
            own["snr"] = min(limits.snr, snr)
        if limits.cosine == usual.cosine:
            own["cosine"] = min(limits.cosine, 1 - 10 ** (-snr / 10))
        outputs[name] = {**own, **limits.outputs.get(name, {})}
    return replace(limits, outputs=outputs)


def _steps(
    model: Model, session: ort.InferenceSession, expected: Reference
) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield the outputs of ``session``, and those of the reference, in each step that a target runs."""
    for each in expected.runs:
        if each.on_target:
            states = expected.facts.states
            outputs = run_steps(session, each.feeds, states, model, _SOURCE)
            yield from zip(outputs, each.outputs, strict=True)


def _compare(
    model: Model, session: ort.InferenceSession, expected: Reference
) -> Iterator[Comparison]:
    """Compare each output of ``session`` for which the reference is conclusive.

    Raises BuildError when one has another shape.
    """
    facts = expected.facts
    for outputs, wanted in _steps(model, session, expected):
        for name in wanted.keys() - {*facts.random, *facts.inconclusive}:
            if (reshaped := other_shape(name, outputs[name], wanted[name])) is not None:
                refuse_differences([reshaped])
            nature, elsewhere = facts.natures.get(name, "any"), expected.elsewhere(name)
            yield compare(
                name, outputs[name], wanted[name], _NO_LIMITS, elsewhere=elsewhere, nature=nature
            )

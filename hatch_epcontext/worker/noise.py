"""The noise of a source model: what other rounding errors make of its outputs.

Where quantization stays, the smallest rounding error can change the integers: no limit of a target is
stricter than what such errors explain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.external import load_whole, save_whole
from hatch_epcontext.providers import QUANTIZED, Tolerance
from hatch_epcontext.worker.advice import Explained, refuse
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.results import GAIN, Agreement, AgreementStatus
from hatch_epcontext.worker.session import LEVELS, cpu_options, open_session

_ROUNDING = 2.0**-20
"""The relative errors of weights whose effect on integers is measured, as float32 sums have them."""

_MAX_SIZES = 16
"""The most floats that may be sizes: the region of a Resize has two for each of 8 dimensions."""

_NO_LIMITS = Tolerance(snr=1000, cosine=1)


def with_noise(path: Path, expected: Reference) -> Reference:
    """``expected``, the reference of the quantized model at ``path``, with its noise."""
    announce("measuring the noise of the source model")
    rng, runs = np.random.default_rng(1), []
    for run in expected.runs:
        feeds = ({name: _noisy(array, rng) for name, array in fed.items()} for fed in run.frames)
        runs.append(replace(run, frames=tuple(feeds)))
    with temp_dir() as folder:
        session = open_rounded(path, folder, cpu_options())
        noisy = _with_noise_of(session, expected, runs)
        # Windows does not remove open files.
        del session
    return noisy


def with_jitter(path: Path, expected: Reference) -> Reference:
    """``expected`` with the noise of the model at ``path`` that ONNX Runtime's own fusions make on the CPU.

    It computes the samples again, each node by itself: in deep quantized models another order of additions
    changes integers.
    """
    announce("measuring the noise of ONNX Runtime's fusions")
    options = cpu_options()
    options.graph_optimization_level = LEVELS["none"]
    return _with_noise_of(open_session(path, options), expected, expected.runs)


def _with_noise_of(
    session: ort.InferenceSession, expected: Reference, runs: Sequence[ReferenceRun]
) -> Reference:
    """``expected`` with the noise of ``session`` on ``runs``, the samples of ``expected`` or nearly."""
    outputs = dict(expected.facts.outputs)
    for agreement in compared(session, Reference(tuple(runs), expected.facts)):
        own = outputs[agreement.output]
        # Equal outputs have no noise, and NaN instead of a number says nothing of other numbers.
        if agreement.margin is not None:
            noise = agreement.within(own.within(_NO_LIMITS).snr)
            outputs[agreement.output] = replace(own, noise=min(own.noise, noise))
    return Reference(expected.runs, replace(expected.facts, outputs=outputs))


def open_rounded(path: Path, folder: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session of the model at ``path`` whose weights have rounding errors, as from sums in another order.

    It is written into ``folder``.
    """
    onnx_model, rng = load_whole(path), np.random.default_rng(0)
    for tensor in onnx_model.graph.initializer:
        # Sizes must not change.
        if tensor.data_type == onnx.TensorProto.FLOAT and math.prod(tensor.dims) > _MAX_SIZES:
            rounded = _noisy(onnx.numpy_helper.to_array(tensor), rng)
            tensor.CopyFrom(onnx.numpy_helper.from_array(rounded, tensor.name))
    save_whole(onnx_model, folder / "rounded.onnx")
    return open_session(folder / "rounded.onnx", options)


def _noisy(array: Array, rng: np.random.Generator) -> Array:
    """``array`` with rounding errors, if it is float32."""
    if array.dtype != np.float32:
        return array
    errors = _ROUNDING * rng.choice((-1, 1), array.shape)
    return np.asarray(array.astype(np.float64) * (1 + errors), np.float32)


def within_noise(limits: Tolerance, facts: Facts) -> Tolerance:
    """``limits``, relaxed to what the noise of the source explains, unless they are fixed."""
    if limits.is_fixed:
        return limits
    outputs = dict(limits.outputs)
    for name, noise in ((name, output.noise) for name, output in facts.outputs.items()):
        # Other rounding errors may have a larger effect than the measured ones.
        if (snr := round(max(noise - GAIN, QUANTIZED.snr), 1)) < limits.snr:
            cosine = min(limits.cosine, 1 - 10 ** (-snr / 10))
            outputs[name] = {"snr": snr, "cosine": cosine, **outputs.get(name, {})}
    return replace(limits, outputs=outputs)


def compared(session: ort.InferenceSession, expected: Reference) -> Iterator[Agreement]:
    """How near ``session`` is to each conclusive output of ``expected``, in each frame that a target runs.

    Raises BuildError when one has another shape.
    """
    facts = expected.facts
    for run in (run for run in expected.runs if run.on_target):
        frames = expected.compare_run(session, run, _NO_LIMITS)
        for agreement in itertools.chain.from_iterable(frames):
            if agreement.status is AgreementStatus.OTHER_SHAPE:
                refuse([Explained(agreement)])
            own = facts.of(agreement.output)
            if not own.is_random and not own.inconclusive:
                yield agreement

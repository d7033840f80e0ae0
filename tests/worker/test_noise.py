from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.providers import QUANTIZED, Tolerance
from hatch_epcontext.worker.comparison.measures import OutputFacts
from hatch_epcontext.worker.comparison.runs import Facts
from hatch_epcontext.worker.noise import within_noise
from hatch_epcontext.worker.reference import (
    reference,
    source_reference,
    write_float_form,
)
from tests.conftest import newer_runtime
from tests.graph.test_dequantize import quantized, recurrent
from tests.models import network, parsed, save
from tests.worker.actions.test_compile import MODEL


def referred(made: onnx.ModelProto, folder: Path) -> tuple[Model, Path, Path]:
    """The model, its file, and that of its float form."""
    path, floats = save(made, folder / "a.onnx"), folder / "floats.onnx"
    assert write_float_form(path, floats)
    return Model("a", path, MODEL), path, floats


@pytest.mark.parametrize(
    "source",
    [pytest.param(network(3), marks=newer_runtime), recurrent()],
    ids=["network", "recurrent"],
)
def test_the_float_form_is_the_reference_and_the_integers_differ_from_it(
    tmp_path: Path, source: onnx.ModelProto
) -> None:
    spec, path, floats = referred(quantized(source, tmp_path), tmp_path)
    expected = source_reference(spec, onnx.load(path), path, floats)
    assert expected.facts.integers is not None
    assert 20 < (expected.facts.integers.snr or 0) < 70
    unmeasured = reference(spec, onnx.load(floats), floats)
    for name, array in unmeasured.runs[0].outputs[0].items():
        np.testing.assert_array_equal(expected.runs[0].outputs[0][name], array)


def test_a_source_whose_quantization_stays_has_noise(tmp_path: Path) -> None:
    path = save(recurrent(), tmp_path / "a.onnx")
    spec = Model("a", path, MODEL)
    floats = source_reference(spec, onnx.load(path), path, None)
    assert floats.facts.of("y").noise == math.inf
    # As large as it takes for some integers to change.
    nodes = "".join(f"m{i} = MatMul (r{i}, w{i}) r{i + 1} = Relu (m{i}) " for i in range(6))
    matrices: dict[str, Any] = {f"w{index}": (256, 256) for index in range(6)}
    text = f"""(float[64, 256] r0) => (float[64, 256] y, bool[64, 256] larger) {{
        {nodes} y = Identity (r6) larger = Greater (r6, r5)
    }}"""
    made = quantized(parsed(text, **matrices), tmp_path)
    path = save(made, tmp_path / "b.onnx")
    expected = source_reference(replace(spec, path=path), made, path, None)
    assert 20 < expected.facts.of("y").noise < 70
    # Of ten thousand comparisons some change.
    assert 10 < expected.facts.of("larger").noise < 50


def test_limits_are_no_stricter_than_the_noise() -> None:
    decibels = {"noisy": 42.0, "wild": 3.0, "quiet": 90.0}
    facts = Facts(outputs={name: OutputFacts(noise=noise) for name, noise in decibels.items()})
    strict = Tolerance(snr=50, cosine=0.9999)
    limits = within_noise(strict, facts)
    assert limits.of("noisy").snr == 36
    assert limits.of("noisy").cosine < 0.9999
    assert limits.of("wild").snr == QUANTIZED.snr
    assert limits.of("quiet") == limits.of("other") == replace(strict, outputs={})
    fixed = replace(strict, is_fixed=True)
    assert within_noise(fixed, facts) == fixed

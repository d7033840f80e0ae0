from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.graph.dequantize import dequantize, is_dynamic
from hatch_epcontext.providers import QUANTIZED, Tolerance
from hatch_epcontext.worker.comparison.measures import OutputFacts
from hatch_epcontext.worker.comparison.reference import (
    reference,
    reference_of_artifact,
    source_reference,
    with_noise,
    within_noise,
    write_float_form,
)
from hatch_epcontext.worker.comparison.runs import Facts
from tests.conftest import newer_runtime
from tests.graph.test_dequantize import quantized, recurrent
from tests.models import network, parsed, save
from tests.worker.actions.test_compile import MODEL

STRICT = Tolerance(snr=50, cosine=0.9999)


def referred(made: onnx.ModelProto, folder: Path) -> tuple[Model, Path, Path]:
    """The model, its file, and that of its float form."""
    path, floats = save(made, folder / "a.onnx"), folder / "floats.onnx"
    assert write_float_form(path, floats)
    return Model("a", path, MODEL), path, floats


def layers() -> onnx.ModelProto:
    """Matrices with a Relu behind each, as large as it takes for some integers to change."""
    nodes, last = "", "x"
    for index in range(6):
        nodes += f"[p{index}] m{index} = MatMul ({last}, w{index}) r{index} = Relu (m{index}) "
        last = f"r{index}"
    matrices: dict[str, Any] = {f"w{index}": (256, 256) for index in range(6)}
    text = f"(float[64, 256] x) => (float[64, 256] y) {{ {nodes} y = Identity (r5) }}"
    return parsed(text, **matrices)


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
    assert expected.facts.float_form is not None
    assert 20 < (expected.facts.float_form.snr or 0) < 70
    assert not expected.facts.of("y").noise
    alone = reference(spec, onnx.load(floats), floats)
    for name, array in alone.runs[0].outputs[0].items():
        np.testing.assert_array_equal(expected.runs[0].outputs[0][name], array)
    # What an artifact of the cache is compared with.
    again = reference_of_artifact(spec, onnx.load(path), dequantized=True)
    assert again.facts == expected.facts


def test_only_a_dynamically_quantized_source_has_noise(tmp_path: Path) -> None:
    path = save(recurrent(), tmp_path / "a.onnx")
    spec = Model("a", path, MODEL)
    expected = reference_of_artifact(spec, onnx.load(path), dequantized=True)
    assert not is_dynamic(onnx.load(path))
    assert not any(output.noise for output in expected.facts.outputs.values())
    assert expected.facts.float_form is None
    made = quantized(layers(), tmp_path)
    path = save(made, tmp_path / "b.onnx")
    spec = replace(spec, path=path)
    noisy = reference_of_artifact(spec, made, dequantized=False)
    assert is_dynamic(made)
    assert noisy.facts.float_form is None
    noise = noisy.facts.of("y").noise
    assert 10 ** (-70 / 20) < noise < 0.1
    # A model of floats differs much less after the same rounding.
    assert dequantize(made)
    floats = save(made, tmp_path / "c.onnx")
    alone = with_noise(spec, floats, reference(spec, made, floats))
    assert 0 < alone.facts.of("y").noise < noise / 3


def test_limits_are_no_stricter_than_the_noise_but_those_of_the_user_stay() -> None:
    facts = Facts(
        outputs={
            name: OutputFacts(noise=10 ** (-decibels / 20))
            for name, decibels in (("noisy", 42.0), ("wild", 3.0), ("quiet", 90.0))
        }
    )
    limits = within_noise(STRICT, facts)
    assert limits.of("noisy").snr == 36
    assert limits.of("noisy").cosine < 0.9999
    assert limits.of("wild").snr == QUANTIZED.snr
    assert limits.of("quiet") == limits.of("other") == replace(STRICT, outputs={})
    chosen = replace(STRICT, snr=60, outputs={"wild": {"snr": 30}})
    limits = within_noise(chosen, facts, STRICT)
    assert limits.of("noisy").snr == 60
    assert limits.of("noisy").cosine < 0.9999
    assert limits.of("wild").snr == 30

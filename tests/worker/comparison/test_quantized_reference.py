from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.worker.comparison.reference import (
    reference,
    reference_of_artifact,
    source_reference,
    write_float_form,
)
from tests.conftest import newer_runtime
from tests.graph.test_dequantize import quantized, recurrent
from tests.models import network, save
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
    assert expected.facts.float_form is not None
    assert 20 < (expected.facts.float_form.snr or 0) < 70
    alone = reference(spec, onnx.load(floats), floats)
    for name, array in alone.runs[0].outputs[0].items():
        np.testing.assert_array_equal(expected.runs[0].outputs[0][name], array)
    # What an artifact of the cache is compared with.
    again = reference_of_artifact(spec, onnx.load(path), dequantized=True)
    assert again.facts == expected.facts

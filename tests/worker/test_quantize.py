from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, ModelError
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.actions.prepare import handle
from hatch_epcontext.worker.requests import Prepared, PrepareRequest
from tests.models import network, save
from tests.worker.actions.test_compile import MODEL


def quantized(
    made: onnx.ModelProto, folder: Path, samples: np.ndarray, snr: float = 15
) -> Prepared:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "samples.npz", x=samples)
    spec = Model("a", save(made, folder / "a.onnx"), MODEL)
    out = folder / "out"
    out.mkdir()
    request = PrepareRequest(
        spec,
        "onnxruntime",
        str(out),
        True,
        quantize="uint16",
        calibration=str(folder / "samples.npz"),
        tolerance=Tolerance(snr, 0.98),
    )
    return handle(request)


def test_a_model_of_floats_is_quantized_and_compared(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).standard_normal((4, 1, 8, 8)).astype(np.float32)
    reply = quantized(network(1), tmp_path / "first", samples)
    assert reply.preparation.precision == "quantized to uint16 with weights of uint8 (4 samples)"
    made = onnx.load(reply.path)
    assert "QuantizeLinear" in {node.op_type for node in made.graph.node}
    # What is quantized already has ranges of its own.
    with pytest.raises(ModelError, match="quantized already") as raised:
        quantized(made, tmp_path / "second", samples)
    assert raised.value.problems[0].kind is Kind.NOT_APPLICABLE


def test_a_disagreement_after_quantizing_says_what_was_done(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).standard_normal((4, 1, 8, 8)).astype(np.float32)
    with pytest.raises(BuildError, match="before it was quantized to uint16") as raised:
        quantized(network(1), tmp_path / "first", samples, snr=500)
    assert raised.value.problems[0].kind is Kind.OUTPUT_DIFFERS


def test_dynamic_quantization_is_undone_and_compared(tmp_path: Path) -> None:
    save(network(1), tmp_path / "floats.onnx")
    path = tmp_path / "a.onnx"
    quantize_dynamic(tmp_path / "floats.onnx", path, op_types_to_quantize=["MatMul"])
    (tmp_path / "out").mkdir()
    request = PrepareRequest(
        Model("a", path, MODEL),
        "onnxruntime",
        str(tmp_path / "out"),
        True,
        dequantize=True,
        tolerance=Tolerance(15, 0.98),
    )
    reply = handle(request)
    assert reply.preparation.precision == "dequantized (2 operators)"
    operators = {node.op_type for node in onnx.load(reply.path).graph.node}
    assert "MatMul" in operators
    assert "MatMulInteger" not in operators

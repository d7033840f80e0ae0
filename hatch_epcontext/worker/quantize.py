"""Quantize a model of floats, with ONNX Runtime's tools and their preset for QNN.

Few builds need it, and importing these tools takes long: import it only if needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnxruntime import quantization
from onnxruntime.quantization.execution_providers import qnn

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.text import count
from hatch_epcontext.worker.inputs import read_samples
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import PrepareRequest

_TYPES = {
    "uint8": quantization.QuantType.QUInt8,
    "int8": quantization.QuantType.QInt8,
    "uint16": quantization.QuantType.QUInt16,
    "int16": quantization.QuantType.QInt16,
}

_QUANTIZED = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM"})
"""Operators that only a quantized model has."""


def write_quantized(source: Path, result: Path, request: PrepareRequest) -> str:
    """Write the model at ``source``, quantized for the calibration data of ``request``, to ``result``.

    Returns a description. Raises ModelError when the data does not fit the model, or the model cannot be
    quantized.
    """
    announce("quantizing the model")
    activation, key = request.quantize, request.model.key / "quantize"
    assert activation is not None, "only then it is called"
    onnx_model = onnx.load(source, load_external_data=False)
    if any(node.op_type in _QUANTIZED for node in graph.nodes(onnx_model.graph)):
        message = "the model is quantized already."
        hint = "Remove quantize: static quantization is compiled as it is; dequantize undoes a dynamic one."
        raise ModelError(Problem.at(key, Kind.NOT_APPLICABLE, message, hint))
    inputs = graph.input_facts(onnx_model.graph)
    named_samples = read_samples(Path(request.calibration), inputs, key / "inputs")
    data = _CalibrationReader(sample for _, sample in named_samples)
    fused = result.with_name("fused.onnx")
    try:
        # The quantizer writes only if it changed something.
        changed = qnn.qnn_preprocess_model(source, fused)
        config = qnn.get_qnn_qdq_config(
            fused if changed else source,
            data,
            activation_type=_TYPES[activation],
            weight_type=quantization.QuantType.QUInt8,
        )
        quantization.quantize(fused if changed else source, result, config)
    except ModelError:
        raise
    except Exception as error:
        message = f"ONNX Runtime cannot quantize the model: {type(error).__name__}: {error}."
        hint = "Remove quantize, or cut away the part that cannot be quantized (not tried)."
        raise ModelError(Problem.at(key, Kind.INVALID_MODEL, message, hint)) from error
    return f"quantized to {activation} with weights of uint8 ({count(data.read, 'sample')})"


class _CalibrationReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Passes samples to ONNX Runtime's quantizer; ``read`` counts them."""

    def __init__(self, samples: Iterator[dict[str, Any]]) -> None:
        self._samples = samples
        self.read = 0

    def get_next(self) -> dict[str, Any] | None:
        sample = next(self._samples, None)
        self.read += sample is not None
        return sample

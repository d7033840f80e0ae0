"""The same work as a script by hand: compile, load, run and compare, one model after the other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxslim
from onnx import numpy_helper

from benchmarks.models import MODELS, OpenModel

PACKAGES = {"qnn": "onnxruntime_qnn", "openvino": "onnxruntime_ep_openvino"}
OPTIONS = {
    "qnn": {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"},
    "openvino": {},
}

ATOL = {"qnn": 5e-2, "openvino": 1e-1}

MakeOptions = Callable[[], ort.SessionOptions]


def plain(paths: dict[str, Path], folder: Path, provider: str) -> None:
    """Compile all models into ``folder``, and compare them; raises if a model fails."""
    package: Any = importlib.import_module(PACKAGES[provider])
    name = package.get_ep_name()
    ort.register_execution_provider_library(name, package.get_library_path())
    device = next(device for device in ort.get_ep_devices() if device.ep_name == name)

    def options() -> ort.SessionOptions:
        result = ort.SessionOptions()
        result.add_provider_for_devices([device], OPTIONS[provider])
        return result

    for model in MODELS:
        result = folder / f"{model.name}_ctx.onnx"
        _one(model, paths[model.name], options, result, ATOL[provider])


def _one(model: OpenModel, path: Path, options: MakeOptions, result: Path, atol: float) -> None:
    fixed = onnx.load(path)
    constants = {name: np.array(value, np.int64) for name, value in model.constants.items()}
    for value in list(fixed.graph.input):
        if value.name in constants:
            fixed.graph.initializer.append(
                numpy_helper.from_array(constants[value.name], value.name)
            )
            fixed.graph.input.remove(value)
            continue
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, model.shapes[value.name], strict=True):
            dim.dim_value = size
    compiler = ort.ModelCompiler(
        options(),
        onnxslim.slim(fixed).SerializeToString(),
        graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
    )
    compiler.compile_to_file(str(result))
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in model.shapes.items()
    }
    outputs = ort.InferenceSession(result, options()).run(None, feeds)
    source = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for output, reference in zip(outputs, source.run(None, {**feeds, **constants}), strict=True):
        assert np.allclose(output, reference, rtol=1e-2, atol=atol), model.name

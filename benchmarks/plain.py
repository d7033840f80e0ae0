"""What one would write by hand: compile, load, run and compare, one model after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_qnn
import onnxslim
from onnx import numpy_helper

from benchmarks.models import MODELS, OpenModel

OPTIONS = {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"}


def plain(paths: dict[str, Path], folder: Path) -> None:
    """Do it for all models, into ``folder``; raises when one goes wrong."""
    name = onnxruntime_qnn.get_ep_name()
    ort.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    for model in MODELS:
        _one(model, paths[model.name], devices, folder / f"{model.name}_ctx.onnx")


def _options(devices: list[Any]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.add_provider_for_devices(devices, OPTIONS)
    return options


def _one(model: OpenModel, path: Path, devices: list[Any], result: Path) -> None:
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
        _options(devices),
        onnxslim.slim(fixed).SerializeToString(),
        graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
    )
    compiler.compile_to_file(str(result))
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in model.shapes.items()
    }
    answers = ort.InferenceSession(result, _options(devices)).run(None, feeds)
    source = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for answer, reference in zip(answers, source.run(None, {**feeds, **constants}), strict=True):
        assert np.allclose(answer, reference, rtol=1e-2, atol=5e-2), model.name

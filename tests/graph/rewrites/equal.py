"""Whether a rewritten model computes what it did, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Rewrite
from hatch_epcontext.graph.rewrites import rewrite
from hatch_epcontext.worker.value_types import value_types
from tests.models import Shape, value

Given = Mapping[str, tuple[int, Shape]]
"""The dtype and shape of each input or output."""

_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(bool)": np.bool_,
}


def made(
    nodes: Sequence[onnx.NodeProto],
    inputs: Given,
    outputs: Given,
    stored: Mapping[str, Any] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """A model of ONNX's and ONNX Runtime's operators, with ``stored`` arrays."""
    made_graph = helper.make_graph(
        nodes,
        "graph",
        [value(name, shape, dtype) for name, (dtype, shape) in inputs.items()],
        [value(name, shape, dtype) for name, (dtype, shape) in outputs.items()],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in (stored or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made_graph, opset_imports=opsets, ir_version=8)


def operators(model: onnx.ModelProto) -> list[str]:
    return [graph.operator(node) for node in graph.compute_nodes(model.graph)]


def feeds(session: ort.InferenceSession, seed: int, scale: float = 3.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    result = {}
    for each in session.get_inputs():
        dtype = _DTYPES[each.type]
        factor = scale if np.dtype(dtype).kind == "f" else 50
        result[each.name] = np.asarray(rng.standard_normal(each.shape) * factor).astype(dtype)
    return result


def check_equal(
    before: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 1e-5, scale: float = 3.0
) -> None:
    """Both give the same results for several inputs."""
    one, other = (ort.InferenceSession(each.SerializeToString()) for each in (before, after))
    for seed in range(4):
        given = feeds(one, seed, scale)
        for a, b in zip(one.run(None, given), other.run(None, given), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


def rewritten(
    model: onnx.ModelProto, each: Rewrite, refused: Sequence[str] | None = None
) -> onnx.ModelProto:
    """``model`` after the rewrite ``each``, which has done something, and has changed no results."""
    after = onnx.ModelProto.FromString(model.SerializeToString())
    wanted = frozenset(operators(model) if refused is None else refused)
    assert rewrite(after, wanted, value_types(model, Path("unsaved.onnx")), (each,)) == (each.name,)
    onnx.checker.check_model(after)
    check_equal(model, after)
    return after


def untouched(model: onnx.ModelProto, each: Rewrite, refused: Sequence[str] | None = None) -> bool:
    """Whether the rewrite ``each`` leaves ``model`` as it is."""
    after = onnx.ModelProto.FromString(model.SerializeToString())
    wanted = frozenset(operators(model) if refused is None else refused)
    return (
        rewrite(after, wanted, value_types(model, Path("unsaved.onnx")), (each,)) == ()
        and after == model
    )

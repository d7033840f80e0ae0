"""Whether a rewritten model computes what it did, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Rewrite
from hatch_epcontext.graph.rewrites import rewrite
from hatch_epcontext.worker.value_types import value_types


def operators(model: onnx.ModelProto) -> list[str]:
    return [graph.operator(node) for node in graph.compute_nodes(model.graph)]


def _dtype(name: str) -> np.dtype[Any]:
    """That of ONNX Runtime's ``name``, such as ``tensor(float)``."""
    name = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype("float32" if name == "float" else name)


def feeds(session: ort.InferenceSession, seed: int, scale: float = 3.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    result = {}
    for each in session.get_inputs():
        dtype = _dtype(each.type)
        factor = scale if dtype.kind == "f" else 50
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
    if graph.MICROSOFT not in {opset.domain for opset in model.opset_import}:
        # As in all models that ONNX Runtime has prepared.
        after.opset_import.add(domain=graph.MICROSOFT, version=1)
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

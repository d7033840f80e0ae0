"""Whether a rewritten model computes what it did, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewriting import Rewrite, apply
from hatch_epcontext.worker.ort_values import value_types


def operators(model: onnx.ModelProto) -> list[str]:
    return [graph.operator(node) for node in graph.compute_nodes(model.graph)]


def _dtype(name: str) -> np.dtype[Any]:
    """That of ONNX Runtime's ``name``, such as ``tensor(float)``."""
    name = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype("float32" if name == "float" else name)


def feeds(session: ort.InferenceSession, seed: int, scale: float = 3.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    result = {}
    for value in session.get_inputs():
        dtype = _dtype(value.type)
        factor = scale if dtype.kind == "f" else 50
        result[value.name] = np.asarray(rng.standard_normal(value.shape) * factor).astype(dtype)
    return result


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session on the CPU; tests start thousands, and threads take longer than such models."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options)


def check_equal(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    tolerance: float = 1e-5,
    scale: float = 3.0,
    atol: float | None = None,
) -> None:
    """Both give the same results for several inputs. ``atol``: the ``tolerance`` by default."""
    one, other = session(before), session(after)
    for seed in range(4):
        given = feeds(one, seed, scale)
        for a, b in zip(one.run(None, given), other.run(None, given), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            absolute = tolerance if atol is None else atol
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=absolute)


def rewritten(
    model: onnx.ModelProto,
    *rewrites: Rewrite,
    allowed: Sequence[str] | None = None,
    tolerance: float = 1e-5,
) -> onnx.ModelProto:
    """``model`` after the ``rewrites``, which have all done something, and have changed no results."""
    after = onnx.ModelProto.FromString(model.SerializeToString())
    operators_ = frozenset(operators(model) if allowed is None else allowed)
    done = apply(after, rewrites, operators_, value_types(model, Path("unsaved.onnx")))
    assert done.names == tuple(rewrite.name for rewrite in rewrites)
    onnx.checker.check_model(after)
    check_equal(model, after, tolerance)
    return after


def reasons(model: onnx.ModelProto, rewrite: Rewrite) -> list[str]:
    """Why ``rewrite`` declines nodes of ``model``, which it leaves as it is."""
    after = onnx.ModelProto.FromString(model.SerializeToString())
    types = value_types(model, Path("unsaved.onnx"))
    # A loop can be endless.
    done = apply(after, [rewrite], frozenset(operators(model)), types, 5000)
    assert (done.names, after) == ((), model)
    return [declined.reason for declined in done.declined]

"""Models with layers, and what unrolls and compares them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.builder import TooManyNodesError
from hatch_epcontext.graph.rewrites import UNROLLS, unrolls
from hatch_epcontext.graph.rewriting import Rewritten, apply
from tests.graph.rewrites.equal import check_equal
from tests.models import parsed

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTH, BATCH, FEATURES, HIDDEN = 3, 2, 4, 5


def recurrent(
    op: str,
    direction: str = "forward",
    *,
    length: int = LENGTH,
    inputs: Sequence[str] = ("B",),
    outputs: Sequence[str] = ("Y", "Y_h", "Y_c"),
    lengths: Sequence[int] = (),
    opset: int = 17,
    elem_type: int = TensorProto.FLOAT,
    **attributes: Any,
) -> onnx.ModelProto:
    """One LSTM, GRU or RNN on ``x`` (length x batch x features).

    ``inputs``: which of "B", "h", "c" and "P" it has; the states are inputs of the model.
    """
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1
    gates = GATES[op] * HIDDEN
    shapes = {
        "W": (directions, gates, FEATURES),
        "R": (directions, gates, HIDDEN),
        "B": (directions, 2 * gates),
        "P": (directions, 3 * HIDDEN),
    }
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    stored: dict[str, Any] = {
        name: (rng.standard_normal(shape) * 0.4).astype(dtype)
        for name, shape in shapes.items()
        if name in (*inputs, "W", "R")
    }
    if lengths:
        stored["lengths"] = np.asarray(lengths, np.int32)
    states = [directions, BATCH, HIDDEN]
    fed = {"x": [length, BATCH, FEATURES]}
    fed |= {name: states for name in ("h", "c") if name in inputs}
    every = {"Y": [length, directions, BATCH, HIDDEN], "Y_h": states, "Y_c": states}
    if op != "LSTM":
        del every["Y_c"]
    made = {name: shape for name, shape in every.items() if name in outputs}
    type_ = "double" if elem_type == TensorProto.DOUBLE else "float"
    given, results = (
        ", ".join(f"{type_}{shape} {name}" for name, shape in values.items())
        for values in (fed, made)
    )
    attributes |= {"direction": direction, "hidden_size": HIDDEN}
    written = ", ".join(f"{name} = {json.dumps(each)}" for name, each in attributes.items())
    order = ["x", "W", "R", "B", "lengths", "h", "c", "P"]
    node = f"{_listed(every, made)} = {op} <{written}> ({_listed(order, [*fed, *stored])})"
    return parsed(f"({given}) => ({results}) {{ [layer] {node} }}", opset, **stored)


def _listed(names: Iterable[str], present: Iterable[str]) -> str:
    """``names`` with gaps for those that are not ``present``, except at the end."""
    return ", ".join(name if name in present else "" for name in names).rstrip(", ")


def unrolled(model: onnx.ModelProto, limit: int = 5000) -> tuple[onnx.ModelProto, Rewritten]:
    """A checked copy of ``model`` in which everything is unrolled that can be, and what was."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    done = apply(result, UNROLLS, None, {}, limit)
    onnx.checker.check_model(result, full_check=True)
    return result, done


def assert_equal(
    model: onnx.ModelProto, *done: str, limit: int = 5000, atol: float = 1e-6
) -> onnx.ModelProto:
    """Unroll ``model`` by the rewrites ``done``, and check that it computes what it did."""
    result, rewritten = unrolled(model, limit)
    assert (rewritten.names, rewritten.declined) == (done, ())
    assert not unrolls(result)
    check_equal(model, result, scale=1.0, atol=atol)
    return result


def assert_too_large(model: onnx.ModelProto, limit: int) -> None:
    """Check that ``model`` is not unrolled, because it would get more than ``limit`` nodes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    with pytest.raises(TooManyNodesError):
        apply(result, UNROLLS, None, {}, limit)
    assert result == model

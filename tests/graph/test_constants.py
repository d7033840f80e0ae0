from __future__ import annotations

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.constants import fold_constants, has_constants
from hatch_epcontext.graph.inference import inferred
from tests.graph.rewrites.equal import check_equal, operators
from tests.models import parsed

WITH = {
    "a product over nothing": ("p = MatMul (x, wide) q = MatMul (p, tall) y = Add (x, q)", ["Add"]),
    "an empty part": ("e = Slice (x, zero, zero, one) y = Concat <axis = 1> (x, e)", ["Identity"]),
    "a part of no rows": ("y, e = Split <axis = 1> (x, parts)", ["Identity"]),
}


@pytest.mark.parametrize("what", WITH)
def test_what_has_no_values_is_no_node(what: str) -> None:
    """As a LoRA of rank 0, without an adapter: microsoft/Olive#1326."""
    text, expected = WITH[what]
    model = parsed(
        f"""(float[2, 16] x) => (float[2, 16] y) <int64[1] zero = {{0}}, int64[1] one = {{1}},
        int64[2] parts = {{16, 0}}> {{ {text} }}""",
        wide=np.zeros((16, 0), np.float32),
        tall=np.zeros((0, 16), np.float32),
    )
    assert has_constants(inferred(model))
    after = onnx.ModelProto.FromString(model.SerializeToString())
    assert fold_constants(after)
    check_equal(model, after)
    assert operators(after)[-1] == expected[-1]


def test_a_model_whose_values_have_numbers_stays() -> None:
    model = parsed("(float[2] x) => (float[2] y) { a = Neg (x) y = Abs (a) }")
    assert not has_constants(inferred(model))
    assert not fold_constants(model)

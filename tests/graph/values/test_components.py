from __future__ import annotations

import numpy as np
import pytest

from hatch_epcontext.graph.facts import Far
from tests.graph.values.test_ranges import all_of

POINTS = "float[1, 24, 3] x"

TURN = np.array([[3, 0, 0], [0, 3, 0], [0, 4, 2]], np.float32)


def center(nodes: str, inputs: str = POINTS) -> Far | None:
    return all_of(
        f"({inputs}) => (y) {{ {nodes} y = Div (s, d) t = Tanh (x) }}",
        zero=np.array([0]),
        one=np.array([1]),
        two=np.array([2]),
        three=np.array([3]),
        last=np.array(2),
        parts=np.array([2, 1]),
        rows=np.array([24, 3]),
        points=np.array([1, 24, 3]),
        turn=TURN,
        turned=TURN.T,
        offset=np.array([1, 2, 0.5], np.float32),
        far=np.array([1, 2, 40], np.float32),
        limit=np.float32(0.1),
        half=np.float32(0.5),
        s=np.float32(1),
    )["x"].standardized


@pytest.mark.parametrize(
    "nodes",
    [
        "d = Slice (x, two, three, two)",
        "d = Gather <axis = 2> (x, last)",
        "n, d = Split <axis = -1> (x, parts)",
        "z = Slice (x, two, three, two) d = Max (limit, z)",
        "z = Slice (x, two, three, two) h = Mul (z, half) d = Clip (h, limit)",
    ],
)
def test_a_component_that_divides_the_others_is_away_from_0(nodes: str) -> None:
    expected = Far(centers=(0, 0, 4), spreads=(1, 1, 1), shape=(3,))
    assert center(nodes) == expected


@pytest.mark.parametrize(
    "nodes",
    [
        "c = MatMul (x, turn) o = Add (c, offset)",
        "r = Reshape (x, rows) g = Gemm (r, turn, offset) o = Reshape (g, points)",
        "r = Reshape (x, rows) g = Gemm <transB = 1> (r, turned, offset) o = Reshape (g, points)",
    ],
)
def test_a_component_that_a_matrix_turns_is_away_from_0(nodes: str) -> None:
    # The last column of the matrix is (0, 0, 2).
    far = center(f"{nodes} d = Slice (o, two, three, two)")
    assert far is not None
    np.testing.assert_allclose(far.centers, (0, 0, 4 - 0.5 / 2))
    far = center(f"{nodes} d = Slice (o, one, two, two)")
    assert far is not None
    # (0, 3, 4) has the length 5.
    np.testing.assert_allclose(far.centers, np.array([0, 3, 4]) * (20 - 2) / 25, rtol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        # A constant keeps it away from 0.
        "c = MatMul (x, turn) o = Add (c, far) d = Slice (o, two, three, two)",
        "z = Slice (x, two, three, two) d = Exp (z)",
        "z = Slice (x, two, three, two) d = Add (z, x)",
        # Points, and no components.
        "d = Slice (x, zero, one, one)",
        "c = Transpose <perm = [0, 2, 1]> (x) d = Gather <axis = 2> (c, last)",
        "d = Identity (x)",
        "d = MatMul (x, x)",
    ],
)
def test_no_other_input_has_a_center(nodes: str) -> None:
    assert center(nodes) is None

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.cells import loop_as_layer
from tests.graph.rewrites.equal import reasons, rewritten
from tests.models import parsed

STEPS, BATCH, FEATURES, HIDDEN = 5, 2, 3, 4

CELLS = {
    # As Keras: weights of each gate, with a product with ones that stands for a dropout.
    "LSTM-keras": """
        same = Mul (h, ones)
        ai = MatMul (x, wi)  bi = MatMul (same, ri)  ci = Add (ai, bi)  di = Add (ci, vi)  i = Sigmoid (di)
        af = MatMul (x, wf)  bf = MatMul (h, rf)  cf = Add (bf, af)  df = Add (vf, cf)  f = Sigmoid (df)
        ag = MatMul (x, wg)  bg = MatMul (h, rg)  cg = Add (ag, bg)  dg = Add (cg, vg)  g = Tanh (dg)
        ao = MatMul (x, wo)  bo = MatMul (h, ro)  co = Add (ao, bo)  do = Add (co, vo)  o = Sigmoid (do)
        fc = Mul (f, c)  ig = Mul (g, i)  c2 = Add (fc, ig)  t = Tanh (c2)  h2 = Mul (t, o)
    """,
    # As PyTorch: two Gemms, and the gates in another order.
    "LSTM-torch": """
        a = Gemm <transB = 1> (x, w4, v4)  b = Gemm <transB = 1> (h, r4, u4)  s = Add (a, b)
        p, q, r, u = Split <axis = 1> (s, quarters)
        i = Sigmoid (p)  f = Sigmoid (q)  g = Tanh (r)  o = Sigmoid (u)
        ig = Mul (i, g)  fc = Mul (f, c)  c2 = Add (ig, fc)  t = Tanh (c2)  h2 = Mul (o, t)
    """,
    # As TensorFlow 1: one product with input and state, and 1 added to the forget gate.
    "LSTM-joined": """
        xh = Concat <axis = 1> (x, h)  a = MatMul (xh, w7)  s = Add (a, v4)
        p, r, q, u = Split <axis = 1> (s, quarters)  q1 = Add (q, one)
        i = Sigmoid (p)  f = Sigmoid (q1)  g = Tanh (r)  o = Sigmoid (u)
        ig = Mul (i, g)  fc = Mul (f, c)  c2 = Add (ig, fc)  t = Tanh (c2)  h2 = Mul (o, t)
    """,
    "LSTM-coupled": """
        a = Gemm <transB = 1> (x, w4, v4)  b = Gemm <transB = 1> (h, r4)  s = Add (a, b)
        p, q, r, u = Split <axis = 1> (s, quarters)
        i = Sigmoid (p)  f = Sub (one, i)  g = Relu (r)  o = Sigmoid (u)
        ig = Mul (i, g)  fc = Mul (f, c)  c2 = Add (ig, fc)  t = Relu (c2)  h2 = Mul (o, t)
    """,
    # The gates are cut out, as PyTorch's `chunk` does, of rows with another dimension for a while.
    "LSTM-cut": """
        a = Gemm <transB = 1> (x, w4, v4)  b = Gemm <transB = 1> (h, r4)  s = Add (a, b)
        v = Unsqueeze (s, at0)  e = Squeeze (v, at0)  n = Reshape (e, flat)
        p = Slice (n, at0, at1, along)  q = Slice (n, at1, at2, along)
        r = Slice (n, at2, at3, along)  u = Slice (n, at3, ends, along)
        i = Sigmoid (p)  f = Sigmoid (q)  g = Tanh (r)  o = Sigmoid (u)
        ig = Mul (i, g)  fc = Mul (f, c)  c2 = Add (ig, fc)  t = Tanh (c2)  h2 = Mul (o, t)
    """,
    "GRU-torch": """
        a = Gemm <transB = 1> (x, w3, v3)  b = Gemm <transB = 1> (h, r3, u3)
        p, q, r = Split <axis = 1> (a, thirds)  p2, q2, r2 = Split <axis = 1> (b, thirds)
        p3 = Add (p, p2)  reset = Sigmoid (p3)  q3 = Add (q, q2)  z = Sigmoid (q3)
        late = Mul (r2, reset)  m = Add (r, late)  n = Tanh (m)
        less = Sub (h, n)  part = Mul (less, z)  h2 = Add (part, n)
    """,
    "GRU-keras": """
        az = MatMul (x, wi)  bz = MatMul (h, ri)  cz = Add (az, bz)  dz = Add (cz, vi)  z = Sigmoid (dz)
        ar = MatMul (x, wf)  br = MatMul (h, rf)  cr = Add (ar, br)  reset = Sigmoid (cr)
        rh = Mul (reset, h)  an = MatMul (x, wg)  bn = MatMul (rh, rg)  cn = Add (an, bn)  n = Tanh (cn)
        zh = Mul (z, h)  rest = Sub (one, z)  new = Mul (rest, n)  h2 = Add (zh, new)
    """,
    "GRU-opposite": """
        xh = Concat <axis = 1> (x, h)  az = MatMul (xh, w2)  z2 = Sigmoid (az)
        z, reset = Split <axis = 1> (z2, halves)
        rh = Mul (reset, h)  xr = Concat <axis = -1> (x, rh)  an = MatMul (xr, w1)  n = Tanh (an)
        zn = Mul (z, n)  rest = Sub (one, z)  old = Mul (rest, h)  h2 = Add (old, zn)
    """,
    "RNN-plain": "a = MatMul (x, wi)  b = MatMul (h, ri)  s = Add (a, b)  h2 = Tanh (s)",
    "RNN-relu": "a = Gemm (x, wi, vi)  b = MatMul (h, ri)  s = Sub (a, b)  h2 = Relu (s)",
}


def stored() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {f"w{gate}": (FEATURES, HIDDEN) for gate in "ifgo"}
    shapes |= {f"r{gate}": (HIDDEN, HIDDEN) for gate in "ifgo"}
    shapes |= {f"v{gate}": (HIDDEN,) for gate in "ifgo"}
    for gates in (3, 4):
        shapes |= {f"w{gates}": (gates * HIDDEN, FEATURES), f"r{gates}": (gates * HIDDEN, HIDDEN)}
        shapes |= {f"{name}{gates}": (gates * HIDDEN,) for name in "vu"}
    joined = FEATURES + HIDDEN
    shapes |= {"w7": (joined, 4 * HIDDEN), "w2": (joined, 2 * HIDDEN), "w1": (joined, HIDDEN)}
    values = {
        name: (rng.standard_normal(shape) * 0.4).astype(np.float32)
        for name, shape in shapes.items()
    }
    values["one"] = np.ones((), np.float32)
    values["ones"] = np.ones((BATCH, HIDDEN), np.float32)
    values |= {f"at{gate}": np.array([gate * HIDDEN]) for gate in range(4)}
    values |= {"ends": np.array([2**63 - 1]), "along": np.array([1])}
    values["flat"] = np.array([0, -1])
    names = ("halves", "thirds", "quarters")
    values |= {name: np.full(i, HIDDEN, np.int64) for i, name in enumerate(names, start=2)}
    return values


def looped(name: str, *, backward: bool = False, batch_first: bool = False) -> onnx.ModelProto:
    """A Loop that reads its items by a counter of its own, as TensorFlow writes it."""
    shape = [BATCH, STEPS, FEATURES] if batch_first else [STEPS, BATCH, FEATURES]
    state = f"float[{BATCH}, {HIDDEN}]"
    cell = [("c", "c0", "c2", "c3")] if name.startswith("LSTM") else []
    states = [("h", "h0", "h2", "h3"), *cell]
    inputs, starts, nexts, ends = (
        ", ".join(f"{prefix} {state[index]}".strip() for state in states)
        for index, prefix in enumerate([state, "", state, ""])
    )
    given = ", ".join(f"{state} {names[1]}" for names in states)
    results = ", ".join(f"{state} {names[3]}" for names in states)
    start, change = (STEPS - 1, "Sub") if backward else (0, "Add")
    return parsed(
        f"""(float{shape} sequence, {given}) => ({results}, float[{STEPS}, {BATCH}, {HIDDEN}] y)
        <int64 start = {{{start}}}, int64 by = {{1}}, int64 trips = {{{STEPS}}}, bool true = {{1}}> {{
        at, {ends}, y = Loop (trips, true, start, {starts}) <body = body
            (int64 k, bool go, int64 now, {inputs}) => (bool go, int64 now2, {nexts}, {state} out) {{
            now2 = {change} (now, by)
            x = Gather <axis = {int(batch_first)}> (sequence, now)
            {CELLS[name]}
            out = Identity (h2) }}> }}""",
        17,
        **stored(),
    )


@pytest.mark.parametrize("name", CELLS)
def test_a_loop_around_a_cell_is_its_layer(name: str) -> None:
    result = rewritten(looped(name), loop_as_layer)
    assert name.split("-", maxsplit=1)[0] in [node.op_type for node in result.graph.node]
    assert "Loop" not in [node.op_type for node in result.graph.node]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_items_are_read_in_any_order_along_any_axis(backward: bool, batch_first: bool) -> None:
    model = looped("GRU-torch", backward=backward, batch_first=batch_first)
    rewritten(model, loop_as_layer)


def scanned(name: str, attributes: str = "") -> onnx.ModelProto:
    state = f"float[{BATCH}, {HIDDEN}]"
    return parsed(
        f"""(float[{STEPS}, {BATCH}, {FEATURES}] sequence, {state} h0)
        => ({state} h3, float[n, m, {HIDDEN}] y) {{
        h3, y = Scan <num_scan_inputs = 1 {attributes}, body = body ({state} h, float[{BATCH}, {FEATURES}] x)
            => ({state} h2, {state} out) {{
            {CELLS[name]}
            out = Identity (h2) }}> (h0, sequence) }}""",
        17,
        **stored(),
    )


@pytest.mark.parametrize(
    "attributes",
    [
        "",
        ", scan_input_directions = [1]",
        ", scan_output_axes = [1]",
        ", scan_output_directions = [1]",
    ],
)
def test_a_scan_around_a_cell_is_its_layer(attributes: str) -> None:
    rewritten(scanned("GRU-keras", attributes), loop_as_layer)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # A residual, a gate that is not the same in both products, and a function of the result.
        ("h2 = Add (zh, new)", "h1 = Add (zh, new) h2 = Add (h1, h)"),
        ("new = Mul (rest, n)", "new = Mul (reset, n)"),
        ("h2 = Add (zh, new)", "h1 = Add (zh, new) h2 = Tanh (h1)"),
        ("rh = Mul (reset, h)", "rh = Mul (reset, reset)"),
    ],
)
def test_other_equations_stay_a_loop(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert before in CELLS["GRU-keras"]
    monkeypatch.setitem(CELLS, "GRU-other", CELLS["GRU-keras"].replace(before, after))
    (reason,) = reasons(scanned("GRU-other"), loop_as_layer)
    assert reason.startswith("it is no layer")

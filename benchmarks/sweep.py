"""Which operators an EP computes wrong: graphs of a few nodes over all finite float16 values, and integers.

    python -m benchmarks.sweep                      # QNN's simulator; prints what changed since the table
    python -m benchmarks.sweep --only Pow Div
    python -m benchmarks.sweep --write              # writes the table; then: python docs/generate.py
    python -m benchmarks.sweep --write --only Pow   # only these, if the versions are those of the table
    python -m benchmarks.sweep --provider cpu       # finds nothing

The reference is ONNX Runtime's CPU EP, unoptimized, in float32, of which the errors are below a thousandth of
those of float16. Inputs and constants are float16 values, so that only results are rounded. Graphs run in a
process beside this one: one that crashes or is refused is a result too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from benchmarks.plain import OPTIONS, PACKAGES, MakeOptions, available, start

Floats = NDArray[np.float32]

FOLDER = Path(__file__).parent

LARGEST = 65504.0

UNITS = 4.0
"""By how many units in the last place of float16 a result may be off. EPs round inside of an operator too
(QNN's ``x / c`` is off by up to 3.3); a fault is off by far more."""

TABLE = 2.0**-9
"""How far an activation's result may be off where it is below 1. EPs interpolate tables: QNN's Sigmoid alone
is off by up to 0.0008, its Gelu by 0.0011; fused ones by 0.0038 and more."""

TIMEOUT = 120.0
"""Seconds for a graph."""

_MAX_REASON = 100


@dataclass(frozen=True)
class Case:
    """A graph: ``nodes`` in ONNX's text form, from ``x`` to ``y``, in which numbers are scalar constants.

    ``of``: what ``x`` is, where several cases have these nodes. ``step``: errors up to it count as none.
    ``result``: ONNX's number of the dtype of ``y``.
    """

    nodes: str
    x: NDArray[Any]
    of: str = ""
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    opset: int = 17
    step: float | NDArray[Any] = 0.0
    result: int = TensorProto.FLOAT

    @property
    def name(self) -> str:
        return f"{self.nodes} [{self.of}]" if self.of else self.nodes

    def model(self) -> bytes:
        """The graph as an ONNX file. Raises onnx.parser.ParseError for malformed nodes."""
        nodes, constants = [], dict(self.constants)
        for statement in self.nodes.split(";"):
            start, _, operands = statement.strip().rstrip(")").rpartition("(")
            names = []
            for operand in map(str.strip, operands.split(",")):
                if re.fullmatch(r"-?[\d.]+(e-?\d+)?", operand):
                    name = re.sub(r"\W", "_", f"c{operand}")
                    constants[name] = np.asarray(operand, np.float16).astype(np.float32)
                    names.append(name)
                else:
                    names.append(operand)
            nodes.append(onnx.parser.parse_node(f"{start}({', '.join(names)})"))
            # As in builds: QNN does not fuse a HardSigmoid without a name.
            nodes[-1].name = nodes[-1].output[0]
        graph = onnx.helper.make_graph(
            nodes,
            "g",
            [onnx.helper.make_tensor_value_info("x", _dtype(self.x), self.x.shape)],
            [onnx.helper.make_tensor_value_info("y", self.result, None)],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        opsets = [
            onnx.helper.make_opsetid("", self.opset),
            onnx.helper.make_opsetid("com.microsoft", 1),
        ]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return model.SerializeToString()


@dataclass(frozen=True)
class Result:
    """What an EP makes of a case.

    ``wrong``: how many of ``values`` are, for values of x from ``low`` to ``high``, of which ``nearest`` is
    the smallest magnitude (None where x has another shape than y). ``examples``: value of x, right result,
    and the EP's; the last one has the largest error. ``largest``: the EP's largest magnitude.
    """

    status: Literal["right", "wrong", "refused", "crashed"] = "right"
    values: int = 0
    wrong: int = 0
    low: float | None = None
    high: float | None = None
    nearest: float | None = None
    examples: Sequence[Sequence[float | None]] = ()
    largest: float = 0.0
    reason: str = ""


def judge(case: Case, got: Floats, exact: Floats) -> Result:
    """Compare ``got`` with ``exact``; results beyond `LARGEST` count as that, undefined ones as right."""
    is_whole = exact.dtype.kind in "biu"
    got, exact = got.ravel().astype(np.float64), exact.ravel().astype(np.float64)
    largest_float = np.inf if is_whole else LARGEST
    expected = np.clip(exact, -largest_float, largest_float)
    with np.errstate(all="ignore"):
        error = np.abs(np.clip(got, -largest_float, largest_float) - expected)
        # Behind the largest value there is none.
        unit = np.spacing(np.abs(expected).astype(np.float16).clip(0, 32768)).astype(np.float64)
        allowed = np.zeros(1) if is_whole else np.maximum(UNITS * unit, np.ravel(case.step))
    error[np.isnan(got)] = np.inf
    error[np.isnan(exact)] = 0.0
    (wrong,) = np.nonzero(error > allowed)
    finite = np.abs(got[np.isfinite(got)])
    largest = _short(float(finite.max(initial=0.0)))
    if not wrong.size:
        return Result("right", got.size, largest=largest)
    same = case.x.size == got.size
    x = case.x.ravel()
    if same:
        wrong = wrong[np.argsort(x[wrong], kind="stable")]
    worst = wrong[np.argmax(error[wrong])]
    others = dict.fromkeys(wrong[np.linspace(0, wrong.size - 1, 3).astype(int)])
    chosen = [*(each for each in others if each != worst), worst]
    return Result(
        "wrong",
        got.size,
        wrong.size,
        _short(float(x[wrong[0]])) if same else None,
        _short(float(x[wrong[-1]])) if same else None,
        _short(float(np.abs(x[wrong]).min())) if same else None,
        [
            [_short(float(x[i])) if same else None, _short(float(exact[i])), _short(float(got[i]))]
            for i in chosen
        ],
        largest,
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}") if np.isfinite(value) else LARGEST if value > 0 else -LARGEST


def run(case: Case, make_options: MakeOptions) -> Result:
    """The result of ``case`` on the EP of ``make_options``, without help from the CPU."""
    model, feeds = case.model(), {"x": case.x}
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(model, plain, providers=["CPUExecutionProvider"])
    (exact,) = reference.run(None, feeds)
    options = make_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    if options.has_providers():
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(model, options)
        session.disable_fallback()
        (got,) = session.run(None, feeds)
    except Exception as error:
        return Result("refused", reason=" ".join(str(error).split())[:_MAX_REASON])
    return judge(case, got, exact)


class _Worker:
    """A process that runs cases on the EP of ``provider``, one after the other, until one ends it."""

    def __init__(self, provider: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=_work, args=(provider, inner), daemon=True)
        self._process.start()
        inner.close()

    def run(self, case: Case) -> Result | None:
        """The result of ``case``; None where the process ended, or was ended after `TIMEOUT`."""
        self._pipe.send(case)
        try:
            if self._pipe.poll(TIMEOUT):
                result: Result = self._pipe.recv()
                return result
        except (EOFError, ConnectionResetError):
            pass
        self.end()
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _work(provider: str, pipe: Connection) -> None:
    ort.set_default_logger_severity(4)
    make_options = start(provider)
    while True:
        pipe.send(run(pipe.recv(), make_options))


def sweep(provider: str, cases: Sequence[Case]) -> Iterator[tuple[Case, Result]]:
    """Each case with its result, as soon as it is there."""
    worker = None
    try:
        for case in cases:
            worker = worker or _Worker(provider)
            result = worker.run(case)
            if result is None:
                worker, result = None, Result("crashed")
            yield case, result
    finally:
        if worker:
            worker.end()


_POSITIVE = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)

ALL = np.concatenate([-_POSITIVE[::-1], _POSITIVE]).reshape(1, 1, -1, 64)
"""All finite float16 values, 0 and -0.0 too."""

NEAR_ZERO = ALL[np.abs(ALL) < 2.0**-6].reshape(1, 1, -1, 64)
"""Those within a 64th of 0."""


def _dtype(array: NDArray[Any]) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


def _rounded(values: Any) -> Floats:
    return np.asarray(np.clip(values, -LARGEST, LARGEST), np.float16).astype(np.float32)


def cases() -> list[Case]:
    """All cases, of which the names differ."""
    return [
        *_unary(),
        *_powers(),
        *_binary(),
        *_fused(),
        *_rows(),
        *_normalizations(),
        *_resizing(),
        *_choosing(),
        *_moving(),
        *_integers(),
        *on_the_way(),
    ]


_EXACT = (
    "Abs", "Neg", "Sqrt", "Exp", "Log", "Reciprocal", "Relu", "Ceil", "Floor", "Round", "Sign", "Identity",
    "ThresholdedRelu", "LeakyRelu<alpha=0.125>", "HardSigmoid<alpha=0.25>",
)  # fmt: skip

_INTERPOLATED = (
    "Sigmoid", "Tanh", "Erf", "Softplus", "Softsign", "Elu", "Selu", "Celu", "Sin", "Cos", "Tan", "Asin",
    "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
)  # fmt: skip

_ANGLES = ("Sin", "Tan", "Atan")
"""These are near 0 for operands near 0."""

_GATED = (
    "HardSwish",
    "Gelu",
    'Gelu<approximate="tanh">',
    "Mish",
    "com.microsoft.QuickGelu<alpha=1.0>",
)
"""Products of x with an activation, of which the error grows with x."""

_SILU = "a = Sigmoid({}); y = Mul({}, a)"


def _unary() -> Iterator[Case]:
    gated = np.maximum(TABLE, TABLE / 2 * np.abs(ALL))
    yield from (Case(f"y = {each}(x)", ALL) for each in _EXACT)
    yield Case("a = Add(x, x); y = Log(a)", ALL)
    yield from (Case(f"y = {each}(x)", ALL, step=TABLE) for each in _INTERPOLATED)
    yield from (Case(f"y = {each}(x)", NEAR_ZERO, of="near 0") for each in ("Tanh", *_ANGLES))
    small = (
        "size = Abs(x); small = Less(size, 0.03125); result = {}(x); y = Where(small, x, result)"
    )
    yield from (Case(small.format(each), NEAR_ZERO, of="near 0") for each in _ANGLES)
    yield from (Case(f"y = {each}(x)", ALL, step=gated, opset=20) for each in _GATED)
    yield Case(_SILU.format("x", "x"), ALL, step=gated)
    yield Case("a = Neg(x); b = Exp(a); c = Add(b, 1); y = Div(1, c)", ALL, step=TABLE)
    erf = "a = Div(x, 1.4140625); b = Erf(a); c = Add(b, 1); d = Mul(x, c); y = Mul(d, 0.5)"
    yield Case(erf, ALL, step=gated)
    yield Case("y = Clip(x, -1, 2)", ALL)
    yield Case("y = Clip<min=-1.0, max=2.0>(x)", ALL, opset=10)
    yield Case("y = Clip<min=-1.0, max=2.0>(x)", ALL, opset=6, of="opset 6")
    for type_ in ("INT32", "INT64", "UINT8", "BOOL", "FLOAT16"):
        to = TensorProto.DataType.Value(type_)
        inside = np.clip(ALL, *((0, 255) if type_ == "UINT8" else (-3e4, 3e4))).astype(np.float32)
        yield Case(f"i = Cast<to={to}>(x); y = Cast<to=1>(i)", inside, of=type_)
    one = {"one": np.array(1, np.int32)}
    inside = np.clip(ALL, -3e4, 3e4).astype(np.float32)
    for operator in ("Add", "Mul"):
        nodes = f"i = Cast<to=6>(x); k = {operator}(i, one); y = Cast<to=1>(k)"
        yield Case(nodes, inside, constants=one)


def _powers() -> Iterator[Case]:
    exponents = (
        0, 0.25, 0.3333, 0.45, 0.5, 1, 1.5, 2, 2.2, 3, 4, 5, 6, 8, 12, -0.25, -0.5, -1, -2, -3,
    )  # fmt: skip
    yield from (Case(f"y = Pow(x, {each})", ALL) for each in exponents)
    yield from (Case(f"y = Pow({each}, x)", ALL) for each in (0.5, 0.993, 2, 10))
    yield Case("a = Neg(x); y = Pow(a, 2)", ALL)


def _binary() -> Iterator[Case]:
    for operator in ("Add", "Sub", "Mul", "Div", "Max", "Min"):
        yield Case(f"y = {operator}(x, x)", ALL)
        for constant in (
            "1e-7",
            "1e-5",
            "0.01",
            "0.3",
            "1",
            "-2",
            "3",
            "100",
            "1000",
            "20000",
            "60000",
        ):
            yield Case(f"y = {operator}(x, {constant})", ALL)
            if operator in ("Sub", "Div"):
                yield Case(f"y = {operator}({constant}, x)", ALL)
    several = {"several": np.array([3, 100, 20000, 60000] * 16, np.float32)}
    wide = _rounded(np.random.default_rng(8).normal(size=(16, 64)) * several["several"])
    yield Case("y = Div(x, several)", wide, constants=several)
    for constant in ("0.5", "3", "100", "-3"):
        yield Case(f"y = Mod<fmod=1>(x, {constant})", ALL)
    yield Case("y = PRelu(x, 0.25)", ALL)
    yield Case("y = Sum(x, x, x)", ALL)
    yield Case("y = Mean(x, x, x)", ALL)
    for operator in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"):
        for constant in ("0", "1e-5", "1"):
            yield Case(f"c = {operator}(x, {constant}); y = Cast<to=1>(c)", ALL)
        yield Case(f"c = {operator}(x, 0); y = Where(c, x, 2)", ALL)
        yield Case(f"d = Mul(x, 2); c = {operator}(d, 7); y = Cast<to=1>(c)", ALL)
    yield Case("c = Equal(x, 0); d = Not(c); y = Cast<to=1>(d)", ALL)
    for operator in ("And", "Or", "Xor"):
        nodes = f"c = Greater(x, 0); d = Less(x, 1); e = {operator}(c, d); y = Cast<to=1>(e)"
        yield Case(nodes, ALL)
    yield Case("c = IsNaN(x); y = Cast<to=1>(c)", ALL)
    yield Case("c = IsInf(x); y = Cast<to=1>(c)", ALL)


def _fused() -> Iterator[Case]:
    """Activations behind layers that change nothing: their weights are identities."""
    values = _rounded(np.linspace(-8, 8, 8192))
    identity, image = np.eye(256, dtype=np.float32), np.zeros((64, 64, 3, 3), np.float32)
    image[range(64), range(64), 1, 1] = 1
    lone = image[range(64), range(64)][:, None]
    zeros, twos = np.zeros(256, np.float32), np.full(256, 2, np.float32)
    rows, images = (32, 256), (1, 64, 8, 16)
    gemm, matmul = "a = Gemm(x, w, zeros)", "a = MatMul(x, w)"
    conv = "a = Conv<pads=[1, 1, 1, 1]>(x, w)"
    shape, first, last = np.array([64, 128]), np.array([1]), np.array([32])
    of_rows = {
        "w": identity,
        "zeros": zeros,
        "twos": twos,
        "shape": shape,
        "first": first,
        "last": last,
    }
    of_images = {"w": image, "shape": shape, "first": first, "last": last}
    layers: tuple[tuple[str, tuple[int, ...], Mapping[str, NDArray[Any]]], ...] = (
        (gemm, rows, of_rows),
        (matmul, rows, of_rows),
        (f"{matmul}; b = Add(a, zeros)", rows, of_rows),
        (f"{matmul}; b = Reshape(a, shape)", rows, of_rows),
        (f"{matmul}; b = Slice(a, first, last)", rows, of_rows),
        (f"{matmul}; b = Mul(a, twos)", rows, of_rows),
        (f"{matmul}; b, c = Split<axis=1, num_outputs=2>(a)", rows, of_rows),
        (f"{matmul}; b = Max(a, -60000)", rows, of_rows),
        ("b = Add(x, zeros)", rows, of_rows),
        (conv, images, of_images),
        (f"{conv}; b = Add(a, 0)", images, of_images),
        (f"{conv}; b = Reshape(a, shape)", images, of_images),
        (f"{conv}; b = Slice(a, first, last, first)", images, of_images),
        (f"{conv}; b, c = Split<axis=1, num_outputs=2>(a)", images, of_images),
        (f"{conv}; b = Max(a, -60000)", images, of_images),
        ("a = Conv<group=64, pads=[1, 1, 1, 1]>(x, w)", images, {"w": lone}),
        ("a = Conv<pads=[1, 1]>(x, w)", (1, 64, 128), {"w": image[:, :, 1]}),
        ("a = ConvTranspose<strides=[2, 2]>(x, w)", images, {"w": image[:, :, 1:, 1:]}),
    )
    others = (
        "y = HardSigmoid<alpha=0.25>({})", "y = HardSwish({})", "y = Gelu({})", "y = Elu({})", "y = Exp({})",
        "y = Softplus({})", "y = LeakyRelu<alpha=0.125>({})", "y = Relu({})", "y = Clip({}, 0, 6)",
        "s = HardSigmoid<alpha=0.16666667, beta=0.5>({}); y = Mul({}, s)",
        "s = HardSigmoid<alpha=0.16666667, beta=0.5>({}); y = Mul(s, {})",
    )  # fmt: skip
    for nodes, shape_, constants in layers:
        before = nodes.rpartition("; ")[2][0]
        plain = nodes in (gemm, matmul, conv)
        both = (
            "y = Sigmoid({})",
            "y = Tanh({})",
            *((_SILU.replace("a", "s"), *others) if plain else ()),
        )
        for activation in both:
            # The largest result is 8.
            step = TABLE * (4 if activation not in both[:2] else 1)
            text = f"{nodes}; {activation.replace('{}', before)}"
            yield Case(text, values.reshape(shape_), constants=constants, opset=20, step=step)


def _rows() -> Iterator[Case]:
    """What goes over rows: positive ones, ones of both signs, of several magnitudes, and constant ones."""
    random = np.random.default_rng(1)
    axes = {"axes": np.array([-1]), "axis": np.array(-1)}
    for size in (8, 64, 512, 4096):
        both = [random.normal(size=size) * 10.0**n for n in (-6, -4, -2, 0, 1, 2, 3)]
        positive = [random.uniform(0.5, 1, size) * 10.0**n for n in (-6, -4, -2, 0, 1, 2, 3, 4.7)]
        constant = [np.full(size, each) for each in (LARGEST, -LARGEST, 32768, 1, 0)]
        x = _rounded([*both, *positive, *constant])[None]
        small = _rounded([*both[:5], *positive[:5]])[None]
        largest = np.abs(x).max(-1, keepdims=True)
        weights = {"w": np.ones(size, np.float32), "b": np.zeros(size, np.float32)}
        of = f"rows of {size}"
        yield Case("y = ReduceSum(x, axes)", x, of, axes, step=largest * TABLE / 2)
        for operator in (
            "Mean",
            "Max",
            "Min",
            "L1",
            "L2",
            "SumSquare",
            "Prod",
            "LogSumExp",
            "LogSum",
        ):
            step = (largest if operator in ("Mean", "LogSumExp") else 0) * TABLE / 2
            yield Case(f"y = Reduce{operator}<axes=[-1]>(x)", x, of, step=step)
        yield Case("y = CumSum(x, axis)", x[:, 7:], of, axes)
        yield Case("y = Softmax(x)", small, of, step=TABLE)
        yield Case("y = LogSoftmax(x)", x, of, step=np.repeat(largest, size, -1) * TABLE + TABLE)
        yield Case("y = LayerNormalization(x, w, b)", x, of, weights, step=2 * TABLE)
        yield Case("y = RMSNormalization(x, w)", x, of, weights, opset=23, step=2 * TABLE)
        yield Case("y = LpNormalization<axis=-1>(x)", x[:, :-1], of, step=TABLE)
        square = "a = Mul(x, x); b = ReduceMean<axes=[-1]>(a); c = Sqrt(b)"
        # Squares of smaller and larger values are beyond float16, whatever the operator.
        yield Case(f"{square}; y = Div(x, c)", small[:, [2, 3, 4, 7, 8, 9]], of, step=2 * TABLE)
        columns = {"w": np.ones((size, 4), np.float32)}
        yield Case("y = MatMul(x, w)", x, of, columns, step=np.repeat(largest, 4, -1) * TABLE / 2)
    ones = np.ones((1, 8192), np.float32)
    yield Case("y = CumSum(x, axis)", ones, "8192 ones", axes)
    yield Case("y = ReduceSum(x, axes)", ones, "8192 ones", axes)


def _normalizations() -> Iterator[Case]:
    random = np.random.default_rng(2)
    x = _rounded(random.normal(size=(1, 16, 8, 8)))
    ones, zeros = np.ones(16, np.float32), np.zeros(16, np.float32)
    constants = {"w": ones, "b": zeros, "v": np.logspace(-4, 4, 16).astype(np.float32)}
    for epsilon in ("0.00001", "0.000001"):
        yield Case(f"y = BatchNormalization<epsilon={epsilon}>(x, w, b, b, v)", x, "", constants)
        nodes = f"y = InstanceNormalization<epsilon={epsilon}>(x, w, b)"
        yield Case(nodes, x, "", constants, step=2 * TABLE)
    nodes = "y = InstanceNormalization(x, w, b)"
    for value in (0, 1, 1000, 20000, 32768):
        constant = np.full_like(x, value)
        yield Case(nodes, constant, f"all {value}", constants, step=2 * TABLE)
    nodes = "y = GroupNormalization<num_groups=4>(x, w, b)"
    yield Case(nodes, x, "", constants, opset=21, step=2 * TABLE)
    yield Case("y = MeanVarianceNormalization(x)", x, step=2 * TABLE)
    yield Case("y = LRN<size=3>(x)", x)
    rows = x.reshape(16, 64)
    hidden = random.random(rows.shape) < 0.3
    for mask in (-1e4, -65504.0, -1e9, -3.4e38):
        masks = {"mask": np.where(hidden, mask, 0).astype(np.float32)}
        yield Case("a = Add(x, mask); y = Softmax(a)", rows, f"mask {mask:g}", masks, step=TABLE)
    yield Case("y = Softmax<axis=0>(x)", rows, step=TABLE)


def _resizing() -> Iterator[Case]:
    x = np.arange(192, dtype=np.float32).reshape(1, 3, 8, 8)
    for scale in (2.0, 1.5, 0.5):
        scales = {"scales": np.array([1, 1, scale, scale], np.float32)}
        for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"):
            given = f'coordinate_transformation_mode="{coordinates}"'
            for mode in ("linear", "cubic"):
                nodes = f'y = Resize<mode="{mode}", {given}>(x, , scales)'
                yield Case(nodes, x, f"scale {scale:g}", scales, step=0.25)
            for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
                nodes = (
                    f'y = Resize<mode="nearest", nearest_mode="{nearest}", {given}>(x, , scales)'
                )
                yield Case(nodes, x, f"scale {scale:g}", scales)
    for nodes in (
        "DepthToSpace<blocksize=2>", 'DepthToSpace<blocksize=2, mode="CRD">', "SpaceToDepth<blocksize=2>",
        "MaxPool<kernel_shape=[3, 3], pads=[1, 1, 1, 1]>", "GlobalAveragePool", "GlobalMaxPool",
        "AveragePool<kernel_shape=[3, 3], pads=[1, 1, 1, 1]>",
        "AveragePool<kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1>",
        "LpPool<kernel_shape=[2, 2]>", "GlobalLpPool",
    ):  # fmt: skip
        yield Case(f"y = {nodes}(x)", x.reshape(1, 12, 4, 4) if "Depth" in nodes else x)
    grid = np.random.default_rng(3).uniform(-1.2, 1.2, (1, 5, 5, 2)).astype(np.float32)
    yield Case("y = GridSample(x, grid)", x, constants={"grid": _rounded(grid)}, step=0.5)


def _choosing() -> Iterator[Case]:
    random = np.random.default_rng(4)
    x = _rounded(random.normal(size=(16, 64)))
    equal = np.array([[1, 3, 3, 2, 3, 0, -0.0, -5]] * 4, np.float32)
    for operator in ("ArgMax", "ArgMin"):
        for of, values in (("random", x), ("equal ones", equal)):
            yield Case(f"i = {operator}<axis=1>(x); y = Cast<to=1>(i)", values, of)
            nodes = f"i = {operator}<axis=1, select_last_index=1>(x); y = Cast<to=1>(i)"
            yield Case(nodes, values, of)
    count = {"count": np.array([5])}
    for largest in (0, 1):
        yield Case(f"y, i = TopK<largest={largest}>(x, count)", x, "", count)
        yield Case(f"v, i = TopK<largest={largest}>(x, count); y = Cast<to=1>(i)", x, "", count)
    for axis in (0, 1):
        indices = {"indices": np.array([0, -1, -16, 3])}
        yield Case(f"y = Gather<axis={axis}>(x, indices)", x, "negative", indices)
    yield Case(
        "y = GatherElements<axis=1>(x, indices)", x, "negative", {"indices": np.full((16, 3), -2)}
    )
    yield Case("y = GatherND(x, indices)", x, "negative", {"indices": np.array([[0, -1], [-2, 5]])})
    updates = np.ones((2, 64), np.float32)
    scattered = {"indices": np.array([[0], [-2]]), "updates": updates}
    yield Case("y = ScatterND(x, indices, updates)", x, "negative", scattered)
    elements = {"indices": np.full((16, 1), -2), "updates": updates[:1, :16].T.copy()}
    yield Case("y = ScatterElements<axis=1>(x, indices, updates)", x, "negative", elements)


def _moving() -> Iterator[Case]:
    x = _rounded(np.random.default_rng(5).normal(size=(16, 64)))
    for mode in ("constant", "reflect", "edge", "wrap"):
        for shape in ((16, 64), (1, 16, 64), (1, 1, 16, 64)):
            pads = np.array([*[0] * (len(shape) - 1), 2] * 2)
            # Not behind Conv, Relu and others: there QNN's is right.
            nodes = f'a = Neg(x); y = Pad<mode="{mode}">(a, pads)'
            yield Case(nodes, x.reshape(shape), f"rank {len(shape)}", {"pads": pads}, opset=19)
    numbers = {
        "one": np.array([1]), "repeats": np.array([2, 3]), "shape": np.array([2, 16, 64]),
        "axes": np.array([0]), "start": np.array([-1]), "end": np.array([-70]), "step": np.array([-3]),
        "lengths": np.arange(64) % 16 + 1,
    }  # fmt: skip
    for nodes in (
        "Slice(x, start, end, one, step)", "Tile(x, repeats)", "Expand(x, shape)", "Concat<axis=0>(x, x)",
        "Transpose<perm=[1, 0]>(x)", "Unsqueeze(x, axes)", "ReverseSequence(x, lengths)", "Trilu(x)",
        "Dropout(x)",
    ):  # fmt: skip
        names = re.findall(r"\w+", nodes.rpartition("(")[2])
        given = {name: numbers[name] for name in names if name in numbers}
        yield Case(f"y = {nodes}", x, constants=given)
    yield Case('y = Einsum<equation="ij,kj->ik">(x, w)', x, constants={"w": x}, step=64 * TABLE)


_SIGNED = ("int32", "int64")

_WHOLE: Mapping[str, Mapping[str, NDArray[Any]]] = {
    **{
        dtype: {
            "small": np.arange(256),
            "signed": np.arange(-128, 128),
            "large": np.geomspace(300, 5e8, 256),
            "large negative": -np.geomspace(300, 5e8, 256),
        }
        for dtype in _SIGNED
    },
    "uint32": {"small": np.arange(256), "large": np.geomspace(300, 5e8, 256)},
    "uint8": {"small": np.arange(256)},
}
"""Integers of each dtype, with signs, and large ones; three times the largest has 32 bits."""

_OF_WHOLE = (
    "Div(x, 2)", "Div(x, 7)", "Div(x, 100)", "Div(x, -3)", "Mod(x, 2)", "Mod(x, 24)", "Mod(x, 100)",
    "Mod(x, -3)", "Mod<fmod=1>(x, 24)", "Mod<fmod=1>(x, -3)", "Add(x, 100)", "Sub(x, 100)", "Mul(x, 3)",
    "Mul(x, -1)", "Max(x, 7)", "Min(x, 7)", "Neg(x)", "Abs(x)", "Sign(x)", "Identity(x)", "Clip(x, 3, 100)",
    "BitwiseAnd(x, 7)", 'BitShift<direction="RIGHT">(x, 1)', "ReduceSum(x, axes)", "ReduceMax<axes=[-1]>(x)",
    "ReduceMin<axes=[-1]>(x)", "CumSum(x, axis)", "Concat<axis=0>(x, x)", "Transpose<perm=[1, 0]>(x)",
    "Tile(x, repeats)",
)  # fmt: skip


def _integers() -> Iterator[Case]:
    """Integers of the types that models have, and the ways in and out of them."""
    tensors = {"axes": np.array([-1]), "axis": np.array(-1), "repeats": np.array([2, 3])}
    for dtype, ranges in _WHOLE.items():
        for name, values in ranges.items():
            x, of = values.astype(dtype).reshape(16, 16), f"{dtype}, {name}"
            for call in _OF_WHOLE:
                start, _, operands = call.rstrip(")").rpartition("(")
                numbers = re.findall(r"-?\b\d+", operands)
                is_signed = dtype in _SIGNED
                if start.startswith("BitShift") if is_signed else "-" in operands or start == "Neg":
                    # ONNX has none of these.
                    continue
                if not is_signed and start.startswith(("Reduce", "CumSum")):
                    # The CPU has none of these.
                    continue
                if "Sum" in start and "large" in name:
                    # Beyond 32 bits.
                    continue
                constants = {
                    f"c{number.replace('-', '_')}": np.array(int(number), dtype)
                    for number in numbers
                }
                named = re.sub(r"-?\b\d+", lambda match: f"c{match[0].replace('-', '_')}", operands)
                constants |= {key: tensors[key] for key in tensors if key in operands.split(", ")}
                nodes, opset = f"y = {start}({named})", 18 if "Bitwise" in call else 17
                yield Case(nodes, x, of, constants, opset, result=_dtype(x))
            for operator in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
                nodes, constants = (
                    f"c = {operator}(x, n); y = Where(c, x, m)",
                    {"n": x[:1, 4], "m": x[:1, 9]},
                )
                yield Case(nodes, x, of, constants, result=_dtype(x))
            for to in (TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64):
                yield Case(f"y = Cast<to={to}>(x)", x, of, result=to)
            yield Case("b = Cast<to=9>(x); y = Cast<to=1>(b)", x, of)
            small = ("y = Div(f, 255)", "y = Sub(f, 100)")
            for nodes in ("y = Div(f, 16384)",) if "large" in name else small:
                yield Case(f"f = Cast<to=1>(x); {nodes}", x, of)
    image = np.arange(192).reshape(1, 8, 8, 3)
    kernel = {"kernel": _rounded(np.random.default_rng(6).normal(size=(4, 3, 3, 3)))}
    for dtype in ("uint8", "int32"):
        nodes = "f = Cast<to=1>(x); a = Div(f, 255); b = Transpose<perm=[0, 3, 1, 2]>(a); y = Conv(b, kernel)"
        yield Case(nodes, image.astype(dtype), f"pixels in {dtype}", kernel, step=8 * TABLE)
    rows = np.random.default_rng(7).normal(size=(8, 16)).astype(np.float16).astype(np.float32)
    for nodes, shape in (
        ("y = Gather<axis=1>(table, x)", (4,)),
        ("y = GatherElements<axis=1>(table, x)", (8, 4)),
        ("y = GatherND<batch_dims=1>(table, x)", (8, 1)),
        ("y = ScatterElements<axis=1>(table, x, updates)", (8, 4)),
        ("y = ScatterND(rows, x, changed)", (4, 1)),
    ):
        indices = -1 - np.arange(np.prod(shape)).reshape(shape) % 4
        # As they are computed, the EP does not count them from the end while it compiles.
        constants = {
            "table": rows,
            "updates": rows[:, :4] + 9,
            "rows": rows,
            "changed": rows[:4] + 9,
        }
        used = {key: value for key, value in constants.items() if key in re.findall(r"\w+", nodes)}
        yield Case(nodes, indices, "negative", used)
    few = np.array([-1, -8, 3], np.int32)
    yield Case("y = Gather(table, x)", few, "negative, int32", {"table": rows})


def on_the_way() -> Iterator[Case]:
    """Graphs of which float16 has inputs and results, but not what is computed between."""
    random = np.random.default_rng(9)
    counts, share = _rounded(np.linspace(-4000, 4000, 4096)).reshape(64, 64), 1 / 64
    # The EP computes the product of two numbers itself if the second one divides.
    yield Case("a = Mul(x, 3300); y = Mul(a, 0.00025)", counts)
    for number in (20, 1000):
        yield Case(f"a = Mul(x, x); y = Div(a, {number})", _rounded(counts / 4))
    yield Case("a = Mul(x, 1000); b = Abs(x); c = Add(b, 1); y = Div(a, c)", counts)
    yield Case("a = Mul(x, x); b = Add(a, 1); y = Div(x, b)", _rounded(counts / 16), step=TABLE)
    constants = {"axes": np.array([-1]), "share": np.array(share, np.float32)}
    yield Case(
        "a = ReduceSum(x, axes); y = Mul(a, share)", _rounded(4 * counts), constants=constants
    )
    spikes = _rounded(random.normal(size=(64, 64)) * np.where(np.arange(64) == 7, 500, 1))
    yield Case("a = Mul(x, x); y = ReduceMean<axes=[-1]>(a)", spikes, "rows with one large number")
    beside = _rounded(30 + random.normal(size=(64, 64)))
    nodes = "a = Mul(x, x); b = ReduceMean<axes=[-1]>(a); c = ReduceMean<axes=[-1]>(x)"
    yield Case(f"{nodes}; d = Mul(c, c); y = Sub(b, d)", beside, "rows beside 30", step=0.05)
    nodes = "a = Exp(x); b = ReduceSum(a, axes)"
    axes = {"axes": constants["axes"]}
    yield Case(f"{nodes}; y = Log(b)", _rounded(counts / 200), constants=axes, step=10 * TABLE)
    yield Case(f"{nodes}; y = Div(a, b)", _rounded(counts / 200), constants=axes, step=2 * TABLE)
    least = {"least": np.array(1e-10, np.float32)}
    smallest = _POSITIVE[:4096].reshape(64, 64)
    yield Case("a = Add(x, least); y = Log(a)", smallest, constants=least, step=0.05)
    levels = _rounded(random.normal(size=(64, 64)) * np.geomspace(1e-4, 3000, 64)[:, None])
    nodes = "a = Mul(x, x); b = ReduceMean<axes=[-1]>(a); c = Add(b, least)"
    yield Case(f"{nodes}; y = Log(c)", levels, "rows of all levels", least, step=0.05)
    watts = _rounded(random.uniform(50, 400, (64, 64)))
    nodes = "a = Pow(x, 4); b = ReduceMean<axes=[-1]>(a); y = Pow(b, 0.25)"
    yield Case(nodes, watts, "rows from 50 to 400", step=1)
    # The exponents are those of rain from the echo of a radar.
    echoes = _rounded(np.linspace(0, 6, 4096)).reshape(64, 64)
    rain = 0.01 * np.power(10, 0.625 * echoes)
    yield Case("a = Pow(10, x); b = Div(a, 200); y = Pow(b, 0.625)", echoes, step=rain)
    whole = {"more": np.array(10**6, np.int32)}
    nodes = "i = Add(x, more); f = Cast<to=1>(x); g = Cast<to=1>(i); y = Div(f, g)"
    large = np.geomspace(300, 5e8, 256).astype(np.int32)
    yield Case(nodes, large, "int32, large", whole, step=TABLE)
    long = random.integers(0, 3 * 10**7, (16, 16)).astype(np.int32)
    for sum_ in ("ReduceSum", "CumSum"):
        given = {"axes": np.array([-1])} if sum_ == "ReduceSum" else {"axis": np.array(-1)}
        nodes = f"y = {sum_}(x, {next(iter(given))})"
        yield Case(nodes, long, "int32, sums above 2^24", given, result=TensorProto.INT32)
    wide = _rounded(random.normal(size=(2, 1, 2, 1, 3)))
    other = {"other": _rounded(random.normal(size=(1, 4, 1, 2, 1)))}
    yield Case("c = Greater(x, other); y = Where(c, x, other)", wide, constants=other)


def table(provider: str) -> Path:
    """The file with the results of ``provider``."""
    return FOLDER / f"faults-{provider}.json"


def read(path: Path) -> dict[str, Result]:
    """The results in the file ``path`` by the names of their cases; none if it does not exist."""
    found = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    return {name: Result(**each) for name, each in found.items()}


def text(provider: str, results: Mapping[str, Result]) -> str:
    """The file's text: a line for each case, with the fields that are not the default ones."""
    default = asdict(Result())
    fields = {
        name: {key: value for key, value in asdict(each).items() if value != default[key]}
        for name, each in results.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in fields.items())
    head = json.dumps({"seen": described(provider), "options": OPTIONS.get(provider, {})})
    return f'{head[:-1]}, "cases": {{\n{lines}\n}}}}\n'


def described(provider: str) -> str:
    """The versions and the machine of this run, such as "onnxruntime 1.32.0, Linux x86_64"."""
    packages = ["onnxruntime"]
    if provider in PACKAGES:
        packages.append(PACKAGES[provider].replace("_", "-"))
    names = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{names}, {platform.system()} {platform.machine()}"


def changes(before: Mapping[str, Result], after: Mapping[str, Result]) -> Iterator[str]:
    """A line for each case whose result is another one."""
    for name, result in after.items():
        known = before.get(name)
        if known is None or (known.status, known.wrong) != (result.status, result.wrong):
            was = describe(known) if known else "new"
            yield f"{name}: {was} -> {describe(result)}"
    yield from (
        f"{name}: {describe(before[name])} -> gone" for name in before.keys() - after.keys()
    )


def describe(result: Result) -> str:
    """A result in one line."""
    if result.status != "wrong":
        return result.status
    x, exact, got = result.examples[-1]
    of = "" if x is None else f" for {x:g}"
    return f"{result.wrong} of {result.values} wrong, such as {got:g}{of} (right: {exact:g})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--provider", default="qnn", choices=[*PACKAGES, "cpu"])
    parser.add_argument(
        "--only", nargs="+", help="cases with one of these in their name", metavar="TEXT"
    )
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    if not available(arguments.provider):
        raise SystemExit(
            f"{arguments.provider} is not installed, or has no device on this machine."
        )
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    words, path = arguments.only or [""], table(arguments.provider)
    if arguments.write and arguments.only:
        seen = json.loads(path.read_text(encoding="utf-8"))["seen"]
        if seen != described(arguments.provider):
            parser.error(f"the table is of {seen}: --write needs all cases")
    chosen = [case for case in cases() if any(word in case.name for word in words)]
    began = time.perf_counter()
    results = {case.name: result for case, result in sweep(arguments.provider, chosen)}
    before = read(path)
    known = {name: each for name, each in before.items() if not arguments.only or name in results}
    for line in changes(known, results):
        print(line)
    counts = Counter(each.status for each in results.values())
    found = ", ".join(f"{number} {status}" for status, number in counts.items())
    print(f"{found}, in {time.perf_counter() - began:.0f} s")
    if arguments.write:
        if arguments.only:
            results = {case.name: (before | results)[case.name] for case in cases()}
        path.write_text(text(arguments.provider, results), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

"""ONNX Runtime's own fused operators, taken apart into ONNX's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import MICROSOFT, Rewrite, Values, by_node
from hatch_epcontext.graph.rewrites.chain import Chain


def _activated(chain: Chain, value: str, name: str, numbers: list[float]) -> str | None:
    """``value`` after the activation ``name``, which takes ``numbers``; None for an unknown one."""
    if name in ("Relu", "Sigmoid", "Tanh"):
        return chain.add(name, value)
    if name == "LeakyRelu":
        return chain.add(name, value, alpha=numbers[0] if numbers else None)
    if name == "HardSigmoid":
        alpha, beta = (*numbers, None, None)[:2]
        return chain.add(name, value, alpha=alpha, beta=beta)
    if name == "Clip" and len(numbers) == 2:
        return chain.clip(value, numbers[0], numbers[1])
    return None


def _conv(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value, weights, bias, added = (*node.input, "", "")[:4]
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {name: graph.attribute(node, name, None) for name in names}
    result = chain.add("Conv", *filter(None, (value, weights, bias)), **attributes)
    if added:
        result = chain.add("Add", result, added)
    return _with_activation(node, chain, result, graph.attribute(node, "activation_params", []))


def _with_activation(
    node: onnx.NodeProto, chain: Chain, value: str, numbers: list[float]
) -> list[str] | None:
    if not (name := graph.text(node, "activation")):
        return [value]
    activated = _activated(chain, value, name, list(numbers))
    return None if activated is None else [activated]


def _gemm(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    names = ("alpha", "beta", "transA", "transB")
    attributes = {name: graph.attribute(node, name, None) for name in names}
    result = chain.add("Gemm", *filter(None, node.input), **attributes)
    numbers = [graph.attribute(node, f"activation_{name}", None) for name in ("alpha", "beta")]
    return _with_activation(node, chain, result, [each for each in numbers if each is not None])


def _matmul(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    operands = []
    for name, letter in zip(node.input, "AB", strict=True):
        rank = chain.rank(name)
        batch = graph.number(node, f"transBatch{letter}", 0)
        transposed = graph.number(node, f"trans{letter}", 0)
        if rank is None or (rank < 2 and (batch or transposed)):
            return None
        order = list(range(rank))
        if batch:
            # The first dimension goes before the last.
            order = [*order[1:-1], order[0], order[-1]]
        if transposed:
            order[-2:] = reversed(order[-2:])
        same = order == sorted(order)
        operands.append(name if same else chain.add("Transpose", name, perm=order))
    return [chain.scaled(chain.add("MatMul", *operands), graph.attribute(node, "alpha", 1.0))]


def _gelu(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value = _biased(node, chain)
    if graph.text(node, "approximate") == "tanh":
        return [_tanh_gelu(chain, value)]
    half = chain.add("Mul", value, chain.number(0.5))
    error = chain.add("Erf", chain.add("Mul", value, chain.number(np.sqrt(0.5))))
    return [chain.add("Mul", half, chain.add("Add", error, chain.number(1)))]


def _fast_gelu(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    return [_tanh_gelu(chain, _biased(node, chain))]


def _tanh_gelu(chain: Chain, value: str) -> str:
    square = chain.add("Mul", value, value)
    factor = chain.add("Mul", square, chain.number(np.sqrt(2 / np.pi) * 0.044715))
    inner = chain.add("Mul", value, chain.add("Add", factor, chain.number(np.sqrt(2 / np.pi))))
    half = chain.add("Mul", value, chain.number(0.5))
    return chain.add("Mul", half, chain.add("Add", chain.add("Tanh", inner), chain.number(1)))


def _quick_gelu(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value = node.input[0]
    alpha = graph.attribute(node, "alpha", 1.702)
    return [chain.add("Mul", value, chain.add("Sigmoid", chain.scaled(value, alpha)))]


def _biased(node: onnx.NodeProto, chain: Chain) -> str:
    value, bias = (*node.input, "")[:2]
    return chain.add("Add", value, bias) if bias else value


def _layer_norm(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value, scale, bias = (*node.input, "")[:3]
    return _normalized(node, chain, value, scale, bias, centred=True)


def _rms_norm(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value, scale = node.input[:2]
    result = _normalized(node, chain, value, scale, "", centred=False)
    return None if result is None else [result[0], *result[2:]]


def _normalized(
    node: onnx.NodeProto, chain: Chain, value: str, scale: str, bias: str, *, centred: bool
) -> list[str] | None:
    """The normalized value, its mean, and the inverse of its standard deviation."""
    rank = chain.rank(value)
    if rank is None:
        return None
    axis = graph.number(node, "axis", -1)
    axes = tuple(range(axis % rank, rank))
    mean = ""
    if centred:
        mean = chain.mean(value, axes)
        value = chain.add("Sub", value, mean)
    variance = chain.mean(chain.add("Mul", value, value), axes)
    epsilon = chain.number(graph.attribute(node, "epsilon", 1e-5))
    deviation = chain.add("Sqrt", chain.add("Add", variance, epsilon))
    result = chain.add("Mul", chain.add("Div", value, deviation), scale)
    inverse = chain.add("Reciprocal", deviation) if any(node.output[1:]) else ""
    return [chain.add("Add", result, bias) if bias else result, mean, inverse]


def _skip_layer_norm(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value, skip, scale, bias, added = (*node.input, "", "")[:5]
    return _with_sum(node, chain, (value, skip, added), scale, bias, centred=True)


def _skip_rms_norm(node: onnx.NodeProto, chain: Chain) -> list[str] | None:
    value, skip, scale, added = (*node.input, "")[:4]
    return _with_sum(node, chain, (value, skip, added), scale, "", centred=False)


def _with_sum(
    node: onnx.NodeProto,
    chain: Chain,
    added: tuple[str, str, str],
    scale: str,
    bias: str,
    *,
    centred: bool,
) -> list[str] | None:
    value, skip, more = added
    total = chain.add("Add", value, skip, like=value)
    if more:
        total = chain.add("Add", total, more, like=value)
    result = _normalized(node, chain, total, scale, bias, centred=centred)
    return None if result is None else [*result, total]


Parts = Callable[[onnx.NodeProto, Chain], "list[str] | None"]
"""Adds the nodes that compute a node's outputs to a chain, and returns their names; None if it cannot."""


def _rewrite(name: str, parts: dict[str, Parts]) -> Rewrite:
    def expand(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
        chain = Chain(values, node)
        found = parts[graph.operator(node)](node, chain)
        if found is None or any(o and not f for o, f in zip(node.output, found, strict=False)):
            return None
        return chain.end({f: o for o, f in zip(node.output, found, strict=False) if o})

    return by_node(name, tuple(parts), expand)


FUSED = _rewrite(
    "operators that ONNX Runtime has fused, taken apart",
    {
        f"{MICROSOFT}.FusedConv": _conv,
        f"{MICROSOFT}.FusedGemm": _gemm,
        f"{MICROSOFT}.FusedMatMul": _matmul,
        f"{MICROSOFT}.TransposeMatMul": _matmul,
        f"{MICROSOFT}.QuickGelu": _quick_gelu,
        f"{MICROSOFT}.Gelu": _gelu,
        f"{MICROSOFT}.BiasGelu": _gelu,
        f"{MICROSOFT}.FastGelu": _fast_gelu,
        f"{MICROSOFT}.SkipLayerNormalization": _skip_layer_norm,
        f"{MICROSOFT}.SkipSimplifiedLayerNormalization": _skip_rms_norm,
        # ONNX Runtime registers it in ONNX's domain.
        "SimplifiedLayerNormalization": _rms_norm,
    },
)

FUNCTIONS = _rewrite(
    "functions as basic operators",
    {
        "Gelu": _gelu,
        "LayerNormalization": _layer_norm,
        "RMSNormalization": _rms_norm,
    },
)

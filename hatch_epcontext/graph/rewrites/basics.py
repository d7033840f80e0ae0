"""Operators of ONNX that few EPs take in all forms, as simpler ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.rewrites.base import Values, by_node
from hatch_epcontext.graph.rewrites.chain import Chain

_MAX_VALUES = 2**24
"""Values of a mask that is stored: 16 MB."""


def _gemm(node: onnx.NodeProto, chain: Chain, values: Values) -> str | None:
    alpha, beta = (graph.attribute(node, name, 1.0) for name in ("alpha", "beta"))
    if alpha == beta == 1:
        # ONNX Runtime makes a Gemm of the product again.
        return None
    operands = [
        chain.add("Transpose", name, perm=[1, 0])
        if graph.number(node, f"trans{letter}", 0)
        else name
        for name, letter in zip(node.input[:2], "AB", strict=True)
    ]
    product = chain.add("MatMul", *operands)
    product = chain.scaled(product, alpha)
    if len(node.input) < 3 or not node.input[2]:
        return product
    return chain.add("Add", product, chain.scaled(node.input[2], beta))


def _mean(node: onnx.NodeProto, chain: Chain, values: Values) -> str | None:
    total, *others = node.input
    for each in others:
        total = chain.add("Add", total, each)
    return chain.add("Mul", total, chain.number(1 / len(node.input)))


def _triangle(node: onnx.NodeProto, chain: Chain, values: Values) -> str | None:
    value, diagonal = (*node.input, "")[:2]
    shape = values.shape(value)
    offset = values.constant(diagonal) if diagonal else np.array(0)
    dtype = values.dtype(value)
    if shape is None or offset is None or dtype is None or np.prod(shape[-2:]) > _MAX_VALUES:
        return None
    ones = np.ones(shape[-2:], np.bool_)
    cut = np.triu if graph.number(node, "upper", 1) else np.tril
    mask = values.store(f"{value}/mask", cut(ones, int(offset.item())))
    return chain.add("Where", mask, value, values.store(f"{value}/zero", np.array(0, dtype)))


def _one_hot(node: onnx.NodeProto, chain: Chain, values: Values) -> str | None:
    indices, depth_name, levels_name = node.input
    shape, dtype = values.shape(indices), values.dtype(indices)
    depth, levels = values.constant(depth_name), values.constant(levels_name)
    if shape is None or dtype is None or dtype.kind not in "iu" or depth is None or levels is None:
        return None
    count = int(depth.item())
    axis = graph.number(node, "axis", -1) % (len(shape) + 1)
    wide = chain.add("Reshape", indices, chain.integers(*shape[:axis], 1, *shape[axis:]))
    # Indices count from the end too.
    positions = np.arange(count).reshape([count if i == axis else 1 for i in range(len(shape) + 1)])
    sides = (positions, positions - count) if dtype.kind == "i" else (positions,)
    equal = [
        chain.add("Equal", wide, values.store(f"{indices}/positions", side.astype(dtype)))
        for side in sides
    ]
    hit = equal[0] if len(equal) == 1 else chain.add("Or", *equal)
    low, high = (values.store(f"{levels_name}/{i}", levels[i : i + 1]) for i in (0, 1))
    return chain.add("Where", hit, high, low)


def _gathered(node: onnx.NodeProto, chain: Chain, values: Values) -> str | None:
    value, indices = node.input[0], values.constant(node.input[1])
    shape, result = values.shape(value), values.shape(node.output[0])
    if shape is None or result is None or indices is None or 0 in shape or not indices.size:
        return None
    batches = graph.number(node, "batch_dims", 0)
    named = batches + indices.shape[-1]
    sizes = np.array(shape[batches:named])
    # Indices count from the end too. All of a place's indices are one, in a list of all places.
    positive = np.where(indices < 0, indices + sizes, indices)
    inner = positive @ np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))], np.int64)
    outer = np.arange(math.prod(shape[:batches])) * math.prod(sizes)
    places = inner + outer.reshape(*shape[:batches], *[1] * (inner.ndim - batches))
    flat = chain.integers(math.prod(shape[:named]), *shape[named:])
    gathered = chain.add(
        "Gather",
        chain.add("Reshape", value, flat),
        chain.integers(*places.ravel().tolist()),
        axis=0,
    )
    return chain.add("Reshape", gathered, chain.integers(*result))


Parts = Callable[[onnx.NodeProto, Chain, Values], "str | None"]
"""Adds the nodes that compute a node's output to a chain, and returns its name; None if it cannot."""

_PARTS: dict[str, Parts] = {
    "GatherND": _gathered,
    "Gemm": _gemm,
    "Mean": _mean,
    "OneHot": _one_hot,
    "Trilu": _triangle,
}


def _expand(node: onnx.NodeProto, values: Values) -> list[onnx.NodeProto] | None:
    chain = Chain(values, node)
    found = _PARTS[node.op_type](node, chain, values)
    return None if found is None else chain.end({found: node.output[0]})


SIMPLER = by_node(
    "GatherND, Gemm, Mean, OneHot or Trilu as simpler operators", tuple(_PARTS), _expand
)

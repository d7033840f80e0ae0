"""Nodes that replace one, written one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from hatch_epcontext.graph.rewrites.base import Values

_AXES_OF_MEAN = 18
_AXES_OF_SUM = 13
"""The opsets since which the axes are an input."""

_BOUNDS_AS_INPUTS = 11
"""The opset since which the bounds of Clip are inputs."""


class Chain:
    """The nodes that replace ``node``, which has floats; each method returns the name of its output."""

    def __init__(self, values: Values, node: onnx.NodeProto) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._values = values
        self._stem = node.output[0]
        dtypes = (values.dtype(name) for name in (*node.input, *node.output))
        self._dtype = next((each for each in dtypes if each is not None), np.dtype(np.float32))
        self._ranks: dict[str, int | None] = {}

    def add(self, operator: str, *inputs: str, like: str = "", **attributes: Any) -> str:
        """Add a node of ``operator``; attributes that are None are left out.

        ``like``: the value whose rank the output has.
        """
        output = self._values.fresh(f"{self._stem}/{operator}")
        given = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, inputs, [output], **given))
        if like:
            self._ranks[output] = self.rank(like)
        return output

    def number(self, value: float) -> str:
        """Store ``value``, in the dtype of the node."""
        return self._values.store(f"{self._stem}/number", np.array(value, self._dtype))

    def integers(self, *values: int) -> str:
        """Store a list of ``values``."""
        return self._values.store(f"{self._stem}/sizes", np.array(values, np.int64))

    def rank(self, value: str) -> int | None:
        """The number of dimensions of ``value``; None if it is unknown."""
        if value in self._ranks:
            return self._ranks[value]
        return self._values.rank(value)

    def scaled(self, value: str, factor: float) -> str:
        """``value`` times ``factor``."""
        return value if factor == 1 else self.add("Mul", value, self.number(factor))

    def mean(self, value: str, axes: tuple[int, ...]) -> str:
        """The mean of ``value`` over ``axes``, which get the size 1."""
        if self._values.opset >= _AXES_OF_MEAN:
            return self.add("ReduceMean", value, self.integers(*axes), keepdims=1)
        return self.add("ReduceMean", value, axes=list(axes), keepdims=1)

    def sum(self, value: str, axes: tuple[int, ...]) -> str:
        """The sum of ``value`` over ``axes``, which are removed."""
        if self._values.opset >= _AXES_OF_SUM:
            return self.add("ReduceSum", value, self.integers(*axes), keepdims=0)
        return self.add("ReduceSum", value, axes=list(axes), keepdims=0)

    def clip(self, value: str, low: float, high: float) -> str:
        """``value`` within bounds."""
        if self._values.opset >= _BOUNDS_AS_INPUTS:
            return self.add("Clip", value, self.number(low), self.number(high))
        return self.add("Clip", value, min=low, max=high)

    def end(self, names: Mapping[str, str]) -> list[onnx.NodeProto]:
        """The nodes, in which values have their new ``names``."""
        for node in self.nodes:
            for list_ in (node.input, node.output):
                list_[:] = [names.get(name, name) for name in list_]
        return self.nodes

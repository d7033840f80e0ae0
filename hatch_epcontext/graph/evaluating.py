"""Computes a node with onnx's own reference, which knows fewer operators than ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper


def evaluate(
    node: onnx.NodeProto, values: Mapping[str, NDArray[Any]], opset: int
) -> list[NDArray[Any]]:
    """The results of ``node`` for the ``values`` of its operands; raises ValueError if onnx has none."""
    # Imported here: few models need it, and it imports all operators.
    from onnx.reference import ReferenceEvaluator

    names = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    single = helper.make_graph([node], "node", names, results)
    model = helper.make_model(single, opset_imports=[helper.make_opsetid("", opset)])
    feeds = {value.name: values[value.name] for value in names}
    try:
        return [*map(np.asarray, ReferenceEvaluator(model).run(None, feeds))]
    except Exception as error:
        # It raises many types.
        raise ValueError(f"onnx does not compute {node.op_type}") from error

"""The types of a model's values, as onnx infers them, and where it cannot, ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.worker.session import open_unoptimized
from hatch_epcontext.worker.tensors import elem_type


def value_types(model: onnx.ModelProto, path: Path) -> dict[str, onnx.TypeProto]:
    """The known types of the values of ``model``, which is in the file ``path``.

    onnx infers none after operators of other domains; there ONNX Runtime does.
    """
    main = graph.inferred(model)
    types = {value.name: value.type for value in (*main.value_info, *main.output)}
    if all(node.domain in graph.STANDARD for node in main.node):
        return types
    names = dict.fromkeys(name for node in main.node for name in node.output if name)
    unknown = [name for name in names if name not in types]
    return types | types_of_runtime(model, path, unknown)


def types_of_runtime(
    model: onnx.ModelProto, path: Path, names: Iterable[str]
) -> dict[str, onnx.TypeProto]:
    """The types of the values ``names`` of ``model`` as ONNX Runtime, with its own operators, infers them.

    Empty if it cannot open the model, which is in the file ``path``.
    """
    # It reports the types of outputs only, so all values become outputs.
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    names = list(names)
    own = {value.name for value in (*model.graph.input, *model.graph.output)}
    extended.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in own
    )
    try:
        session = open_unoptimized(extended.SerializeToString(), path)
    except Exception:
        # The types stay unknown, and running the model reports why it does not open.
        return {}
    outputs = {output.name: output for output in session.get_outputs()}
    return {
        # It reports no dimensions for an unknown rank too.
        name: onnx.helper.make_tensor_type_proto(number, outputs[name].shape or None)
        for name in names
        if name in outputs and (number := elem_type(outputs[name].type)) is not None
    }

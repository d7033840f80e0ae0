"""The types and shapes that onnx infers, and where they contradict those of a model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.text import listing

_CONTRADICTS = re.compile(r"node name: ([0-9]+)\): \[ShapeInferenceError\] (?!Inference error)")

_MAX_VALUES = 2**16
"""The most values of a stored tensor that can decide shapes: weights are larger."""


def inferred(
    model: onnx.ModelProto,
    types: Mapping[str, onnx.TypeProto] = MappingProxyType({}),
    *,
    anew: bool = False,
) -> onnx.GraphProto:
    """The main graph of a copy of ``model`` with the types that onnx infers, without its large tensors.

    ``types``: those of values that onnx may not infer; ``anew``: whether the model's own types of values
    behind its inputs are left out. The main graph itself if onnx does not understand it.
    """
    light = _without_weights(model, types, anew=anew)
    try:
        return onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except Exception:
        # It raises many types, even for models that ONNX Runtime opens.
        return model.graph


def contradiction(model: onnx.ModelProto) -> str | None:
    """The first node of ``model`` whose inputs' shapes contradict each other or its attributes, with these
    shapes; None if onnx finds none.
    """
    light = _without_weights(model, {}, anew=True)
    named = {str(number): node for number, node in enumerate(graph.nodes(light.graph))}
    for number, node in named.items():
        node.name = number
    try:
        onnx.shape_inference.infer_shapes(light, strict_mode=True, data_prop=True)
    except Exception as error:
        numbers = _CONTRADICTS.findall(str(error))
    else:
        return None
    if not numbers:
        return None
    known = inferred(model, anew=True)
    values = [
        v for body in graph.graphs(known) for v in (*body.input, *body.value_info, *body.output)
    ]
    texts = {value.name: graph.facts(value).shape_text for value in values}
    texts |= {tensor.name: " x ".join(map(str, tensor.dims)) for tensor in known.initializer}
    node = named[numbers[0]]
    read = listing(f"{name!r} ({texts[name]})" for name in node.input if texts.get(name))
    return f"{graph.operator(node)} {node.output[0]!r} reads {read}" if read else None


def infer_anew(
    model: onnx.ModelProto,
    types_of_runtime: Callable[[onnx.ModelProto, list[str]], Mapping[str, onnx.TypeProto]],
) -> None:
    """Replace the shapes of values of ``model`` that contradict what onnx infers from its inputs.

    ``types_of_runtime``: the types of values of a model as ONNX Runtime infers them. It takes a shape that
    contradicts its own as open, and onnx infers some wrong, such as that of an STFT with one side.
    """
    new_main = inferred(model, anew=True)
    replacements: list[tuple[onnx.ValueInfoProto, onnx.TypeProto, onnx.TypeProto]] = []
    for body, new_body in zip(graph.graphs(model.graph), graph.graphs(new_main), strict=True):
        types = {value.name: value.type for value in (*new_body.value_info, *new_body.output)}
        for value in (*body.value_info, *body.output):
            own, new = graph.sizes(value.type), graph.sizes(types.get(value.name, value.type))
            if own is None or new is None:
                continue
            if len(own) != len(new) or any(
                None not in pair and pair[0] != pair[1] for pair in zip(own, new, strict=True)
            ):
                replacements.append((value, copy.deepcopy(value.type), types[value.name]))
                value.type.tensor_type.ClearField("shape")
    results = {name for node in model.graph.node for name in node.output}
    names = [value.name for value, _, _ in replacements if value.name in results]
    known = types_of_runtime(model, names) if names else {}
    for value, declared, type_ in replacements:
        is_right = value.name in known and graph.sizes(known[value.name]) == graph.sizes(declared)
        value.type.CopyFrom(declared if is_right else type_)


def _without_weights(
    model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto], *, anew: bool
) -> onnx.ModelProto:
    # Before ONNX IR 4, initializers had to be inputs too.
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    main = light.graph
    main.name = model.graph.name
    main.node.extend(map(_light, model.graph.node))
    main.input.extend(graph.inputs(model.graph))
    if anew:
        main.output.extend(onnx.ValueInfoProto(name=value.name) for value in model.graph.output)
    else:
        main.output.extend(model.graph.output)
        main.value_info.extend(model.graph.value_info)
    for name, type_ in types.items():
        main.value_info.add(name=name, type=type_)
    main.sparse_initializer.extend(model.graph.sparse_initializer)
    for tensor in model.graph.initializer:
        # Shape inference would copy large tensors twice, and fail if they are in another file.
        if math.prod(tensor.dims) <= _MAX_VALUES and not graph.is_external(tensor):
            main.initializer.append(tensor)
        else:
            type_ = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            main.value_info.add(name=tensor.name, type=type_)
    for body in graph.graphs(main) if anew else ():
        if body is not main:
            del body.value_info[:]
            for value in body.output:
                value.ClearField("type")
    return light


def _light(node: onnx.NodeProto) -> onnx.NodeProto:
    """``node``, of which a copy lacks long lists: ensembles of trees have millions of numbers."""
    lengths = [len(a.floats) + len(a.ints) + len(a.strings) for a in node.attribute]
    if sum(lengths) <= _MAX_VALUES:
        return node
    light = onnx.NodeProto(op_type=node.op_type, domain=node.domain, name=node.name)
    light.input.extend(node.input)
    light.output.extend(node.output)
    pairs = zip(node.attribute, lengths, strict=True)
    light.attribute.extend(attribute for attribute, length in pairs if length <= _MAX_VALUES)
    return light

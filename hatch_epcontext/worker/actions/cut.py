"""Cut a source model, and write its constants into it: a model with its own data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from hatch_epcontext.config.genai import check_layers
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.graph import external, graph, inference
from hatch_epcontext.graph.parts import extract, part_between
from hatch_epcontext.worker.ort_values import types_of_runtime
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import CutReply, CutRequest
from hatch_epcontext.worker.source import data_of, fix_constants, fix_defaults, read_source


def handle(request: CutRequest) -> CutReply:
    """Write the request's part of the model, with its constants, into its folder; the source is only read.

    Raises ModelError when the model cannot be cut there, when a tensor's type is unknown, or when a
    constant does not fit.
    """
    model, source = request.model, Path(request.model.path)
    announce(f"writing the configured part of {source.name}")
    onnx_model = read_source(source, model.key)
    data = data_of(onnx_model, source, model.key)
    known = {value.name for value in onnx_model.graph.input}
    ModelError.check(check_layers(model, known))
    if model.cut:
        _cut(onnx_model, model)
    # An input that the cut removes needs no value; a name that no input has is an error.
    known -= {value.name for value in onnx_model.graph.input}
    if constants := {n: constant for n, constant in model.constants.items() if n not in known}:
        fix_constants(onnx_model, replace(model, dims={}, shapes={}, constants=constants))
    if request.with_defaults:
        fix_defaults(onnx_model)
    apart = any(graph.is_external(tensor) for tensor in graph.tensors(onnx_model.graph))
    external.read_data(onnx_model, source.parent)
    files = external.save_whole(onnx_model, Path(request.folder) / source.name, apart=apart)
    return CutReply(files, data)


def _cut(onnx_model: onnx.ModelProto, model: Model) -> None:
    """Keep only the part of ``onnx_model`` that ``model`` names."""
    key = model.key / "cut"
    nodes = onnx_model.graph.node if model.cut.lengths else ()
    attention = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    lengths = _lengths(attention, model) if model.cut.lengths else {}
    positions = _positions(onnx_model, model)
    cut = replace(model.cut, inputs=(*model.cut.inputs, *positions, *lengths))
    optional = {value.name: value for value in graph.optional_inputs(onnx_model)}
    part = part_between(onnx_model.graph, cut, model.constants, key, optional)
    names = (*part.inputs, *part.outputs)
    values = _values(onnx_model, model.path, [name for name in names if name not in lengths])
    values |= optional | lengths
    for node in attention:
        # Caches have slots for all tokens: none is left out, and they may be smaller than the window.
        windowed = [a for a in node.attribute if a.name == "sliding_window_cache"]
        for attribute in windowed:
            node.attribute.remove(attribute)
        # The cache has the same slots before and after.
        for past, present in zip(node.input[3:5], node.output[1:3], strict=False):
            if past in values:
                values[present] = onnx.ValueInfoProto(name=present, type=values[past].type)
    if unknown := [name for name in names if not _is_typed(values.get(name))]:
        message = f"the type of {unknown[0]!r} is not known before the model runs."
        hint = "Cut at another tensor, or save the model with the types of all its tensors."
        raise ModelError(Problem.at(key, Kind.INVALID_CUT, message, hint))
    extract(onnx_model, part, values)
    for name in positions:
        _compute_positions(onnx_model.graph, name, model.cut.inputs[0], next(iter(lengths)))


def _positions(onnx_model: onnx.ModelProto, model: Model) -> list[str]:
    """The input with the positions of tokens, which genai feeds to no stage of fixed sizes."""
    config = model.genai.config if model.genai and model.cut.lengths else None
    name = config and config.inputs.get("position_ids")
    return [value.name for value in graph.inputs(onnx_model.graph) if value.name == name]


def _compute_positions(main: onnx.GraphProto, name: str, tokens: str, last: str) -> None:
    """Replace the input ``name`` by the positions of ``tokens``, of which the last is at ``last``.

    That is how GroupQueryAttention counts them where it rotates itself.
    """
    (own,) = [value for value in main.input if value.name == name]
    main.input.remove(own)
    constants = {f"{name}/{number}": np.array(number) for number in (0, 1)}
    zero, one = constants
    nodes = [
        onnx.helper.make_node("Shape", [tokens], [f"{name}/shape"]),
        onnx.helper.make_node("Gather", [f"{name}/shape", one], [f"{name}/count"]),
        onnx.helper.make_node("Range", [zero, f"{name}/count", one], [f"{name}/numbers"]),
        onnx.helper.make_node("Cast", [last], [f"{name}/last"], to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Sub", [f"{name}/last", f"{name}/count"], [f"{name}/before"]),
        onnx.helper.make_node("Add", [f"{name}/before", one], [f"{name}/first"]),
        onnx.helper.make_node("Add", [f"{name}/first", f"{name}/numbers"], [f"{name}/int64"]),
        onnx.helper.make_node("Cast", [f"{name}/int64"], [name], to=own.type.tensor_type.elem_type),
    ]
    for node in reversed(nodes):
        main.node.insert(0, node)
    main.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())


def _lengths(attention: Iterable[onnx.NodeProto], model: Model) -> dict[str, onnx.ValueInfoProto]:
    """The tensors with the lengths of the cache, before the last token and in all, as genai feeds them."""
    names = {tuple(node.input[5:7]) for node in attention}
    if [*map(len, names)] != [2]:
        message = f"{model.path.name} has no GroupQueryAttention, or its lengths differ by layer."
        hint = "Build the folder with onnxruntime-genai's model builder, with -e cpu for example."
        raise ModelError(Problem.at(model.key / "path", Kind.INVALID_FOLDER, message, hint))
    past, total = names.pop()
    shapes, int32 = {past: [1, 1], total: [1]}, onnx.TensorProto.INT32
    return {n: onnx.helper.make_tensor_value_info(n, int32, s) for n, s in shapes.items()}


def _values(
    model: onnx.ModelProto, source: Path, names: Iterable[str]
) -> dict[str, onnx.ValueInfoProto]:
    """Return the types of the tensors ``names`` as onnx infers them, or else ONNX Runtime."""
    inferred = inference.inferred(model)
    values = {
        value.name: value for value in (*inferred.value_info, *inferred.output, *inferred.input)
    }
    if missing := [name for name in names if not _is_known(values.get(name))]:
        for name, type_ in types_of_runtime(model, source, missing).items():
            values[name] = onnx.ValueInfoProto(name=name, type=type_)
    return values


def _is_typed(value: onnx.ValueInfoProto | None) -> bool:
    """Whether the type is known; for a tensor, the dtype and the rank."""
    if value is None or value.type.WhichOneof("value") != "tensor_type":
        return value is not None and value.type.WhichOneof("value") is not None
    tensor = value.type.tensor_type
    return tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape")


def _is_known(value: onnx.ValueInfoProto | None) -> bool:
    """Whether the type is known, and each size has a number or a name."""
    return value is not None and _is_typed(value) and None not in graph.facts(value).sizes

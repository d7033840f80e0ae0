"""Cut a source model, and write its constants into it: a model with its own data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, ModelError, Problem, Setting
from hatch_epcontext.graph import external, graph
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.parts import Part, WrongCut, extract, part_between
from hatch_epcontext.worker.configured import data_of, fix_constants, fix_inputs, read_source
from hatch_epcontext.worker.protocol import step
from hatch_epcontext.worker.requests import CutReply, CutRequest
from hatch_epcontext.worker.results import CutResult
from hatch_epcontext.worker.value_types import types_of_runtime

_Values = dict[str, onnx.ValueInfoProto]


def handle(request: CutRequest) -> CutReply:
    """Write the request's part of the model, with its constants, into its folder; the source is only read.

    Raises ModelError when the model cannot be cut there, when a tensor's type is unknown, or when a
    constant does not fit.
    """
    first = request.forms[0]
    source = Path(first.path)
    step(f"writing the configured part of {source.name}")
    onnx_model = read_source(source, first.key)
    data = data_of(onnx_model, source, first.key)
    known = {value.name for value in graph.inputs(onnx_model.graph)}
    forms = tuple(CutResult(model.dims, model.shapes) for model in request.forms)
    if first.cut:
        forms = _cut(onnx_model, request)
    # An input that the cut removes needs no value; a name that no input has is an error.
    known -= {value.name for value in graph.inputs(onnx_model.graph)}
    if constants := {n: constant for n, constant in first.constants.items() if n not in known}:
        fix_constants(
            onnx_model, dataclasses.replace(first, dims={}, shapes={}, constants=constants)
        )
    apart = any(graph.is_external(tensor) for tensor in graph.tensors(onnx_model.graph))
    external.read_data(onnx_model, source.parent)
    files = external.save_whole(onnx_model, Path(request.folder) / source.name, apart=apart)
    return CutReply(files, data, forms)


def _cut(onnx_model: onnx.ModelProto, request: CutRequest) -> tuple[CutResult, ...]:
    """Keep only the part of ``onnx_model``, in place."""
    first = request.forms[0]
    source, key = Path(first.path), first.key / "cut"
    part = part_between(onnx_model.graph, first.cut, first.constants)
    if isinstance(part, WrongCut):
        place = key / part.end
        better = [Setting(place, list(part.names))] if part.names else []
        raise ModelError(Problem.at(place, Kind.INVALID_CUT, part.message, part.hint, *better))
    names = (*part.inputs, *part.outputs)
    values = _values(onnx_model, source, names)
    if unknown := [name for name in names if not _is_typed(values.get(name))]:
        message = f"the type of {unknown[0]!r} is not known before the model runs."
        hint = "Cut at another tensor, or save the model with the types of all its tensors."
        raise ModelError(Problem.at(key, Kind.INVALID_CUT, message, hint))
    forms = tuple(_form(model, onnx_model, source, part, values) for model in request.forms)
    extract(onnx_model, part, values)
    return forms


def _values(model: onnx.ModelProto, source: Path, names: Iterable[str]) -> _Values:
    """Return the types of the tensors ``names`` as onnx infers them, or else ONNX Runtime."""
    inferred = graph.inferred(model)
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


def _form(
    model: Model, onnx_model: onnx.ModelProto, source: Path, part: Part, values: _Values
) -> CutResult:
    """Return what ``model`` fixes in the cut model.

    Names that neither the model nor the part has are kept: the check of the cut model reports them.
    """
    inputs = {value.name: graph.facts(value) for value in graph.inputs(onnx_model.graph)}
    ends = {name: graph.facts(values[name]) for name in part.inputs}
    of_model, of_part = _named_sizes(inputs.values()), _named_sizes(ends.values())
    shapes = {n: s for n, s in model.shapes.items() if n in ends or n not in inputs}
    inner = [
        n
        for n, tensor in ends.items()
        if n not in inputs and n not in shapes and not tensor.is_fixed
    ]
    if inner:
        own = dataclasses.replace(
            model,
            dims={name: size for name, size in model.dims.items() if name in of_model},
            shapes={name: shape for name, shape in model.shapes.items() if name in inputs},
            constants={
                name: constant for name, constant in model.constants.items() if name in inputs
            },
            static_shapes=True,
        )
        fixed = onnx.ModelProto()
        fixed.CopyFrom(onnx_model)
        fix_inputs(fixed, own)
        inferred = {
            name: graph.facts(value) for name, value in _values(fixed, source, inner).items()
        }
        shapes |= {name: _sizes(inferred[name]) for name in inner if inferred[name].is_fixed}
    dims = {n: size for n, size in model.dims.items() if n in of_part or n not in of_model}
    return CutResult(dims, shapes)


def _named_sizes(tensors: Iterable[TensorFacts]) -> set[str]:
    return {size for tensor in tensors for size in tensor.sizes if isinstance(size, str)}


def _sizes(tensor: TensorFacts) -> tuple[int, ...]:
    return tuple(size for size in tensor.sizes if isinstance(size, int))

"""Read untrusted ONNX files: damage is found before they are used."""

from __future__ import annotations

import math
import stat
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.text import show_size

_MAX_NODES = 1_000_000
"""The most nodes to which the functions of a model may expand."""

_FEW_BITS: dict[int, int] = {
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.UINT2: 2,
    TensorProto.INT2: 2,
}
"""The bits of a value of each dtype that packs several into a byte."""

_UNPACKED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


_Function = tuple[str, str, str]
"""The domain, name and overload of a function."""


def load(path: Path, location: str = "") -> onnx.ModelProto:
    """Read the ONNX file at ``path``, compiled or not, without its external data.

    ``location`` is that of problems, whose messages begin with a verb. Raises ModelError when the file is not
    an ONNX model, is too large, or has damaged names, tensors or functions; the message names them.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _invalid(location, "is not a regular file.")
    if status.st_size > PROTOBUF_LIMIT:
        size = show_size(status.st_size)
        message = f"has {size}, but an ONNX file cannot be larger than 2 GiB."
        raise _invalid(location, message)
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except DecodeError:
        reason = "it is damaged, or its graphs are nested too deeply"
        message = f"is not an ONNX model: it cannot be read as one, because {reason}."
        raise _invalid(location, message) from None
    if not model.ir_version or not model.HasField("graph"):
        raise _invalid(location, "is not an ONNX model: it has no graph.")
    if problem := next(_damage(model), None):
        raise _invalid(location, f"is damaged: {problem}.")
    return model


def _invalid(location: str, message: str) -> ModelError:
    return ModelError(Problem(Kind.INVALID_MODEL, location, message))


def _damage(model: onnx.ModelProto) -> Iterator[str]:
    """Descriptions of the damage in ``model``."""
    yield from _damaged_body(model.graph)
    for function in model.functions:
        names = (function.name, function.domain, *function.input, *function.output)
        yield from _no_names("a name of a function", *names)
        yield from _damaged_body(function)
    for entry in model.metadata_props:
        yield from _no_names("an entry of the metadata", entry.key, entry.value)
    for opset in model.opset_import:
        yield from _no_names("the domain of an opset", opset.domain)
    yield from _endless_functions(model)
    inputs = Counter(value.name for value in graph.inputs(model.graph))
    yield from (f"two inputs are called {name!r}" for name, count in inputs.items() if count > 1)


def _damaged_body(body: graph.Body) -> Iterator[str]:
    # All in one pass: there are models with a million nodes.
    waiting = [body]
    while waiting:
        inner = waiting.pop()
        yield from _damaged_values(inner)
        for node in inner.node:
            names = (node.name, node.op_type, node.domain, *node.input, *node.output)
            if not _are_names(names):
                yield from _no_names("a name of a node", *names)
            waiting += graph.inner_graphs(node)
            for attribute in node.attribute:
                for tensor in graph.attribute_tensors(attribute):
                    yield from _damaged_tensor(tensor)


def _damaged_values(body: graph.Body) -> Iterator[str]:
    if isinstance(body, onnx.GraphProto):
        for value in (*body.input, *body.output, *body.value_info):
            dims = (dim.dim_param for dim in value.type.tensor_type.shape.dim)
            yield from _no_names("a name of a value", value.name, *dims)
    for tensor in graph.stored_tensors(body):
        yield from _damaged_tensor(tensor)


def _are_names(names: Iterable[str]) -> bool:
    try:
        return "\0" not in "".join(names)
    except TypeError:
        # protobuf returns bytes for text that is not UTF-8.
        return False


def _no_names(what: str, *names: str | bytes) -> Iterator[str]:
    """The ``names`` that are not text, or that contain NUL, where they would end for code in C."""
    for name in names:
        if not isinstance(name, str):
            yield f"{what} is not UTF-8 text: {name!r}"
        elif "\0" in name:
            yield f"{what} has a NUL character: {name!r}"


def _endless_functions(model: onnx.ModelProto) -> Iterator[str]:
    """The functions that call themselves, or expand to too many nodes."""
    own = {(inner.domain, inner.name, inner.overload): inner for inner in model.functions}
    calls = {name: _calls(graph.nodes(function), own) for name, function in own.items()}
    expanded: dict[_Function, int] = {}
    try:
        for name in TopologicalSorter(calls).static_order():
            size = len([*graph.nodes(own[name])]) + sum(expanded[call] for call in calls[name])
            expanded[name] = min(size, _MAX_NODES + 1)
    except CycleError as error:
        yield f"the function {error.args[1][0][1]!r} calls itself"
        return
    if own and sum(expanded[n] for n in _calls(graph.nodes(model.graph), own)) > _MAX_NODES:
        yield f"its functions expand to more than {_MAX_NODES} nodes"


def _calls(nodes: Iterable[onnx.NodeProto], own: Container[_Function]) -> list[_Function]:
    names = ((node.domain, node.op_type, node.overload) for node in nodes)
    return [name for name in names if name in own]


def _damaged_tensor(tensor: TensorProto) -> Iterator[str]:
    yield from _no_names("the name of a tensor", tensor.name)
    if any(size < 0 for size in tensor.dims):
        yield f"the tensor {tensor.name!r} has a negative size: {list(tensor.dims)}"
        return
    if tensor.data_type == TensorProto.STRING:
        return
    needed, stored = byte_size(tensor), len(tensor.raw_data)
    if needed is None:
        yield f"the tensor {tensor.name!r} has the unknown dtype {tensor.data_type}"
    elif stored != needed and not graph.is_external(tensor) and not _is_unpacked(tensor):
        yield f"the tensor {tensor.name!r} has {stored} bytes, and its shape needs {needed}"


def _is_unpacked(tensor: TensorProto) -> bool:
    return not tensor.raw_data and any(len(getattr(tensor, name)) for name in _UNPACKED)


def byte_size(tensor: TensorProto) -> int | None:
    """The bytes of the values of ``tensor`` as raw data; None for a dtype without raw data."""
    count = math.prod(tensor.dims)
    if bits := _FEW_BITS.get(tensor.data_type):
        return -(-count * bits // 8)
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        return None
    return None if dtype.hasobject else count * int(dtype.itemsize)

"""What an ONNX file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from hatch_epcontext.errors import ModelError, Problem
from hatch_epcontext.protocol import Size, TensorFacts

LFS = b"version https://git-lfs"
CONTEXT_OP = "EPContext"


def read(path: Path, where: str) -> onnx.ModelProto:
    """The source model at ``path``, without its external data.

    Raises ModelError, about ``where``, when it is not a source model.
    """

    def refuse(what: str, fix: str = "") -> ModelError:
        return ModelError(Problem(where, f"{path.name} {what}", fix))

    with path.open("rb") as file:
        head = file.read(len(LFS))
    if head == LFS:
        raise refuse("is a Git LFS pointer, not the model itself.", "Run: git lfs pull")
    if not head:
        raise refuse("is empty.")
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        raise refuse("is not an ONNX model: it cannot be read as one.") from None
    if not model.ir_version or not model.graph.node:
        raise refuse("is not an ONNX model: it has no graph.")
    if contexts(model.graph):
        raise refuse(
            "is a context model already.",
            "List the source model that it was compiled from.",
        )
    return model


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """``graph`` and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from graphs(inner)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes of ``graph`` and of the graphs inside them."""
    for each in graphs(graph):
        yield from each.node


def compute_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of ``graph``, nested ones too, that compute something."""
    return [node for node in nodes(graph) if node.op_type != "Constant"]


def contexts(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The EPContext nodes of ``graph``, nested ones too."""
    return [node for node in nodes(graph) if node.op_type == CONTEXT_OP]


def operator(node: onnx.NodeProto) -> str:
    """The operator of ``node``, after its domain where that is not ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute of ``node``, text as bytes; ``default`` where it is absent."""
    for each in node.attribute:
        if each.name == name:
            return onnx.helper.get_attribute_value(each)
    return default


def text(node: onnx.NodeProto, name: str) -> str:
    """A text attribute of ``node``, which need not be UTF-8; empty where it is absent."""
    return bytes(attribute(node, name, b"")).decode("utf-8", "replace")


def is_main(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has a context, and does not refer to another's."""
    # 1 is the operator's default, which holds where the attribute is absent.
    return bool(attribute(node, "main_context", 1) == 1)


def is_embedded(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has its context inside the model, and not in a sidecar."""
    # 1 is the operator's default, which holds where the attribute is absent.
    return bool(attribute(node, "embed_mode", 1) != 0)


def control_flow(graph: onnx.GraphProto) -> tuple[str, ...]:
    """The operators in ``graph`` that choose or repeat other graphs, each once."""
    found = (node.op_type for node in nodes(graph) if node.op_type in ("If", "Loop", "Scan"))
    return tuple(dict.fromkeys(found))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def external_data_names(model: onnx.ModelProto) -> tuple[str, ...]:
    """The files in which ``model`` keeps tensors, as it writes them, sorted; they need not be there."""
    return tuple(sorted(_external_data_ends(model)))


def _external_data_ends(model: onnx.ModelProto) -> dict[str, int]:
    """Each file in which ``model`` keeps tensors -> the byte up to which it is used."""
    ends: dict[str, int] = {}
    for tensor in _tensors(model):
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            end = int(info.offset or 0) + int(info.length or 0)
            ends[info.location] = max(ends.get(info.location, 0), end)
    return ends


def external_data(model: onnx.ModelProto, folder: Path, where: str) -> tuple[str, ...]:
    """The files in which ``model``, which lies in ``folder``, keeps tensors.

    Relative to ``folder``, with forward slashes, sorted. Raises ModelError, about ``where``, when one
    leads out of the folder, is missing, or is too short.
    """
    ends = _external_data_ends(model)
    problems = []
    for location, end in sorted(ends.items()):
        if not stays_inside(folder, location):
            what, fix = (
                "leads out of the model's folder.",
                "Save the model with relative locations.",
            )
        elif not (folder / location).is_file():
            what, fix = "is not there.", "The model needs it beside its own file, in the sdist too."
        elif (folder / location).stat().st_size < end:
            what, fix = "is shorter than the model says.", "Save the model and its data again."
        else:
            continue
        problems.append(Problem(where, f"the external data {location!r} {what}", fix))
    if problems:
        raise ModelError(*problems)
    return tuple(PurePosixPath(location).as_posix() for location in sorted(ends))


def stays_inside(folder: Path, location: str) -> bool:
    """Whether a file that a model names lies in the model's folder, on any system and by any link."""
    if not location or PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive:
        return False
    if PureWindowsPath(location).root or ".." in PureWindowsPath(location).parts:
        return False
    return (folder / location).resolve().is_relative_to(folder.resolve())


def inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs that have to be fed: before ONNX IR 4 initializers were listed as inputs too."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in stored]


_SAME_VALUES = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand"}
)


def index_bounds(main: onnx.GraphProto) -> dict[str, int]:
    """For each input whose values choose among things: how many there are, the least if in several ways.

    By an index (``Gather``, ``GatherElements``), or by being one of a range (``OneHot``, or ``Equal``
    with a stored range, as exporters write it).
    """
    stored = {tensor.name: tensor for tensor in main.initializer}
    sizes = {name: list(tensor.dims) for name, tensor in stored.items()}
    for value in (*main.input, *main.value_info):
        sizes.setdefault(value.name, [dim.dim_value for dim in value.type.tensor_type.shape.dim])
    origin = {value.name: value.name for value in main.input}
    bounds: dict[str, int] = {}
    for node in main.node:
        if node.op_type in _SAME_VALUES and node.input and node.input[0] in origin:
            origin.update(dict.fromkeys(node.output, origin[node.input[0]]))
        for chosen, among in _choices(node, stored, sizes):
            if chosen in origin and among > 0:
                name = origin[chosen]
                bounds[name] = min(bounds.get(name, among), among)
    return bounds


def _choices(
    node: onnx.NodeProto, stored: dict[str, onnx.TensorProto], sizes: dict[str, list[int]]
) -> Iterator[tuple[str, int]]:
    """The values that choose in ``node``, each with among how many."""
    if node.op_type in ("Gather", "GatherElements"):
        axis = attribute(node, "axis", 0)
        shape = sizes.get(node.input[0], [])
        if -len(shape) <= axis < len(shape):
            yield node.input[1], shape[axis]
    elif node.op_type == "OneHot" and node.input[1] in stored:
        yield node.input[0], int(_stored(stored[node.input[1]]).max())
    elif node.op_type == "Equal":
        for chosen, range_ in (node.input, reversed(node.input)):
            if range_ in stored and max(sizes[range_], default=1) > 1:
                yield chosen, int(_stored(stored[range_]).max()) + 1


def _stored(tensor: onnx.TensorProto) -> NDArray[np.float64]:
    # What is in another file is not read: such ranges are small.
    if uses_external_data(tensor):
        return np.zeros(1)
    return np.asarray(onnx.numpy_helper.to_array(tensor), np.float64)


def facts(value: onnx.ValueInfoProto) -> TensorFacts:
    """Name, dtype and shape of an input or output. Anything but a tensor has its kind as its dtype."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorFacts(value.name, kind or "unknown", ())
    tensor = value.type.tensor_type
    return TensorFacts(
        value.name, dtype_name(tensor.elem_type), tuple(size(dim) for dim in tensor.shape.dim)
    )


def size(dim: onnx.TensorShapeProto.Dimension) -> Size:
    """A dimension's size, or its name while it is open, or None if it has neither."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return int(dim.dim_value)
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def dtype_name(elem_type: int) -> str:
    """NumPy's name of an ONNX element type, such as ``"float32"``; ``"string"`` for strings.

    ``"undefined"`` for what is no element type, as a damaged file may have it.
    """
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    try:
        return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type)).name)
    except KeyError:
        return "undefined"

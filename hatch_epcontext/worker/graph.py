"""Read the facts of ONNX models and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.ipc.facts import Size, TensorFacts

CONTEXT_OP = "EPContext"

_LFS = b"version https://git-lfs"
_COMPATIBILITY = "ep_compatibility_info."
"""The prefix of the metadata with an EP's compatibility string; the EP's name follows it."""


def read(path: Path, key: Key) -> onnx.ModelProto:
    """Read the source model at ``path``, without its external data.

    ``key`` is the model's place in the configuration. Raises ModelError when the file is not a source
    model.
    """

    def invalid(
        message: str, hint: str | None = None, kind: Kind = Kind.INVALID_MODEL
    ) -> ModelError:
        return ModelError(Problem.at(key, kind, f"{path.name} {message}", hint))

    with path.open("rb") as file:
        head = file.read(len(_LFS))
    if head == _LFS:
        raise invalid("is a Git LFS pointer, not the model itself.", "Run: git lfs pull")
    if not head:
        raise invalid("is empty.")
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        raise invalid("is not an ONNX model: it cannot be read as one.") from None
    if not model.ir_version or not model.graph.node:
        raise invalid("is not an ONNX model: it has no graph.")
    if contexts(model.graph):
        raise invalid(
            "is a context model already.",
            "Name the source model instead.",
            Kind.COMPILED_MODEL,
        )
    return model


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield ``graph`` and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                yield from graphs(inner)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of ``graph`` and of the graphs inside them."""
    for each in graphs(graph):
        yield from each.node


def compute_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of ``graph``, nested ones too, that are not constants."""
    return [node for node in nodes(graph) if node.op_type != "Constant"]


def contexts(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the EPContext nodes of ``graph``, nested ones too."""
    return [node for node in nodes(graph) if node.op_type == CONTEXT_OP]


def operator(node: onnx.NodeProto) -> str:
    """Return the operator of ``node``, after its domain unless that is ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute of ``node``, text as bytes; ``default`` if it is missing."""
    for each in node.attribute:
        if each.name == name:
            return onnx.helper.get_attribute_value(each)
    return default


def text(node: onnx.NodeProto, name: str) -> str:
    """Return a text attribute of ``node``, which may not be UTF-8; empty if it is missing."""
    return bytes(attribute(node, name, b"")).decode("utf-8", "replace")


def is_main(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has a context of its own, and does not refer to another node's."""
    # 1 is the operator's default, for a missing attribute.
    return bool(attribute(node, "main_context", 1) == 1)


def is_embedded(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has its context inside the model, and not in a sidecar."""
    # 1 is the operator's default, for a missing attribute.
    return bool(attribute(node, "embed_mode", 1) != 0)


def compatibility(model: onnx.ModelProto) -> dict[str, str]:
    """Return the compatibility strings in the model's metadata, by EP."""
    return {
        entry.key.removeprefix(_COMPATIBILITY): entry.value
        for entry in model.metadata_props
        if entry.key.startswith(_COMPATIBILITY)
    }


def control_flow(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the operators in ``graph`` that choose or repeat other graphs, each once."""
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
    """Return the files of the model's external data as it names them, sorted; they may be missing."""
    return tuple(sorted(_external_data_ends(model)))


def _external_data_ends(model: onnx.ModelProto) -> dict[str, int]:
    """Return each file of the model's external data -> the byte up to which the model uses it."""
    ends: dict[str, int] = {}
    for tensor in _tensors(model):
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            end = int(info.offset or 0) + int(info.length or 0)
            ends[info.location] = max(ends.get(info.location, 0), end)
    return ends


def external_data(model: onnx.ModelProto, folder: Path, location: Key | str) -> tuple[str, ...]:
    """Return the files of the external data of ``model``, which is in ``folder``.

    They are relative to ``folder``, with forward slashes, sorted. ``location`` is that of problems.
    Raises ModelError when a file is outside the folder, is missing, or is too short.
    """
    ends = _external_data_ends(model)
    problems = []
    key = location if isinstance(location, Key) else None
    for name, end in sorted(ends.items()):
        if not stays_inside(folder, name):
            message, hint = (
                "is outside the model's folder.",
                "Save the model with relative locations.",
            )
        elif not (folder / name).is_file():
            message, hint = (
                "is missing.",
                "The model needs it beside its own file, in the sdist too.",
            )
        elif (folder / name).stat().st_size < end:
            message, hint = "is shorter than the model says.", "Save the model and its data again."
        else:
            continue
        message = f"the external data {name!r} {message}"
        problems.append(Problem(Kind.EXTERNAL_DATA, str(location), message, hint, key))
    if problems:
        raise ModelError(*problems)
    return tuple(PurePosixPath(name).as_posix() for name in sorted(ends))


def stays_inside(folder: Path, location: str) -> bool:
    """Whether a file that a model names is in the model's folder: on any system, links resolved."""
    if not location or PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive:
        return False
    if PureWindowsPath(location).root or ".." in PureWindowsPath(location).parts:
        return False
    return (folder / location).resolve().is_relative_to(folder.resolve())


def inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that must be fed: before ONNX IR 4, initializers were listed as inputs too."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in stored]


_SAME_VALUES = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand"}
)


def index_bounds(main: onnx.GraphProto) -> dict[str, int]:
    """Return the number of choices of each input that has indices; the smallest if there are several.

    An index is an input of ``Gather`` or ``GatherElements``, or a member of a range: an input of
    ``OneHot``, or of ``Equal`` with a stored range, as exporters write it.
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
        for index, choices in _indices(node, stored, sizes):
            if index in origin and choices > 0:
                name = origin[index]
                bounds[name] = min(bounds.get(name, choices), choices)
    return bounds


def _indices(
    node: onnx.NodeProto, stored: dict[str, onnx.TensorProto], sizes: dict[str, list[int]]
) -> Iterator[tuple[str, int]]:
    """Yield the values that are indices in ``node``, each with the number of choices."""
    if node.op_type in ("Gather", "GatherElements"):
        axis = attribute(node, "axis", 0)
        shape = sizes.get(node.input[0], [])
        if -len(shape) <= axis < len(shape):
            yield node.input[1], shape[axis]
    elif node.op_type == "OneHot" and node.input[1] in stored:
        yield node.input[0], _largest(stored[node.input[1]])
    elif node.op_type == "Equal":
        for index, range_ in (node.input, reversed(node.input)):
            if range_ in stored and max(sizes[range_], default=1) > 1:
                yield index, _largest(stored[range_]) + 1


def _largest(tensor: onnx.TensorProto) -> int:
    # External data is not read: such ranges are small.
    if uses_external_data(tensor):
        return 0
    return max(int(value) for value in onnx.numpy_helper.to_array(tensor).flat)


def facts(value: onnx.ValueInfoProto) -> TensorFacts:
    """Return name, dtype and shape of an input or output. If it is no tensor, its dtype is its kind."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorFacts(value.name, kind or "unknown", ())
    tensor = value.type.tensor_type
    return TensorFacts(
        value.name, _dtype_name(tensor.elem_type), tuple(size(dim) for dim in tensor.shape.dim)
    )


def size(dim: onnx.TensorShapeProto.Dimension) -> Size:
    """Return a dimension's size, or its name if it is open, or None if it has neither."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return int(dim.dim_value)
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def _dtype_name(elem_type: int) -> str:
    """Return NumPy's name of an ONNX element type, such as ``"float32"``; ``"string"`` for strings.

    ``"undefined"`` for an invalid element type, which a damaged file can have.
    """
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    try:
        return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type)).name)
    except KeyError:
        return "undefined"

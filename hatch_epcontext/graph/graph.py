"""Read the facts of ONNX models and graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import onnx

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.graph.facts import Size, TensorFacts

CONTEXT_OP = "EPContext"

STANDARD = ("", "ai.onnx")
"""The names of ONNX's own domain."""

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

_COMPATIBILITY = "ep_compatibility_info."
"""The prefix of the metadata with an EP's compatibility string; the EP's name follows it."""

_LICENSES = ("license", "licence", "licenses", "model_license")
"""The keys of the metadata that exporters use for the license, in lower case."""

_RANDOM = frozenset(
    {
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        *("Multinomial", "Bernoulli"),
    }
)
"""Operators whose results depend on chance."""

TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""The attributes of standard operators that name the type of a result."""


Body = onnx.GraphProto | onnx.FunctionProto
"""A graph, or the body of a function."""


_P = TypeVar("_P", bound=Body)


def graphs(body: _P) -> Iterator[_P | onnx.GraphProto]:
    """Yield ``body`` and all graphs inside its nodes."""
    waiting: list[_P | onnx.GraphProto] = [body]
    while waiting:
        outer = waiting.pop()
        yield outer
        waiting += reversed([inner for node in outer.node for inner in inner_graphs(node)])


def inner_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs inside ``node``, without those inside them."""
    inner: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            inner.append(attribute.g)
        inner += attribute.graphs
    return inner


def nodes(body: Body) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of ``body`` and of the graphs inside them."""
    for inner in graphs(body):
        yield from inner.node


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values of the graph around it that ``node`` reads, also in the graphs inside it."""
    yield from filter(None, node.input)
    for inner in inner_graphs(node):
        own = {value.name for value in inner.input}
        own |= {tensor.name for tensor in stored_tensors(inner)}
        own |= {name for child in inner.node for name in child.output}
        for child in inner.node:
            yield from (name for name in read_by(child) if name not in own)
        # An inner graph may also return a value of the graph around it as it is.
        yield from (value.name for value in inner.output if value.name not in own)


def is_random(node: onnx.NodeProto) -> bool:
    """Whether two runs of ``node``, or of a graph inside it, can give different values."""
    nested = (child for inner in inner_graphs(node) for child in nodes(inner))
    return any(child.op_type in _RANDOM for child in (node, *nested))


def compute_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of ``graph`` that are not constants, including nested ones."""
    return [node for node in nodes(graph) if node.op_type != "Constant"]


def contexts(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the EPContext nodes of ``graph``, nested ones too."""
    return [node for node in nodes(graph) if node.op_type == CONTEXT_OP]


def operator(node: onnx.NodeProto) -> str:
    """Return the operator of ``node``, after its domain unless that is ONNX's own."""
    return node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"


def opset(model: onnx.ModelProto | onnx.FunctionProto) -> int:
    """Return the version of ONNX's own operators in ``model``; 1 if it does not name it."""
    return max((e.version for e in model.opset_import if e.domain in STANDARD), default=1)


def operands(node: onnx.NodeProto, count: int) -> list[str]:
    """Return the first ``count`` inputs of ``node``, empty for missing ones."""
    return [*node.input[:count], *[""] * (count - len(node.input))]


def operand(node: onnx.NodeProto, number: int) -> str:
    """Return the input ``number`` of ``node``, counted from 0; empty if it is missing."""
    return node.input[number] if number < len(node.input) else ""


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute of ``node``, text as bytes; ``default`` if it has no value."""
    for attribute in node.attribute:
        if attribute.name == name:
            # It refers to a function's attribute, or has an invalid type.
            with contextlib.suppress(ValueError):
                return onnx.helper.get_attribute_value(attribute)
    return default


def text(node: onnx.NodeProto, name: str) -> str:
    """Return a text attribute of ``node``, which may not be UTF-8; empty if it is missing.

    Raises ModelError, without a location, when it is not text.
    """
    return blob(node, name).decode("utf-8", "replace")


def blob(node: onnx.NodeProto, name: str) -> bytes:
    """Return the bytes of a text attribute of ``node``; empty if it is missing. Raises as `text` does."""
    attribute = _typed(node, name, onnx.AttributeProto.STRING)
    return b"" if attribute is None else bytes(attribute.s)


def number(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return an integer attribute of ``node``, ``default`` if it is missing.

    Raises ModelError, without a location, when it is not an integer.
    """
    attribute = _typed(node, name, onnx.AttributeProto.INT)
    return default if attribute is None else int(attribute.i)


def _typed(node: onnx.NodeProto, name: str, type_: int) -> onnx.AttributeProto | None:
    attribute = next((attribute for attribute in node.attribute if attribute.name == name), None)
    if attribute is not None and attribute.type != type_:
        types = onnx.AttributeProto.AttributeType
        message = (
            f"the attribute {name!r} of the node {node.name!r} ({node.op_type}) must be "
            f"{types.Name(type_).lower()}, not {types.Name(attribute.type).lower()}."
        )
        raise ModelError(Problem(Kind.INVALID_MODEL, "", message))
    return attribute


def is_main(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has a context of its own, and does not refer to another node's."""
    # 1 is the operator's default, for a missing attribute. TensorRT RTX's EP writes 0 for all.
    return number(node, "main_context", 1) == 1 or bool(blob(node, "ep_cache_context"))


def is_embedded(node: onnx.NodeProto) -> bool:
    """Whether an EPContext node has its context inside the model, and not in a sidecar."""
    # 1 is the operator's default, for a missing attribute.
    return number(node, "embed_mode", 1) != 0


def compatibility(model: onnx.ModelProto) -> dict[str, str]:
    """Return the compatibility strings in the model's metadata, by EP."""
    return {
        entry.key.removeprefix(_COMPATIBILITY): entry.value
        for entry in model.metadata_props
        if entry.key.startswith(_COMPATIBILITY)
    }


def license_of(model: onnx.ModelProto) -> str | None:
    """The license that the model's metadata names, in whatever words; exporters use several keys for it."""
    named = {entry.key.lower(): entry.value.strip() for entry in model.metadata_props}
    return next((named[key] for key in _LICENSES if named.get(key)), None)


def control_flow(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the operators in ``graph`` that choose or repeat other graphs, each once."""
    operators = dict.fromkeys(node.op_type for node in nodes(graph))
    return tuple(operator for operator in operators if operator in ("If", "Loop", "Scan"))


def tensors(body: Body) -> Iterator[onnx.TensorProto]:
    """Yield all stored tensors of ``body``, also those in attributes and in the graphs inside it."""
    for inner in graphs(body):
        yield from stored_tensors(inner)
        for node in inner.node:
            for attribute in node.attribute:
                yield from attribute_tensors(attribute)


def stored_tensors(body: Body) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of ``body``, without those of the graphs inside it."""
    if isinstance(body, onnx.GraphProto):
        yield from body.initializer
        for sparse in body.sparse_initializer:
            yield from (sparse.values, sparse.indices)


def attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors that are values of ``attribute``, without those of the graphs inside it."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
    for sparse in attribute.sparse_tensors:
        yield from (sparse.values, sparse.indices)


def has_float16(model: onnx.ModelProto) -> bool:
    """Whether ``model`` has values of float16: inputs, stored tensors, or results of a conversion."""
    half = onnx.TensorProto.FLOAT16
    return (
        any(value.type.tensor_type.elem_type == half for value in model.graph.input)
        or any(tensor.data_type == half for body in bodies(model) for tensor in tensors(body))
        or any(
            attribute.i == half and attribute.name in TYPE_ATTRIBUTES
            for body in bodies(model)
            for node in nodes(body)
            for attribute in node.attribute
        )
    )


def bodies(model: onnx.ModelProto) -> tuple[Body, ...]:
    """Return the main graph and the functions of ``model``."""
    return (model.graph, *model.functions)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values of ``tensor`` are in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a Constant node; None for another node, or a value that is not a dense tensor."""
    if node.op_type != "Constant" or node.domain not in STANDARD or not node.attribute:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return attribute.t
    types = {"int": onnx.TensorProto.INT64, "float": onnx.TensorProto.FLOAT}
    kind = attribute.name.removeprefix("value_").removesuffix("s")
    if kind not in types:
        return None
    values = onnx.helper.get_attribute_value(attribute)
    several = isinstance(values, (list, tuple))
    shape = [len(values)] if several else []
    return onnx.helper.make_tensor("", types[kind], shape, values if several else [values])


def array_of(tensor: onnx.TensorProto | None) -> Array | None:
    """Return the values of ``tensor``; None without one, or if they are in another file, or damaged."""
    if tensor is None or is_external(tensor):
        return None
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError):
        return None


def with_outputs(
    model: onnx.ModelProto, names: Iterable[str], elem_type: int | None = None
) -> onnx.ModelProto:
    """A copy of ``model`` that also returns the values called ``names``, of ``elem_type`` if given."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    own = {value.name for value in model.graph.output}
    for name in dict.fromkeys(name for name in names if name not in own):
        value = copy.graph.output.add(name=name)
        if elem_type is not None:
            value.type.tensor_type.elem_type = elem_type
    return copy


def inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that must be fed: before ONNX IR 4, initializers were listed as inputs too."""
    stored = {tensor.name for tensor in graph.initializer}
    stored |= {tensor.values.name for tensor in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in stored]


def optional_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of ``model`` with a default value: since ONNX IR 4, those with an initializer."""
    if model.ir_version < 4:
        return []
    needed = {value.name for value in inputs(model.graph)}
    return [value for value in model.graph.input if value.name not in needed]


def facts(value: onnx.ValueInfoProto) -> TensorFacts:
    """Return name, dtype and shape of an input or output. If it is no tensor, its dtype is its kind."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorFacts(value.name, kind or "unknown", ())
    tensor = value.type.tensor_type
    shape = tuple(map(size, tensor.shape.dim)) if tensor.HasField("shape") else None
    return TensorFacts(value.name, dtype_name(tensor.elem_type), shape)


def input_facts(graph: onnx.GraphProto) -> tuple[TensorFacts, ...]:
    """Return the `facts` of the `inputs` that must be fed."""
    return tuple(map(facts, inputs(graph)))


def output_facts(graph: onnx.GraphProto) -> tuple[TensorFacts, ...]:
    """Return the `facts` of the outputs."""
    return tuple(map(facts, graph.output))


def sizes(type_: onnx.TypeProto) -> tuple[int | None, ...] | None:
    """Return the shape of a tensor's type, with None for open dimensions; None if its rank is unknown."""
    tensor = type_.tensor_type
    if not tensor.HasField("shape"):
        return None
    dims = map(size, tensor.shape.dim)
    return tuple(dim if isinstance(dim, int) else None for dim in dims)


def size(dim: onnx.TensorShapeProto.Dimension) -> Size:
    """Return a dimension's size, or its name if it is open, or None if it has neither."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return int(dim.dim_value)
    return dim.dim_param if dim.dim_param not in ("", "?") else None


def dtype_name(elem_type: int) -> str:
    """Return NumPy's name of an ONNX element type, such as ``"float32"``; ``"string"`` for strings.

    ``"undefined"`` for an invalid element type, which a damaged file can have.
    """
    if elem_type == onnx.TensorProto.STRING:
        return "string"
    try:
        return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type)).name)
    except KeyError:
        return "undefined"


def type_text(elem_type: int) -> str:
    """Return the text of schemas for tensors of an ONNX element type, such as ``"tensor(float)"``."""
    return f"tensor({onnx.TensorProto.DataType.Name(elem_type).lower()})"

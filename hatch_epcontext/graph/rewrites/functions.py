"""Operators as functions of others: those that ONNX defines itself, and texts in ``graph/functions``.

A text is in ONNX's syntax. What a node has decides which lines of it count: the comment ``# if bias`` keeps a
line only for nodes with this input, output or attribute. Other conditions are an attribute's value, as in
``do_rotary = 1`` or ``opset < 13``, the type of an input, as in ``x is float``, its number of dimensions, as
in ``mask has 2``, or its length, as in ``mask fits input``; ``not``, ``and`` and ``or`` join them. A node
that fails a condition after ``# needs`` stays as it is, for the reason after a colon. The texts are for the
newest version of an operator; reductions and others get that of the model's opset.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, helper, numpy_helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import LISTS, Builder, Outputs, copy_of
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import Operators, Rewrite
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.versions import defining_opsets, has_function, is_in_opset

_FOLDER = Path(__file__).parent.parent / "functions"

_NAMED = re.compile(r'<domain: "([^"]*)"[^>]*>\s*(\w+)')

_KINDS = {"float": "f", "integer": "iu", "signed": "i", "unsigned": "u", "bool": "b"}
"""What a condition calls kinds of dtypes, and NumPy's letters for these."""


@functools.cache
def texts() -> Mapping[str, str]:
    """The text of each operator, as `graph.operator` writes it."""
    result = {}
    for path in sorted(_FOLDER.glob("*.txt")):
        for text in re.split(r"\n(?=<domain)", path.read_text(encoding="utf-8")):
            if match := _NAMED.search(text):
                result[".".join(filter(None, match.groups()))] = text[match.start() :]
    return result


def _is_defined(operator: str) -> bool:
    """Whether ONNX defines ``operator`` by others, and no text does."""
    is_own = "." not in operator and onnx.defs.has(operator) and operator not in texts()
    return is_own and has_function(onnx.defs.get_schema(operator))


def _apply_text(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """What a text in `hatch_epcontext/graph/functions` defines it by."""
    text = texts()[graph.operator(node)]
    function = onnx.parser.parse_function(text)
    attributes = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
    facts = _Facts(node, scope, function, attributes)
    for condition, reason in re.findall(r"# needs ([^:\n]*):? ?([^\n]*)", text):
        if not facts.holds(condition):
            return Declined(reason) if reason else None
    if builder.opset < (oldest := graph.opset(function)):
        return Declined(f"its function needs opset {oldest}")
    lines = text.splitlines()
    kept = [line for line in lines if " # if " not in line or facts.holds(line.split("# if ")[1])]
    function = onnx.parser.parse_function("\n".join(kept))
    operands = graph.operands(node, len(function.input))
    names = dict(zip(function.input, operands, strict=True))
    builder.copy(_bodies(function, attributes, names, scope, builder), names)
    return [names.get(name, "") for name in function.output]


class _Facts:
    """What conditions ask about a node of ``function``."""

    def __init__(
        self,
        node: onnx.NodeProto,
        scope: Scope,
        function: onnx.FunctionProto,
        attributes: Mapping[str, AttributeProto],
    ) -> None:
        self._inputs = dict(zip(function.input, node.input, strict=False))
        outputs = dict(zip(function.output, node.output, strict=False))
        self._names = {name for name, value in (*self._inputs.items(), *outputs.items()) if value}
        self._scope, self._attributes = scope, attributes

    def holds(self, condition: str) -> bool:
        return any(
            all(map(self._term, terms.split(" and "))) for terms in condition.strip().split(" or ")
        )

    def _term(self, term: str) -> bool:
        if term.startswith("not "):
            return not self._term(term.removeprefix("not "))
        name, relation, value = (*term.split(), "", "")[:3]
        if relation == "<":
            return bool(helper.get_attribute_value(self._attributes[name]) < int(value))
        if relation in ("=", "is"):
            return self._has_value(name, value) if relation == "=" else self._is(name, value)
        sizes = self._scope.sizes(self._inputs.get(name, "")) or ()
        if relation == "has":
            return f"{len(sizes)}" == value
        if relation == "fits":
            other = self._scope.sizes(self._inputs.get(value, "")) or ()
            return len(sizes) == 1 and sizes == other[:1]
        return name in self._names or name in self._attributes

    def _has_value(self, name: str, value: str) -> bool:
        """Whether the attribute ``name`` is ``value``."""
        attribute = self._attributes.get(name)
        known = None if attribute is None else helper.get_attribute_value(attribute)
        return value == (known.decode() if isinstance(known, bytes) else f"{known}")

    def _is(self, name: str, value: str) -> bool:
        """Whether the input ``name`` is of the type ``value``, or zero, as a missing one is too."""
        if value == "zero":
            values = self._scope.constant(self._inputs.get(name, ""))
            return name not in self._names or (values is not None and not values.any())
        dtype = self._scope.dtype(self._inputs.get(name, ""))
        return dtype is not None and (dtype.name == value or dtype.kind in _KINDS.get(value, ""))


def _bodies(
    function: onnx.FunctionProto,
    attributes: Mapping[str, AttributeProto],
    inputs: Mapping[str, str],
    scope: Scope,
    builder: Builder,
) -> Iterator[onnx.NodeProto]:
    """The nodes of ``function`` with the ``attributes`` that they refer to, for the model's opset."""
    constants: dict[str, Any] = {}
    for node in map(copy_of, function.node):
        own = [*node.attribute]
        del node.attribute[:]
        for attribute in own:
            if not attribute.ref_attr_name:
                node.attribute.append(attribute)
            elif (value := attributes.get(attribute.ref_attr_name)) is not None:
                new = node.attribute.add()
                new.CopyFrom(value)
                new.name = attribute.name
                if attribute.name == "value_ints" and value.type == AttributeProto.INT:
                    new.CopyFrom(helper.make_attribute("value_ints", [value.i]))
        if (tensor := graph.constant_tensor(node)) is not None:
            constants[node.output[0]] = graph.array_of(tensor)
            # Older Constants have only this attribute.
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", tensor))
        like = scope.elem_type(inputs.get(node.input[1], "")) if node.op_type == "CastLike" else 0
        if like:
            node.op_type = "Cast"
            del node.input[1:]
            node.attribute.append(helper.make_attribute("to", like))
        _lower(node, constants, builder.opset)
        if node.op_type == "Shape" and node.attribute and builder.opset < _PARTS_OF_SHAPES:
            yield from _part_of_shape(node)
        else:
            yield node


_PARTS_OF_SHAPES = 15
"""The opset from which Shape has a start and an end."""


def _part_of_shape(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """A Shape with a start and an end, as a Slice."""
    (name,), whole = node.output, f"{node.output[0]}/whole"
    ends = (graph.number(node, "start", 0), graph.number(node, "end", 2**31 - 1))
    names = [f"{name}/{which}" for which in ("start", "end")]
    yield helper.make_node("Shape", node.input, [whole])
    for value, constant in zip(ends, names, strict=True):
        tensor = numpy_helper.from_array(np.array([value], np.int64))
        yield helper.make_node("Constant", [], [constant], value=tensor)
    yield helper.make_node("Slice", [whole, *names], [name])


def _lower(node: onnx.NodeProto, constants: Mapping[str, Any], opset: int) -> None:
    """Make ``node`` one of ``opset``."""
    first, name = LISTS.get(node.op_type, (0, ""))
    if opset < first and len(node.input) > 1 and node.input[1] in constants:
        values = [int(value) for value in np.ravel(constants[node.input[1]])]
        node.attribute.append(helper.make_attribute(name, values))
        del node.input[1:]
    if node.op_type == "Split" and opset < 18:
        # All parts have the same size.
        kept = [attribute for attribute in node.attribute if attribute.name != "num_outputs"]
        del node.attribute[:]
        node.attribute.extend(kept)


def _inline(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """What ONNX defines it by, in the model's opset or in a later one for which it has not changed."""
    types = {name: scope.types.get(name) for name in node.input if name}
    for name in types:
        if tensor := scope.stored.get(name):
            types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    known = {name: type_ for name, type_ in types.items() if type_ is not None}
    if missing := sorted(types.keys() - known.keys()):
        return Declined(f"the type of {missing[0]!r} is not known")
    outcome: Outputs = None
    for opset in defining_opsets(node, builder.opset, scope):
        try:
            inlined = _inlined(node, known, opset, builder.model.ir_version)
        except RuntimeError as error:
            # onnx cannot handle all models that ONNX Runtime opens.
            return Declined(f"onnx does not inline it: {' '.join(str(error).split())}")
        outcome = _copied(node, inlined, opset, builder)
        if not isinstance(outcome, Declined):
            break
    return outcome


def _inlined(
    node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], opset: int, ir_version: int
) -> Scope:
    """The graph of ``node`` as ``opset`` defines it. Raises RuntimeError."""
    single = onnx.ModelProto(ir_version=ir_version)
    single.opset_import.add(version=opset)
    main = single.graph
    main.name = operator = node.op_type
    main.node.append(_with_defaults(node, opset))
    main.input.extend(onnx.ValueInfoProto(name=name, type=types[name]) for name in types)
    main.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    # The inliner looks up the types of missing operands too.
    main.value_info.append(onnx.ValueInfoProto(name="", type=onnx.TypeProto()))
    inlined = onnx.inliner.inline_selected_functions(
        single, [("", operator)], inline_schema_functions=True
    )
    return Scope.of(inlined)


def _copied(node: onnx.NodeProto, inlined: Scope, opset: int, builder: Builder) -> Outputs:
    """The outputs of ``node`` in the copied nodes of ``inlined``, of ``opset``; Declined if the model's has
    none of these.
    """
    nodes = [*inlined.body.node]
    used = {new.op_type for new in nodes}
    if node.op_type in used:
        return Declined(f"opset {opset} does not define it by other operators")
    if "Loop" in used:
        return Declined("its function is a Loop")
    if opset != builder.opset:
        same = {name: name for name in inlined.types}
        nodes = [*_bodies(onnx.FunctionProto(node=nodes), {}, same, inlined, builder)]
        for new in nodes:
            if not is_in_opset(new, builder.opset, opset, inlined):
                return Declined(f"opset {builder.opset} has another {new.op_type}")
    names: dict[str, str] = {}
    builder.copy(nodes, names)
    return [names.get(name, "") for name in node.output]


def _with_defaults(node: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    """A copy of ``node`` with all attributes that have a default, which the inliner does not look up."""
    result = copy_of(node)
    present = {attribute.name for attribute in node.attribute}
    result.attribute.extend(
        attribute.default_value
        for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items()
        if name not in present and attribute.default_value.type
    )
    while result.input and not result.input[-1]:
        del result.input[-1]
    return result


apply_text = Rewrite("apply_text", Operators(lambda name: name in texts()), _apply_text)
"""Operators as their texts define them."""

inline_function = Rewrite("inline_function", Operators(_is_defined), _inline)
"""Functions of ONNX as the operators by which ONNX defines them."""

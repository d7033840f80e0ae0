"""IR versions and opsets of models, no higher than their nodes need, and what apps read beside the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import onnx.inliner
from onnx import TensorProto
from onnx.defs import OpSchema

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.scope import Scope

_OLDEST = 7
"""The oldest opset that all releases of ONNX Runtime read."""

_OLDEST_IR = 8
"""An IR version that all supported releases of ONNX Runtime read, and that has all features but new types."""

_NEWEST = 27
"""The newest opset of which ONNX Runtime has most operators."""

_LAST_OF_MEANING = 13
"""The opset after which a version with an equal signature differs from the one before only in its types, and
an attribute that it adds changes nothing by default. Before, some got negative axes, for example.
"""

_OTHER_MEANING = frozenset(
    {("GroupNormalization", 21), ("Max", 8), ("Min", 8), ("Mod", 28), ("RoiAlign", 16)}
)
"""The exceptions: the operator, and its version."""

_DEFINED = ("", "ai.onnx.ml")
"""The domains whose operators onnx defines."""

_IR_OF_TYPES: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ), 9),
    **dict.fromkeys((TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ), 9),
    **dict.fromkeys((TensorProto.UINT4, TensorProto.INT4), 10),
    TensorProto.FLOAT4E2M1: 11,
}
"""The IR versions that introduced types; newer types have newer ones."""


def lower_versions(model: onnx.ModelProto) -> None:
    """Give ``model`` the lowest IR version and opsets with which its nodes are the same.

    Nothing changes if it has functions, or opsets that are newer than onnx.
    """
    opsets = {_domain(opset.domain): opset.version for opset in model.opset_import}
    if model.functions or opsets.get("", 0) > onnx.defs.onnx_opset_version():
        return
    scope = Scope(inference.inferred(model), nested=True)
    lowest: dict[str, int] = {"": min(_OLDEST, opsets[""])} if "" in opsets else {}
    for node in graph.nodes(model.graph):
        domain = _domain(node.domain)
        needed = opsets.get(domain, 1)
        if domain in _DEFINED:
            needed = _oldest_version(node, domain, needed, scope)
        lowest[domain] = max(lowest.get(domain, 1), needed)
    del model.opset_import[:]
    for domain, version in sorted(lowest.items()):
        model.opset_import.add(domain=domain, version=version)
    needed = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    values = (*model.graph.input, *model.graph.output)
    types = (_IR_OF_TYPES.get(value.type.tensor_type.elem_type, 0) for value in values)
    model.ir_version = min(model.ir_version, max(needed, _OLDEST_IR, *types))


def usual_versions(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with equal versions of its operators, if its opset is newer or older than usual.

    What ONNX has defined since `_NEWEST` by other operators becomes these. May change ``model``.
    """
    opset = graph.opset(model)
    if opset < _OLDEST:
        schemas = (
            [_schema(node, _domain(node.domain), version) for version in (opset, _OLDEST)]
            for node in graph.nodes(model.graph)
        )
        if all(old and new and old.since_version == new.since_version for old, new in schemas):
            del model.opset_import[:]
            model.opset_import.add(version=_OLDEST)
        return model
    if not _NEWEST < opset <= onnx.defs.onnx_opset_version():
        return model
    new = {
        ("", node.op_type)
        for node in graph.nodes(model.graph)
        if (schema := _schema(node, _domain(node.domain), graph.opset(model))) is not None
        and schema.since_version > _NEWEST
        and schema.domain == ""
        and has_function(schema)
    }
    # A function may have others inside.
    for functions in (sorted(new), [("", "Swish")] if new else []):
        if functions:
            model = onnx.inliner.inline_selected_functions(
                model, functions, inline_schema_functions=True
            )
    lower_versions(model)
    return model


def has_function(schema: Any) -> bool:
    """Whether ONNX defines the operator of ``schema`` by others."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def defining_opsets(node: onnx.NodeProto, opset: int, scope: Scope) -> Iterator[int]:
    """``opset``, and the later ones that define ``node``, of that opset, by others, and in which it is the
    same; the nearest first.
    """
    for version in range(opset, onnx.defs.onnx_opset_version() + 1):
        schema: Any = _schema(node, "", version)
        if schema is None or _oldest_version(node, "", version, scope) > opset:
            return
        own = schema.function_opset_versions, schema.context_dependent_function_opset_versions
        if version == opset or any(version in versions for versions in own):
            yield version


def is_in_opset(node: onnx.NodeProto, opset: int, later: int, scope: Scope) -> bool:
    """Whether ``opset`` has the operator of ``node``, of a ``later`` one, with its parameters and types."""
    is_always = node.op_type == "Constant"
    return is_always or _oldest_version(node, "", later, scope, meaning=0) <= opset


def keep_metadata(source: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Give ``model`` what apps read of ``source`` besides its graph: texts and properties.

    Its own properties stay, such as the compatibility of a context.
    """
    own = {entry.key for entry in model.metadata_props}
    model.metadata_props.extend(entry for entry in source.metadata_props if entry.key not in own)
    for name in ("doc_string", "domain", "model_version", "producer_name", "producer_version"):
        setattr(model, name, getattr(source, name))
    model.graph.name, model.graph.doc_string = source.graph.name, source.graph.doc_string
    values = {value.name: value for value in (*source.graph.input, *source.graph.output)}
    for value in (*model.graph.input, *model.graph.output):
        if (before := values.get(value.name)) is not None:
            value.doc_string = before.doc_string


def _domain(name: str) -> str:
    return "" if name in graph.STANDARD else name


def _oldest_version(
    node: onnx.NodeProto,
    domain: str,
    version: int,
    scope: Scope,
    meaning: int = _LAST_OF_MEANING,
) -> int:
    """The oldest version of its domain in which ``node``, of ``version``, is the same, as far as signatures
    show it from ``meaning`` on.
    """
    schema = _schema(node, domain, version)
    if schema is None:
        return version
    while (older := _schema(node, domain, schema.since_version - 1)) is not None:
        if schema.since_version <= meaning or not _takes(older, schema, node, scope):
            break
        schema = older
    return int(schema.since_version)


def _schema(node: onnx.NodeProto, domain: str, version: int) -> OpSchema | None:
    with contextlib.suppress(onnx.defs.SchemaError):
        return onnx.defs.get_schema(node.op_type, version, domain)
    return None


def _takes(older: OpSchema, newer: OpSchema, node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether ``node``, of the version ``newer``, is the same in the version before, ``older``."""
    known = _defaults(older)
    is_same = (
        (node.op_type, newer.since_version) not in _OTHER_MEANING
        and _parameters(older) == _parameters(newer)
        and known.items() <= _defaults(newer).items()
    )
    if not is_same or any(attribute.name not in known for attribute in node.attribute):
        return False
    # An attribute that is text may have a value that only the newer version has.
    texts = {name: attribute.default_value.s for name, attribute in older.attributes.items()}
    if any(attribute.s and attribute.s != texts[attribute.name] for attribute in node.attribute):
        return False
    allowed = {rule.type_param_str: rule.allowed_type_strs for rule in older.type_constraints}
    for names, formal in ((node.input, older.inputs), (node.output, older.outputs)):
        for index, name in enumerate(names):
            parameter = formal[min(index, len(formal) - 1)]
            elem_type = scope.elem_type(name) if name else None
            types = allowed.get(parameter.type_str, [parameter.type_str])
            if name and (elem_type is None or graph.type_text(elem_type) not in types):
                return False
    return True


def _defaults(schema: OpSchema) -> dict[str, tuple[Any, ...]]:
    return {
        name: (rule.type, rule.required, rule.default_value.SerializeToString())
        for name, rule in schema.attributes.items()
    }


def _parameters(schema: OpSchema) -> list[list[tuple[Any, str]]]:
    return [
        [(parameter.option, parameter.type_str) for parameter in side]
        for side in (schema.inputs, schema.outputs)
    ]

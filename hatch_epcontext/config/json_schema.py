"""The JSON schema of ``[tool.epcontext]``, generated from the dataclasses that declare the keys.

It is shipped as ``epcontext.schema.json``, for editors and for validate-pyproject. Rules that depend on the
provider, the model or other keys are only in `config.checks`.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hatch_epcontext.config.tables import ModelTable, RootTable, TargetTable, declaration_of
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import show, toml_key

FILE = Path(__file__).with_name("epcontext.schema.json")

_TARGET = {"$ref": "#/definitions/target"}
"""A target, whose keys the schema lists once."""

_LEAVES: Mapping[Any, dict[str, Any]] = {
    Any: {},
    TargetTable: _TARGET,
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
}


def make() -> dict[str, Any]:
    """The schema, in JSON Schema draft 7."""
    root = _table(RootTable)
    target = _table(TargetTable)
    # Only a target needs its provider, not what a model changes of it. No enumeration: ONNX Runtime's names
    # and other spellings are valid too.
    required = target.pop("required")
    target["properties"]["provider"]["description"] += f" One of {', '.join(PROVIDERS)}."
    root["properties"]["targets"]["additionalProperties"] = {
        "allOf": [_TARGET, {"required": required}]
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://github.com/hatch-epcontext/hatch-epcontext/epcontext.schema.json",
        "title": "[tool.epcontext]",
        "description": "ONNX models that hatch-epcontext compiles into the wheel.",
        **root,
        "definitions": {"target": target},
    }


def text() -> str:
    """The schema as it is shipped."""
    return json.dumps(make(), indent=2) + "\n"


def tool_schema(tool_name: str) -> dict[str, Any]:
    """The shipped schema, for validate-pyproject's entry point."""
    shipped: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return shipped


def _table(table: type) -> dict[str, Any]:
    hints = get_type_hints(table)
    properties, required = {}, []
    for field in dataclasses.fields(table):
        key = toml_key(field.name)
        doc = declaration_of(field).doc
        if missing := when_missing(field):
            doc += f" Default: {missing}."
        properties[key] = {**_schema(hints[field.name]), "description": doc}
        if declaration_of(field).required:
            required.append(key)
        elif field.default not in (None, dataclasses.MISSING, (), ""):
            properties[key]["default"] = field.default
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if table is ModelTable:
        schema["oneOf"] = [{"required": ["path"]}, {"required": ["url"]}]
    return {**schema, "required": required} if required else schema


def when_missing(field: dataclasses.Field[Any]) -> str:
    """What applies if the key of ``field`` is missing, unless it is the field's default."""
    declared = declaration_of(field)
    missing = declared.otherwise is None
    return declared.when_missing if missing else f"`{show(declared.otherwise)}`"


def _schema(type_: Any) -> dict[str, Any]:
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        members = [_schema(member) for member in arguments if member is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is not None and issubclass(origin, Mapping):
        inside = _schema(arguments[1])
        return {"type": "object", **({"additionalProperties": inside} if inside else {})}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0])}
    return _LEAVES[type_] if type_ in _LEAVES else _table(type_)

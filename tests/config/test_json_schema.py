"""The JSON schema, with the tool that users check their pyproject.toml with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from validate_pyproject import api
from validate_pyproject.error_reporting import ValidationError

from hatch_epcontext.config import json_schema, tables
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.text import toml_key
from tests.config.examples import EVERYTHING, LONG, SHORT
from tests.conftest import REPOSITORY

PROJECT = {"name": "my-app", "version": "1.0"}

# A new validator compiles all schemas, so all tests share one.
VALIDATE = functools.cache(api.Validator)


def validate(table: dict[str, Any]) -> None:
    """Run ``validate-pyproject`` on a project with ``table`` as its ``[tool.epcontext]``."""
    VALIDATE()({"project": PROJECT, "tool": {"epcontext": table}})


def test_the_shipped_schema_is_generated_from_the_tables() -> None:
    assert json_schema.FILE.read_text(encoding="utf-8") == json_schema.text(), (
        "run: python docs/generate.py"
    )
    assert json_schema.tool_schema("epcontext") == json_schema.make()


@pytest.mark.parametrize("toml", [SHORT, LONG, EVERYTHING])
def test_valid_configurations_pass(toml: str) -> None:
    validate(parse(toml))


def test_the_examples_configuration_passes() -> None:
    text = (REPOSITORY / "example_project" / "pyproject.toml").read_text(encoding="utf-8")
    VALIDATE()(parse(text))


@pytest.mark.parametrize(
    "wrong",
    [
        {"provder": "qnn"},
        {"provider": "qnn"},
        {"models": [{"name": "a"}]},
        {"models": [{"path": "a.onnx", "dims": {"batch": "one"}}]},
        {"targets": {"a": {}}},
        {"targets": {"a": {"provider": "qnn", "device": "tpu"}}},
        {"targets": {"a": {"provider": "rtx", "profiles": [{"x": {"min": [1], "opt": [1]}}]}}},
        {"models": [{"path": "a.onnx", "targets": {"npu": {"device": "tpu"}}}]},
        {"build": {"jobs": "many"}},
        {"models": [{"path": "a.onnx", "validate": "always"}]},
        {"models": [{"path": "a.onnx", "validate": {"tolerance": True}}]},
    ],
)
def test_invalid_configurations_do_not_pass(wrong: dict[str, Any]) -> None:
    good = {"targets": {"npu": {"provider": "qnn"}}, "models": ["models/a.onnx"]}
    validate(good)
    with pytest.raises(ValidationError):
        validate(good | wrong)


def test_the_schema_has_every_key_with_its_documentation() -> None:
    made = json_schema.make()
    model = made["properties"]["models"]["items"]["anyOf"][1]
    for table, place in (
        (tables.RootTable, made),
        (tables.TargetTable, made["definitions"]["target"]),
        (tables.ModelTable, model),
        (tables.CutTable, model["properties"]["cut"]),
        (tables.ValidateTable, model["properties"]["validate"]["anyOf"][0]),
        (tables.BuildTable, made["properties"]["build"]),
        (tables.WheelTable, made["properties"]["wheel"]),
    ):
        keys = {toml_key(f.name): tables.declaration_of(f).doc for f in dataclasses.fields(table)}
        assert place["properties"].keys() == keys.keys()
        assert all(keys.values())
        for key, doc in keys.items():
            assert place["properties"][key]["description"].startswith(doc)

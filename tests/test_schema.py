"""The JSON schema, with the tool that users check their pyproject.toml with."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from validate_pyproject import api
from validate_pyproject.error_reporting import ValidationError

from hatch_epcontext import schema, tables
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import toml_key
from tests.conftest import REPOSITORY
from tests.test_config import LONG, SHORT
from tests.test_targets import EVERYTHING

PROJECT = {"name": "my-app", "version": "1.0"}


def validate(table: dict[str, Any]) -> None:
    """What ``validate-pyproject`` does with a project whose ``[tool.epcontext]`` is ``table``."""
    api.Validator()({"project": PROJECT, "tool": {"epcontext": table}})


def test_the_shipped_schema_is_that_of_the_tables() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), "run: python docs/generate.py"
    assert schema.tool_schema("epcontext") == schema.make()


@pytest.mark.parametrize("toml", [SHORT, LONG, EVERYTHING])
def test_configurations_that_are_right_pass(toml: str) -> None:
    validate(parse(toml))


def test_all_configurations_in_the_readme_pass() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = 0
    for block in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL):
        table = parse(block).get("tool", {}).get("epcontext")
        if table is not None:
            validate(table)
            found += 1
    assert found >= 3


def test_the_examples_configuration_passes() -> None:
    text = (REPOSITORY / "example_project" / "pyproject.toml").read_text(encoding="utf-8")
    api.Validator()(parse(text))


@pytest.mark.parametrize(
    "wrong",
    [
        {"provder": "qnn"},
        {"provider": 3},
        {"models": "models/a.onnx"},
        {"models": [{"name": "a"}]},
        {"models": [{"path": "a.onnx", "dims": {"batch": "one"}}]},
        {"targets": {"a": {}}},
        {"targets": {"a": {"provider": "qnn", "device": "tpu"}}},
        {"profiles": [{"x": {"min": [1], "opt": [1]}}]},
        {"embed": "yes"},
        {"jobs": "many"},
    ],
)
def test_configurations_that_are_wrong_do_not(wrong: dict[str, Any]) -> None:
    good = {"provider": "qnn", "models": ["models/a.onnx"]}
    validate(good)
    with pytest.raises(ValidationError):
        validate(good | wrong)


def test_every_key_is_in_it_with_its_documentation() -> None:
    made = schema.make()
    for table, place in (
        (tables.RootTable, made),
        (tables.TargetTable, made["properties"]["targets"]["additionalProperties"]),
        (tables.ModelTable, made["properties"]["models"]["items"]["anyOf"][1]),
    ):
        keys = {toml_key(field.name): field.metadata["doc"] for field in dataclasses.fields(table)}
        assert place["properties"].keys() == keys.keys()
        for key, doc in keys.items():
            assert place["properties"][key]["description"].startswith(doc)

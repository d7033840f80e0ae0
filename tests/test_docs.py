"""What the README says is what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest

import hatch_epcontext
from hatch_epcontext import environment, tables
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import toml_key
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text under ``heading``, up to the next one."""
    _, found = README.split(f"### {heading}\n", 1)
    return found.split("\n#", 1)[0]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("`[tool.epcontext]`", tables.RootTable),
        ("`[tool.epcontext.targets.<name>]`", tables.TargetTable),
        ("`[[tool.epcontext.models]]`", tables.ModelTable),
    ],
)
def test_every_key_is_in_the_table_of_its_place(heading: str, table: type) -> None:
    rows = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", section(heading), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    keys = {toml_key(field.name) for field in dataclasses.fields(table)}
    assert told - keys == set()
    # A target's are told once, with the targets.
    of_targets = {toml_key(field.name) for field in dataclasses.fields(tables.TargetTable)}
    assert keys - told <= (set() if table is tables.TargetTable else of_targets)


def test_every_variable_is_told() -> None:
    told = set(re.findall(r"^\| `HATCH_EPCONTEXT_([A-Z_]+)=", section("Environment"), re.MULTILINE))
    assert told == set(environment._READERS)


def test_every_key_has_its_documentation() -> None:
    for table in (tables.RootTable, tables.TargetTable, tables.ModelTable, tables.ToleranceTable):
        assert all(field.metadata["doc"] for field in dataclasses.fields(table))


def test_every_provider_is_told_and_where_it_was_verified() -> None:
    for name in PROVIDERS:
        assert re.search(rf"^\| .*`{name}`.*hardware", README, re.MULTILINE)


def test_the_page_about_providers_is_what_the_registry_says() -> None:
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (REPOSITORY / "docs" / "providers.md").read_text(encoding="utf-8")
    assert page == generate.providers(), "run: python docs/generate.py"


def test_the_page_about_providers_has_every_option() -> None:
    page = (REPOSITORY / "docs" / "providers.md").read_text(encoding="utf-8")
    for provider in PROVIDERS.values():
        told = page.split(f"\n## {provider.name}\n")[1].split("\n## ")[0]
        assert all(f"| `{option}` |" in told for option in provider.options)


def test_all_toml_in_the_readme_is_toml() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        parse(block)


def test_the_version_stands_in_one_place() -> None:
    project = parse((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "hatch_epcontext/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", hatch_epcontext.__version__)

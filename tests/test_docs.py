"""What the README says is what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from types import ModuleType

import pytest

import hatch_epcontext
from hatch_epcontext import environment, tables
from hatch_epcontext.cli.app import app
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import toml_key
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


CONFIGURATION = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands in ``text`` under ``heading``, up to the next one."""
    _, found = text.split(f"{heading}\n", 1)
    return found.split("\n#", 1)[0]


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("`[tool.epcontext]`", tables.RootTable),
        ("`[tool.epcontext.targets.<name>]`", tables.TargetTable),
        ("`[[tool.epcontext.models]]`", tables.ModelTable),
    ],
)
def test_every_key_is_told_in_its_place(heading: str, table: type) -> None:
    told = set(re.findall(r"`([a-z-]+)`", section(CONFIGURATION, f"## {heading}")))
    keys = {toml_key(field.name) for field in dataclasses.fields(table)}
    # A target's are told once, with the targets.
    of_targets = {toml_key(field.name) for field in dataclasses.fields(tables.TargetTable)}
    assert keys - told <= (of_targets if table is tables.RootTable else set())


def test_every_variable_is_told() -> None:
    told = set(
        re.findall(
            r"^\| `HATCH_EPCONTEXT_([A-Z_]+)=", section(README, "### Environment"), re.MULTILINE
        )
    )
    assert told == set(environment._READERS)


def test_every_key_has_its_documentation() -> None:
    for table in (tables.RootTable, tables.TargetTable, tables.ModelTable, tables.ToleranceTable):
        assert all(field.metadata["doc"] for field in dataclasses.fields(table))


def test_every_provider_is_told_and_where_it_was_verified() -> None:
    for name in PROVIDERS:
        assert re.search(rf"^\| .*`{name}`.*hardware", README, re.MULTILINE)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """``docs/generate.py``, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["providers", "configuration"])
def test_a_generated_page_is_what_the_package_says(generate: ModuleType, name: str) -> None:
    page = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == getattr(generate, name)(), "run: python docs/generate.py"


def test_the_page_about_commands_is_what_their_help_says(generate: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    # How lines are broken is click's, and changes with its releases.
    assert page.split() == generate.commands().split(), "run: python docs/generate.py"


def test_other_tools_are_answered_with_flags_that_exist() -> None:
    page = (REPOSITORY / "docs" / "other-tools.md").read_text(encoding="utf-8")
    lines = page.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("epcontext ")]
    commands += [cell for line in lines for cell in re.findall(r"\| `(epcontext [^`]+)`", line)]
    assert len(commands) >= 7
    for command in commands:
        name, *arguments = shlex.split(command)[1:]
        flags = {flag for p in app.commands[name].params for flag in p.opts + p.secondary_opts}
        assert {each for each in arguments if each.startswith("-")} <= flags


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

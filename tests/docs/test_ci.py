"""The files for CI, this project's own and those in docs/ci.md, follow the schemas of their tools."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest
from click.testing import CliRunner

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(yaml|json)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

JOB = "on: push\njobs:\n  build:\n    runs-on: ubuntu-latest\n"


def as_file(block: str) -> tuple[str, str]:
    """The schema of an example, and the whole file: the page shows parts of workflows."""
    first = dedent(block).partition(":")[0]
    if first == "wheel":
        return "gitlab-ci", block
    if first == "jobs":
        return "github-workflows", f"on: push\n{block}"
    job = block if first == "steps" else f"{dedent(block)}steps:\n  - run: pipx run build\n"
    return "github-workflows", JOB + indent(job, "    ")


def check(schema: str, *files: Path) -> None:
    # Importing it takes a second, which all processes that collect tests would spend.
    from check_jsonschema import main

    done = CliRunner().invoke(main, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_follow_the_schemas(number: int, tmp_path: Path) -> None:
    language, block = BLOCKS[number]
    if block.startswith("repos:"):
        # Its tool names no schema.
        hooks = (REPOSITORY / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
        names = [re.findall(r"- id: (\S+)", text) for text in (block, hooks)]
        assert names == [["epcontext-fetch"]] * 2
        return
    schema, text = ("renovate", block) if language == "json" else as_file(block)
    path = tmp_path / f"example.{language}"
    path.write_text(text, encoding="utf-8")
    check(schema, path)


def test_the_page_has_an_example_for_each_tool() -> None:
    assert [language for language, _ in BLOCKS].count("json") == 1
    schemas = [as_file(block)[0] for language, block in BLOCKS if language == "yaml"]
    assert schemas.count("github-workflows") >= 4
    assert schemas.count("gitlab-ci") == 1


def test_the_projects_own_files_follow_the_schemas() -> None:
    check("github-actions", REPOSITORY / "action.yml")
    check("github-workflows", *(REPOSITORY / ".github" / "workflows").glob("*.yml"))
    check("dependabot", REPOSITORY / ".github" / "dependabot.yml")


def test_a_wrong_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "action.yml"
    text = (REPOSITORY / "action.yml").read_text(encoding="utf-8")
    path.write_text(text.replace("using: composite", "uses: composite"), encoding="utf-8")
    with pytest.raises(AssertionError, match="composite"):
        check("github-actions", path)

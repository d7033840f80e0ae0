"""Every ``epcontext`` command in the README and in docs/ is run, as tests/docs/settings.py says."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hatch_epcontext.cli.app import app
from hatch_epcontext.config.environ import PREFIX
from tests.conftest import REPOSITORY, needs_qnn
from tests.docs import settings
from tests.docs.pages import Command, File, Line, missing, pages

pytestmark = pytest.mark.slow

PAGES = pages(REPOSITORY)
COMMANDS = [item for items in PAGES.values() for item in items if isinstance(item, Command)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all pages."""
    return tmp_path_factory.mktemp("cache")


@needs_qnn
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(
    page: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    settings.PAGES.get(page, settings.Page()).project(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(f"{PREFIX}CACHE_DIR", str(cache))
    for item in PAGES[page]:
        if isinstance(item, File):
            Path(item.path).parent.mkdir(parents=True, exist_ok=True)
            Path(item.path).write_text(item.text, encoding="utf-8")
        elif isinstance(item, Line):
            script(item)
        elif item.text not in settings.NOT_RUN:
            run(item)


def run(command: Command) -> None:
    """Run it in this process, in the current folder; it must end as its setting says."""
    for each in settings.BEFORE.get(command.text, ()):
        before = invoke(each)
        assert before.exit_code == 0, f"{command.place}: {each}: {before.output}"
    text = settings.WRITTEN_OUT.get(command.text, command.text)
    result = invoke(text)
    failing = settings.FAILING.get(command.text)
    expected = failing.code if failing else 0
    assert result.exit_code == expected, (
        f"{command.place}: `{text}` ended with exit code {result.exit_code}, and not {expected}. "
        f"tests/docs/settings.py says where to add its setting. It printed:\n{result.output}"
    )
    assert not failing or re.search(failing.message, result.output), result.output
    same = text == command.text and text not in settings.OTHER_OUTPUT
    output = command.output if same else ()
    assert missing(output, result.output) == [], (
        f"{command.place}: `{text}` does not print these lines, but:\n{result.output}"
    )


def script(line: Line) -> None:
    """Run a line that calls Python, if it is one that a later command needs."""
    if line.text in settings.SCRIPTS:
        words = [sys.executable, *settings.SCRIPTS[line.text]]
        subprocess.run(words, check=True, capture_output=True)


def invoke(command: str) -> Result:
    """Run it without what an earlier command of the page has written in its place."""
    _, *words = shlex.split(command)
    if "--overwrite" not in words:
        for flag, name in itertools.pairwise(words):
            path = Path(name)
            if flag in {"-o", "--output"} and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    # As wide as the blocks of pages, so that no table wraps.
    return CliRunner().invoke(app, words, env={"COLUMNS": "160"}, prog_name="epcontext")


def test_every_setting_is_for_a_command_or_a_page() -> None:
    named = {
        *settings.OTHER_OUTPUT,
        *settings.BEFORE,
        *settings.WRITTEN_OUT,
        *settings.FAILING,
        *settings.NOT_RUN,
    }
    assert named <= {command.text for command in COMMANDS}
    lines = {item.text for items in PAGES.values() for item in items if isinstance(item, Line)}
    assert set(settings.SCRIPTS) <= lines
    assert set(settings.PAGES) <= set(PAGES)
    assert len(COMMANDS) > 50
    assert sum(bool(command.output) for command in COMMANDS) > 10

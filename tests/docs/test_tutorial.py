"""The tutorial, with all of its commands, as a reader types them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, needs_qnn
from tests.docs import settings
from tests.docs.pages import File, Line, lines_of, missing

PAGE = "docs/tutorial.md"
ITEMS = list(lines_of(PAGE, (REPOSITORY / PAGE).read_text(encoding="utf-8")))

pytestmark = [
    pytest.mark.front_ends,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the page has the commands of other shells"),
    needs_qnn,
]


def script() -> str:
    """All items for a shell; before the output of each command is a line with its number."""
    lines = ["set -e"]
    for number, item in enumerate(ITEMS):
        if isinstance(item, File):
            path = shlex.quote(item.path)
            lines.append(f'mkdir -p "$(dirname {path})"\ncat > {path} <<"END OF {number}"')
            lines.append(f"{item.text}END OF {number}")
        else:
            failing = settings.FAILING.get(item.text)
            ends = f" || test $? -eq {failing.code}" if failing else ""
            lines.append(f"echo '@ {number}'\n{item.text}{ends}")
    return "\n".join(lines)


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist)
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PIP_FIND_LINKS": str(dist), "PIP_QUIET": "1", "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)  # noqa: T201 (the items of a test that takes minutes)
    assert done.returncode == 0
    _, *parts = re.split(r"^@ (\d+)\n", done.stdout, flags=re.MULTILINE)
    printed = {int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True)}
    for number, item in enumerate(ITEMS):
        if isinstance(item, Line):
            assert missing(item.output, printed[number]) == [], f"{PAGE}:{item.line}: {item.text}"

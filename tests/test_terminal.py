"""What somebody at a terminal sees of a build whose front end keeps its output: with real terminals."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.altered_workers import write_start_code
from tests.models import network
from tests.projects import make_project

if sys.platform == "win32":
    pytest.skip("Windows has no pseudo-terminals for Python", allow_module_level=True)
import pty

REPOSITORY = Path(__file__).resolve().parents[1]

HOOK = """
import os
from hatch_epcontext.terminal import find_terminal
terminal = find_terminal(os.environ)
print("none" if terminal is None else "shown" if terminal.show("A LINE") else "not now")
"""

FRONT_END = """
import json, os, subprocess, sys, termios
code, out = sys.argv[1:]
say = lambda **more: subprocess.run(
    [sys.executable, "-c", code], check=True, text=True, stdin=0,
    **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more)
found = {"captured": say().stdout, "in CI": say(env={**os.environ, "CI": "true"}).stdout}
found["errors at the terminal"] = say(stderr=None).stdout
found["without a terminal"] = say(start_new_session=True).stdout
found["background"] = say(preexec_fn=lambda: os.setpgid(0, 0)).stdout
termios.tcflow(1, termios.TCOOFF)
found["stopped"] = say().stdout
termios.tcflow(1, termios.TCOON)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1), os.dup2(null, 2)
found["front end without a terminal"] = say().stdout
open(out, "w").write(json.dumps({name: text.strip() for name, text in found.items()}))
"""


def run(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[bytes]:
    """What ``command`` writes to a terminal of its own, in pieces."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(command[0], command, environ)  # noqa: S606
    try:
        while True:
            # Linux reports the end as an error.
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                return
            if not piece:
                return
            yield piece
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def environment(**more: str) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if name != "CI"}
    path = os.pathsep.join((str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])))
    return {**inherited, "PYTHONPATH": path, **more}


def test_a_line_is_shown_only_where_somebody_waits_for_it(tmp_path: Path) -> None:
    import json

    out = tmp_path / "found.json"
    shown = b"".join(
        run([sys.executable, "-c", FRONT_END, HOOK, str(out)], tmp_path, environment())
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found == {
        "captured": "shown",
        "in CI": "none",
        "errors at the terminal": "none",
        "without a terminal": "none",
        "background": "none",
        "stopped": "not now",
        # Only Linux tells what another process writes to.
        "front end without a terminal": "none" if sys.platform == "linux" else "shown",
    }
    assert shown.count(b"\nA LINE\r") == list(found.values()).count("shown")


BUILD = """
import sys
from hatch_epcontext.jobs.processes import process
process._FIRST_BEAT, process._NEXT_BEATS = 0.2, 600
from hatchling.build import build_wheel
build_wheel(sys.argv[1])
"""

CAPTURING = """
import subprocess, sys
code, wheels, log = sys.argv[1:]
done = subprocess.run([sys.executable, "-c", code, wheels], stdout=-1, stderr=-2, text=True)
open(log, "w").write(done.stdout)
"""


@pytest.fixture
def slow_project(tmp_path: Path) -> tuple[Path, Callable[..., dict[str, str]]]:
    """A project in which the worker waits for the file ``seen``, and the environment to build it in."""
    folder = tmp_path / "site"
    folder.mkdir()
    source = f"""
        import os, time
        from hatch_epcontext.worker import progress
        from hatch_epcontext.worker.actions import prepare
        real = prepare.handle
        def handle(request):
            progress.step("turning \\x1b[31mred")
            while not os.path.exists({str(tmp_path / "seen")!r}):
                time.sleep(0.05)
            return real(request)
        prepare.handle = handle
        """
    write_start_code(folder, source)
    toml = 'provider = "cpu"\nmodels = ["models/*.onnx"]\n'
    project = make_project(tmp_path / "project", toml, network(1))

    def environ(**more: str) -> dict[str, str]:
        path = os.pathsep.join((str(REPOSITORY), str(folder)))
        return {**environment(), "PYTHONPATH": path, **more}

    return project, environ


def test_a_long_step_is_shown_on_the_terminal_and_nowhere_twice(
    slow_project: tuple[Path, Callable[..., dict[str, str]]], tmp_path: Path
) -> None:
    project, environ = slow_project
    log = tmp_path / "log"
    command = [sys.executable, "-c", CAPTURING, BUILD, str(tmp_path), str(log)]
    shown = b""
    for piece in run(command, project, environ()):
        shown += piece
        if b"prepare has run for" in shown:
            (tmp_path / "seen").touch()
    (line,) = re.findall(rb"epcontext .*prepare.*?(?=\r)", shown)
    assert re.fullmatch(
        rb"epcontext \(\d+ s\): a -> cpu: preparation: prepare has run for \d+ s"
        rb"( while turning \\x1b\[31mred \(for \d+ s\))?",
        line,
    )
    captured = log.read_text(encoding="utf-8")
    assert "has run for" not in captured
    assert "epcontext: a -> cpu (cpu): optimized graph" in captured
    assert len(list(tmp_path.glob("*.whl"))) == 1

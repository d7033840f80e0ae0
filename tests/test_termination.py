"""Builds that get SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hatch_epcontext.system import terminated_as_error
from tests.altered_workers import write_start_code
from tests.conftest import REPOSITORY, wait_for
from tests.models import network, save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")

PYPROJECT = '[tool.epcontext]\ntargets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


def test_the_process_ends_as_after_an_error_and_the_handler_is_restored() -> None:
    def work() -> None:
        with terminated_as_error():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    with pytest.raises(SystemExit) as raised:
        work()
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_process_is_left_alone() -> None:
    def own(*_: object) -> None:
        pass

    earlier = signal.signal(signal.SIGTERM, own)
    try:
        with terminated_as_error():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_only_the_main_thread_handles_signals() -> None:
    done: list[bool] = []

    def work() -> None:
        with terminated_as_error():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_build_leaves_nothing_behind(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    (project / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    site, started = tmp_path / "site", tmp_path / "started"
    for folder in (site, tmp_path / "tmp"):
        folder.mkdir()
    source = f"""
        import time
        from hatch_epcontext.worker.actions import check
        check.handle = lambda request: (open({str(started)!r}, "w"), time.sleep(600))
        """
    write_start_code(site, source)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(site), *sys.path)),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    command = (
        sys.executable,
        "-c",
        "from hatch_epcontext.cli import main; main()",
        "build",
        str(project),
    )
    with subprocess.Popen(command, cwd=REPOSITORY, env=environ) as build:
        wait_for(lambda: started.exists() or build.poll() is not None)
        build.terminate()
        assert build.wait() == 143
    assert list((tmp_path / "tmp").glob("hatch-epcontext-*")) == []

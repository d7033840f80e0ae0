"""Builds that are killed, which Windows tells nobody, and workers that crash."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Key, Kind
from hatch_epcontext.files import STAGING_PREFIX
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.system import terminated_as_error
from hatch_epcontext.worker.requests import CheckRequest
from tests.altered_workers import write_start_code
from tests.models import network, save
from tests.windows.conftest import EPCONTEXT, kernel, only_windows, python, variables

pytestmark = only_windows

PYPROJECT = '[tool.epcontext]\ntargets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'

SYNCHRONIZE, SIGNALED = 0x100000, 0


def ends(process: int, seconds: float) -> bool:
    """Whether the process of this number ends in time, or has ended."""
    api = kernel()
    api.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(api.OpenProcess(SYNCHRONIZE, False, process))
    if not handle:
        return True
    try:
        return bool(api.WaitForSingleObject(handle, int(1000 * seconds)) == SIGNALED)
    finally:
        api.CloseHandle(handle)


def test_a_killed_build_leaves_no_worker_and_the_next_one_removes_its_folder(
    project: Path, tmp_path: Path
) -> None:
    save(network(), project / "models" / "a.onnx")
    (project / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    site, started, temporary = tmp_path / "site", tmp_path / "started", tmp_path / "temporary"
    site.mkdir()
    source = f"""
        import os, pathlib, time
        from hatch_epcontext.worker.actions import check
        def handle(request):
            new = pathlib.Path({str(tmp_path / "new")!r})
            new.write_text(str(os.getpid()))
            new.rename({str(started)!r})
            time.sleep(600)
        check.handle = handle
        """
    write_start_code(site, source)
    command = (*EPCONTEXT, "build", project)
    env = variables(temporary, HATCH_EPCONTEXT_CACHE_DIR=str(tmp_path / "cache"))
    altered = env | {"PYTHONPATH": os.pathsep.join((str(site), *sys.path))}
    with subprocess.Popen([sys.executable, *map(str, command)], env=altered) as build:
        while not started.exists() and build.poll() is None:
            time.sleep(0.05)
        worker = int(started.read_text("utf-8"))
        assert not ends(worker, 0)
        build.terminate()
    assert ends(worker, 10)
    assert len(list(temporary.glob(f"{STAGING_PREFIX}*"))) == 1
    python(*command, cwd=tmp_path, env=env)
    assert list(temporary.glob(f"{STAGING_PREFIX}*")) == []


def test_ctrl_break_is_an_error_after_which_a_build_cleans_up() -> None:
    ctrl_break = signal.Signals["SIGBREAK"]
    with pytest.raises(SystemExit) as raised, terminated_as_error():
        signal.raise_signal(ctrl_break)
    assert raised.value.code == 128 + ctrl_break
    assert signal.getsignal(ctrl_break) is signal.SIG_DFL


def test_a_crash_of_a_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "onnx.py").write_text("import faulthandler\nfaulthandler._read_null()\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    request = CheckRequest((Model("a", tmp_path / "a.onnx", Key() / "models" / 0),))
    with pytest.raises(BuildError) as raised:
        Workers(60).call(request, tmp_path / "call", location="a")
    (problem,) = raised.value.problems
    assert problem.kind is Kind.WORKER_CRASHED
    assert "access violation" in problem.message
    assert "access violation" in (problem.log or "")

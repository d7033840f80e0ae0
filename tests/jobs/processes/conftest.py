"""Real workers, which do what the source in a file says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Key, Problem
from hatch_epcontext.jobs.processes import process
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.processes.running import CAN_FORK
from hatch_epcontext.worker.requests import CheckRequest
from tests.altered_workers import write_start_code
from tests.kept_server import KeptServers

KEY = Key() / "models" / 0


def request_for(path: Path, name: str = "a") -> CheckRequest:
    return CheckRequest((Model(name, path, KEY),))


def problem(workers: Workers, folder: Path) -> Problem:
    """The problem of a worker in ``folder``."""
    with pytest.raises(BuildError) as raised:
        workers.call(request_for(folder / "a.onnx"), folder / "call", location="a -> npu")
    (only,) = raised.value.problems
    return only


def time_out_when_it_sleeps(workers: Workers) -> None:
    """Let a worker that prints "sleeping" be too slow; how long a machine needs until then is open."""

    def shorten(line: str) -> None:
        if line.endswith("sleeping"):
            workers.timeout = 1

    workers.log = shorten


def process_in(file: Path) -> int:
    """The number of a process that a worker wrote to ``file``."""
    return int(file.read_text("utf-8"))


@pytest.fixture
def one_server() -> None:
    """Here each build has a server of its own: when it starts and ends is what is tested."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with which workers run ``body.py`` there for check requests.

    A fork fails if there is a file ``failing``, and removes it. With the variable LOADS_NOTHING the server
    cannot import what takes most of its start, and no body needs.
    """
    folder = tmp_path_factory.mktemp("site")
    body, failing = folder / "body.py", folder / "failing"
    # Python runs it when it starts, and the server later imports the same module.
    source = f"""
        import os, pathlib
        def handle(request):
            names = {{"request": request}}
            exec(pathlib.Path({str(body)!r}).read_text("utf-8"), names)
            return names.get("reply")
        # What the real one imports, no body needs: ONNX Runtime, which takes most of the time of a start.
        check = types.ModuleType("hatch_epcontext.worker.actions.check")
        check.handle = handle
        sys.modules[check.__name__] = check
        if "LOADS_NOTHING" in os.environ:
            sys.modules.update(dict.fromkeys(("numpy", "onnx", "onnxruntime")))
        failing = pathlib.Path({str(failing)!r})
        def limited(fork=getattr(os, "fork", None)):
            if failing.exists():
                failing.unlink()
                raise BlockingIOError
            return fork()
        if hasattr(os, "fork"):
            os.fork = limited
        """
    write_start_code(folder, source)
    return folder


@pytest.fixture
def check(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source file of the body of ``handle`` for check requests, which the test writes."""
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return site / "body.py"


@pytest.fixture(params=[*(["forks"] if CAN_FORK else []), "interpreters"])
def workers(
    request: pytest.FixtureRequest, kept_servers: KeptServers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workers]:
    """Workers of each kind that the system has; the same server forks those of all tests."""
    monkeypatch.setattr(process, "ForkServer", kept_servers.get)
    workers = Workers(60)
    if request.param == "interpreters":
        yield workers
    else:
        with workers:
            yield workers


@pytest.fixture
def usual_workers(kept_servers: KeptServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Workers of the kind that builds use on this system."""
    monkeypatch.setattr(process, "ForkServer", kept_servers.get)
    with Workers(60) as workers:
        yield workers

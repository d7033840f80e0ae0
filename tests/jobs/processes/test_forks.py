"""The server that forks workers, and what becomes of them when it, or the build, ends or fails."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hatch_epcontext.errors import Kind
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.processes.running import Fork, ForkServer
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json, to_plain
from hatch_epcontext.worker.protocol import Order
from tests.conftest import REPOSITORY, is_running, wait_for
from tests.jobs.processes.conftest import (
    problem,
    process_in,
    request_for,
    time_out_when_it_sleeps,
)
from tests.jobs.processes.test_process import SLEEPING, wait_until_gone

if sys.platform != "linux":
    # Other systems do not even have the signals that it names.
    pytest.skip("only Linux forks workers", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture
def loaded_workers() -> Iterator[Workers]:
    """Forks of a server of their own."""
    with Workers(60) as started:
        yield started


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Forks of a server of their own, which loads nothing for them."""
    monkeypatch.setenv("LOADS_NOTHING", "1")
    with Workers(60) as started:
        yield started


def server_of(workers: Workers) -> int:
    server = workers._server
    assert server is not None
    return server._process.pid


def wait_for_process(file: Path) -> int:
    """The number of a process that writes it to ``file``, which is empty for a moment."""
    wait_for(lambda: file.exists() and file.read_text("utf-8") != "")
    return process_in(file)


def test_workers_are_forks_of_one_process_that_has_loaded_what_they_need(
    tmp_path: Path, check: Path, loaded_workers: Workers
) -> None:
    workers = loaded_workers
    check.write_text(
        "import os, sys\n"
        "known = sorted({'onnx', 'onnxruntime', 'numpy'} & sys.modules.keys())\n"
        "simulates = 'libQnnHtp.so' in open('/proc/self/maps').read()\n"
        "raise OSError(f'{os.getpid()} {os.getppid()} {simulates} {known}')\n",
        encoding="utf-8",
    )
    workers.expect([PROVIDERS["qnn"]])
    said = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        said.append(problem(workers, tmp_path / name).message.split(" ", 4)[1:])
    server = server_of(workers)
    simulates = str(importlib.util.find_spec("onnxruntime_qnn") is not None)
    both = [str(server), simulates, "['numpy', 'onnx', 'onnxruntime']"]
    assert [rest for _, *rest in said] == [both] * 2
    assert said[0][0] != said[1][0]
    workers.__exit__()
    assert not is_running(server)


def daemon(folder: Path) -> str:
    """The source that starts a process with a session of its own, which writes its number into ``folder``."""
    return (
        "import os, time\n"
        "if not (child := os.fork()):\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        f"    open({str(folder / 'new')!r}, 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(folder / 'new')!r}, {str(folder / 'daemon')!r})\n"
        "    time.sleep(600)\n"
        "os.waitpid(child, 0)\n"
        f"while not os.path.exists({str(folder / 'daemon')!r}): time.sleep(0.01)\n"
    )


def test_a_daemon_that_a_worker_started_ends_with_it(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    time_out_when_it_sleeps(workers)
    slow = "print('sleeping', flush=True); time.sleep(600)"
    ends = ("raise ValueError", "os.kill(os.getpid(), 9)", "os.abort()", slow)
    for end in ends:
        folder = tmp_path / str(ends.index(end))
        folder.mkdir()
        check.write_text(daemon(folder) + end, encoding="utf-8")
        problem(workers, folder)
        # Not some time later: it may use a device, or write to the folder of the request.
        assert not is_running(process_in(folder / "daemon")), end


@contextlib.contextmanager
def another_job(workers: Workers, folder: Path, check: Path, start: str = "") -> Iterator[None]:
    """A job that runs meanwhile, begins with the source ``start``, and answers after that."""
    (folder / "other").mkdir()
    check.write_text(
        f"{start}import pathlib, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "(folder / 'runs').touch()\n"
        "while not (folder / 'end').exists(): time.sleep(0.02)\n"
        "raise OSError('of its own')\n",
        encoding="utf-8",
    )
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(problem, workers, folder / "other")
        wait_for((folder / "runs").exists)
        try:
            yield
        finally:
            (folder / "end").touch()
        assert called.result(60).message == "OSError: of its own"


def test_the_end_of_a_worker_is_not_that_of_another_ones_daemon(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    with another_job(workers, tmp_path, check, daemon(tmp_path)):
        (tmp_path / "own").mkdir()
        check.write_text(f"{daemon(tmp_path / 'own')}os.abort()", encoding="utf-8")
        problem(workers, tmp_path / "own")
        assert not is_running(process_in(tmp_path / "own" / "daemon"))
        assert is_running(process_in(tmp_path / "daemon"))
    assert not is_running(process_in(tmp_path / "daemon"))


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_build_however_it_ends(
    tmp_path: Path, check: Path, by: signal.Signals, forks: bool
) -> None:
    # Only the server of forks knows processes outside of the worker's group.
    start = daemon(tmp_path) if forks else ""
    check.write_text(f"{start}{SLEEPING}time.sleep(600)\n", encoding="utf-8")
    folder = tmp_path / "call"
    script = textwrap.dedent(f"""
        from pathlib import Path
        from hatch_epcontext.jobs.processes.process import Workers
        from tests.jobs.processes.conftest import request_for
        workers = Workers(600)
        if {forks}: workers.__enter__()
        workers.call(request_for(Path("a.onnx")), Path({str(folder)!r}), location="a")
        """)
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as build:
        wait_for_process(folder / "worker")
        build.send_signal(by)
    for file in (folder / "worker", folder / "child", *tmp_path.glob("daemon")):
        wait_until_gone(process_in(file))


def test_workers_end_with_their_server_and_the_next_ones_are_interpreters(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(f"{SLEEPING}time.sleep(600)\n", encoding="utf-8")
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(problem, workers, tmp_path)
        worker = wait_for_process(tmp_path / "call" / "worker")
        os.kill(server_of(workers), signal.SIGKILL)
        assert called.result(60).kind is Kind.WORKER_KILLED
    wait_until_gone(worker)
    os.kill(process_in(tmp_path / "call" / "child"), signal.SIGKILL)
    check.write_text("raise OSError('another')\n", encoding="utf-8")
    (tmp_path / "two").mkdir()
    assert problem(workers, tmp_path / "two").message == "OSError: another"


@pytest.mark.parametrize(
    ("module", "message"),
    [("numpy", "the worker crashed with SIGILL"), ("onnxruntime", "OSError: of its own")],
)
def test_a_server_whose_imports_crash_is_replaced_by_interpreters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Path,
    loaded_workers: Workers,
    module: str,
    message: str,
) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / f"{module}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(fake), prepend=os.pathsep)
    # What every worker imports, and what only some need.
    check.write_text("import numpy\nraise OSError('of its own')\n", encoding="utf-8")
    assert problem(loaded_workers, tmp_path).message.startswith(message)


@pytest.mark.parametrize("reason", ["too many processes", "too many open files"])
def test_a_fork_that_fails_is_replaced_by_an_interpreter_alone(
    tmp_path: Path, site: Path, check: Path, workers: Workers, reason: str
) -> None:
    import resource

    with another_job(workers, tmp_path, check):
        if reason == "too many processes":
            (site / "failing").touch()
        else:
            resource.prlimit(server_of(workers), resource.RLIMIT_NOFILE, (3, 3))
        check.write_text("raise OSError('another')\n", encoding="utf-8")
        assert problem(workers, tmp_path).message == "OSError: another"
    assert not (site / "failing").exists()


def test_a_worker_that_the_system_does_not_start_fails_alone(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with another_job(workers, tmp_path, check), contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
        full = stack.enter_context(contextlib.ExitStack())
        last = os.open(os.devnull, os.O_RDONLY)
        with contextlib.suppress(OSError):
            while True:
                full.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        # Enough to make the worker's log.
        os.close(last)
        refused = problem(workers, tmp_path)
    assert refused.kind is Kind.SYSTEM_ERROR
    assert refused.message == "the worker cannot be started: Too many open files."


def test_a_worker_that_does_not_end_leaves_the_others_alone(
    tmp_path: Path, check: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.jobs.processes.running._GRACE", 1.0)
    with another_job(workers, tmp_path, check):
        check.write_text(
            f"import os, time\nos.kill({server_of(workers)}, 19)\ntime.sleep(600)\n",
            encoding="utf-8",
        )
        slow = copy.copy(workers)
        slow.timeout = 1
        assert problem(slow, tmp_path).kind is Kind.WORKER_TIMEOUT
        (tmp_path / "next").mkdir()
        check.write_text("raise OSError('another')\n", encoding="utf-8")
        assert problem(workers, tmp_path / "next").message == "OSError: another"


def test_workers_that_end_when_they_are_killed_do_not_end_the_server(
    tmp_path: Path, check: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADS_NOTHING", "1")
    check.write_text("", encoding="utf-8")
    order = Order("check", to_plain(request_for(tmp_path / "a.onnx")), tmp_path)
    server = ForkServer()
    try:
        for _ in range(10):
            forks = [Fork(server) for _ in range(12)]
            for fork in forks:
                fork.answer(to_json(order, indent=None).encode(), 0.01)
                fork.kill()
            for fork in forks:
                fork.close()
        assert server._process.poll() is None
    finally:
        server.close()

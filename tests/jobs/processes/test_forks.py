"""Real workers that are forks of one process, some of which misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.processes import process
from hatch_epcontext.jobs.processes.forks import ForkServer
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.processes.running import WorkerCommand
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.worker.requests import CheckReply, CheckRequest
from tests.altered_workers import write_start_code
from tests.conftest import REPOSITORY, needs_qnn, wait_for
from tests.jobs.processes.test_process import KEY, LEAVING_FILES, request_for
from tests.kept_server import KeptServers
from tests.models import network, save

if sys.platform != "linux":
    # Other systems do not even have the signals that it names.
    pytest.skip("only Linux forks workers", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with which workers run ``body.py`` there for check requests.

    As many forks fail as the file ``failing`` there says.
    """
    folder = tmp_path_factory.mktemp("site")
    body, failing = folder / "body.py", folder / "failing"
    # Python runs it when it starts, and the server later imports the same module.
    source = f"""
        import os, pathlib
        from hatch_epcontext.worker.actions import check
        def handle(request):
            exec(pathlib.Path({str(body)!r}).read_text(), {{"request": request}})
        check.handle = handle
        failing, fork = pathlib.Path({str(failing)!r}), os.fork
        def limited():
            if failing.exists() and (times := int(failing.read_text())):
                failing.write_text(str(times - 1))
                raise BlockingIOError
            return fork()
        os.fork = limited
        """
    write_start_code(folder, source)
    return folder


@pytest.fixture
def check(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source file of the body of ``handle`` for check requests, which the test writes."""
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return site / "body.py"


@pytest.fixture
def kept_server(kept_servers: KeptServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of single workers: the same server forks those of all these tests."""
    monkeypatch.setattr(process, "ForkServer", kept_servers.get)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(60) as started:
        yield started


def problem(workers: Workers, folder: Path) -> Problem:
    with pytest.raises(BuildError) as raised:
        workers.call(request_for(folder / "a.onnx"), folder / "call", location="a -> npu")
    (found,) = raised.value.problems
    return found


def test_what_libraries_leave_in_the_temporary_folder_is_in_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Path
) -> None:
    check.write_text(LEAVING_FILES, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with Workers(60) as workers:
        problem(workers, tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    names = sorted(each.name[:8] for each in (tmp_path / "call" / "tmp").iterdir())
    assert names == ["of-a-chi", "of-pytho"]


def wait_until_gone(process_id: int) -> None:
    end = time.monotonic() + 60
    while is_running(process_id):
        assert time.monotonic() < end, f"the process {process_id} still runs"
        time.sleep(0.05)


def is_running(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def server_of(workers: Workers) -> int:
    server = workers._processes._server
    assert server is not None
    return server._process.pid


def test_workers_are_forks_of_one_process_and_end_with_it(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "import os, sys\n"
        "from hatch_epcontext.errors import BuildError, Kind, Problem\n"
        "known = sorted({'onnx', 'onnxruntime', 'numpy'} & sys.modules.keys())\n"
        "stat = open(f'/proc/{os.getppid()}/stat').read()\n"
        "server = stat.rpartition(')')[2].split()[1]\n"
        "text = f'{os.getpid()} {server} {known}'\n"
        "raise BuildError(Problem(Kind.COMPILE_FAILED, '', text))\n",
        encoding="utf-8",
    )
    said = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        said.append(problem(workers, tmp_path / name).message.split(" ", 2))
    server = server_of(workers)
    assert [parent for _, parent, _ in said] == [str(server)] * 2
    assert said[0][0] != said[1][0]
    assert said[0][2] == "['numpy', 'onnx']"
    assert said[1][2] == "['numpy', 'onnx', 'onnxruntime']"
    workers.__exit__()
    assert not is_running(server)


def test_a_fork_answers_as_an_interpreter_does(tmp_path: Path, workers: Workers) -> None:
    path = save(network(), tmp_path / "a.onnx")
    request = CheckRequest((Model("a", path, KEY),))
    forked = workers.call(request, tmp_path / "fork", location="reading")
    assert isinstance(forked, CheckReply)
    assert forked == Workers(60).call(request, tmp_path / "interpreter", location="reading")


@needs_qnn
def test_forks_share_the_simulator_of_what_they_compile_for(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "maps = open('/proc/self/maps').read()\nraise OSError(str('libQnnHtp.so' in maps))\n",
        encoding="utf-8",
    )
    workers.expect([PROVIDERS["qnn"]])
    # The first fork begins before that.
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        last = problem(workers, tmp_path / name)
    assert last.message == "OSError: True"


def test_many_threads_share_the_server(tmp_path: Path, workers: Workers) -> None:
    path = save(network(), tmp_path / "a.onnx")

    def call(number: int) -> CheckReply:
        return workers.call(request_for(path), tmp_path / str(number), location="a")

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(call, range(24)))
    assert all(reply == replies[0] for reply in replies)


@pytest.mark.usefixtures("kept_server")
def test_a_crash_ends_the_worker_alone(tmp_path: Path, check: Path, workers: Workers) -> None:
    check.write_text(
        "import os, signal\nprint('compiling', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        encoding="utf-8",
    )
    crashed = problem(workers, tmp_path)
    assert crashed.kind is Kind.WORKER_CRASHED
    assert "SIGSEGV" in crashed.message
    assert crashed.log is not None
    assert crashed.log.startswith("compiling\nFatal Python error: Segmentation fault")
    check.write_text("import os\nos._exit(7)\n", encoding="utf-8")
    (tmp_path / "two").mkdir()
    ended = problem(workers, tmp_path / "two")
    assert ended.kind is Kind.WORKER_CRASHED
    assert "exit code 7" in ended.message


@pytest.mark.usefixtures("kept_server")
def test_what_native_code_prints_is_in_the_log(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')\nraise OSError('failed')\n",
        encoding="utf-8",
    )
    assert "from C" in (problem(workers, tmp_path).log or "")


@pytest.mark.usefixtures("kept_server")
@pytest.mark.parametrize("way", ["sleeps", "is stopped"])
def test_a_worker_is_killed_after_the_timeout_with_what_it_started(
    tmp_path: Path, check: Path, way: str
) -> None:
    check.write_text(
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        f"if {way!r} == 'is stopped': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    with Workers(1) as workers:
        stopped = problem(workers, tmp_path)
    assert stopped.kind is Kind.WORKER_TIMEOUT
    wait_until_gone(int((tmp_path / "child").read_text(encoding="ascii")))


@pytest.mark.usefixtures("kept_server")
def test_what_a_worker_leaves_behind_ends_with_it(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "raise OSError(child.pid)\n",
        encoding="utf-8",
    )
    wait_until_gone(int(problem(workers, tmp_path).message.removeprefix("OSError: ")))


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


@pytest.mark.parametrize("forks", [True, False])
def test_a_daemon_that_a_worker_started_ends_with_it(
    tmp_path: Path, check: Path, forks: bool
) -> None:
    ends = {
        "well": "raise ValueError",
        "killed": "os.kill(os.getpid(), 9)",
        "crashed": "os.kill(os.getpid(), 11)",
        "too slow": "time.sleep(600)",
    }
    with contextlib.ExitStack() as stack:
        workers = Workers(60)
        if forks:
            stack.enter_context(workers)
        for name, end in ends.items():
            if name == "too slow":
                workers = dataclasses.replace(workers, timeout=1 if forks else 4)
            folder = tmp_path / name
            folder.mkdir()
            check.write_text(daemon(folder) + end, encoding="utf-8")
            problem(workers, folder)
            # Not some time later: it may use a device, or write to the folder of the step.
            assert not is_running(int((folder / "daemon").read_text("ascii"))), name


@pytest.mark.parametrize("by", ["build", "server", "supervisor"])
def test_daemons_of_four_workers_live_and_end_with_their_own(
    tmp_path: Path, check: Path, by: str
) -> None:
    ends = {"one": "raise ValueError", "two": "os.abort()", "three": "pass", "four": "pass"}
    source = "import os, time\n"
    for name, end in ends.items():
        folder = tmp_path / name
        folder.mkdir()
        own = textwrap.indent(
            f"{daemon(folder)}"
            f"while not os.path.exists({str(folder / 'end')!r}): time.sleep(0.01)\n{end}\n",
            "    ",
        )
        source += f"if os.getcwd() == {str(folder / 'call')!r}:\n{own}"
    check.write_text(source, encoding="utf-8")
    script = textwrap.dedent(f"""
        import sys, threading
        from pathlib import Path
        from hatch_epcontext.jobs.processes.process import Workers
        from tests.jobs.processes.test_process import request_for
        with Workers(600) as workers:
            def call(name):
                folder = Path({str(tmp_path)!r}, name)
                try:
                    workers.call(request_for(folder / "a.onnx"), folder / "call", location="a")
                except Exception:
                    (folder / "ended").touch()
            threads = [threading.Thread(target=call, args=(name,)) for name in {list(ends)}]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        """)
    build = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    try:
        daemons = {name: number_in(tmp_path / name / "daemon") for name in ends}
        for name in ("one", "two"):
            (tmp_path / name / "end").touch()
            wait_for((tmp_path / name / "ended").exists)
            assert not is_running(daemons.pop(name))
            assert all(map(is_running, daemons.values()))
        (supervisor,) = children_of(build.pid)
        (server,) = children_of(supervisor)
        os.kill({"build": build.pid, "server": server, "supervisor": supervisor}[by], 9)
        for number in daemons.values():
            wait_until_gone(number)
    finally:
        build.kill()
        build.wait()


def number_in(file: Path) -> int:
    """The number that a process writes into ``file``, which is empty for a moment."""
    wait_for(lambda: file.exists() and file.read_text(encoding="ascii") != "")
    return int(file.read_text(encoding="ascii"))


def children_of(process_id: int) -> list[int]:
    found: list[int] = []
    for each in Path(f"/proc/{process_id}/task").glob("*/children"):
        # Its thread may have ended.
        with contextlib.suppress(FileNotFoundError):
            found += map(int, each.read_text(encoding="ascii").split())
    return found


def test_a_daemon_ends_when_the_server_of_its_worker_is_killed(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        f"{daemon(tmp_path)}\nos.kill(os.getppid(), 9)\ntime.sleep(600)", encoding="utf-8"
    )
    assert problem(workers, tmp_path).kind is Kind.WORKER_KILLED
    wait_until_gone(int((tmp_path / "daemon").read_text("ascii")))


def write_crashing(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / f"{module}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def test_a_server_that_cannot_start_workers_is_replaced_by_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    # What every worker imports crashes.
    write_crashing("numpy", tmp_path / "fake", monkeypatch)
    crashed = problem(workers, tmp_path)
    assert crashed.kind is Kind.WORKER_CRASHED
    assert "SIGILL" in crashed.message


def test_a_server_that_crashes_beside_a_worker_does_not_take_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Path, workers: Workers
) -> None:
    # What only some workers import crashes, and the server imports it for them.
    write_crashing("onnxruntime", tmp_path / "fake", monkeypatch)
    check.write_text(
        "import time\ntime.sleep(1.5)\nraise OSError('of its own')\n", encoding="utf-8"
    )
    assert problem(workers, tmp_path).message == "OSError: of its own"


def test_workers_end_with_their_server_and_the_next_ones_are_interpreters(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    started = tmp_path / "started"
    check.write_text(
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n",
        encoding="utf-8",
    )
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(problem, workers, tmp_path)
        number = number_in(started)
        os.kill(server_of(workers), signal.SIGKILL)
        assert called.result(60).kind is Kind.WORKER_KILLED
    wait_until_gone(number)
    check.write_text("raise OSError('another')\n", encoding="utf-8")
    (tmp_path / "two").mkdir()
    assert problem(workers, tmp_path / "two").message == "OSError: another"


@contextlib.contextmanager
def another_job(workers: Workers, folder: Path, check: Path) -> Iterator[None]:
    """A job that runs meanwhile, and answers after that."""
    (folder / "other").mkdir()
    check.write_text(
        "import pathlib, time\n"
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


def test_a_worker_falls_back_alone_where_the_server_has_too_many_open_files(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    import resource

    with another_job(workers, tmp_path, check):
        (server,) = children_of(server_of(workers))
        resource.prlimit(server, resource.RLIMIT_NOFILE, (3, 3))
        check.write_text("raise OSError('another')\n", encoding="utf-8")
        assert problem(workers, tmp_path).message == "OSError: another"


@pytest.mark.parametrize("times", [1, 2])
def test_a_fork_that_fails_ends_its_worker_alone(
    tmp_path: Path, site: Path, check: Path, workers: Workers, times: int
) -> None:
    with another_job(workers, tmp_path, check):
        (site / "failing").write_text(str(times), encoding="ascii")
        check.write_text("raise OSError('another')\n", encoding="utf-8")
        found = problem(workers, tmp_path)
    assert (site / "failing").read_text(encoding="ascii") == "0"
    if times == 1:
        assert found.message == "OSError: another"
    else:
        assert found.kind is Kind.SYSTEM_ERROR
        assert found.message == "the worker cannot be started: the system refuses a fork."


def test_a_worker_that_does_not_end_leaves_the_others_alone(
    tmp_path: Path, check: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GRACE", "_BUSY"):
        monkeypatch.setattr(f"hatch_epcontext.jobs.processes.forks.{name}", 1.0)
    with another_job(workers, tmp_path, check):
        (server,) = children_of(server_of(workers))
        check.write_text(
            f"import os, time\nos.kill({server}, 19)\ntime.sleep(600)\n", encoding="utf-8"
        )
        slow = dataclasses.replace(workers, timeout=1)
        assert problem(slow, tmp_path).kind is Kind.WORKER_TIMEOUT
        (tmp_path / "next").mkdir()
        check.write_text("raise OSError('another')\n", encoding="utf-8")
        assert problem(workers, tmp_path / "next").message == "OSError: another"


def test_workers_that_end_when_they_are_killed_do_not_end_the_server(
    tmp_path: Path, check: Path
) -> None:
    check.write_text("", encoding="utf-8")
    save(network(), tmp_path / "a.onnx")
    order = WorkerCommand("check", to_json(request_for(tmp_path / "a.onnx"), indent=None), tmp_path)
    server = ForkServer()
    try:
        for _ in range(10):
            forks = [server.start() for _ in range(12)]
            for fork in forks:
                fork.send(order, 60)
                fork.wait(0.01)
                fork.kill()
            for fork in forks:
                fork.close()
        assert server._process.poll() is None
    finally:
        server.close()


@pytest.mark.parametrize("is_for_one", [True, False])
def test_a_worker_that_may_end_before_it_reads_its_order_was_started(
    tmp_path: Path, is_for_one: bool
) -> None:
    server = ForkServer(tmp_path / "log" if is_for_one else None)
    try:
        fork = server.start()
        fork.send(WorkerCommand("check", "no request", tmp_path), 60)
        fork.kill()
        # It has perhaps read the order, which has no request.
        assert fork.wait(60) in (-signal.SIGKILL, 1)
        fork.close()
    finally:
        server.close()


@pytest.mark.usefixtures("kept_server")
def test_stopping_kills_running_forks(tmp_path: Path, check: Path, workers: Workers) -> None:
    check.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    found: list[Problem] = []
    thread = threading.Thread(target=lambda: found.append(problem(workers, tmp_path)))
    thread.start()
    number = number_in(tmp_path / "pid")
    workers.stop()
    thread.join(60)
    assert found[0].kind is Kind.INTERRUPTED
    wait_until_gone(number)


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_build_however_it_ends(
    tmp_path: Path, check: Path, by: signal.Signals, forks: bool
) -> None:
    check.write_text(
        f"{daemon(tmp_path)}\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    script = textwrap.dedent(f"""
        from pathlib import Path
        from hatch_epcontext.jobs.processes.process import Workers
        from tests.jobs.processes.test_process import request_for
        workers = Workers(600)
        if {forks}: workers.__enter__()
        workers.call(request_for(Path("a.onnx")), Path({str(tmp_path / "call")!r}), location="a")
        """)
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root) as build:
        number_in(tmp_path / "pid")
        build.send_signal(by)
    for name in ("pid", "daemon"):
        wait_until_gone(int((tmp_path / name).read_text(encoding="ascii")))


@pytest.mark.parametrize("forks", [True, False])
def test_too_little_memory_is_an_error_of_its_own(tmp_path: Path, check: Path, forks: bool) -> None:
    check.write_text("bytearray(3 * 10**9)\n", encoding="utf-8")
    workers = Workers(60, memory_limit=2 * 10**9)
    if forks:
        with workers:
            limited = problem(workers, tmp_path)
    else:
        limited = problem(workers, tmp_path)
    assert limited.kind is Kind.OUT_OF_MEMORY
    assert [str(each) for each in limited.settings] == [
        'tool.epcontext.build.memory-limit = "4000 MB"'
    ]


@pytest.mark.usefixtures("kept_server")
def test_a_refusal_for_too_little_memory_names_the_limit(tmp_path: Path, check: Path) -> None:
    check.write_text(
        "from hatch_epcontext.errors import Kind, ModelError, Problem\n"
        "text = 'the source model itself cannot be run on the CPU: std::bad_alloc'\n"
        "raise ModelError(Problem(Kind.SOURCE_FAILED, 'models[0]', text))\n",
        encoding="utf-8",
    )
    with Workers(60, memory_limit=2 * 10**9) as workers:
        limited = problem(workers, tmp_path)
    assert (limited.kind, limited.location) == (Kind.OUT_OF_MEMORY, "models[0]")
    assert limited.message.endswith("cannot be run on the CPU: std::bad_alloc")


@pytest.mark.usefixtures("kept_server")
def test_with_a_limit_every_failure_may_be_its_fault(tmp_path: Path, check: Path) -> None:
    check.write_text("raise OSError('a node was not selected')\n", encoding="utf-8")
    with Workers(60, memory_limit=2 * 10**9) as workers:
        failed = problem(workers, tmp_path)
    assert failed.kind is Kind.COMPILE_FAILED
    assert "tool.epcontext.build.memory-limit is 2.0 GB" in failed.advice()


@pytest.mark.usefixtures("kept_server")
def test_the_hint_names_the_variable_that_sets_the_limit(
    tmp_path: Path, check: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_TIMEOUT", "3")
    check.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    with Workers(0.2) as workers:
        stopped = problem(workers, tmp_path)
    assert "HATCH_EPCONTEXT_TIMEOUT" in stopped.advice()
    assert stopped.settings == ()


@pytest.mark.usefixtures("kept_server")
@pytest.mark.parametrize(
    "body",
    [
        "raise MemoryError",
        "import os\nprint('terminate called after throwing: std::bad_alloc', flush=True)\nos.abort()",
    ],
)
def test_without_a_limit_short_memory_is_not_blamed_on_it(
    tmp_path: Path, check: Path, workers: Workers, body: str
) -> None:
    check.write_text(body, encoding="utf-8")
    short = problem(workers, tmp_path)
    assert short.kind is Kind.OUT_OF_MEMORY
    assert "build.jobs" in short.advice()
    assert "memory-limit" not in short.text()


@pytest.mark.usefixtures("kept_server")
def test_long_steps_are_reported_while_they_run(
    tmp_path: Path, check: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.jobs.processes.process._FIRST_BEAT", 0.2)
    monkeypatch.setattr("hatch_epcontext.jobs.processes.process._NEXT_BEATS", 0.2)
    check.write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'seen')!r}): time.sleep(0.05)\n"
        "raise OSError\n",
        encoding="utf-8",
    )
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            (tmp_path / "seen").touch()

    with Workers(60, progress=progress) as workers:
        problem(workers, tmp_path)
    assert lines[0].startswith("a -> npu: check has run for ")
    assert lines[0].endswith(" s")


@pytest.mark.usefixtures("kept_server")
@pytest.mark.parametrize("reply", ['b\'{"models": [{"inp\'', "bytes(range(256))", "None"])
def test_a_reply_that_cannot_be_read_is_a_crash_with_the_end_of_the_log(
    tmp_path: Path, check: Path, workers: Workers, reply: str
) -> None:
    check.write_text(
        "import os\n"
        "print('compiling', flush=True)\n"
        f"reply = {reply}\n"
        "from hatch_epcontext.worker.progress import _listeners\n"
        "if reply is not None: _listeners[0](b'reply ' + reply + b'\\nanswered 0\\n')\n"
        "os._exit(0)\n",
        encoding="utf-8",
    )
    crashed = problem(workers, tmp_path)
    assert (crashed.kind, crashed.location) == (Kind.WORKER_CRASHED, "a -> npu")
    assert crashed.log == "compiling"


@pytest.mark.usefixtures("kept_server")
def test_a_worker_that_floods_its_log_is_stopped(
    tmp_path: Path, check: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.jobs.processes.process.LOG_LIMIT", 10**6)
    check.write_text(
        "import os\nwhile True: os.write(1, b'x' * 10_000_000 + b'\\nthe end\\n')\n",
        encoding="utf-8",
    )
    lines: list[str] = []
    with Workers(60, lines.append) as workers:
        flooded = problem(workers, tmp_path)
    assert flooded.kind is Kind.WORKER_CRASHED
    assert "1.0 MB" in flooded.message
    assert flooded.log is not None
    assert len(flooded.log) < 100_000
    assert max(map(len, lines)) < 3000


@pytest.mark.usefixtures("kept_server")
def test_a_line_that_never_ends_is_shown_by_its_beginning(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text("print('x' * 10**6, flush=True)\nraise ValueError\n", encoding="utf-8")
    log = problem(workers, tmp_path).log
    assert log is not None
    assert "ValueError" in log
    assert max(map(len, log.splitlines())) < 3000


@pytest.mark.usefixtures("kept_server")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_worker_answers_although_its_log_cannot_be_written(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "import os\n"
        "full = os.open('/dev/full', os.O_WRONLY)\n"
        "for each in (1, 2): os.dup2(full, each)\n"
        "raise OSError(28, 'No space left on device')\n",
        encoding="utf-8",
    )
    assert problem(workers, tmp_path).kind is Kind.SYSTEM_ERROR

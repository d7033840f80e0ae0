"""Real worker processes of each kind, some of which misbehave."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from pathlib import Path

import onnxruntime
import pytest
from packaging.version import Version

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.jobs.processes import failures
from hatch_epcontext.jobs.processes.failures import TAIL
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.system import core_numbers, cores
from hatch_epcontext.worker.protocol import ACTIVITY, LOG
from hatch_epcontext.worker.requests import PrepareRequest
from tests.conftest import is_running, wait_for
from tests.jobs.processes.conftest import (
    KEY,
    problem,
    process_in,
    request_for,
    time_out_when_it_sleeps,
)
from tests.models import network, save

pytestmark = pytest.mark.slow

only_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")

SLEEPING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for name, number in (("child", child.pid), ("worker", os.getpid())):
    with open(name, "w") as file: file.write(str(number))
print("sleeping", flush=True)
"""
"""Starts a child, and writes the numbers of both processes."""


def wait_until_gone(process: int) -> None:
    wait_for(lambda: not is_running(process))


def test_a_reply_has_its_own_type_and_a_refusal_its_own_location_and_no_log(
    tmp_path: Path, workers: Workers
) -> None:
    path = save(network(), tmp_path / "a.onnx")
    reply = workers.call(request_for(path), tmp_path / "reply", location="reading")
    assert reply[0].inputs[0].shape == ("batch", 1, 8, 8)
    path.write_text("text", encoding="utf-8")
    refused = problem(workers, tmp_path)
    assert refused.key == KEY
    assert "is not an ONNX model" in refused.message
    assert refused.log is None


ANSWERING = """
import os
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.protocol import ACTIVITY, LOG
from hatch_epcontext.worker.results import ModelFacts
name = request.models[0].name
announce("looking")
print(name, "prints", flush=True)
if name == "crash":
    os.abort()
if name == "fail":
    raise BuildError(Problem(Kind.COMPILE_FAILED, "", f"it fails in {os.getcwd()}"))
open("pid", "w").write(f"{os.getpid()} {os.environ['TMPDIR']}")
reply = (ModelFacts((), (), ()),)
"""


@only_posix
@pytest.mark.parametrize("last", ["crash", "fail"])
def test_a_worker_answers_several_requests_each_in_a_folder_of_its_own(
    tmp_path: Path, check: Path, workers: Workers, last: str
) -> None:
    check.write_text(ANSWERING, encoding="utf-8")
    names, path = ("one", "two"), tmp_path / "a.onnx"
    with workers.process() as worker:
        for name in names:
            worker.call(request_for(path, name), tmp_path / name, location=name)
        with pytest.raises(BuildError) as raised:
            worker.call(request_for(path, last), tmp_path / last, location="the last one")
    said = [(tmp_path / name / "pid").read_text(encoding="utf-8").split() for name in names]
    assert said[0][0] == said[1][0]
    assert [Path(temporary).name for _, temporary in said] == ["one", "two"]
    for name in (*names, last):
        log = (tmp_path / name / "worker.log").read_text(encoding="utf-8")
        assert log.splitlines()[0] == f"{name} prints"
    (failed,) = raised.value.problems
    assert failed.location == "the last one"
    assert failed.kind is (Kind.WORKER_CRASHED if last == "crash" else Kind.COMPILE_FAILED)
    found = re.search(r" while looking \(for \d+ s\)", failed.message)
    assert (found is not None) == (last == "crash")


USED = """
import os, sys
sys.tasks = getattr(sys, "tasks", 0) + 1
open("pid", "w").write(str(os.getpid()))
if request.models[0].name == "spoilt" and sys.tasks > 1:
    os.abort()
if request.models[0].name == "fail":
    raise ValueError(f"task {sys.tasks}")
reply = ()
"""


@only_posix
def test_tasks_of_one_purpose_share_processes_and_only_a_new_one_decides_that_one_fails(
    tmp_path: Path, check: Path
) -> None:
    check.write_text(USED, encoding="utf-8")

    def answering(name: str, purpose: str | None) -> int:
        folder = tmp_path / f"{name} {purpose} {len(list(tmp_path.iterdir()))}"
        with workers.process(purpose) as worker:
            worker.call(request_for(tmp_path / "a.onnx", name), folder, location=name)
        return process_in(folder / "pid")

    with Workers(60) as workers:
        first = answering("one", "run")
        others = [answering("two", purpose) for purpose in ("optimize", None, "run")]
        assert first not in others[:2]
        assert others[2] == first
        assert answering("spoilt", "run") != first
        with pytest.raises(BuildError, match=r"task 1$"):
            answering("fail", "optimize")
        assert answering("three", "optimize") not in others
        idle = [answering("three", "run"), answering("three", "optimize")]
    for process in idle:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_are_busy_while_each_core_has_a_task() -> None:
    with Workers(60) as workers, contextlib.ExitStack() as tasks:
        for number in range(cores()):
            assert not workers.is_busy, number
            tasks.enter_context(workers.process())
        assert workers.is_busy
        tasks.close()
        assert not workers.is_busy


def test_tasks_on_one_core_have_different_ones_and_free_ones_first() -> None:
    workers, numbers = Workers(60), core_numbers()
    with contextlib.ExitStack() as tasks:
        taken = [tasks.enter_context(workers.one_core()) for _ in numbers]
        assert sorted(taken) == numbers
        with workers.one_core() as shared:
            assert shared in numbers
    with workers.one_core() as first, workers.one_core() as second:
        assert len(numbers) == 1 or first != second
        with contextlib.ExitStack() as others:
            used = {others.enter_context(workers.one_core()) for _ in numbers[2:]}
            assert used.isdisjoint({first, second})


PRINTING = "for number in range(50): print('line', number, flush=True)\n"
KILLING = "import os, signal\nos.kill(os.getpid(), signal.{})\n"
FULL = """
import os
if os.path.exists("/dev/full"):
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (1, 2): os.dup2(full, descriptor)
raise OSError(28, "No space left on device")
"""
ALTERED_REPLY = (
    "import os, sys\n"
    "module = sys.modules.get('hatch_epcontext.worker.__main__') or sys.modules['__main__']\n"
    "print('compiling', flush=True)\n"
    "module.to_json = lambda *_, **__: {!r}\n"
)


CRASHED, FAILED = Kind.WORKER_CRASHED, Kind.COMPILE_FAILED


@only_posix
@pytest.mark.parametrize(
    ("body", "kind", "words", "logged"),
    [
        (PRINTING + KILLING.format("SIGSEGV"), CRASHED, "with SIGSEGV", "line 49\nFatal"),
        (KILLING.format("SIGKILL"), Kind.WORKER_KILLED, "when memory is short", ""),
        ("import os\nos._exit(7)\n", CRASHED, "exit code 7 and without a reply", ""),
        ("import sys\nsys.exit(7)\n", CRASHED, "without a reply", ""),
        ("raise OSError('libx is missing')", FAILED, "OSError: libx", "Traceback"),
        ("import ctypes\nctypes.CDLL(None).puts(b'of C')\n1/0", FAILED, "Zero", "of C"),
        ("print('x' * 10**6)\nraise ValueError", FAILED, "ValueError", "ValueError"),
        ("print('\\x1b[0;93mof C\\x1b[m')\n1/0", FAILED, "Zero", "of C\nTraceback"),
        (ALTERED_REPLY.format('{"models": [{"inp\n'), CRASHED, "cannot be read", "compiling"),
        (ALTERED_REPLY.format("\udcff\n"), CRASHED, "without a reply", "compiling"),
        (FULL, Kind.SYSTEM_ERROR, "No space left on device", ""),
    ],
)
def test_how_a_worker_ends_is_one_message_with_the_end_of_its_log(
    tmp_path: Path,
    check: Path,
    usual_workers: Workers,
    body: str,
    kind: Kind,
    words: str,
    logged: str,
) -> None:
    check.write_text(body, encoding="utf-8")
    ended = problem(usual_workers, tmp_path)
    assert (ended.kind, ended.location) == (kind, "a -> npu")
    assert words in f"{ended.message} {ended.advice()}"
    log = ended.log or ""
    assert logged in log
    assert len(log.splitlines()) <= TAIL
    assert max(map(len, log.splitlines()), default=0) < 3000


@only_posix
@pytest.mark.parametrize("way", ["sleeps", "is stopped"])
def test_a_worker_is_killed_after_the_timeout_with_what_it_started(
    tmp_path: Path, check: Path, workers: Workers, way: str
) -> None:
    stop = "os.kill(os.getpid(), 19)\n" if way == "is stopped" else ""
    check.write_text(f"{SLEEPING}{stop}time.sleep(600)\n", encoding="utf-8")
    time_out_when_it_sleeps(workers)
    stopped = problem(workers, tmp_path)
    assert stopped.kind is Kind.WORKER_TIMEOUT
    assert "after 1 seconds" in stopped.message
    assert "build.timeout" in stopped.text()
    assert stopped.log == "sleeping"
    for name in ("worker", "child"):
        wait_until_gone(process_in(tmp_path / "call" / name))


def test_stopping_kills_running_workers(tmp_path: Path, check: Path, workers: Workers) -> None:
    check.write_text(f"{SLEEPING}time.sleep(600)\n", encoding="utf-8")

    def stop(line: str) -> None:
        if line.endswith("sleeping"):
            threading.Thread(target=workers.stop).start()

    workers.log = stop
    stopped = problem(workers, tmp_path)
    assert stopped.message == "the build was interrupted."
    if sys.platform != "win32":
        assert not is_running(process_in(tmp_path / "call" / "worker"))


def test_the_log_is_forwarded_while_a_worker_runs(
    tmp_path: Path, check: Path, workers: Workers
) -> None:
    check.write_text(
        "import os, time\n"
        "print('\\x1b[0;93mfirst\\x1b[m', flush=True)\n"
        "while not os.path.exists('seen'): time.sleep(0.05)\n"
        "print('second', end='', flush=True)\n"
        "os._exit(7)\n",
        encoding="utf-8",
    )
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if line.endswith("first"):
            (tmp_path / "call" / "seen").touch()

    workers.log = log
    problem(workers, tmp_path)
    assert lines[:3] == ["a -> npu: check ...", "a -> npu | first", "a -> npu | second"]
    assert re.fullmatch(r"a -> npu: check took \d+\.\d s", lines[3])
    assert len(lines) == 4


def test_a_worker_that_floods_its_log_is_stopped(
    tmp_path: Path, check: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.jobs.processes.failures.LOG_LIMIT", 10**6)
    check.write_text(
        "import os\nwhile True: os.write(1, b'x' * 10_000_000 + b'\\nthe end\\n')\n",
        encoding="utf-8",
    )
    lines: list[str] = []
    workers.log = lines.append
    flooded = problem(workers, tmp_path)
    assert flooded.kind is Kind.WORKER_CRASHED
    assert "1.0 MB" in flooded.message
    assert flooded.log is not None
    assert len(flooded.log) < 100_000
    assert max(map(len, lines)) < 3000


def test_long_activities_are_reported_while_they_run(
    tmp_path: Path, check: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatch_epcontext.system._NEXT_BEATS", 0.2)
    check.write_text(
        "import os, time\n"
        "from hatch_epcontext.worker.protocol import announce\n"
        "announce('waiting', 'for a file')\n"
        "while not os.path.exists('seen'): time.sleep(0.05)\n"
        "raise OSError\n",
        encoding="utf-8",
    )
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if "while waiting" in line:
            (tmp_path / "call" / "seen").touch()

    workers.pulse.mark_reported()
    workers.progress = progress
    problem(workers, tmp_path)
    # A busy machine needs more than a second to start an interpreter.
    assert re.fullmatch(r"a -> npu: check (begins|has run for \d+ s)", lines[0])
    assert re.fullmatch(
        r"a -> npu: check has run for \d+ s while waiting for a file \(for \d+ s\)", lines[-1]
    )


def prepare(folder: Path, workers: Workers) -> None:
    """Let a worker run ONNX Runtime, in ``call`` below ``folder``."""
    (folder / "prepared").mkdir(parents=True)
    model = Model("a", save(network(), folder / "a.onnx"), KEY, {"batch": 1})
    request = PrepareRequest(model, "onnxruntime", str(folder / "prepared"), True)
    workers.call(request, folder / "call", location="a")


def test_verbose_workers_print_onnx_runtimes_whole_log(tmp_path: Path, workers: Workers) -> None:
    for verbose in (False, True):
        lines: list[str] = []
        workers.log = lines.append
        workers.verbose = verbose
        prepare(tmp_path / str(verbose), workers)
        assert any("[I:onnxruntime" in line for line in lines) == verbose


LEAVING_FILES = """
import os, subprocess, sys, tempfile
print("secrets:", "hunter2" in os.environ.values(), os.environ["VENDOR_SDK"], flush=True)
tempfile.mkstemp(prefix="of-python")
code = "import tempfile; tempfile.mkstemp(prefix='of-a-child')"
subprocess.run([sys.executable, "-c", code], check=True)
os._exit(9)
"""


def test_workers_get_variables_but_no_credentials_and_a_temporary_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Path, workers: Workers
) -> None:
    check.write_text(LEAVING_FILES, encoding="utf-8")
    for name in (
        "HATCH_EPCONTEXT_SHARED_CACHE_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("VENDOR_SDK", "/opt/vendor")
    (tmp_path / "tmp").mkdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "tmp"))
    assert problem(workers, tmp_path).log == "secrets: False /opt/vendor"
    assert list((tmp_path / "tmp").iterdir()) == []
    names = sorted(file.name[:8] for file in (tmp_path / "call").glob("of-*"))
    assert names == ["of-a-chi", "of-pytho"]


@pytest.mark.skipif(sys.platform == "win32", reason="what ONNX Runtime sends there leaves no files")
@pytest.mark.parametrize(
    ("variable", "sends"), [(None, False), ("", False), ("1", False), ("0", True)]
)
def test_nothing_is_sent_that_the_user_has_not_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usual_workers: Workers,
    variable: str | None,
    sends: bool,
) -> None:
    if sends and Version(onnxruntime.__version__) < Version("1.29"):
        pytest.skip("what this ONNX Runtime sends leaves no such files")
    # ONNX Runtime sends nothing where it sees that it runs in CI.
    for name in ("CI", "GITHUB_ACTIONS", "TF_BUILD", "JENKINS_URL", "GITLAB_CI", "BUILD_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", variable)
    prepare(tmp_path, usual_workers)
    in_call = {file.name for file in (tmp_path / "call").iterdir()} - {ACTIVITY, LOG}
    assert bool(in_call or list((tmp_path / "home").rglob("*"))) == sends


REFUSING = """
from hatch_epcontext.errors import Kind, ModelError, Problem
text = "the source model itself cannot be run on the CPU: std::bad_alloc"
raise ModelError(Problem(Kind.SOURCE_FAILED, "models[0]", text))
"""
ABORTING = "import os\nprint('what(): std::bad_alloc', flush=True)\nos.abort()\n"


@pytest.mark.parametrize(
    ("body", "limit", "kind", "words"),
    [
        (REFUSING, 2 * 10**9, Kind.OUT_OF_MEMORY, "memory-limit allows (2.0 GB)"),
        ("raise OSError('no node')", 2 * 10**9, Kind.COMPILE_FAILED, "memory-limit is 2.0 GB"),
        ("raise MemoryError", None, Kind.OUT_OF_MEMORY, "build.jobs"),
        (ABORTING, None, Kind.OUT_OF_MEMORY, "build.jobs"),
        pytest.param(
            *("bytearray(3 * 10**9)", 2 * 10**9, Kind.OUT_OF_MEMORY, 'memory-limit = "4000 MB"'),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces it here"),
        ),
    ],
)
def test_a_lack_of_memory_is_an_error_of_its_own_that_names_the_limit(
    tmp_path: Path,
    check: Path,
    workers: Workers,
    body: str,
    limit: int | None,
    kind: Kind,
    words: str,
) -> None:
    check.write_text(body, encoding="utf-8")
    workers.memory_limit = limit
    short = problem(workers, tmp_path)
    assert short.kind is kind
    assert words in short.text()
    assert ("memory-limit" in short.text()) == (limit is not None)
    assert (short.location == "models[0]") == (body == REFUSING)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (0xC000013A, Kind.WORKER_KILLED, "stopped with Ctrl-C"),
        (0xC0000409, Kind.WORKER_CRASHED, "an abort, or a stack buffer overrun (0xC0000409)"),
        (0xC0000005, Kind.WORKER_CRASHED, "access violation (0xC0000005)"),
        (3, Kind.WORKER_CRASHED, "exit code 3"),
    ],
)
def test_exit_codes_of_windows_are_said_in_words(code: int, kind: Kind, words: str) -> None:
    """Not run on Windows."""
    (ended,) = failures.ended(code, " while compiling").problems
    assert ended.kind is kind
    assert words in ended.message

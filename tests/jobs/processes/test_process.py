"""Real worker processes, some of them with an ``onnx`` that fails."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import pytest
from packaging.version import Version

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import (
    AccidentError,
    BuildError,
    CrashError,
    Key,
    Kind,
    Problem,
    RefusedError,
)
from hatch_epcontext.jobs.processes import process
from hatch_epcontext.jobs.processes.forks import is_supported
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.processes.worker_log import TAIL
from hatch_epcontext.worker.requests import CheckReply, CheckRequest, PrepareRequest
from tests.altered_workers import write_start_code
from tests.models import network, save

pytestmark = pytest.mark.slow

KEY = Key() / "models" / 0


def request_for(path: Path) -> CheckRequest:
    return CheckRequest((Model("a", path, KEY),))


def problem(tmp_path: Path, path: Path, timeout: float = 60) -> Problem:
    with pytest.raises(BuildError) as raised:
        Workers(timeout).call(request_for(path), tmp_path / "call", location="a -> npu")
    (found,) = raised.value.problems
    return found


@pytest.fixture
def fake_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source file of the ``onnx`` that workers import, which the test writes."""
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder / "onnx.py"


def test_a_request_gets_its_own_type_of_reply(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    reply = Workers(60).call(request_for(path), tmp_path / "call", location="reading")
    assert isinstance(reply, CheckReply)
    assert reply.models[0].inputs[0].shape == ("batch", 1, 8, 8)


def test_a_refusal_has_its_own_location_and_no_log(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("text", encoding="utf-8")
    refused = problem(tmp_path, path)
    assert refused.key == KEY
    assert "is not an ONNX model" in refused.message
    assert refused.log is None


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_a_crash_is_reported_with_its_signal_and_the_end_of_the_log(
    tmp_path: Path, fake_onnx: Path
) -> None:
    fake_onnx.write_text(
        "import os, signal\n"
        "for n in range(50): print('line', n, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n",
        encoding="utf-8",
    )
    crashed = problem(tmp_path, tmp_path / "a.onnx")
    assert (crashed.kind, crashed.location) == (Kind.WORKER_CRASHED, "a -> npu")
    assert crashed.log is not None
    assert "SIGSEGV" in crashed.message
    assert "Segmentation fault" in crashed.log
    assert "line 49" in crashed.log
    assert len(crashed.log.splitlines()) == TAIL


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_the_hint_for_a_killed_worker_is_memory(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text("import os\nos.kill(os.getpid(), 9)\n", encoding="utf-8")
    killed = problem(tmp_path, tmp_path / "a.onnx")
    assert "SIGKILL" in killed.message
    assert "memory" in killed.advice()


def test_a_worker_without_a_reply(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text("import os\nos._exit(7)\n", encoding="utf-8")
    assert "exit code 7" in problem(tmp_path, tmp_path / "a.onnx").message


def test_a_worker_is_stopped_after_the_timeout(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text(
        "import time\nprint('compiling', flush=True)\ntime.sleep(600)\n", encoding="utf-8"
    )
    # Python starts slowly under Wine.
    timeout = 10 if sys.platform == "win32" else 2
    stopped = problem(tmp_path, tmp_path / "a.onnx", timeout=timeout)
    assert f"after {timeout} seconds" in stopped.message
    assert "build.timeout" in stopped.advice()
    assert stopped.log == "compiling"


def test_an_exception_is_one_message_and_its_traceback_is_in_the_log(
    tmp_path: Path, fake_onnx: Path
) -> None:
    fake_onnx.write_text("raise OSError('libonnx is missing')\n", encoding="utf-8")
    failed = problem(tmp_path, tmp_path / "a.onnx")
    assert failed.message == "OSError: libonnx is missing"
    assert "Traceback" in (failed.log or "")


def test_colours_are_removed_from_the_log(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text(
        "import os\nprint('\\x1b[0;93mwarning\\x1b[m', flush=True)\nos._exit(1)\n", encoding="utf-8"
    )
    assert problem(tmp_path, tmp_path / "a.onnx").log == "warning"


def test_the_log_is_forwarded_while_a_worker_runs(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text(
        "import os, time\n"
        "print('\\x1b[0;93mfirst\\x1b[m', flush=True)\n"
        f"wait = {str(tmp_path / 'seen')!r}\n"
        "end = time.monotonic() + 60\n"
        "while not os.path.exists(wait) and time.monotonic() < end: time.sleep(0.05)\n"
        "print('second', end='', flush=True)\n"
        "os._exit(7)\n",
        encoding="utf-8",
    )
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if line.endswith("first"):
            (tmp_path / "seen").touch()

    with pytest.raises(BuildError):
        Workers(120, log).call(
            request_for(tmp_path / "a.onnx"), tmp_path / "call", location="a -> npu"
        )
    assert lines[:3] == ["a -> npu: check ...", "a -> npu | first", "a -> npu | second"]
    assert re.fullmatch(r"a -> npu: check took \d+\.\d s", lines[3])
    assert len(lines) == 4


def test_verbose_workers_print_onnx_runtimes_whole_log(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    spec = Model("a", path, KEY, {"batch": 1})
    for name, verbose in (("short", False), ("whole", True)):
        (tmp_path / name).mkdir()
        lines: list[str] = []
        Workers(60, lines.append, verbose=verbose).call(
            PrepareRequest(spec, "onnxruntime", str(tmp_path / name), True),
            tmp_path / f"call-{name}",
            location="a",
        )
        assert any("[I:onnxruntime" in line for line in lines) == verbose


def test_stopping_kills_running_workers(tmp_path: Path, fake_onnx: Path) -> None:
    fake_onnx.write_text(
        "import os, time\n"
        f"with open({str(tmp_path / 'pid')!r}, 'w') as file: file.write(str(os.getpid()))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    started = threading.Event()
    workers = Workers(300, lambda line: started.set() if line.endswith("started") else None)
    failed: list[BuildError] = []

    def work() -> None:
        try:
            workers.call(request_for(tmp_path / "a.onnx"), tmp_path / "call", location="a -> npu")
        except BuildError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(120)
    workers.stop()
    thread.join(120)
    assert [problem.message for problem in failed[0].problems] == ["the build was interrupted."]
    if sys.platform == "win32":
        # There it would end the process.
        return
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="ascii")), 0)


def test_workers_do_not_get_the_credentials_of_the_shared_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_onnx: Path
) -> None:
    fake_onnx.write_text(
        "import os\n"
        "print('secrets:', 'hunter2' in os.environ.values(), os.environ['VENDOR_SDK'], flush=True)\n"
        "os._exit(9)",
        encoding="utf-8",
    )
    names = ("HATCH_EPCONTEXT_CACHE_KEY", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
    for name in names:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("VENDOR_SDK", "/opt/vendor")
    for forks in (True, False):
        with contextlib.ExitStack() as stack:
            workers = Workers(60)
            if forks:
                stack.enter_context(workers)
            with pytest.raises(BuildError) as raised:
                workers.call(request_for(tmp_path), tmp_path / f"call-{forks}", location="a")
        (found,) = raised.value.problems
        assert "secrets: False /opt/vendor" in str(found.log)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_shell_that_limits_the_address_space_is_named(
    tmp_path: Path, fake_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    fake_onnx.write_text("raise ValueError('the EP says something else')", encoding="utf-8")
    assert "ulimit" not in problem(tmp_path / "without", tmp_path / "a.onnx").advice()
    limit = (2 * 10**9, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    assert "ulimit -v allows 2.0 GB" in problem(tmp_path, tmp_path / "a.onnx").advice()


_FORKS = ["forks", "single forks"] if is_supported() else []


@pytest.fixture(params=[*_FORKS, "interpreters"])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Workers of each kind that the system has."""
    if request.param == "interpreters":
        monkeypatch.setattr(process, "is_supported", lambda: False)
    workers = Workers(60)
    with contextlib.nullcontext() if request.param == "single forks" else workers:
        yield workers


ANSWERING = """
import os, sys
print("Python starts", end="", flush=True)
from hatch_epcontext.errors import Kind, Problem, RefusedError
from hatch_epcontext.worker.actions import check
from hatch_epcontext.worker.results import ModelFacts
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.requests import CheckReply
def handle(request):
    name = request.models[0].name
    step("looking")
    print(name, "prints", flush=True)
    if name == "crash":
        os.abort()
    if name == "fail":
        raise RefusedError(Problem(Kind.COMPILE_FAILED, "", f"it fails in {os.getcwd()}"))
    open("pid", "w").write(f"{os.getpid()} {os.environ['TMPDIR']}")
    return CheckReply((ModelFacts((), (), ()),))
check.handle = handle
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("last", ["crash", "fail"])
def test_a_worker_answers_several_requests_each_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers, last: str
) -> None:
    write_start_code(tmp_path, ANSWERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def request(name: str) -> CheckRequest:
        return CheckRequest((Model(name, Path("a.onnx"), KEY),))

    with workers.process() as worker:
        for name in ("one", "two"):
            worker.call(request(name), tmp_path / name, location=name)
        with pytest.raises(BuildError) as raised:
            worker.call(request(last), tmp_path / last, location="the last one")
    found = [
        (tmp_path / name / "pid").read_text(encoding="utf-8").split() for name in ("one", "two")
    ]
    assert found[0][0] == found[1][0]
    assert [Path(each[1]).parent.name for each in found] == ["one", "two"]
    logs = [(tmp_path / n / "worker.log").read_text(encoding="utf-8") for n in ("one", "two", last)]
    assert [each.splitlines()[0] for each in logs] == ["one prints", "two prints", f"{last} prints"]
    (failed,) = raised.value.problems
    assert failed.location == "the last one"
    assert type(raised.value) is (CrashError if last == "crash" else RefusedError)
    # Each request has steps of its own, also where they are called the same.
    assert (" while looking " in failed.message) == (last == "crash")


LEAVING_FILES = """
import os, subprocess, sys, tempfile
tempfile.mkstemp(prefix='of-python')
code = 'import tempfile; tempfile.mkstemp(prefix="of-a-child")'
subprocess.run([sys.executable, '-c', code], check=True)
os._exit(9)
"""


def test_what_libraries_leave_in_the_temporary_folder_is_in_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_onnx: Path
) -> None:
    fake_onnx.write_text(LEAVING_FILES, encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "tmp"))
    problem(tmp_path, tmp_path / "a.onnx")
    assert list((tmp_path / "tmp").iterdir()) == []
    names = sorted(each.name[:8] for each in (tmp_path / "call" / "tmp").iterdir())
    assert names == ["of-a-chi", "of-pytho"]


@pytest.mark.parametrize(
    ("given", "sends"), [(None, False), ("", False), ("1", False), ("0", True)]
)
def test_nothing_is_sent_that_the_user_has_not_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Workers,
    given: str | None,
    sends: bool,
) -> None:
    if sends and (sys.platform == "win32" or Version(onnxruntime.__version__) < Version("1.29")):
        pytest.skip("what ONNX Runtime sends here leaves no such files")
    # ONNX Runtime sends nothing where it sees that it runs in CI.
    for name in ("CI", "GITHUB_ACTIONS", "TF_BUILD", "JENKINS_URL", "GITLAB_CI", "BUILD_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    if given is not None:
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", given)
    path = save(network(), tmp_path / "a.onnx")
    spec = Model("a", path, KEY, {"batch": 1})
    (tmp_path / "prepared").mkdir()
    request = PrepareRequest(spec, "onnxruntime", str(tmp_path / "prepared"), True)
    workers.call(request, tmp_path / "call", location="a")
    written = [*(tmp_path / "home").rglob("*"), *(tmp_path / "call" / "tmp").iterdir()]
    assert bool(written) == sends


def test_values_of_secrets_are_hidden_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_onnx: Path
) -> None:
    fake_onnx.write_text("import os\nprint(os.environ['MODEL_KEY'])\nos._exit(9)", encoding="utf-8")
    monkeypatch.setenv("MODEL_KEY", "hunter2")
    lines: list[str] = []
    constants = {"x": "{env:MODEL_KEY}"}
    request = CheckRequest((Model("a", Path("a.onnx"), KEY, constants=constants),))
    with pytest.raises(BuildError) as raised:
        Workers(60, lines.append).call(request, tmp_path / "call", location="a")
    (found,) = raised.value.problems
    assert found.log == "***"
    assert "a | ***" in lines
    assert (tmp_path / "call" / "worker.log").read_text(encoding="utf-8").strip() == "***"


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (0xC000013A, AccidentError, "stopped with Ctrl-C"),
        (0xC0000409, CrashError, "an abort, or a stack buffer overrun (0xC0000409)"),
        (0xC0000005, CrashError, "access violation (0xC0000005)"),
        (3, CrashError, "exit code 3"),
    ],
)
def test_exit_codes_of_windows_are_said_in_words(
    code: int, error: type[BuildError], words: str
) -> None:
    """Not run on Windows."""
    ended = process._ended(code, " while compiling")
    assert type(ended) is error
    assert words in ended.problems[0].message

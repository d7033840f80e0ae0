"""Real worker processes, some of them with an ``onnx`` that dies."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import InspectReply, InspectRequest, ModelSpec, PrepareRequest
from tests.models import network, save


def request_for(path: Path) -> InspectRequest:
    return InspectRequest((ModelSpec("a", str(path), "models[0]"),), {})


def problem(tmp_path: Path, path: Path, timeout: float = 60) -> Problem:
    with pytest.raises(BuildError) as raised:
        Workers(timeout).call(request_for(path), tmp_path / "call", where="a -> npu")
    (found,) = raised.value.problems
    return found


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of the ``onnx`` that workers import, to be written by the test."""
    folder = tmp_path / "instead"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "onnx.py"


def test_one_request_in_one_reply_out(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    reply = Workers(60).call(request_for(path), tmp_path / "call", where="reading")
    assert isinstance(reply, InspectReply)
    assert reply.models[0].inputs[0].shape == ("batch", 1, 8, 8)


def test_a_refusal_names_its_own_place_and_needs_no_log(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("text", encoding="utf-8")
    refused = problem(tmp_path, path)
    assert refused.where == "models[0]"
    assert "is not an ONNX model" in refused.what
    assert refused.log == ""


def test_a_crash_is_told_with_its_signal_and_the_end_of_the_log(
    tmp_path: Path, dying: Path
) -> None:
    dying.write_text(
        "import os, signal\n"
        "for n in range(50): print('line', n, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n",
        encoding="utf-8",
    )
    crashed = problem(tmp_path, tmp_path / "a.onnx")
    assert crashed.where == "a -> npu"
    assert crashed.what == "the worker crashed with SIGSEGV."
    assert "Segmentation fault" in crashed.log
    assert "line 49" in crashed.log
    assert len(crashed.log.splitlines()) == 30


def test_a_worker_that_is_killed_may_have_lacked_memory(tmp_path: Path, dying: Path) -> None:
    dying.write_text("import os\nos.kill(os.getpid(), 9)\n", encoding="utf-8")
    killed = problem(tmp_path, tmp_path / "a.onnx")
    assert "SIGKILL" in killed.what
    assert "memory" in killed.fix


def test_a_worker_that_ends_without_a_word(tmp_path: Path, dying: Path) -> None:
    dying.write_text("import os\nos._exit(7)\n", encoding="utf-8")
    assert "exit code 7" in problem(tmp_path, tmp_path / "a.onnx").what


def test_a_worker_that_takes_too_long_is_stopped(tmp_path: Path, dying: Path) -> None:
    dying.write_text(
        "import time\nprint('compiling', flush=True)\ntime.sleep(600)\n", encoding="utf-8"
    )
    stopped = problem(tmp_path, tmp_path / "a.onnx", timeout=2)
    assert "longer than 2 seconds" in stopped.what
    assert "HATCH_EPCONTEXT_TIMEOUT" in stopped.fix
    assert stopped.log == "compiling"


def test_an_exception_is_one_message_and_its_traceback_is_in_the_log(
    tmp_path: Path, dying: Path
) -> None:
    dying.write_text("raise OSError('libonnx is missing')\n", encoding="utf-8")
    failed = problem(tmp_path, tmp_path / "a.onnx")
    assert failed.what == "OSError: libonnx is missing"
    assert "Traceback" in failed.log


def test_colours_of_the_log_are_taken_out(tmp_path: Path, dying: Path) -> None:
    dying.write_text(
        "import os\nprint('\\x1b[0;93mwarning\\x1b[m', flush=True)\nos._exit(1)\n", encoding="utf-8"
    )
    assert problem(tmp_path, tmp_path / "a.onnx").log == "warning"


def test_who_asks_is_told_what_a_worker_does_while_it_runs(tmp_path: Path, dying: Path) -> None:
    dying.write_text(
        "import os, time\n"
        "print('\\x1b[0;93mfirst\\x1b[m', flush=True)\n"
        f"wait = {str(tmp_path / 'told')!r}\n"
        "end = time.monotonic() + 60\n"
        "while not os.path.exists(wait) and time.monotonic() < end: time.sleep(0.05)\n"
        "print('second', end='', flush=True)\n"
        "os._exit(7)\n",
        encoding="utf-8",
    )
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if line.endswith("first"):
            (tmp_path / "told").touch()

    with pytest.raises(BuildError):
        Workers(120, tell).call(
            request_for(tmp_path / "a.onnx"), tmp_path / "call", where="a -> npu"
        )
    assert told[:3] == ["a -> npu: inspect ...", "a -> npu | first", "a -> npu | second"]
    assert re.fullmatch(r"a -> npu: inspect took \d+\.\d s", told[3])
    assert len(told) == 4


def test_onnx_runtimes_whole_log_is_for_those_who_ask_for_it(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    spec = ModelSpec("a", str(path), "models[0]", {"batch": 1})
    for name, verbose in (("short", False), ("whole", True)):
        (tmp_path / name).mkdir()
        told: list[str] = []
        Workers(60, told.append, verbose=verbose).call(
            PrepareRequest(spec, "onnxruntime", str(tmp_path / name), True),
            tmp_path / f"call-{name}",
            where="a",
        )
        assert any("[I:onnxruntime" in line for line in told) == verbose


def test_a_worker_that_nobody_waits_for_is_killed(tmp_path: Path, dying: Path) -> None:
    dying.write_text(
        "import os, time\n"
        f"with open({str(tmp_path / 'pid')!r}, 'w') as file: file.write(str(os.getpid()))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    begun = threading.Event()
    workers = Workers(300, lambda line: begun.set() if line.endswith("begun") else None)
    failed: list[BuildError] = []

    def work() -> None:
        try:
            workers.call(request_for(tmp_path / "a.onnx"), tmp_path / "call", where="a -> npu")
        except BuildError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(120)
    workers.stop()
    thread.join(120)
    assert [problem.what for problem in failed[0].problems] == ["the build was interrupted."]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="ascii")), 0)

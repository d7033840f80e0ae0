"""Compiling on the user's machine, with the real onnxruntime."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from hatch_epcontext import _recompile
from hatch_epcontext.cli.cache import info
from tests.conftest import is_running, needs_qnn, wait_for
from tests.loader.shipped import (
    CPU,
    NPU,
    OPENVINO_EP,
    QNN,
    QNN_EP,
    Shipper,
    Table,
    X,
    changed,
    damage,
    device,
    opener,
    outcomes,
)
from tests.models import parsed, save


def test_an_editable_install_may_have_the_source_alone(ship: Shipper) -> None:
    app = ship()
    assert app.target_of(app.load("a", recompile=True)) == "source"


def kept(app: Any) -> list[Path]:
    """The folders of the contexts that were compiled on this machine."""
    folder = app.user_folder() / "compiled"
    return sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def jit(app: Any, **arguments: Any) -> Any:
    session = app.load("a", device="any", recompile=True, **arguments)
    assert session.run(None, X)[0].shape == (1, 10)
    return session


@pytest.fixture
def broken(qnn: Shipper) -> Any:
    """An app whose context QNN refuses."""
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    return app


@needs_qnn
def test_a_target_is_compiled_before_the_next_one_is_opened(qnn: Shipper) -> None:
    app = qnn(npu=QNN, cpu=CPU)
    assert app.target_of(jit(app)) == "npu"
    assert kept(app) == [], "what opens is not compiled again"
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    for fallback in (True, False):
        assert app.target_of(app.load("a", device="any", fallback=fallback)) == "cpu"
    assert kept(app) == [], "only on request"
    assert app.target_of(jit(app)) == "npu"
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts) == [
        ("npu", "failed"),
        ("npu", "opened"),
        ("cpu", "not needed"),
        ("source", "not needed"),
    ]


CHIPS = changed(
    QNN,
    # No simulator opens what is for several chips.
    needs_device=True,
    chip_options=["soc_model", "htp_arch"],
    settings={
        "provider_options": {"backend_type": "htp", "soc_model": "60,57", "htp_arch": "73,75"}
    },
)


@needs_qnn
def test_a_chip_that_no_context_is_for_gets_one_of_its_own(
    qnn: Shipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = qnn(npu=CHIPS)
    attempts = app.explain("a", device="any")
    assert outcomes(attempts) == [("npu", "skipped"), ("source", "opened")]
    assert "is for several chips" in str(attempts[0])
    assert app.check("a", device="any")[0].answer == "cannot"
    assert app.check("a", device="any", recompile=True)[0].answer == "unknown"
    with monkeypatch.context() as frozen:
        frozen.setattr(sys, "frozen", True, raising=False)
        assert app.check("a", device="any", recompile=True)[0].answer == "cannot"
    assert app.target_of(jit(app)) == "npu"
    (folder,) = kept(app)
    model = onnx.load(folder / "a_ctx.onnx", load_external_data=False)
    (compatibility,) = (
        entry.value for entry in model.metadata_props if entry.key.startswith("ep_compat")
    )
    # Of the device, whose architecture and SoC the options did not name.
    assert compatibility.split(":")[4:6] == ["0", "0"]
    written = (folder / "files.json").stat().st_mtime_ns
    assert app.target_of(jit(app)) == "npu"
    assert (folder / "files.json").stat().st_mtime_ns == written


@needs_qnn
def test_nothing_is_compiled_while_a_later_target_has_the_chip(qnn: Shipper) -> None:
    shutil.copytree(qnn.folder / "a/npu", qnn.folder / "a/own")
    own = {**changed(QNN, chip_options=["soc_model", "htp_arch"]), "variant_directory": "a/own"}
    app = qnn(npu=CHIPS, own=own, cpu=CPU)
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts)[:2] == [("npu", "skipped"), ("own", "opened")]
    assert [attempt.target for attempt in attempts] == ["npu", "own", "cpu", "source"]
    assert kept(app) == []
    damage(qnn.folder / "a/own/a_ctx_qnn.bin")
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts) == [
        ("npu", "skipped"),
        ("own", "failed"),
        ("npu", "opened"),
        ("cpu", "not needed"),
        ("source", "not needed"),
    ]
    # Without their chips the two are one.
    assert app.target_of(jit(app, target="own")) == "own"
    assert len(kept(app)) == 1
    app = qnn(npu=CHIPS, cpu=CPU, own=own)
    assert app.target_of(jit(app)) == "npu", "a target of another kind is not before it"


@needs_qnn
def test_options_that_name_files_have_those_of_the_package(qnn: Shipper) -> None:
    own = QNN["additional_metadata"]["hatch-epcontext"]["settings"]["provider_options"]
    shipped = f"{'a' * 32}/x.so"
    options = {
        **own,
        "shipped": f"{{file}}/{shipped}",
    }
    app = qnn(npu=changed(QNN, settings={"provider_options": options}))
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    file = qnn.folder / "a" / "npu" / "files" / shipped
    file.parent.mkdir(parents=True)
    file.write_bytes(b"library")
    assert app.target_of(jit(app, target="npu")) == "npu"


def test_on_a_machine_without_the_device_nothing_is_compiled(ship: Shipper) -> None:
    app = ship(npu=changed(NPU, prepared="prepared/a.onnx"))
    attempts = app.explain("a", recompile=True)
    assert outcomes(attempts) == [("npu", "skipped"), ("source", "opened")]
    assert kept(app) == []


@needs_qnn
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a_ctx.onnx", "missing"),
        ("a_ctx_qnn.bin", "altered"),
        # The source opens only when it is compiled, which is forbidden.
        ("a_ctx.onnx", "not compiled"),
    ],
)
def test_a_context_that_does_not_open_is_compiled_once(
    qnn: Shipper, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    if how == "not compiled":
        shutil.copyfile(qnn.folder / "a/npu/prepared/a.onnx", qnn.folder / "a/npu/a_ctx.onnx")
        app = qnn(npu=QNN)
    else:
        app = qnn(npu=QNN)
        damage(qnn.folder / f"a/npu/{name}", how)
    first = jit(app)
    assert app.target_of(first) == "npu"
    assert first.get_providers()[0] == QNN_EP
    assert "a on npu: failed" in caplog.text
    assert caplog.text.count("a is compiled for npu on this machine") == 1
    (folder,) = kept(app)
    assert (folder / "a_ctx.onnx").is_file()
    assert onnx.load(folder / "a_ctx.onnx").graph.node[0].op_type == "EPContext"
    written = (folder / "a_ctx.onnx").stat().st_mtime_ns
    caplog.clear()
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts) == [("npu", "failed"), ("npu", "opened"), ("source", "not needed")]
    assert attempts[1].reason == f"{QNN_EP} on cpu, compiled on this machine"
    jit(app)
    assert "is compiled" not in caplog.text
    assert kept(app) == [folder]
    assert (folder / "a_ctx.onnx").stat().st_mtime_ns == written


@pytest.mark.parametrize("how", ["of another version", "missing", "truncated"])
def test_openvino_compiles_again_what_does_not_fit_any_more(
    openvino: tuple[Shipper, Table], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ship, entry = openvino
    if how == "of another version":
        entry["compatibility_string"] = how
    app = ship(openvino=entry)
    if how != "of another version":
        (sidecar,) = (ship.folder / "a/openvino").glob("*.bin")
        damage(sidecar, how)
    for _ in range(2):
        first, second, source = app.explain("a", recompile=True)
        assert first.outcome == ("skipped" if how == "of another version" else "failed")
        assert str(second) == f"openvino: opened, {OPENVINO_EP} on cpu, compiled on this machine"
        assert source.outcome == "not needed"
    assert app.load("a", recompile=True).run(None, X)[0].shape == (1, 10)
    assert caplog.text.count("a is compiled for openvino on this machine") == 1


@needs_qnn
def test_a_damaged_context_of_this_machine_is_compiled_again(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    jit(broken)
    (folder,) = kept(broken)
    for file, how, verify, reason in (
        ("a_ctx_qnn.bin", "truncated", False, "bytes, and"),
        ("a_ctx_qnn.bin", "altered", False, "INVALID_GRAPH"),
        ("a_ctx_qnn.bin", "altered", True, "its sha256 differs"),
        ("a_ctx.onnx", "missing", False, "is missing"),
        ("files.json", "truncated", False, "line 1"),
    ):
        damage(folder / file, how)
        caplog.clear()
        assert broken.target_of(jit(broken, verify=verify)) == "npu"
        (message,) = (
            message for message in caplog.messages if "cannot be opened any more" in message
        )
        assert reason in message
        assert caplog.text.count("is compiled for npu") == 1
        assert kept(broken) == [folder]
        caplog.clear()
        jit(broken, verify=True)
        assert "is compiled" not in caplog.text


@needs_qnn
def test_a_changed_manifest_is_found_on_request_also_where_it_was_compiled(
    broken: Any, qnn: Shipper
) -> None:
    jit(broken)
    manifest = qnn.folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"basic"', b'"BASIC"'))
    attempts = broken.explain("a", device="any", recompile=True, verify=True)
    assert {attempt.outcome for attempt in attempts} == {"failed"}


AT_ONCE = """
import json, logging, sys, time
from pathlib import Path
import onnxruntime_qnn
from shipped import explain
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
records = []
logging.getLogger("shipped").addFilter(lambda record: records.append(record.msg))
attempts = explain("a", device="any", recompile=True)
print(json.dumps([[str(each) for each in attempts], sum("is compiled" in each for each in records)]))
"""


@needs_qnn
def test_of_two_processes_one_compiles(qnn: Shipper, broken: Any, tmp_path: Path) -> None:
    ready = [tmp_path / f"ready{index}" for index in range(2)]
    go = tmp_path / "go"
    processes = [qnn.start(AT_ONCE, str(each), str(go)) for each in ready]
    wait_for(lambda: all(map(Path.exists, ready)) or any(each.poll() for each in processes))
    go.touch()
    results = [qnn.finish(each) for each in processes]
    for (first, second, _), _ in results:
        assert first.startswith("npu: failed")
        assert second == f"npu: opened, {QNN_EP} on cpu, compiled on this machine"
    assert sorted(compiled for _, compiled in results) == [0, 1]
    assert len(kept(broken)) == 1


COMPILER = """
import ctypes, json, os, sys, time
from pathlib import Path
import onnxruntime, onnxruntime_qnn

get_library_path = onnxruntime_qnn.get_library_path
started, may_go_on = map(Path(__file__).with_name, ("started", "may_go_on"))
compile_really = onnxruntime.ModelCompiler.compile_to_file

def wait():
    end = time.monotonic() + 60
    while not may_go_on.exists() and time.monotonic() < end:
        time.sleep(0.01)

def compile_to_file(self, file):
    NOTE
    CODE

if "compile" in sys.argv:
    onnxruntime.ModelCompiler.compile_to_file = compile_to_file
"""

NOTE = "started.open('a').write(f'{os.getpid()}\\n')"

OF_COMPILER = {"module": "compiler", "package": "onnxruntime-qnn", "registration_name": QNN_EP}


class Compilers:
    """Ships an app whose context QNN refuses, and whose compiler runs other code."""

    def __init__(self, ship: Shipper, folder: Path) -> None:
        self.ship, self.folder = ship, folder

    def write(self, code: str) -> None:
        script = COMPILER.replace("CODE", code).replace("NOTE", NOTE)
        (self.folder / "compiler.py").write_text(script, encoding="utf-8")

    def __call__(self, code: str) -> Any:
        self.write(code)
        app = self.ship(npu=changed(QNN, plugin=OF_COMPILER))
        damage(self.ship.folder / "a/npu/a_ctx_qnn.bin")
        return app

    def go_on(self) -> None:
        """Let those go on that `wait`."""
        (self.folder / "may_go_on").touch()

    @property
    def started(self) -> list[int]:
        """The ids of the processes that have compiled."""
        file = self.folder / "started"
        return list(map(int, file.read_text("utf-8").split())) if file.exists() else []


@pytest.fixture
def compilers(qnn: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return Compilers(qnn, folder)


def explained(app: Any) -> str:
    """How compiling on this machine ended; the app has opened the source."""
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts)[2:] == [("source", "opened")], attempts
    return str(attempts[1])


def left(app: Any) -> list[str]:
    """The suffixes of what is in the folder of contexts that were compiled on this machine."""
    folder = app.user_folder() / "compiled"
    return sorted(path.suffix for path in folder.iterdir()) if folder.is_dir() else []


def forget(app: Any) -> None:
    """Remove what is known of failures."""
    for record in (app.user_folder() / "compiled").glob("*.json"):
        record.unlink()


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


LIMITS = (2.0, 12.0)
"""Of seconds for a compiler that hangs; in the first a busy machine may not have started onnxruntime."""


@needs_qnn
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.abort()", "the compiler was ended by SIGABRT"),
        ("ctypes.string_at(0)", "the compiler was ended by SIGSEGV"),
        ("os._exit(3)", "the compiler ended with exit code 3"),
        # A library that has started a process, and hangs with the interpreter's lock.
        slow("os.fork(); NOTE; ctypes.PyDLL(None).sleep(600)", "the compiler did not end in "),
        ("raise ValueError('no room')", "ValueError: no room"),
        ("Path(file).write_text('no model')", "Protobuf parsing failed"),
        ("Path(file).write_bytes(Path(JOB).read_bytes())", "User disabled EP compilation"),
    ],
)
def test_accidents_and_refusals_are_remembered(
    code: str, reason: str, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compilers.ship.folder / "a/npu/prepared/a.onnx"
    app = compilers(code.replace("JOB", repr(str(model))))
    for seconds in LIMITS if "did not end" in reason else (600.0,):
        monkeypatch.setattr(_recompile, "_SECONDS", seconds)
        first = explained(app)
        if compilers.started:
            break
        forget(app)
    assert first.startswith("npu: failed, compiling it on this machine: ")
    assert reason in first
    assert left(app) == [".json", ".lock"]
    started = compilers.started
    again = explained(app)
    assert again.startswith("npu: skipped, nothing is compiled on this machine: ")
    assert reason in again
    assert "(compiled again from " in again
    assert compilers.started == started != []
    wait_for(lambda: not any(map(is_running, started)))


@needs_qnn
def test_what_has_failed_is_compiled_again_after_a_week(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = compilers("os._exit(3)")
    assert "the compiler ended with exit code 3" in explained(app)
    compilers.write("compile_really(self, file)")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 6 * 24 * 3600)
    assert "(compiled again from " in explained(app)
    monkeypatch.setattr(time, "time", lambda: now + 8 * 24 * 3600)
    assert app.target_of(jit(app)) == "npu"
    assert left(app) == ["", ".lock"]


@needs_qnn
def test_a_full_disk_is_not_remembered(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = compilers("raise ValueError('cannot write')")
    usage = SimpleNamespace(free=0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        assert "no space is left in" in explained(app)
    assert left(app) == [".lock"]
    compilers.write("compile_really(self, file)")
    assert app.target_of(jit(app)) == "npu"


@needs_qnn
def test_the_compiler_gets_no_handle_of_the_app(compilers: Compilers, tmp_path: Path) -> None:
    app = compilers(
        "Path(r'HANDLES').write_text(json.dumps([os.path.realpath(f'/proc/self/fd/{each}')"
        " for each in os.listdir('/proc/self/fd')])); compile_really(self, file)".replace(
            "HANDLES", str(tmp_path / "handles")
        )
    )
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    with (tmp_path / "of the app").open("w") as own:
        os.set_inheritable(own.fileno(), True)
        assert app.target_of(jit(app)) == "npu"
    handles = json.loads((tmp_path / "handles").read_text("utf-8"))
    assert "/dev/null" in handles
    assert str(tmp_path / "of the app") not in handles


@needs_qnn
@pytest.mark.parametrize("kind", ["frozen", "embedded", "missing"])
def test_an_app_that_is_no_python_starts_no_process(
    kind: str, compilers: Compilers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = compilers("compile_really(self, file)")
    starts: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **_: starts.append(words))
    if kind == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        program = tmp_path / ("python3" if kind == "missing" else "pythonic")
        if kind != "missing":
            shutil.copy(sys.executable, program)
        monkeypatch.setattr(sys, "executable", str(program))
    frozen = "the app is frozen, and a compiler needs a Python"
    why = frozen if kind == "frozen" else "a compiler needs a Python, and sys.executable is '"
    assert f"npu: skipped, nothing is compiled on this machine: {why}" in explained(app)
    assert starts == []
    assert left(app) == []


@needs_qnn
def test_a_library_that_the_app_has_registered_is_passed(qnn: Shipper) -> None:
    plugin = {"module": "no_such_ep", "package": "", "registration_name": QNN_EP}
    # Registered by an earlier test, or by this one.
    qnn(npu=QNN).load("a", device="any")
    app = qnn(npu=changed(QNN, plugin=plugin))
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    assert app.target_of(jit(app)) == "npu"


@needs_qnn
def test_without_a_home_that_can_be_written_nothing_is_compiled(
    compilers: Compilers, tmp_path: Path
) -> None:
    app = compilers("compile_really(self, file)")
    (tmp_path / "home").write_text("a file", encoding="utf-8")
    assert "npu: skipped, nothing is compiled on this machine: [" in explained(app)
    assert compilers.started == []


def in_background(app: Any, **arguments: Any) -> list[str]:
    attempts = app.explain("a", device="any", recompile="background", **arguments)
    return list(map(str, attempts))


LATER = "npu: skipped, it is compiled in the background, for a later start"


@needs_qnn
def test_the_fallback_is_opened_until_a_context_is_compiled_in_the_background(
    compilers: Compilers, tmp_path: Path
) -> None:
    facts = tmp_path / "facts"
    app = compilers(
        "Path(FACTS).write_text(json.dumps([os.nice(0), os.getsid(0)])); wait();"
        "compile_really(self, file)".replace("FACTS", repr(str(facts)))
        if sys.platform != "win32"
        else "wait(); compile_really(self, file)"
    )
    texts = list[Any]()
    first = in_background(app, progress=lambda *words: texts.append(words))
    assert first[1:] == [LATER, "source: opened, CPUExecutionProvider on cpu"]
    assert in_background(app)[1] == LATER, "it is compiled only once"
    compilers.go_on()
    wait_for(lambda: left(app) == ["", ".lock"])
    assert in_background(app)[1] == f"npu: opened, {QNN_EP} on cpu, compiled on this machine"
    assert app.target_of(jit(app)) == "npu"
    assert len(compilers.started) == 1
    assert texts == []
    if sys.platform != "win32":
        niceness, own_session = json.loads(facts.read_text("utf-8"))
        assert niceness == 19
        assert own_session != os.getsid(0)


IN_BACKGROUND = """
import os, sys
import compiler
from shipped import load, target_of
print(target_of(load("a", target=sys.argv[1] or None, device="any", recompile="background")))
sys.stdout.flush()
os.kill(os.getpid(), 9) if sys.argv[2] else None
"""


@needs_qnn
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_what_compiles_in_the_background_outlives_the_app(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(compilers.folder))
    app = compilers("wait(); compile_really(self, file)")
    process = compilers.ship.start(IN_BACKGROUND, "", "killed")
    assert "source" in process.communicate(timeout=60)[0]
    assert process.returncode == -9
    compilers.go_on()
    wait_for(lambda: left(app) == ["", ".lock"])
    assert app.target_of(jit(app)) == "npu"
    assert len(compilers.started) == 1


@needs_qnn
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_one_process_compiles_in_the_background(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(compilers.folder))
    compilers("wait(); compile_really(self, file); time.sleep(0.5); NOTE")
    targets = {}
    for index in range(3):
        settings = {"session_options": {"session.some": str(index)}}
        targets[f"npu{index}"] = changed(QNN, plugin=OF_COMPILER, settings=settings)
    app = compilers.ship(**targets)
    apps = [compilers.ship.start(IN_BACKGROUND, name, "") for name in targets for _ in range(2)]
    for process in apps:
        assert "Error" in process.communicate(timeout=60)[1], "without a fallback nothing opens"
    compilers.go_on()
    wait_for(lambda: left(app) == ["", "", "", ".lock", ".lock", ".lock"])
    numbers = compilers.started
    assert numbers[::2] == numbers[1::2], "each ends before the next one starts"
    assert len(set(numbers)) == 3


@needs_qnn
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("code", "reason"),
    [("time.sleep(600)", "did not end in "), ("os.abort()", "was ended by SIGABRT")],
)
def test_accidents_in_the_background_are_remembered(
    code: str, reason: str, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = compilers(code)
    for seconds in LIMITS if "did not end" in reason else (600.0,):
        monkeypatch.setattr(_recompile, "_SECONDS", seconds)
        assert in_background(app)[1] == LATER
        wait_for(lambda: left(app) == [".json", ".lock"])
        if compilers.started:
            break
        forget(app)
    for recompile in (True, "background"):
        (_, attempt, source) = app.explain("a", device="any", recompile=recompile)
        assert attempt.outcome == "skipped"
        assert reason in attempt.reason
        assert source.outcome == "opened"
    wait_for(lambda: not any(map(is_running, compilers.started)))
    assert len(compilers.started) == 1


@needs_qnn
def test_progress_is_told_and_may_end_it(compilers: Compilers) -> None:
    app = compilers("time.sleep(3); compile_really(self, file)")
    texts = list[Any]()

    def stop(*words: Any) -> None:
        texts.append(words)
        if len(texts) == 2:
            raise ValueError("the user has pressed a button")

    attempts = app.explain("a", device="any", recompile=True, progress=stop)
    button = "compiling it on this machine: ValueError: the user has pressed a button"
    assert attempts[1].reason == button
    assert texts[0] == ("a is compiled for npu on this machine, once", None)
    assert re.fullmatch(r"a is compiled for npu: \d+ s", texts[1][0])
    assert len(texts) == 2
    assert left(app) == [".lock"]
    compilers.write("compile_really(self, file)")
    assert app.target_of(jit(app)) == "npu"


LOAD = """
import compiler
from shipped import load, target_of
print(target_of(load("a", device="any", recompile=True)))
"""


@needs_qnn
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_an_app_that_is_killed_leaves_nothing(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(compilers.folder))
    code = "Path(file).write_text('half of it'); time.sleep(0.5); compile_really(self, file)"
    app = compilers(code)
    for moment in range(6):
        (compilers.folder / "started").unlink(missing_ok=True)
        process = compilers.ship.start(LOAD)
        if moment > 2:
            # While it compiles: at first it imports onnxruntime.
            wait_for(lambda: bool(compilers.started))
        time.sleep(moment % 3 * 0.3)
        process.kill()
        process.communicate(timeout=60)
        wait_for(lambda: not any(map(is_running, compilers.started)))
    assert app.target_of(jit(app)) == "npu"
    assert left(app) == ["", ".lock"]


@needs_qnn
def test_what_killed_processes_left_is_removed_by_the_next(broken: Any) -> None:
    folder = broken.user_folder() / "compiled"
    (folder / "other.tmp" / "other").mkdir(parents=True)
    (folder / "locked.tmp").mkdir()
    with _recompile._locked(folder / "locked.lock"):
        assert broken.target_of(jit(broken)) == "npu"
    assert {path.name for path in folder.glob("*.tmp")} == {"locked.tmp"}
    (own,) = (path for path in kept(broken) if path.suffix != ".tmp")
    for unused in (own, *folder.glob("*.tmp"), *folder.glob("*.lock")):
        os.utime(unused, (0, 0))
    jit(broken)
    assert list(folder.iterdir()) == [own]


@needs_qnn
def test_the_command_shows_what_apps_have_compiled(broken: Any) -> None:
    jit(broken)
    (own,) = kept(broken)
    printed = CliRunner().invoke(info).output
    (row,) = (line for line in printed.splitlines() if "compiled by" in line)
    assert re.search(rf"compiled by shipped +a_ctx.onnx, a_ctx_qnn.bin .* {own.name[:12]}", row)


@needs_qnn
def test_of_several_threads_one_compiles(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(lambda _: jit(broken), range(4)))
    assert {broken.target_of(each) for each in sessions} == {"npu"}
    assert caplog.text.count("is compiled for npu") == 1


@needs_qnn
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("altered", "a/npu/prepared/a.onnx was changed"),
        ("truncated", "a/npu/prepared/a.onnx has"),
        ("not for QNN", "Unable to compile any nodes"),
    ],
)
def test_a_prepared_model_that_cannot_be_compiled_is_a_failure(
    qnn: Shipper, how: str, reason: str
) -> None:
    prepared = qnn.folder / "a/npu/prepared/a.onnx"
    if how == "not for QNN":
        save(parsed("(float[2, 4] x) => (int64[2, ?] y) { y = NonZero (x) }"), prepared)
    app = qnn(npu=QNN)
    if how != "not for QNN":
        damage(prepared, how)
    # It matters only where it is compiled.
    assert app.target_of(app.load("a", device="any", verify=True)) == "npu"
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    attempts = app.explain("a", device="any", recompile=True)
    assert outcomes(attempts) == [("npu", "failed"), ("npu", "failed"), ("source", "opened")]
    assert attempts[1].reason.startswith("compiling it on this machine: ")
    assert reason in attempts[1].reason
    assert left(app) == ([".json", ".lock"] if how == "not for QNN" else [])


@needs_qnn
def test_settings_decide_how_and_whether_a_model_is_compiled_again(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    jit(app)
    session_options = {"session.some": "1"}
    for settings in (
        {"embed": True, "session_options": session_options},
        {"optimization": "all", "embed": True},
        {"optimization": None, "session_options": None},
    ):
        app = qnn(npu=changed(QNN, settings=settings))
        damage(qnn.folder / "a/npu/a_ctx_qnn.bin", "truncated")
        jit(app)
    assert len(kept(app)) == 4
    embedded = [each for each in kept(app) if not (each / "a_ctx_qnn.bin").exists()]
    assert len(embedded) == 2


@needs_qnn
def test_another_version_or_device_needs_another_context(
    broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = opener(broken)

    def key(device: Any) -> str:
        return str(_recompile._key_of_compiled(own, own.variant, device))

    library = tmp_path / "library.so"
    library.write_bytes(b"library")
    npu = device("NPU", driver="1", library_path=str(library))
    first = key(npu)
    # A frozen app unpacks its libraries at each start, and the same vendor has other names.
    moved = device("NPU", "Other", driver="1", library_path=str(library.rename(tmp_path / "moved")))
    os.utime(tmp_path / "moved", (1, 1))
    assert key(moved) == first
    keys = {first, key(device("NPU", driver="2")), key(device("NPU", driver="1"))}
    moved.device.device_id = 3
    keys.add(key(moved))
    (tmp_path / "moved").write_bytes(b"another library")
    keys.add(key(moved))
    monkeypatch.setattr(onnxruntime, "__version__", "99.0")
    keys.add(key(moved))
    driver = tmp_path / "driver"
    own.variant.about["driver_files"] = [str(driver), str(tmp_path)]
    for text in ("1", "2"):
        driver.write_text(text, encoding="utf-8")
        keys.add(key(moved))
    # Of an EP without a package.
    plugin, own.variant.plugin = own.variant.plugin, {}
    keys.add(key(moved))
    own.variant.plugin = plugin
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    keys.add(key(moved))
    assert len(keys) == 10


@needs_qnn
def test_a_context_is_compiled_from_a_zip_archive(
    qnn: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    app = from_zip()
    assert app.target_of(jit(app)) == "npu"
    (folder,) = kept(app)
    assert folder.parent.parent.name == "zipped"
    gc.collect()
    assert not list((tmp_path / "temp").iterdir())


@needs_qnn
def test_a_kept_context_whose_ep_is_missing_is_not_thrown_away(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit(broken)
    (own,) = kept(broken)

    def refuse(*_: Any) -> Any:
        raise broken.SkipTargetError("the session was opened without it")

    monkeypatch.setattr(broken.Opener, "open", refuse)
    caplog.clear()
    attempt = broken.explain("a", device="any", recompile=True)[0]
    assert str(attempt) == "npu: skipped, the session was opened without it"
    assert kept(broken) == [own]
    assert "is compiled" not in caplog.text

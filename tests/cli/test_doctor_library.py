"""``epcontext doctor --library``, with real libraries of plugin EPs."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from hatch_epcontext.cli._library import show_library
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.tools.plugin_library import (
    LibraryDiagnosis,
    StepStatus,
    Trial,
    TrialStep,
    Verdict,
)
from tests.altered_workers import write_start_code
from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn, newer_runtime
from tests.models import network
from tests.projects import make_project

needs_nxrt = needs("nxrt_ep_cpu")
QNN = ("--library", "onnxruntime_qnn")

CRASHING = """
from hatch_epcontext.worker import compiler
from hatch_epcontext.worker.actions import assign
import os, sys
def crash(*_):
    os.write(2, b"the EP is tired")
    os.abort()
real = assign.handle
assign.handle = lambda request: crash() if "gemm" in request.prepared else real(request)
"""
"""Workers in which opening one of the graphs on an EP crashes."""

DISAGREEING = """
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.worker.actions import validate
def differ(request):
    raise BuildError(Problem(Kind.OUTPUT_DIFFERS, "", "the output 'y' differs."))
validate.handle = differ
"""
"""Workers in which what an EP compiles computes something else."""


def library_of(package: str) -> Path:
    return Path(importlib.import_module(package).get_library_path())


@needs_qnn
def test_the_table_for_an_ep_that_writes_contexts_builds(cli: Cli, tmp_path: Path) -> None:
    path = library_of("onnxruntime_qnn")
    found = json.loads(cli("doctor", "--library", path, "--json", "--graph", "gemm").stdout)
    assert (found["verdict"], found["module"], found["ep"], found["provider"]) == (
        "works",
        "onnxruntime_qnn",
        "QNNExecutionProvider",
        "qnn",
    )
    (trial,) = found["trials"]
    assert {trial[step]["status"] for step in ("run", "compiled", "loaded")} == {"done"}
    assert (trial["taken"], trial["left"]) == ({"Gemm": 2, "Relu": 1, "Softmax": 1}, {})
    target = parse(found["table"])["tool"]["epcontext"]["targets"]["qnn"]
    assert (target["provider"], target["library"]) == ("plugin", "onnxruntime_qnn")
    assert target["requirements"][0].startswith("onnxruntime-qnn>=")
    models = 'models = [{ path = "models/a.onnx", dims = { batch = 1 } }]\n'
    project = make_project(tmp_path / "app", models + found["table"], network())
    assert "4/4 nodes in 1 context, ran and agrees" in cli("build", project).output


@newer_runtime
@needs_nxrt
def test_an_ep_that_writes_no_contexts_gets_no_table(cli: Cli, tmp_path: Path) -> None:
    # Outside of a package nothing but the file is known.
    path = tmp_path / "libnew.so"
    shutil.copy(library_of("nxrt_ep_cpu"), path)
    printed = cli("doctor", "--library", path, "--graph", "gemm", code=1).stdout
    assert f"library: {path}\n" in printed
    assert "registered as new; it offers:\n  cpu_ep on cpu" in printed
    assert "takes 4 of 4 nodes, agrees │ no context │ -" in printed
    assert "takes: Gemm, Relu, Softmax\n" in printed
    assert "cpu_ep writes no EP contexts: it cannot compile ahead of time." in printed
    assert "[tool.epcontext" not in printed


@needs_qnn
def test_a_crash_is_a_row_and_not_the_end(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_start_code(tmp_path, CRASHING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    printed = cli("doctor", *QNN, "--graph", "gemm", code=1).stdout
    assert "FAILED: Worker crashed" in printed
    assert "  - gemm: the worker crashed with SIGABRT" in printed
    assert "    | the EP is tired" in printed
    assert "Current thread" not in printed
    # The other steps were taken all the same.
    assert "4/4 nodes in 1 context" in printed
    assert "agrees (" in printed
    assert "verdict: QNNExecutionProvider writes EP contexts, and something failed" in printed
    assert "[tool.epcontext.targets.qnn]" in printed


@needs_qnn
def test_contexts_that_differ_from_the_cpu_are_faults(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_start_code(tmp_path, DISAGREEING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    found = json.loads(cli("doctor", *QNN, "--graph", "gemm", "--json", code=1).stdout)
    (trial,) = found["trials"]
    steps = [trial[step]["status"] for step in ("run", "compiled", "loaded")]
    assert (steps, found["verdict"]) == (["done", "done", "failed"], "faulty")
    assert trial["loaded"]["problems"][0]["kind"] == "EPC401"


@needs("onnxruntime_ep_nv_tensorrt_rtx")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA GPU")
def test_a_library_without_what_it_needs_names_it(cli: Cli) -> None:
    printed = cli("doctor", "--library", "onnxruntime_ep_nv_tensorrt_rtx", code=1).stdout
    (line,) = [each for each in printed.splitlines() if "the library cannot be loaded" in each]
    # Of CUDA's libraries some may be missing too.
    assert "libcuda.so.1" in line
    assert "Install the driver of an NVIDIA GPU" in printed
    assert printed.endswith("verdict: the library cannot be used here.\n")


@needs("onnxruntime_ep_webgpu")
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_a_library_without_a_device_says_what_it_needs(cli: Cli) -> None:
    printed = cli("doctor", "--library", "onnxruntime_ep_webgpu", code=1).stdout
    assert "registered as WebGpuExecutionProvider, and offers no device" in printed
    assert "It needs a GPU" in printed
    assert "Try them with --set virtual-devices=true." in printed


def test_a_file_that_is_no_library_is_a_problem(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plugin.so"
    path.write_text("not a library", encoding="utf-8")
    found = json.loads(cli("doctor", "--library", path, "--json", code=1).stdout)
    assert found["verdict"] == "unusable"
    (problem,) = found["problems"]
    assert problem["message"].startswith("the library cannot be loaded: ")
    assert "Check that the file is a library for this system" in problem["hint"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--library", "./none.so"), "does not exist."),
        (("--library", "no_such_ep"), "is not a package that is installed here."),
        (("--library", "no_such.package.at_all"), "is not a package that is installed here."),
        (("--library", "hatch-epcontext"), "The package is imported as hatch_epcontext."),
        (("--library", "../"), "is a folder."),
        (("--ep-name", "X"), "These flags are for a library: give --library too."),
        (("-O", "a=b"), "These flags are for a library: give --library too."),
        (("--library", "json", "--graph", "all"), "'all' is not one of"),
    ],
)
def test_wrong_usage_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli("doctor", *flags, code=2).output


@needs_qnn
def test_an_ep_that_the_library_does_not_have_is_an_error(cli: Cli) -> None:
    printed = cli("doctor", *QNN, "--ep-name", "Other", code=2).output
    assert "the library offers QNNExecutionProvider, and not Other." in printed
    assert "--set registration-name=Other" in printed


@newer_runtime
@needs_nxrt
def test_another_registration_is_not_advised_where_it_was_tried(cli: Cli) -> None:
    printed = cli("doctor", "--library", "nxrt_ep_cpu", "--ep-name", "Other", code=2).output
    assert "the library offers cpu_ep, and not Other." in printed
    assert "leave --ep-name out" in printed
    assert "registration-name" not in printed


@needs_qnn
def test_a_timeout_names_the_flag(cli: Cli) -> None:
    printed = cli("doctor", *QNN, "--set", "build.timeout=0.01", code=1)
    assert "Add --set build.timeout=0.02" in printed.output


def test_a_timeout_in_a_step_names_the_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    limit = Setting(Key() / "build" / "timeout", 9)
    slow = Problem(Kind.WORKER_TIMEOUT, "", "the worker was stopped.", settings=(limit,))
    failed = TrialStep(StepStatus.FAILED, "FAILED", (slow,))
    trials = tuple(Trial(name, {}, {}, failed, failed, failed) for name in ("gemm", "conv"))
    show_library(LibraryDiagnosis("some_ep", {}, {}, Verdict.FAULTY, ep="SomeEP", trials=trials))
    assert capsys.readouterr().out.count("Add --set build.timeout=9") == 1


def test_a_package_without_the_function_names_its_library(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_ep"
    (package / "lib").mkdir(parents=True)
    for name in ("__init__.py", "_native.cpython-311-x86_64-linux-gnu.so", "lib/libsome_ep.so"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    printed = cli("doctor", "--library", "some_ep", code=1).stdout
    assert f"name the path of the library instead: {package / 'lib' / 'libsome_ep.so'}." in printed

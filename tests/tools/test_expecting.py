"""What is expected of a wheel's targets is what the loader's `check` says of them, or it is unknown."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import pytest

from hatch_epcontext.errors import InspectionError
from hatch_epcontext.package.manifest import UNSEALED, seal
from hatch_epcontext.shipped import METADATA
from hatch_epcontext.tools.environment import Machine, describe_machine, examine
from hatch_epcontext.tools.expecting import (
    Expectation,
    expect,
    opens_nothing,
    read_wheel,
    this_machine,
)
from tests.cli.conftest import build_wheel
from tests.conftest import needs, needs_qnn
from tests.loader.shipped import import_copy
from tests.loader.test_check import compare
from tests.models import network
from tests.projects import make_project

TOML = """
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
fallback = "source"
targets.cpu = { provider = "cpu" }
"""

RTX = "NvTensorRTRTXExecutionProvider"

FOLDER = "my_app/epcontext"

Table = dict[str, Any]


class Release:
    """A built wheel, with the model package in it, which a test changes."""

    def __init__(self, built: Path, folder: Path) -> None:
        self.folder = folder / "installed"
        shutil.unpack_archive(built, self.folder, "zip")
        self.wheel = folder / built.name
        self.manifest = json.loads((self.package / "manifest.json").read_bytes())
        self.variants = self.manifest["components"]["a"]["variants"]

    @property
    def package(self) -> Path:
        return self.folder / FOLDER

    def about(self, target: str = "cpu") -> Table:
        """What is ours of a variant."""
        about: Table = self.variants[target]["additional_metadata"][METADATA]
        return about

    def add(self, target: str, ep: str, device: str = "any", **ours: Any) -> None:
        """A copy of the CPU's variant for another EP, as the first one."""
        variant = copy.deepcopy(self.variants["cpu"]) | {"ep": ep}
        about = variant["additional_metadata"][METADATA]
        about["settings"] |= {"ep": ep, "device": device}
        about |= ours
        others = dict(self.variants)
        self.variants.clear()
        self.variants.update({target: variant, **others})

    def write(self) -> None:
        """Write the manifest, and the wheel with what is in the folder."""
        ours = self.manifest["additional_metadata"][METADATA]
        ours["manifest_sha256"] = UNSEALED
        (self.package / "manifest.json").write_text(seal(json.dumps(self.manifest)), "utf-8")
        (record,) = self.folder.glob("*.dist-info/RECORD")
        files = [f for f in sorted(self.folder.rglob("*")) if f.is_file() and f != record]
        files = [file for file in files if "__pycache__" not in file.parts]
        names = {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in files}
        recorded = {f"{FOLDER}/{name}": r["sha256"] for name, r in ours["files"].items()}
        rows = []
        for name, content in names.items():
            digest = bytes.fromhex(recorded.get(name, sha256(content).hexdigest()))
            rows.append(f"{name},sha256={urlsafe_b64encode(digest).decode().rstrip('=')},0")
        record.write_text("\n".join(rows), "utf-8")
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for file in (*files, record):
                archive.write(file, file.relative_to(self.folder).as_posix())

    def answers(self, machine: Machine) -> list[str]:
        """The expected answers, of which none contradicts `check` and `load`."""
        self.write()
        expectations = expect([read_wheel(self.wheel)], machine)
        app = import_copy(self.package / "__init__.py")
        checked = compare(app)
        answers = [expectation.answer for expectation in expectations]
        assert [e.target for e in expectations] == [e.target for e in app.check("a")]
        assert all(
            ours in (theirs, "unknown") for ours, theirs in zip(answers, checked, strict=True)
        )
        assert all(expectation.reason for expectation in expectations)
        return [f"{ours}/{theirs}" for ours, theirs in zip(answers, checked, strict=True)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a model for the CPU, and its source."""
    folder = tmp_path_factory.mktemp("app")
    project = make_project(folder, "", network())
    file = project / "pyproject.toml"
    file.write_text(f"[tool.epcontext]\n{TOML}", "utf-8")
    return build_wheel(project)


@pytest.fixture
def release(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    monkeypatch.setitem(sys.modules, "shipped", ModuleType("shipped"))
    return Release(built, tmp_path)


@pytest.fixture(scope="module")
def here() -> Machine:
    return describe_machine(*examine())


def plugin(module: str) -> Table:
    return {"module": module, "package": module.replace("_", "-"), "registration_name": "X"}


def set_ours(**ours: Any) -> Callable[[Release], None]:
    return lambda release: release.about().update(ours)


def set_level(level: str) -> Callable[[Release], None]:
    return lambda release: release.about()["settings"].update(optimization=level)


def add(ep: str, device: str = "any", **ours: Any) -> Callable[[Release], None]:
    return lambda release: release.add("new", ep, device, **ours)


def add_qnn(device: str, **ours: Any) -> Callable[[Release], None]:
    about = {"plugin": plugin("onnxruntime_qnn"), **ours}
    return lambda release: release.add("new", "QNNExecutionProvider", device, **about)


def drop(target: str) -> Callable[[Release], None]:
    return lambda release: release.variants.pop(target)


def alter(release: Release) -> None:
    file = release.package / "a" / "cpu" / "a_optimized.onnx"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


BOTH = "opens/opens opens/opens"

# The app may use Windows ML's.
ABSENT = "unknown" if sys.platform == "win32" else "cannot"


@pytest.mark.parametrize(
    ("change", "answers"),
    [
        (lambda release: None, BOTH),
        (drop("source"), "opens/opens"),
        (drop("cpu"), "unknown/unknown"),
        (set_ours(compiled_with={"onnxruntime": "99.0"}), "unknown/unknown unknown/unknown"),
        (set_ours(compiled_with={"onnxruntime": "1.9.1"}), BOTH),
        (set_ours(compiled_with={"onnxruntime-gpu": "99.0"}), "unknown/unknown unknown/unknown"),
        (set_ours(compiled_with={}), BOTH),
        (set_level("none"), BOTH),
        (set_level("extended"), BOTH),
        (set_level("all"), "unknown/unknown opens/opens"),
        (alter, "unknown/unknown opens/opens"),
        (add("CUDAExecutionProvider", "gpu"), f"{ABSENT}/cannot {BOTH}"),
        (add("MIGraphXExecutionProvider", "gpu"), f"{ABSENT}/cannot {BOTH}"),
        (add("CPUExecutionProvider", "npu", plugin=plugin("no_such_ep")), f"unknown/cannot {BOTH}"),
        (
            add("AcmeExecutionProvider", "npu", plugin=plugin("no_such_ep")),
            f"unknown/cannot {BOTH}",
        ),
        (add("AcmeExecutionProvider", "npu", plugin=plugin("")), f"unknown/cannot {BOTH}"),
        (add("QNNExecutionProvider", "npu", plugin=plugin("no_such_ep")), f"unknown/cannot {BOTH}"),
    ],
)
def test_no_loader_is_needed_to_know_what_it_does(
    release: Release, here: Machine, change: Callable[[Release], None], answers: str
) -> None:
    change(release)
    assert release.answers(here) == answers.split()


@needs_qnn
@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (add_qnn("npu"), "cannot/cannot"),
        (add_qnn("gpu"), "cannot/cannot"),
        (add_qnn("cpu"), "unknown/unknown"),
        (add_qnn("any"), "unknown/unknown"),
        (add_qnn("any", needs_device=True), "cannot/cannot"),
        (add_qnn("cpu", needs_device=True), "unknown/unknown"),
    ],
)
def test_devices_decide(
    release: Release, here: Machine, change: Callable[[Release], None], answer: str
) -> None:
    change(release)
    assert release.answers(here) == [answer, *BOTH.split()]


@needs_qnn
@pytest.mark.parametrize(("version", "is_named"), [("99.0", True), ("2.0", False)])
def test_an_older_release_of_the_ep_than_the_one_that_compiled_is_named(
    release: Release, here: Machine, version: str, is_named: bool
) -> None:
    ours = plugin("onnxruntime_qnn")
    versions = {"onnxruntime-qnn": version}
    release.add("new", "QNNExecutionProvider", "cpu", plugin=ours, compiled_with=versions)
    release.write()
    new, *_ = expect([read_wheel(release.wheel)], here)
    assert new.answer == "unknown"
    assert (f"; onnxruntime-qnn {version} compiled it, and " in new.reason) == is_named


@needs("onnxruntime_ep_nv_tensorrt_rtx")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA GPU")
def test_a_library_without_its_driver_cannot(release: Release, here: Machine) -> None:
    release.add("new", RTX, "gpu", plugin=plugin("onnxruntime_ep_nv_tensorrt_rtx"))
    assert release.answers(here) == ["cannot/cannot", *BOTH.split()]


@needs("onnxruntime_ep_openvino")
def test_the_ep_is_asked_whether_it_can_run_a_context(release: Release) -> None:
    ours = {"plugin": plugin("onnxruntime_ep_openvino"), "compares": True}
    release.add("new", "OpenVINOExecutionProvider", "cpu", **ours)
    release.variants["new"]["compatibility_string"] = "of another version"
    release.write()
    machine = this_machine([read_wheel(release.wheel)])
    if not any(s.devices for s in machine.providers if s.provider == "openvino"):
        pytest.skip("OpenVINO offers no CPU device on this processor")
    assert release.answers(machine) == ["cannot/cannot", *BOTH.split()]
    # A file says nothing of this context.
    assert release.answers(describe_machine(*examine()))[0] == "unknown/cannot"


def test_an_old_onnx_runtime_has_no_plugins(
    release: Release, here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(onnxruntime, "get_ep_devices")
    assert here.runtime is not None
    old = replace(here, runtime=replace(here.runtime, lists_devices=False))
    release.add("new", "QNNExecutionProvider", "npu", plugin=plugin("onnxruntime_qnn"))
    assert release.answers(old) == ["cannot/cannot", *BOTH.split()]


def test_a_companion_has_a_wheel_of_its_own(release: Release, here: Machine) -> None:
    component = release.manifest["components"]["a"]["additional_metadata"][METADATA]
    component["modules"] = {"npu": "no_such_companion", "cpu": ""}
    ours = release.manifest["additional_metadata"][METADATA]
    ours["companions"] = {"no_such_companion": "my-app[npu]"}
    assert release.answers(here) == ["unknown/cannot", *BOTH.split()]
    (npu, *_) = expect([read_wheel(release.wheel)], here)
    assert (npu.target, npu.reason) == ("npu", "it is in the wheel of my-app[npu]")


def lacking(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Machines of which something is not known."""
    yield "runtime", replace(machine, runtime=None)
    yield "providers", replace(machine, providers=())
    yield (
        "modules",
        replace(machine, providers=tuple(replace(s, module="") for s in machine.providers)),
    )
    asked = tuple(replace(s, is_all=False, devices=()) for s in machine.providers)
    yield "devices", replace(machine, providers=asked)
    yield "windows", replace(machine, platform="win32")


def test_what_is_not_known_is_unknown(release: Release, here: Machine) -> None:
    release.add("new", "QNNExecutionProvider", "npu", plugin=plugin("onnxruntime_qnn"))
    release.add("cuda", "CUDAExecutionProvider", "gpu")
    release.write()
    wheel = read_wheel(release.wheel)
    answers = {
        name: {e.target: e.answer for e in expect([wheel], machine)}
        for name, machine in lacking(replace(here, platform="linux"))
    }
    assert set(answers["runtime"].values()) == {"unknown"}
    assert {answers[name]["new"] for name in ("providers", "modules", "devices")} == {"unknown"}
    assert answers["windows"]["cuda"] == "unknown"
    assert answers["providers"]["cuda"] == "cannot"
    assert {answers[name]["cpu"] for name in list(answers)[1:]} == {"opens"}


@pytest.mark.parametrize(
    ("tag", "facts", "answer"),
    [
        ("py3-none-win_arm64", {}, "cannot"),
        ("py3-none-win_arm64.win_amd64", {"tags": ("win_amd64",)}, "opens"),
        ("cp399-cp399-win_amd64", {"tags": ("win_amd64",)}, "unknown"),
        ("py2.py3-none-any", {}, "opens"),
        ("py3-none-any", {"python": "3.9.7"}, "cannot"),
        ("py3-none-any", {"python": "3.15.0a1+"}, "opens"),
    ],
)
def test_what_pip_refuses_cannot_open(
    release: Release, here: Machine, tag: str, facts: Table, answer: str
) -> None:
    release.wheel = release.wheel.with_name(f"my_app-1.0-{tag}.whl")
    release.write()
    expectations = expect([read_wheel(release.wheel)], replace(here, **facts))
    assert {expectation.answer for expectation in expectations} == {answer}


def test_what_pip_installs_with_the_wheel_is_not_there_yet(release: Release, here: Machine) -> None:
    release.add("cuda", "CUDAExecutionProvider", "gpu")
    release.add("npu", "QNNExecutionProvider", "npu", plugin=plugin("onnxruntime_qnn"))
    (metadata,) = release.folder.glob("*.dist-info/METADATA")
    plain, there = metadata.read_text("utf-8"), {"onnxruntime": "1.30.0", "onnxruntime-qnn": "2.7"}
    machine = replace(here, packages=there, platform="linux")
    answers = {}
    for required in (
        "numpy",
        "onnxruntime>=1.29",
        "onnxruntime>=1.31",
        'onnxruntime-gpu; extra == "gpu"',
        'Onnxruntime_QNN>=2.8; extra == "npu"',
    ):
        metadata.write_text(f"Requires-Dist: {required}\n{plain}", "utf-8")
        release.write()
        expectations = expect([read_wheel(release.wheel)], machine)
        answers[required] = " ".join(e.answer for e in expectations if e.target != "npu")
        if "QNN" in required:
            assert expectations[0].answer == "unknown"
    opens, unknown = "cannot opens opens", "unknown unknown unknown"
    assert list(answers.values()) == [opens, opens, unknown, unknown, opens]
    odd = replace(machine, packages={"onnxruntime-qnn": "none"})
    assert expect([read_wheel(release.wheel)], odd)[0].answer == "unknown"


@pytest.mark.parametrize("name", ["my_app.whl", "my_app-1.0-py3-none-any.zip", "my_app"])
def test_only_a_wheel_is_read(release: Release, name: str) -> None:
    release.write()
    file = release.wheel.rename(release.wheel.with_name(name))
    with pytest.raises(InspectionError, match="has no name of a wheel"):
        read_wheel(file)


def test_a_damaged_wheel_is_an_error(release: Release) -> None:
    (release.package / "a" / "cpu" / "a_optimized.onnx").unlink()
    release.write()
    with pytest.raises(InspectionError, match="is not in the wheel"):
        read_wheel(release.wheel)


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_what_the_loader_refuses_is_an_error(release: Release, kind: str) -> None:
    release.about("source")[kind] = [{"name": "x", "shape": "any"}]
    release.write()
    with pytest.raises(InspectionError, match=f"PlainMetadata.{kind}"):
        read_wheel(release.wheel)
    app = import_copy(release.package / "__init__.py")
    with pytest.raises(app.LoadError):
        app.check("a")


def test_a_model_that_no_target_opens_is_named() -> None:
    answers = {"a": ("cannot", "cannot"), "b": ("cannot", "unknown"), "c": ("cannot", "opens")}
    expectations = [
        Expectation("", model, f"t{number}", answer, "")  # type: ignore[arg-type]
        for model, of_model in answers.items()
        for number, answer in enumerate(of_model)
    ]
    assert opens_nothing(expectations) == ["a"]

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hatch_epcontext.build import requirements
from hatch_epcontext.cli.app import app
from hatch_epcontext.providers import PROVIDERS
from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn

HOOK = "[tool.hatch.build.targets.wheel.hooks.epcontext]\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("nothing"))
    result: dict[str, Any] = json.loads(
        CliRunner().invoke(app, ["doctor", folder, "--json"]).stdout
    )
    return result


@pytest.fixture
def _only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each EP's library is loaded in a process of its own, which takes a while."""
    monkeypatch.setattr(survey, "PROVIDERS", {"cpu": PROVIDERS["cpu"]})


def state(found: dict[str, Any], provider: str) -> dict[str, Any]:
    (one,) = [each for each in found["providers"] if each["provider"] == provider]
    result: dict[str, Any] = one
    return result


def test_every_provider_is_told_with_its_devices_or_why_it_has_none(found: dict[str, Any]) -> None:
    assert [each["provider"] for each in found["providers"]] == list(PROVIDERS)
    assert all(each["devices"] or each["why"] for each in found["providers"])
    assert state(found, "cpu")["devices"] == ["CPUExecutionProvider loads"]
    assert state(found, "vitisai")["why"] == "onnxruntime-vitisai is not installed."
    assert (found["distributions"], found["problems"]) == (
        {"onnxruntime": found["distributions"]["onnxruntime"]},
        [],
    )
    assert found["tools"].keys() == {"onnx", "onnxslim", "numpy"}


@needs_qnn
def test_a_plugin_that_works(found: dict[str, Any]) -> None:
    qnn = state(found, "qnn")
    assert qnn["package"].startswith("onnxruntime-qnn ")
    assert qnn["devices"][0].startswith("QNNExecutionProvider on ")


@needs("onnxruntime_ep_nv_tensorrt_rtx")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is an NVIDIA GPU here")
def test_a_plugin_that_misses_its_driver(found: dict[str, Any]) -> None:
    rtx = state(found, "tensorrt-rtx")
    assert rtx["devices"] == []
    assert "libcuda.so.1" in rtx["why"]


@pytest.mark.usefixtures("_only_cpu")
def test_it_is_for_reading(cli: Cli, tmp_path: Path) -> None:
    told = cli("doctor", tmp_path).stdout
    assert "There is no pyproject.toml here." in told
    assert f"cache: {tmp_path / 'user-cache'}, 0 artifacts" in told
    assert "to be mended" not in told
    assert not (tmp_path / "user-cache").exists()


@pytest.mark.usefixtures("_only_cpu")
@pytest.mark.parametrize(
    ("toml", "told", "code"),
    [
        ("[project]\n", "The project here does not use hatch-epcontext.", 0),
        (f'{HOOK}[tool.epcontext]\nprovider = "cpu"\nmodels = ["models/a.onnx"]', "with 1 job.", 0),
        (('[tool.hatch.build.hooks.epcontext]\n[tool.epcontext]\nprovider = "cpu"\n'
         'models = ["models/*.onnx"]'), "with 2 jobs.", 0),
        ('[tool.epcontext]\nprovider = "cpu"\n', "[tool.epcontext] is there, and no hook.", 1),
        (HOOK, "[tool.epcontext]\n        is not in pyproject.toml", 1),
        (f'{HOOK}[tool.epcontext]\nprovder = "cpu"\n', 'Did you mean "provider"?', 1),
        ("[tool", "cannot be read", 1),
        ("tool = 3", "cannot be read", 1),
    ],
)  # fmt: skip
def test_what_is_said_of_the_project(
    cli: Cli, project: Path, toml: str, told: str, code: int
) -> None:
    (project / "pyproject.toml").write_text(toml, encoding="utf-8")
    output = cli("doctor", project, code=code).stdout
    assert told in output
    assert ("to be mended:" in output) == bool(code)


@pytest.mark.usefixtures("_only_cpu")
def test_two_flavours_have_to_be_mended(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = requirements.installed

    def both(name: str) -> str | None:
        return "1.31.1" if name == "onnxruntime-gpu" else real(name)

    monkeypatch.setattr(requirements, "installed", both)
    monkeypatch.setattr(survey, "installed", both)
    told = cli("doctor", tmp_path, code=1).stdout
    assert "ONNX Runtime: onnxruntime 1." in told
    assert "are both installed, and overwrite one another" in told


def test_an_environment_without_onnx_runtime(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed", lambda name: None)
    monkeypatch.setattr(survey, "installed", lambda name: None)
    told = cli("doctor", tmp_path, code=1).stdout
    assert "ONNX Runtime: none" in told
    assert "No ONNX Runtime is installed" in told
    assert "onnxruntime-qnn>=2.7 is not installed." in told

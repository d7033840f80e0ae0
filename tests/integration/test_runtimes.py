"""Targets of several ONNX Runtime distributions, with a real front end that installs them."""

from __future__ import annotations

import ctypes
import json
import platform
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import needs_qnn
from tests.integration.conftest import UV, run
from tests.projects import make_project

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64") or sys.version_info < (3, 11),
        reason="onnxruntime-gpu has no wheels for this Python or platform",
    ),
]

TENSORRT = """
targets.tensorrt.provider = "tensorrt"
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""

TWO = """
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
[tool.epcontext.targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
requirements = ["onnxruntime", "onnxruntime-qnn>=2.7"]
[tool.epcontext.targets.gpu]
provider = "cuda"
requirements = ["onnxruntime-gpu"]
"""


def build(project: Path, env: dict[str, str], *, fails: bool = False, **settings: str) -> str:
    variables = {f"HATCH_EPCONTEXT_{name}": value for name, value in settings.items()}
    command = (sys.executable, "-m", "build", UV, "-w", "-o", project / "dist", project)
    return run(*command, cwd=project, env={**env, **variables}, fails=fails)


def has(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@pytest.mark.skipif(has("libnvinfer.so.10"), reason="this machine has TensorRT")
def test_the_missing_libraries_of_tensorrt_are_named(tmp_path: Path, env: dict[str, str]) -> None:
    project = make_project(tmp_path / "project", TENSORRT)
    text = build(project, env, fails=True)
    assert "the library of TensorrtExecutionProvider cannot be loaded" in text
    assert "Install NVIDIA's TensorRT, which is not a dependency of onnxruntime-gpu." in text
    assert "libnvinfer.so.10" in text
    assert "Traceback" not in text
    assert not (project / "dist").exists() or not list((project / "dist").iterdir())


@needs_qnn
def test_targets_of_two_distributions_get_into_one_wheel(
    tmp_path: Path, env: dict[str, str]
) -> None:
    project = make_project(tmp_path / "project", TWO)
    together = build(project, env, fails=True)
    assert "onnxruntime and onnxruntime-gpu cannot be installed together" in together
    assert "HATCH_EPCONTEXT_FROM_CACHE=<names>" in together
    build(project, env, TARGETS="npu")
    text = build(project, env, FROM_CACHE="npu")
    assert "a -> npu (qnn): ok, 4/4 nodes" in text
    assert "a -> gpu (cuda): compiled, optimized graph" in text
    (wheel,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read("my_app/epcontext/manifest.json"))
    variants = manifest["components"]["a"]["variants"]
    assert [(name, each.get("device")) for name, each in variants.items()] == [
        ("npu", "npu"),
        ("gpu", "gpu"),
        ("source", None),
    ]
    about = {n: each["additional_metadata"]["hatch-epcontext"] for n, each in variants.items()}
    npu, gpu = about["npu"], about["gpu"]
    assert npu["validation"]["status"] == "ran"
    assert npu["compiled_with"].keys() >= {"onnxruntime", "onnxruntime-qnn"}
    assert "onnxruntime-gpu" in gpu["compiled_with"]
    assert "onnxruntime-gpu" not in npu["compiled_with"]

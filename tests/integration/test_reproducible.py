"""Cold builds of the same sources, each in a folder and with a cache of its own."""

from __future__ import annotations

import contextlib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest

from tests.integration.conftest import build_project
from tests.models import (
    interrupted,
    parsed,
    save,
    save_with_data,
    transformer,
)
from tests.projects import make_project

MODELS = """
wheel.sbom = true
[[tool.epcontext.models]]
path = "models/a.onnx"
dims = { batch = 1 }
[[tool.epcontext.models]]
path = "models/parts.onnx"
[[tool.epcontext.models]]
path = "models/branches.onnx"
targets = ["basic", "for-this-cpu"]
[tool.epcontext.targets.basic]
provider = "cpu"
[tool.epcontext.targets.for-this-cpu]
provider = "cpu"
optimization = "all"
external-initializers = true
"""

QNN_TARGET = """
provider = "qnn"
chip = "snapdragon-x-elite"
min-coverage = 0.5
"""

QNN = f"""
[[tool.epcontext.models]]
path = "models/prefill.onnx"
share-weights = "decoder"
targets = ["beside"]
[[tool.epcontext.models]]
path = "models/decode.onnx"
share-weights = "decoder"
targets = ["beside"]
[tool.epcontext.targets.beside]{QNN_TARGET}
[tool.epcontext.targets.embedded]{QNN_TARGET}embed = true
[tool.epcontext.targets.weights]{QNN_TARGET}external-initializers = true
recompile = true
"""

RTX = """
[tool.epcontext.targets.library]
provider = "tensorrt-rtx"
chip = ["rtx-30", "rtx-40"]
"""

OPENVINO = """
[tool.epcontext.targets.intel]
provider = "openvino"
device = "cpu"
[tool.epcontext.targets.intel-embedded]
provider = "openvino"
device = "cpu"
embed = true
"""


def branches() -> onnx.ModelProto:
    """Convolutions whose layout ONNX Runtime changes back on a CPU, for an operator that has one layout."""
    nodes = "c0 = Conv (x, w) "
    for index in range(20):
        nodes += f"c{index + 1} = Conv <pads = [1, 1, 1, 1]> (c{index}, w) "
        nodes += f"s{index} = Softmax <axis = 1> (c{index + 1}) "
    summed = ", ".join(f"s{index}" for index in range(20))
    text = f"(float[1, 16, 10, 10] x) => (float[1, 16, 8, 8] y) {{ {nodes} y = Sum ({summed}) }}"
    return parsed(text, w=(16, 16, 3, 3))


def cold_wheel(folder: Path, toml: str) -> Path:
    make_project(folder, toml)
    save(interrupted(), folder / "models" / "parts.onnx")
    save(branches(), folder / "models" / "branches.onnx")
    for name, length in (("prefill", 64), ("decode", 1)):
        path = folder / "models" / f"{name}.onnx"
        save_with_data(transformer(length), path, f"{name}.data")
    cache = str(folder / "cache")
    wheel, _ = build_project(
        folder, HATCH_EPCONTEXT_CACHE_DIR=cache, SOURCE_DATE_EPOCH="1700000000"
    )
    return wheel


@pytest.fixture
def targets(request: pytest.FixtureRequest) -> str:
    """All targets that this machine compiles: a process for each EP would take most of the time."""
    packages = {"onnxruntime_qnn": QNN, "tensorrt_rtx_bindings": RTX}
    text = "".join(own for package, own in packages.items() if find_spec(package) is not None)
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("openvino_cpu")
        text += OPENVINO
    return text


def test_two_cold_builds_write_the_same_wheel(targets: str, tmp_path: Path) -> None:
    """What packagers ask of a build: pyca/cryptography#12811."""
    folders = (tmp_path / "one", tmp_path / "another" / "deeper")
    wheels = [cold_wheel(folder, MODELS + targets) for folder in folders]
    first, second = (contents(wheel) for wheel in wheels)
    assert [
        file for file in first.keys() | second.keys() if first.get(file) != second.get(file)
    ] == []
    assert wheels[0].read_bytes() == wheels[1].read_bytes()


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}

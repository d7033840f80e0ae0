"""Weight-sharing groups in a real wheel."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import needs_qnn, printed_json
from tests.integration.conftest import run
from tests.models import save, transformer
from tests.projects import PROJECT

pytestmark = needs_qnn

TOML = """
targets.qnn.provider = "qnn"
targets.qnn.provider-options = { soc_model = 60, htp_arch = 73 }

[[tool.epcontext.models]]
path = "models/prefill.onnx"
share-weights = "decoder"

[[tool.epcontext.models]]
path = "models/decode.onnx"
share-weights = "decoder"
"""

OPEN = """
import json
import numpy as np
from my_app.epcontext import explain, load
steps = {device: [str(s) for s in explain("decode", device=device)] for device in (None, "any")}
shape = load("decode").run(None, {"x": np.ones((1, 1, 256), np.float32)})[0].shape
print(json.dumps([list(steps.values()), shape]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("sharing")
    (project / "my_app").mkdir()
    (project / "my_app" / "__init__.py").touch()
    (project / "pyproject.toml").write_text(PROJECT + TOML, encoding="utf-8")
    for name, length in (("prefill", 64), ("decode", 1)):
        save(transformer(length), project / "models" / f"{name}.onnx")
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(project.parent / "cache")}
    text = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=project, env=env)
    assert "decoder (prefill + decode) -> qnn (qnn)" in text
    (built,) = (project / "dist").glob("*.whl")
    return built


def test_two_contexts_and_one_blob_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
        manifest = json.loads(archive.read("my_app/epcontext/manifest.json"))
    folder = "my_app/epcontext/decoder/qnn/"
    assert {name for name in sizes if name.startswith(folder)} == {
        f"{folder}prefill_ctx.onnx",
        f"{folder}decode_ctx.onnx",
        f"{folder}prefill_ctx_qnn.bin",
    }
    for name in ("prefill", "decode"):
        variants = manifest["components"][name]["variants"]
        assert list(variants) == ["qnn", "source"]
        variant = variants["qnn"]
        assert variant["variant_directory"] == "decoder/qnn"
        info = variant["executor_info"]["ort"]
        assert info["model_file"] == f"{name}_ctx.onnx"
        assert info["session_options"]["ep.share_ep_contexts"] == "1"
        about = variant["additional_metadata"]["hatch-epcontext"]
        assert about["sharing"]["members"] == ["prefill", "decode"]
        assert about["validation"]["status"] == "ran-alone"
        assert about["validation"]["agreements"]


def test_the_simulator_does_not_open_them(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    (tmp_path / "open.py").write_text(OPEN, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    printed = run(sys.executable, tmp_path / "open.py", cwd=tmp_path, env=env)
    (usual, anywhere), shape = printed_json(printed)
    assert usual[0].startswith("qnn: skipped, QNNExecutionProvider finds no npu, only cpu")
    assert anywhere[0] == "qnn: skipped, QNNExecutionProvider finds no npu, only cpu"
    assert usual[1] == anywhere[1] == "source: opened, CPUExecutionProvider on cpu"
    assert shape == [1, 1, 256]

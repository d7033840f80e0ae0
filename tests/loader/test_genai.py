"""`genai_folder`, which an app with a language model calls instead of `load`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from hatch_epcontext import _genai, loader
from hatch_epcontext.package.bundle import bundle
from tests.conftest import needs
from tests.language_models import make_folder
from tests.results import compiled, configured, install

TOML = """
models = [{ path = "models/llama", context-length = 128 }, "models/a.onnx"]
targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }
targets.cpu.provider = "cpu"
"""


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package with the models, whose loader it imports.
    monkeypatch.setattr(_genai, "__package__", "hatch_epcontext.loader")


@pytest.fixture
def package(project: Path, tmp_path: Path) -> Path:
    make_folder(project / "models" / "llama")
    config = configured(project, TOML)
    return bundle(compiled(config, tmp_path / "artifacts"), tmp_path, {}).folder


def test_without_the_device_it_is_the_plain_folder(package: Path) -> None:
    overlay = '{"model": {"context_length": 128}, "search": {"max_length": 128}}'
    chosen = _genai.genai_folder("llama", package=package)
    assert chosen == (str(package / "llama"), overlay, "source")
    assert chosen.max_length == 128
    with pytest.raises(loader.LoadError, match=r"\n  rtx: skipped, .+ cannot be loaded"):
        _genai.genai_folder("llama", target="rtx", package=package)


def test_what_fills_a_chunk_leaves_the_configured_length(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path))
    chosen = _genai.GenaiFolder(folder, json.dumps({"model": {}}), "source")
    assert chosen.max_length == 256
    window = {"decoder": {"sliding_window": {"window_size": 64, "slide_inputs": True}}}
    overlay = {"model": window, "search": {"max_length": 192}}
    assert chosen._replace(overlay=json.dumps(overlay)).max_length == 129


def test_one_name_has_a_folder_for_each_target(project: Path, tmp_path: Path) -> None:
    for name in ("llama", "other"):
        make_folder(project / "models" / name)
    toml = """
        models = [{ path = "models/llama", targets.cpu.path = "models/other" }]
        targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }
        targets.cpu.provider = "cpu"
    """
    package = bundle(compiled(configured(project, toml), tmp_path / "a"), tmp_path, {}).folder
    chosen = _genai.genai_folder("llama", package=package)
    assert (Path(chosen.folder), chosen.target) == (package / "llama.cpu", "source")
    with pytest.raises(loader.LoadError, match=r"\n  rtx: skipped"):
        _genai.genai_folder("llama", target="rtx", package=package)


def test_another_model_is_an_error(package: Path) -> None:
    with pytest.raises(loader.LoadError, match="'a' is no language model of "):
        _genai.genai_folder("a", package=package)


def test_in_an_editable_install_it_is_the_folder_of_the_project(
    project: Path, tmp_path: Path
) -> None:
    folder: Any = make_folder(project / "models" / "llama")
    config = configured(project, 'models = ["models/llama"]\ntargets.cpu.provider = "cpu"')
    package = project / "my_app" / "epcontext"
    install(compiled(config, tmp_path / "artifacts"), package)
    chosen = _genai.genai_folder("llama", package=package)
    assert Path(chosen.folder).samefile(folder)
    assert (chosen.overlay, chosen.target) == ('{"model": {}}', "source")


@pytest.mark.parametrize(("fallback", "is_opened"), [("source", True), ("none", False)])
@pytest.mark.parametrize("contains", [False, True])
def test_only_a_fallback_is_taken_where_no_device_is(
    project: Path,
    tmp_path: Path,
    fallback: str,
    is_opened: bool,
    contains: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """onnxruntime-gpu contains CUDA's EP on machines without a GPU too."""
    if contains:
        known = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: known)
    make_folder(project / "models" / "llama")
    toml = f"""
        models = [{{ path = "models/llama", fallback = "{fallback}" }}]
        targets.gpu.provider = "cuda"
    """
    package = bundle(compiled(configured(project, toml), tmp_path / "a"), tmp_path, {}).folder
    if is_opened:
        assert _genai.genai_folder("llama", package=package).target == "source"
    else:
        with pytest.raises(loader.LoadError, match=r"\n  gpu: .*CUDAExecutionProvider"):
            _genai.genai_folder("llama", package=package)


@needs("onnxruntime_ep_webgpu")
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_a_library_that_finds_no_gpu_is_passed_over(project: Path, tmp_path: Path) -> None:
    make_folder(project / "models" / "llama")
    toml = """
        models = ["models/a.onnx", "models/llama"]
        targets.gpu.provider = "webgpu"
    """
    package = bundle(compiled(configured(project, toml), tmp_path / "a"), tmp_path, {}).folder
    assert _genai.genai_folder("llama", package=package).target == "source"
    assert loader.explain("a", package=package)[0].outcome == "skipped"
    overlay = json.loads((package / "llama" / "gpu" / "overlay.json").read_text())
    session = overlay["model"]["decoder"]["session_options"]
    assert session == {"provider_options": [{"WebGPU": {}}]}


@needs("onnxruntime_genai")
def test_a_model_of_one_file_gets_the_ep_of_its_target(package: Path) -> None:
    import onnxruntime_genai

    overlay = (package / "llama" / "rtx" / "overlay.json").read_text()
    config = _genai.GenaiFolder(str(package / "llama"), overlay, "rtx").config()
    # For NVIDIA's GPUs it is another distribution.
    with pytest.raises(RuntimeError, match=r"libonnxruntime-genai-cuda|Cuda interface"):
        onnxruntime_genai.Model(config)

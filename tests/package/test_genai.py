"""The package of a language model in a folder of onnxruntime-genai."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.package.bundle import bundle, modules
from tests.language_models import make_folder
from tests.package.conftest import opened
from tests.package.test_bundle import recorded
from tests.results import compiled, configured

TOML = """
models = [{ path = "models/llama", context-length = 128 }]
targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }
targets.cpu.provider = "cpu"
"""

FOLDER = {
    "llama/genai_config.json",
    "llama/model.onnx",
    "llama/model.onnx.data",
    "llama/tokenizer.json",
    "llama/tokenizer_config.json",
}


def test_the_folder_is_in_it_once_with_an_overlay_for_each_target(
    project: Path, tmp_path: Path
) -> None:
    options = {"provider_options": [{"NvTensorRtRtx": {"enable_cuda_graph": "1"}}]}
    make_folder(project / "models" / "llama", decoder={"session_options": options})
    config = configured(project, TOML)
    bundled = bundle(compiled(config, tmp_path / "a"), tmp_path, modules(None, config.models))
    assert recorded(bundled) == FOLDER | {
        "__init__.py",
        "_check.py",
        "_runner.py",
        "_user_cache.py",
        "genai.py",
        "llama/rtx/llama_ctx.onnx",
        "llama/rtx/overlay.json",
        "llama/rtx/sidecar.bin",
        "llama/source/overlay.json",
    }
    limits = {"model": {"context_length": 128}, "search": {"max_length": 128}}
    overlays = {
        target: json.loads((bundled.folder / f"llama/{target}/overlay.json").read_text())
        for target in ("rtx", "source")
    }
    assert overlays["source"] == limits
    decoder = {
        "filename": "rtx/llama_ctx.onnx",
        "session_options": {"session.disable_model_compile": "1", **options},
    }
    assert overlays["rtx"] == {**limits, "model": {**limits["model"], "decoder": decoder}}
    assert list(opened(bundled.folder).components["llama"].variants) == ["rtx", "source"]


def test_two_models_of_one_folder_have_one_each(project: Path, tmp_path: Path) -> None:
    make_folder(project / "models" / "llama")
    toml = """
        models = ["models/llama", { path = "models/llama", name = "short", context-length = 64 }]
        targets.cpu.provider = "cpu"
    """
    config = configured(project, toml)
    bundled = bundle(compiled(config, tmp_path / "a"), tmp_path, modules(None, config.models))
    assert {name.replace("llama/", "short/") for name in FOLDER} | FOLDER <= recorded(bundled)


@pytest.mark.parametrize("is_other", [False, True])
def test_folders_of_one_model_have_one_tokenizer(
    project: Path, tmp_path: Path, is_other: bool
) -> None:
    for name in ("a", "b"):
        folder = make_folder(project / "models" / name)
    if is_other:
        (folder / "tokenizer_config.json").write_text("{}")
    toml = """
        models = [{ path = "models/a", name = "llama", targets.cpu.path = "models/b" }]
        targets = { cuda.provider = "cuda", cpu.provider = "cpu" }
    """
    bundled = bundle(compiled(configured(project, toml), tmp_path / "a"), tmp_path, {})
    tokenizers = {name for name in recorded(bundled) if "tokenizer" in name}
    both = {f"{n}/tokenizer{f}.json" for n in ("llama", "llama.cpu") for f in ("", "_config")}
    overlay = json.loads((bundled.folder / "llama.cpu/source/overlay.json").read_text())
    if is_other:
        assert tokenizers == both
        assert overlay == {"model": {}}
    else:
        assert tokenizers == {name for name in both if name.startswith("llama/")}
        assert overlay == {"model": {"tokenizer_dir": "../llama"}}


def test_an_ep_that_runs_the_folder_itself_gets_an_overlay(project: Path, tmp_path: Path) -> None:
    options = {"provider_options": [{"CUDA": {"enable_cuda_graph": "0"}}]}
    make_folder(project / "models" / "llama", decoder={"session_options": options})
    toml = """
        models = [{ path = "models/llama", context-length = 128, fallback = "none" }]
        targets.cuda = { provider = "cuda", provider-options.use_tf32 = false }
        targets.cpu.provider = "cpu"
    """
    config = configured(project, toml)
    assert not any("onnxruntime-gpu" in text for text in plan(config).requirements)
    assert plan(config).jobs == ()
    bundled = bundle(compiled(config, tmp_path / "a"), tmp_path, {})
    assert recorded(bundled) == FOLDER | {"llama/cuda/overlay.json"}
    overlay = json.loads((bundled.folder / "llama/cuda/overlay.json").read_text())
    session = overlay["model"]["decoder"]["session_options"]
    assert session == {"provider_options": [{"cuda": {"enable_cuda_graph": "0", "use_tf32": "0"}}]}
    assert overlay["search"] == {"max_length": 128}
    variants = opened(bundled.folder).components["llama"].variants
    assert {name: (v.ep, v.model_file) for name, v in variants.items()} == {
        "cuda": ("CUDAExecutionProvider", "llama/model.onnx")
    }


def test_without_a_fallback_the_weights_are_in_contexts_alone(
    project: Path, tmp_path: Path
) -> None:
    make_folder(project / "models" / "llama")
    toml = TOML.replace(" }", ', fallback = "none" }', 1)
    bundled = bundle(compiled(configured(project, toml), tmp_path / "a"), tmp_path, {})
    assert FOLDER - recorded(bundled) == {"llama/model.onnx"}
    assert "llama/rtx/overlay.json" in recorded(bundled)
    assert "llama/source/overlay.json" not in recorded(bundled)
    assert list(opened(bundled.folder).components["llama"].variants) == ["rtx"]

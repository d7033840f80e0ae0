"""Folders of onnxruntime-genai in place of a model's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.errors import Kind
from hatch_epcontext.graph.facts import Cut
from tests.config.examples import assert_one_problem, problems, read
from tests.language_models import make_folder

LLAMA = 'models = [{ path = "models/llama", context-length = 128 }]\n'
CPU = 'targets.cpu.provider = "cpu"\n'
NPU = 'targets.npu = { provider = "qnn", chip = "snapdragon-x-elite" }\n'
RTX = 'targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }\n'


@pytest.fixture
def folder(project: Path) -> Path:
    return make_folder(project / "models" / "llama")


def change(folder: Path, **decoder: Any) -> None:
    """Change the decoder's keys; None removes one."""
    file = folder / "genai_config.json"
    content = json.loads(file.read_text())
    table = {**content["model"]["decoder"], **decoder}
    content["model"]["decoder"] = {key: value for key, value in table.items() if value is not None}
    file.write_text(json.dumps(content))


def test_a_folder_is_a_model_with_all_its_files(project: Path, folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "state").touch()
    (model,) = read(project, 'models = ["models/llama"]\n' + CPU).models
    assert (model.name, model.path, model.fallback) == ("llama", folder / "model.onnx", "source")
    assert model.genai is not None
    assert model.genai.beside == (
        "genai_config.json",
        "model.onnx.data",
        "tokenizer.json",
        "tokenizer_config.json",
    )


def test_an_ep_with_profiles_gets_that_of_onnxruntime_genai(project: Path, folder: Path) -> None:
    (model,) = read(project, LLAMA + CPU + RTX).models
    profiles = {target.name: target.profiles for target in model.targets}
    past = {"min": (1, 1, 0, 16), "opt": (1, 1, 64, 16), "max": (1, 1, 128, 16)}
    names = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    assert profiles["rtx"] == (
        {
            "input_ids": {"min": (1, 1), "opt": (1, 1), "max": (1, 128)},
            "attention_mask": {"min": (1, 1), "opt": (1, 64), "max": (1, 128)},
            **dict.fromkeys(names, past),
        },
    )
    assert not any(target.settings.static_shapes for target in model.targets)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"filename": "../llama/model.onnx"},
            'names "../llama/model.onnx", which cannot be a file',
        ),
        ({"filename": "other.onnx"}, 'names the file "other.onnx", which is missing'),
        ({"filename": ""}, 'names "", which cannot be a file in the folder'),
        ({"inputs": {"input_ids": []}}, "inputs.past_key_names must be of the type str"),
        ({"session_options": {"provider_options": ["qnn"]}}, "cannot be read"),
        ({"filename": None}, "model.decoder.filename must be of the type str"),
        ({"head_size": "16"}, 'head_size must be of the type int, not "16"'),
        ({"head_size": -16}, "head_size must be from 1 to 16777216, not -16"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be from 1 to 16777216"),
        (
            {"session_options": {"provider_options": [{"qnn": {"backend_path": "QnnHtp.dll"}}]}},
            'names the library "QnnHtp.dll", which is for one system',
        ),
    ],
)
def test_what_is_wrong_with_its_configuration_is_one_problem(
    project: Path, folder: Path, decoder: dict[str, Any], message: str
) -> None:
    change(folder, **decoder)
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


@pytest.mark.parametrize("name", ["../x", "a/b", "a\0b"])
def test_a_stage_whose_name_cannot_be_a_file_is_a_problem(
    project: Path, folder: Path, name: str
) -> None:
    stage = {"filename": "model.onnx", "inputs": ["past_key_values.0.key"]}
    change(folder, filename=None, pipeline=[{name: stage}])
    assert_one_problem(
        project, LLAMA + CPU, "models[0].path", "which cannot be a file in the folder"
    )


def test_keys_that_contradict_the_folder_are_problems(project: Path, folder: Path) -> None:
    (folder / "cpu").mkdir()
    (folder / "cpu" / "notes.txt").touch()
    toml = """
        models = [{ path = "models/llama", context-length = 257, dims = { batch_size = 1 } }]
        targets.cuda = { provider = "openvino" }
    """
    found = problems(project, toml + CPU)
    assert {place: problem.kind for place, problem in found.items()} == {
        "models[0].dims": Kind.NOT_APPLICABLE,
        "models[0].context-length": Kind.INVALID_FOLDER,
        "models[0].targets": Kind.NOT_APPLICABLE,
        "models[0].path": Kind.INVALID_FOLDER,
    }


def test_a_context_length_is_of_language_models_only(project: Path) -> None:
    toml = 'models = [{ path = "models/a.onnx", context-length = 9 }]\n' + CPU
    assert_one_problem(project, toml, "models[0].context-length", "is for a folder")


def test_an_ep_with_fixed_sizes_gets_a_stage_for_a_chunk_and_one_for_a_token(
    project: Path, folder: Path
) -> None:
    toml = 'models = [{ path = "models/llama", context-length = 128, chunk = 32 }]\n'
    chunk, token, plain = read(project, toml + NPU + CPU).models
    past = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    slots = dict.fromkeys(past, (1, 1, 128, 16))
    for stage, tokens in ((chunk, 32), (token, 1)):
        assert stage.name == f"llama.{tokens}"
        assert stage.shapes == {"input_ids": (1, tokens), **slots}
        assert stage.cut == Cut(("input_ids", *past), lengths=True)
        assert (stage.share_weights, stage.fallback) == ("llama.shared", "none")
    assert [target.name for target in chunk.targets] == ["npu"]
    assert (plain.name, [target.name for target in plain.targets]) == ("llama", ["cpu"])
    assert not plain.cut


def make_pipeline(folder: Path, **changes: Any) -> None:
    """Make a pipeline of the folder, whose decoder is its only stage with a cache."""
    stages = {
        "embeddings": {"filename": "embeddings.onnx", "inputs": ["input_ids"]},
        "context": {"filename": "model.onnx", "inputs": ["hidden", "past_key_values.0.key"]},
    }
    (folder / "embeddings.onnx").touch()
    change(folder, filename=None, pipeline=[stages], **changes)


def test_the_stages_of_a_pipeline_that_have_a_cache_are_compiled(
    project: Path, folder: Path
) -> None:
    make_pipeline(folder)
    stage, plain = read(project, 'models = ["models/llama"]\n' + NPU).models
    assert (stage.name, stage.path, stage.cut) == ("llama.context", folder / "model.onnx", Cut())
    assert (plain.path, plain.targets) == (folder / "embeddings.onnx", ())
    assert_one_problem(
        project,
        'models = ["models/llama"]\n' + NPU + RTX,
        "models[0].targets",
        "names rtx, and a pipeline of onnxruntime-genai is not compiled",
    )


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        ("", "models[0].context-length", "is required for targets with fixed sizes"),
        (", context-length = 32", "models[0].chunk", "is 64, and context-length is 32"),
        (", context-length = 32, chunk = 1", "models[0].chunk", "must be at least 2, not 1"),
    ],
)
def test_fixed_sizes_are_consistent(
    project: Path, folder: Path, keys: str, place: str, message: str
) -> None:
    toml = f'models = [{{ path = "models/llama"{keys} }}]\n{NPU}'
    assert_one_problem(project, toml, place, message)


def test_the_token_that_fills_a_chunk_begins_no_prompt(project: Path) -> None:
    make_folder(project / "models" / "llama", bos_token_id=[1, 0])
    message = "has the pad_token_id 0, and prompts begin with [1, 0] (bos_token_id)"
    assert_one_problem(project, LLAMA + NPU, "models[0].path", message)
    assert read(project, LLAMA + RTX + CPU).models


def test_a_link_out_of_the_folder_is_not_shipped(project: Path, folder: Path) -> None:
    (project / "secret.json").write_text("{}")
    (folder / "vocabulary.json").symlink_to(project / "secret.json")
    message = 'is beside "vocabulary.json", which is a link out of the folder'
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)

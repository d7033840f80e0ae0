"""Folders of onnxruntime-genai instead of a model's file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config import genai
from hatch_epcontext.errors import Kind
from hatch_epcontext.graph.facts import Cut, TensorFacts
from hatch_epcontext.text import show, toml_key
from tests.config.examples import assert_one_problem, problems, read
from tests.conftest import needs
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
        targets.cuda = { provider = "tensorrt" }
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
    # One chunk more than the conversation.
    slots = dict.fromkeys(past, (1, 1, 160, 16))
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


UNUSED = 258
"""The token of the byte 255, which no UTF-8 text has."""


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        # A text that names a special token has it.
        ({}, UNUSED),
        ({"pad_token_id": 258}, 258),
        ({"pad_token_id": 195}, 195),
        ({"bos_token_id": [1, 0]}, UNUSED),
        ({"eos_token_id": 0}, UNUSED),
        ({"eos_token_id": [2, 5], "pad_token_id": 5}, UNUSED),
        ({"eos_token_id": []}, UNUSED),
        ({"pad_token_id": None}, UNUSED),
        ({"pad_token_id": 300}, UNUSED),
        ({"pad_token_id": -1}, UNUSED),
        # An ordinary letter.
        ({"pad_token_id": 100}, UNUSED),
        # A size that the tokenizer does not need.
        ({"pad_token_id": 2, "vocab_size": 262}, 261),
    ],
)
def test_the_token_that_fills_a_chunk_is_in_no_prompt(
    project: Path, changes: dict[str, Any], token: int
) -> None:
    make_folder(project / "models" / "llama", **changes)
    stage, *_ = read(project, LLAMA + NPU).models
    assert stage.genai is not None
    assert stage.genai.filler == token
    # What has no chunks needs none.
    (plain,) = read(project, LLAMA + RTX + CPU).models
    assert plain.genai is not None
    assert plain.genai.filler is None


def rewrite(file: Path, **changes: Any) -> None:
    """Change the keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (None, None),
        ("{{ messages }}", 0),
        ("{{ bos_token }}{{ messages }}", None),
        ([{"name": "default", "template": "<s>{{ messages }}"}], None),
    ],
)
def test_only_where_no_token_is_unused_the_chat_template_decides(
    project: Path, folder: Path, template: Any, token: int | None
) -> None:
    # Without bytes, each token is in some text.
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"t{n}": n for n in range(3, 259)}}
    added = [{"id": i, "content": t, "special": True} for t, i in [*vocabulary.items()][:3]]
    tokenizer = {"added_tokens": added, "model": {"vocab": vocabulary, "unk_token": "<unk>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"bos_token": "<s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    file = folder / "genai_config.json"
    model = json.loads(file.read_text())["model"]
    rewrite(file, model={**model, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    if token is None:
        message = "the pad_token_id 0, and prompts begin with 0 (bos_token_id)"
        assert_one_problem(project, LLAMA + NPU, "models[0].path", message)
    else:
        stage, *_ = read(project, LLAMA + NPU).models
        assert stage.genai is not None
        assert stage.genai.filler == token


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_named(project: Path, folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    assert_one_problem(project, LLAMA + NPU, "models[0].path", f"{name} cannot be read")


def test_caches_have_slots_for_what_fills_the_last_chunk(project: Path, folder: Path) -> None:
    def slots(length: int) -> tuple[int, dict[str, Any]]:
        toml = LLAMA.replace("128", str(length))
        stage, *_ = read(project, toml + NPU).models
        assert stage.genai is not None
        return stage.shapes["past_key_values.0.key"][2], stage.genai.limits["search"]

    assert slots(128) == (192, {"max_length": 192})
    # The rotary caches of the model end there.
    assert slots(250) == (256, {"max_length": 256})


def test_the_plain_folder_has_a_cache_of_the_attention_s_window(
    project: Path, folder: Path
) -> None:
    window = {"window_size": 200, "slide_key_value_cache": False, "slide_inputs": False}
    change(folder, sliding_window=window)
    stage, *_, plain = read(project, LLAMA + NPU).models
    assert stage.genai is not None
    assert plain.genai is not None
    assert plain.genai.plain_overlay["search"] == {"max_length": 200}
    assert stage.genai.limits["search"] == {"max_length": 192}


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("session_options.custom_ops_library", "libops.so", "libops.so"),
        ("session_options.custom_ops_library", "Ops.DLL", "Ops.DLL"),
        ("session_options.custom_ops_library", "libops.SO.1", "libops.SO.1"),
        ("session_options.custom_ops_library", "libops.1.dylib", "libops.1.dylib"),
        ("session_options.custom_ops_library", "ops.dll. .", "ops.dll. ."),
        ("session_options.custom_ops_library", "sub/libops.so.1.2", "sub/libops.so.1.2"),
        # What is loaded, whatever it is called.
        ("session_options.custom_ops_library", "tokenizer.bin", "tokenizer.bin"),
        ("session_options.Backend_Path", "QnnHtp", "QnnHtp"),
        # Other keys, and what is inside of them.
        ("other", {"deep": [{"a": "Add:libadd.So:Provider"}]}, "Add:libadd.So:Provider"),
        ("pipeline_options", {"evil.dll": "1"}, "evil.dll"),
        ("deep", json.loads("[" * 900 + '"a.dll"' + "]" * 900), "a.dll"),
    ],
)
def test_a_library_in_its_configuration_is_one_problem(
    project: Path, folder: Path, place: str, value: Any, named: str
) -> None:
    key, _, inner = place.partition(".")
    change(folder, **{key: {inner: value} if inner else value})
    message = f"names the library {show(named)}, which is for one system"
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


def test_a_key_twice_hides_nothing(project: Path, folder: Path) -> None:
    file = folder / "genai_config.json"
    hidden = '{"model": {"decoder": {"session_options": {"custom_ops_library": "a.so"}}},'
    file.write_text(hidden + file.read_text().removeprefix("{"))
    assert_one_problem(project, LLAMA + CPU, "models[0].path", "a key is there twice")


@pytest.mark.parametrize("type_", ["whisper", "phi3v", "embeddings", "Llama"])
def test_only_a_text_model_is_a_model(project: Path, type_: str) -> None:
    make_folder(project / "models" / "llama", type=type_)
    message = f'has the type "{type_}", and onnxruntime-genai has no text model of that type'
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


@needs("onnxruntime_genai")
def test_onnxruntime_genai_opens_all_types_of_text_models(tmp_path: Path) -> None:
    import onnxruntime_genai

    folder = make_folder(tmp_path)
    config = onnxruntime_genai.Config(str(folder))
    for type_ in sorted(genai._TEXT_TYPES):
        config.overlay(json.dumps({"model": {"type": type_}}))
        assert onnxruntime_genai.Model(config).type == type_


@pytest.mark.parametrize(
    "name", ["genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json"]
)
def test_a_pointer_of_git_lfs_is_no_file_of_a_folder(
    project: Path, folder: Path, name: str
) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    message = f'has pointers of Git LFS instead of files: "{name}"'
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


@pytest.mark.parametrize(
    ("missing", "changes", "message"),
    [
        ("tokenizer.json", {}, 'no tokenizer for onnxruntime-genai: "tokenizer.json" is missing'),
        ("tokenizer_config.json", {}, '"tokenizer_config.json" is missing'),
        (None, {"tokenizer_dir": "other"}, '"other/tokenizer.json" and "other/tokenizer_config'),
        (None, {"tokenizer_dir": "../other"}, 'the tokenizer_dir "../other", which is not in'),
        (None, {"tokenizer_dir": "/other"}, 'the tokenizer_dir "/other", which is not in'),
    ],
)
def test_a_folder_has_its_tokenizer(
    project: Path, missing: str | None, changes: dict[str, Any], message: str
) -> None:
    folder = make_folder(project / "models" / "llama", **changes)
    if missing is not None:
        (folder / missing).unlink()
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


@pytest.mark.parametrize("target", [NPU, RTX])
def test_a_cache_of_a_convolution_is_not_compiled(project: Path, folder: Path, target: str) -> None:
    file = folder / "genai_config.json"
    inputs = json.loads(file.read_text())["model"]["decoder"]["inputs"]
    change(folder, inputs={**inputs, "past_conv_names": "past.%d.conv"})
    message = (
        "a folder with the inputs past.%d.conv of onnxruntime-genai is not compiled for its EP"
    )
    assert_one_problem(project, LLAMA + target, "models[0].targets", message)
    assert read(project, LLAMA + CPU).models


def test_a_tokenizer_may_be_in_a_folder_of_its_own(project: Path) -> None:
    folder = make_folder(project / "models" / "llama", tokenizer_dir="words")
    (folder / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "words" / name)
    assert read(project, LLAMA + CPU).models


def test_a_link_out_of_the_folder_is_not_shipped(project: Path, folder: Path) -> None:
    (project / "secret.json").write_text("{}")
    (folder / "vocabulary.json").symlink_to(project / "secret.json")
    message = 'has links out of the folder: "vocabulary.json"'
    assert_one_problem(project, LLAMA + CPU, "models[0].path", message)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_snapshot_of_a_hub_is_one_problem_that_says_how_to_get_files(
    project: Path, folder: Path, is_complete: bool
) -> None:
    repository = project / "hub" / "models--meta--llama-3"
    snapshot = repository / "snapshots" / "4bba9b98"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    if is_complete:
        folder.rename(repository / "blobs")
    else:
        shutil.rmtree(folder)
    folder.symlink_to(snapshot)
    (problem,) = problems(project, LLAMA + CPU).values()
    assert problem.message.startswith("has links ")
    assert "and 2 more" in problem.message
    assert "hf download meta/llama-3 --local-dir FOLDER" in (problem.hint or "")


@pytest.mark.parametrize("models", ['["models/llama/model.onnx"]', '["models/llama/*.onnx"]'])
def test_the_model_in_a_folder_is_not_listed_without_it(
    project: Path, folder: Path, models: str
) -> None:
    message = 'is a part of the folder "llama" of onnxruntime-genai'
    assert_one_problem(project, f"models = {models}\n" + CPU, "models[0]", message)
    change(folder, filename="other.onnx")
    assert read(project, f"models = {models}\n" + CPU).models


def test_each_target_with_fixed_sizes_is_for_one_chip(project: Path, folder: Path) -> None:
    several = NPU.replace('"snapdragon-x-elite"', '["snapdragon-x-elite", "snapdragon-8-gen-3"]')
    message = "names several chips, and the stages of a language model share weights"
    assert_one_problem(project, LLAMA + several, "targets.npu.chip", message)
    # A single stage shares nothing.
    make_pipeline(folder)
    assert read(project, LLAMA + several).models


@pytest.mark.parametrize("provider", ["tensorrt", "vitisai"])
def test_a_target_that_onnxruntime_genai_does_not_run_is_left_out_for_a_folder(
    project: Path, folder: Path, provider: str
) -> None:
    target = f'targets.other.provider = "{provider}"\n'
    (problem,) = problems(project, LLAMA + CPU + target).values()
    assert problem.message.startswith("names other, and a folder of onnxruntime-genai")
    assert (
        problem.hint
        == "Providers that can: cpu, cuda, directml, openvino, qnn, tensorrt-rtx, webgpu."
    )
    (setting,) = problem.settings
    model = LLAMA.replace(
        " }", f", {toml_key(str(setting.key.parts[-1]))} = {{ other = false }} }}"
    )
    assert setting.value == {"other": False}
    assert read(project, model + CPU + target).models


def test_what_another_target_needs_is_not_needed_where_it_is_left_out(
    project: Path, folder: Path
) -> None:
    toml = 'models = ["models/llama"]\n' + NPU + RTX
    assert [problem.kind for problem in problems(project, toml).values()] == [Kind.INVALID_FOLDER]
    (model,) = read(project, toml, TARGETS="rtx").models
    assert [target.name for target in model.targets] == ["rtx"]


@pytest.mark.parametrize("fallback", ["auto", "source", "none"])
def test_only_none_is_another_fallback_of_a_folder(
    project: Path, folder: Path, fallback: str
) -> None:
    model = LLAMA.replace(" }", f', fallback = "{fallback}" }}')
    (plain,) = read(project, model + RTX).models
    assert plain.fallback == ("none" if fallback == "none" else "source")
    assert plain.ships_weights == (fallback != "none")
    if fallback == "none":
        # Contexts need the other files of the folder, in their own wheel.
        config = read(project, model + NPU.replace(" }", ', companion = "my-app-npu" }'))
        names = [model.name for model in config.of_wheel("my-app-npu").models]
        assert names == ["llama.64", "llama.1", "llama"]


def test_a_pipeline_is_not_for_gpus(project: Path, folder: Path) -> None:
    make_pipeline(folder)
    toml = 'models = ["models/llama"]\ntargets.gpu.provider = "cuda"\n'
    message = "names gpu, and a pipeline of onnxruntime-genai is not compiled"
    assert_one_problem(project, toml + NPU, "models[0].targets", message)


def test_caches_have_the_sizes_of_the_model_s_inputs(project: Path, folder: Path) -> None:
    (model,) = read(project, LLAMA + CPU).models
    kinds = ("key", "value")
    # A layer with another head size, and one without a cache.
    facts = [
        TensorFacts(f"past_key_values.0.{kind}", "float32", ("b", 2, "slots", 32)) for kind in kinds
    ]
    fitting = genai.with_cache_sizes(model, facts).shapes
    caches = {f"past_key_values.0.{kind}": (1, 2, 8, 32) for kind in kinds}
    assert fitting == {"input_ids": (1, 4), "attention_mask": (1, 12), **caches}


def test_a_target_may_have_a_folder_of_its_own(project: Path, folder: Path) -> None:
    other = make_folder(project / "models" / "other", pad_token_id=2)
    own = '{ path = "models/other" }'
    toml = LLAMA.replace(" }", f", targets = {{ npu = {own}, cpu = {own} }} }}")
    main, chunk, token, plain = read(project, toml + RTX + NPU + CPU).models
    facts = [(m.name, m.path.parent, [t.name for t in m.targets]) for m in (main, chunk, plain)]
    assert facts == [
        ("llama", folder, ["rtx"]),
        ("llama.npu.64", other, ["npu"]),
        ("llama.npu", other, ["cpu"]),
    ]
    # The plain folder is that of the CPU's target.
    assert (main.fallback, token.fallback, plain.fallback) == ("none", "none", "source")
    assert {m.genai.app_name for m in (chunk, token, plain) if m.genai} == {"llama"}


def test_a_folder_of_a_target_is_one_in_a_model_s_table(project: Path, folder: Path) -> None:
    top = CPU + 'targets.npu = { path = "models/llama", provider = "qnn", chip = "x1e80100" }\n'
    assert "targets.npu.path" in problems(project, 'models = ["models/a.onnx"]\n' + top)
    file = LLAMA.replace(" }", ', targets.cpu.path = "models/a.onnx" }')
    message = "is for a folder of onnxruntime-genai, instead of another one"
    assert_one_problem(project, file + CPU, "models[0].targets.cpu.path", message)

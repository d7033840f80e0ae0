"""A language model in an installed wheel, run by onnxruntime-genai."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.errors import BuildError, Kind, ModelError
from hatch_epcontext.jobs.genai import open_folders
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import begin, build
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.tools.compiling import export
from hatch_epcontext.tools.inspecting import inspect
from hatch_epcontext.worker.requests import ConverseRequest
from tests.conftest import needs, needs_qnn
from tests.integration.conftest import build_project, run, tool
from tests.language_models import PROMPTS, make_folder
from tests.projects import make_project
from tests.results import configured

pytestmark = needs("onnxruntime_genai")

NPU = 'targets.npu = { provider = "qnn", chip = "snapdragon-x-elite" }'

RTX = 'targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }'

CPU = 'targets.cpu.provider = "cpu"'

TOML = 'models = [{ path = "models/llama", context-length = 160 }]\n'

CHAT = f"""
import json, sys
import onnxruntime_genai as og
if sys.argv[1].startswith("{{"):
    from my_app.epcontext.genai import genai_folder
    chosen = genai_folder("llama", **json.loads(sys.argv[1]))
    config, target = chosen.config(), chosen.target
else:
    config, target = og.Config(sys.argv[1]), None
model = og.Model(config)
tokenizer, answers = og.Tokenizer(model), []
for prompt in {PROMPTS!r}:
    tokens = [1, *tokenizer.encode(prompt)]
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(tokens)
    answers.append([])
    while len(answers[-1]) < 12 and not generator.is_done():
        generator.generate_next_token()
        answers[-1].append(int(generator.get_next_tokens()[0]))
print(json.dumps([target, answers]))
"""


def answers(site: Path, what: object) -> Any:
    """The target, and the tokens after each prompt, of a folder, or of `genai_folder` with arguments."""
    argument = what if isinstance(what, Path) else json.dumps(what)
    env = {**os.environ, "PYTHONPATH": str(site), "ORT_DISABLE_TELEMETRY": "1"}
    printed = run(sys.executable, "-c", CHAT, str(argument), cwd=site, env=env)
    # The simulator prints lines of its own, and some at the end.
    (answer,) = (line for line in printed.splitlines() if line.startswith("["))
    return json.loads(answer)


def install(wheel: Path, site: Path) -> Path:
    command = (tool("uv"), "pip", "install", "-q", "--no-deps", "--target", site, wheel)
    run(*command, cwd=wheel.parent, env=os.environ)
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "project" / "models" / "llama")


def test_the_plain_folder_of_a_wheel_gives_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", TOML + CPU)
    wheel, _ = build_project(project)
    site = install(wheel, tmp_path / "site")
    target, tokens = answers(site, {})
    assert target == "source"
    assert tokens == answers(site, folder)[1]
    assert [len(answer) for answer in tokens] == [12] * len(PROMPTS)


@needs_qnn
def test_stages_for_an_npu_give_the_same_tokens_as_the_cpu(folder: Path, tmp_path: Path) -> None:
    # The end of a turn, which prompts have, cannot fill chunks.
    make_folder(folder, pad_token_id=2)
    project = make_project(tmp_path / "project", TOML + NPU)
    # Only a device opens contexts that share weights.
    config = configured(project, TOML.replace(" }", ", share-weights = false }") + NPU)
    package = tmp_path / "site" / "my_app" / "epcontext"
    package.parent.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    lines: list[str] = []
    run_plan = partial(build, cache=Cache(None, lines.append), log=lines.append)
    export(config, package, run_plan, loader=True, overwrite=False)
    # The attention, which the EP leaves to the CPU, does not count against min-coverage.
    assert "llama.64 -> npu (qnn): ok, 31/33 nodes in 3 contexts" in lines[0]
    target, tokens = answers(tmp_path / "site", {"device": "any"})
    assert target == "npu"
    assert tokens == answers(tmp_path / "site", folder)[1]
    overlay = json.loads((package / "llama" / "npu" / "overlay.json").read_bytes())
    first, last = (stage for (stage,) in map(dict.values, overlay["model"]["decoder"]["pipeline"]))
    first["filename"], last["filename"] = last["filename"], first["filename"]
    plugin = PROVIDERS["qnn"].plugin
    genai = config.models[0].genai
    assert plugin is not None
    assert genai is not None
    request = ConverseRequest(str(package / "llama"), genai, json.dumps(overlay), plugin)
    with pytest.raises(BuildError, match="invalid dimensions"):
        Workers(100).call(request, tmp_path / "call", location="llama")


@needs_qnn
def test_positions_follow_from_the_length_of_the_cache(folder: Path, tmp_path: Path) -> None:
    make_folder(folder, positions=True)
    wheel, printed = build_project(make_project(tmp_path / "project", TOML + NPU))
    assert "llama -> npu: onnxruntime-genai answers 4 prompts as on the CPU" in printed
    with zipfile.ZipFile(wheel) as archive:
        overlay = json.loads(archive.read("my_app/epcontext/llama/npu/overlay.json"))
    stages = [stage for (stage,) in map(dict.values, overlay["model"]["decoder"]["pipeline"])]
    assert [stage["inputs"][0] for stage in stages] == ["input_ids", "input_ids"]
    # onnxruntime-genai feeds them to no stage.
    assert not any("position_ids" in stage["inputs"] for stage in stages)


def damaged_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{")
    return "tokenizer.json is no JSON: Expecting property name"


def tokenizer_without_tokens(folder: Path) -> str:
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return "onnxruntime-genai cannot read its tokenizer"


def missing_draft_model(folder: Path) -> str:
    file = folder / "genai_config.json"
    content = json.loads(file.read_text())
    content["model"]["draft"] = {"filename": "draft.onnx"}
    file.write_text(json.dumps(content))
    return "cannot answer with it on the CPU: Load model from .*draft.onnx failed"


def other_vocabulary(folder: Path) -> str:
    make_folder(folder, vocab_size=64)
    return "its tokenizer has the token 122, and vocab_size is 64"


@pytest.mark.parametrize(
    "damage", [damaged_tokenizer, tokenizer_without_tokens, missing_draft_model, other_vocabulary]
)
def test_a_folder_is_opened_before_it_is_shipped(
    folder: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    message = damage(folder)
    project = make_project(tmp_path / "project", TOML + CPU)
    with pytest.raises(ModelError, match=message) as raised:
        build(plan(configured(project, TOML + CPU)), tmp_path / "out", Cache(None, print), print)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.INVALID_FOLDER


def nothing(folder: Path) -> list[str]:
    return []


def no_template(folder: Path) -> list[str]:
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    del content["chat_template"]
    file.write_text(json.dumps(content))
    return ["llama: onnxruntime-genai cannot apply its chat template: Empty chat template."]


def no_tokenizer(folder: Path) -> list[str]:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return ["llama: has no tokenizer (tokenizer.json), so that apps need their own"]


@pytest.mark.parametrize("remove", [nothing, no_template, no_tokenizer])
def test_a_folder_is_opened_once_and_what_it_lacks_is_named(
    folder: Path, tmp_path: Path, remove: Callable[[Path], list[str]]
) -> None:
    lacks = remove(folder)
    (folder / "poems.onnx_adapter").touch()
    project = make_project(tmp_path / "project", TOML + CPU + "\n" + RTX)
    config = configured(project, TOML + CPU + "\n" + RTX)
    cache = Cache(tmp_path / "cache", print)
    with Workers(100) as workers:
        begun = begin(plan(config), tmp_path / "out", cache, workers)
        lines = [*open_folders(begun, only_known=False)]
        adapters = 'llama: apps cannot use "poems.onnx_adapter" on rtx, only on the CPU'
        assert lines == [adapters, *lacks]
        # Another call would fail.
        stopped = dataclasses.replace(begun, workers=Workers(0))
        assert [*open_folders(stopped, only_known=False)] == lines


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("target", [NPU, RTX, CPU])
def test_the_configuration_has_the_layers_of_the_model(
    tmp_path: Path, layers: int, target: str
) -> None:
    changes = {"num_hidden_layers": layers}
    make_folder(tmp_path / "project" / "models" / "llama", decoder=changes)
    project = make_project(tmp_path / "project", TOML + target)
    config = configured(project, TOML + target)
    message = f"is {layers}, and model.onnx has caches of 2 layers"
    with pytest.raises(BuildError, match=message) as raised:
        build(plan(config), tmp_path / "out", Cache(None, print), print)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.hint) == (Kind.INVALID_FOLDER, "Set it to 2.")


def test_one_profile_has_no_two_head_sizes(tmp_path: Path) -> None:
    """Gemma 4 has them: microsoft/onnxruntime-genai#2062 and #2098."""
    make_folder(tmp_path / "project" / "models" / "llama", head_sizes=(16, 32))
    project = make_project(tmp_path / "project", TOML + RTX)
    config = configured(project, TOML + RTX)
    with pytest.raises(ModelError, match=r"past_key_values.1.key of .+ is for 1 head of 32"):
        build(plan(config), tmp_path / "out", Cache(None, print), print)


@needs_qnn
def test_a_wheel_has_the_stages_with_shared_weights(folder: Path, tmp_path: Path) -> None:
    # In some models layers differ: microsoft/onnxruntime-genai#2062 and #2098.
    make_folder(folder, head_sizes=(16, 32))
    target = NPU.replace(" }", ', provider-options.op_affinity = "affinity.json" }')
    project = make_project(tmp_path / "project", TOML + target)
    affinity = {"op_type": {"GroupQueryAttention": "htp"}}
    (project / "affinity.json").write_text(json.dumps(affinity))
    wheel, printed = build_project(project)
    assert "shared (llama.64 + llama.1) -> npu (qnn): compiled, llama.64 33/33 nodes, " in printed
    # Of what was compiled alone.
    assert "llama -> npu: onnxruntime-genai answers 4 prompts as on the CPU" in printed
    (package,) = inspect(wheel).packages.values()
    assert {name for name in package.files if name.startswith("llama/npu/")} == {
        "llama/npu/llama.1_ctx.onnx",
        "llama/npu/llama.64_ctx.onnx",
        "llama/npu/llama.64_ctx_qnn.bin",
        "llama/npu/overlay.json",
    }
    # Here only a simulator is, which cannot open them.
    site = install(wheel, tmp_path / "site")
    assert answers(site, {"device": "any"})[0] == "source"

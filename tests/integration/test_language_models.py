"""A language model in an installed wheel, run by onnxruntime-genai."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs
from tests.integration.conftest import build_project, run, tool
from tests.language_models import PROMPTS, make_folder
from tests.projects import make_project

pytestmark = needs("onnxruntime_genai")

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
    parameters.set_search_options(max_length=len(tokens) + 12, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    answers.append([int(token) for token in generator.get_sequence(0)])
print(json.dumps([target, answers]))
"""


def answers(site: Path, what: object) -> Any:
    """The target, and the tokens after each prompt, of a folder, or of `genai_folder` with arguments."""
    argument = what if isinstance(what, Path) else json.dumps(what)
    env = {**os.environ, "PYTHONPATH": str(site), "ORT_DISABLE_TELEMETRY": "1"}
    printed = run(sys.executable, "-c", CHAT, str(argument), cwd=site, env=env)
    return json.loads(printed.splitlines()[-1])


def install(wheel: Path, site: Path) -> Path:
    command = (tool("uv"), "pip", "install", "-q", "--no-deps", "--target", site, wheel)
    run(*command, cwd=wheel.parent, env=os.environ)
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "project" / "models" / "llama")


def test_the_plain_folder_of_a_wheel_gives_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", TOML + 'targets.cpu.provider = "cpu"')
    wheel, _ = build_project(project)
    site = install(wheel, tmp_path / "site")
    target, tokens = answers(site, {})
    assert target == "source"
    assert tokens == answers(site, folder)[1]
    assert {len(prompt) for prompt in tokens} == {len(prompt) + 13 for prompt in PROMPTS}

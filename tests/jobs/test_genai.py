"""What onnxruntime-genai answers with what was compiled of a language model."""

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, UnavailableError
from hatch_epcontext.jobs import genai
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.worker.results import Answer
from tests.conftest import needs
from tests.language_models import make_folder
from tests.results import configured

TOML = """
models = [{ path = "models/llama", context-length = 160, validate = "MODE" }]
targets.npu = { provider = "qnn", chip = "snapdragon-x-elite" }
"""


@needs("onnxruntime_genai")
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_what_must_be_run_is_not_skipped_without_onnxruntime_genai(
    project: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    make_folder(project / "models" / "llama")
    (job,) = plan(configured(project, TOML.replace("MODE", mode))).jobs
    assert genai.can_answer(job)
    monkeypatch.setattr(genai, "genai_installed", lambda: None)
    if mode == "auto":
        assert not genai.can_answer(job)
        return
    with pytest.raises(UnavailableError) as raised:
        genai.can_answer(job)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOT_RUN
    assert [setting.value for setting in problem.settings] == ["auto"]


@pytest.mark.parametrize(
    ("validate", "answers"),
    [
        ('"auto"', True),
        ('"require"', True),
        ('"structure"', False),
        ("false", False),
        ("{ tolerance = false }", False),
    ],
)
def test_only_a_model_that_is_compared_answers(project: Path, validate: str, answers: bool) -> None:
    make_folder(project / "models" / "llama")
    toml = TOML.replace('"MODE"', validate)
    planned = plan(configured(project, toml))
    assert [job.may_answer for job in planned.jobs] == [answers]
    opens = validate not in ('"structure"', "false")
    assert any("onnxruntime-genai" in name for name in planned.requirements) == opens


def test_other_answers_are_an_error_that_names_the_prompts() -> None:
    right, wrong = Answer("a chat", 90, 40.0, 0), Answer("a prompt", 65, 3.0, 2)
    genai._check([right], 30.0)
    with pytest.raises(BuildError, match="at 2 positions, after a prompt of 65 tokens") as raised:
        genai._check([right, wrong], 30.0)
    assert "a chat" not in str(raised.value)

"""Which problems of failed jobs are reported once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, Problem, Setting
from hatch_epcontext.jobs.artifact import FailureReport, Result
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.run import IncompleteError
from tests.language_models import make_folder
from tests.results import configured

TOML = """
models = ["models/a.onnx", "models/b.onnx"]
[targets.one]
provider = "cpu"
[targets.two]
provider = "cpu"
"""


SEVERAL_CHIPS = """
targets.qnn.provider = "qnn"
targets.qnn.provider-options = { soc_model = "60", htp_arch = "73" }
models = ["models/a.onnx"]
"""


def failure(job: Job, problem: Problem) -> FailureReport:
    """The failure of ``job`` by an error with ``problem``."""
    return FailureReport.of(job, job.located(BuildError(problem)).problems)


def places(failures: Sequence[FailureReport]) -> list[str]:
    """Where the problems are that are reported of ``failures``."""
    problems = IncompleteError(Result((), (), tuple(failures))).problems
    return [problem.where() for problem in problems]


def test_the_same_failure_for_several_targets_is_one_for_each_model(project: Path) -> None:
    def problem(job: Job) -> Problem:
        log = f"took {len(job.name)} s"
        return Problem(Kind.COMPILE_FAILED, "", "does not work.", log=log, step="prepare")

    jobs = plan(configured(project, TOML)).jobs
    failures = [failure(job, problem(job)) for job in jobs]
    assert places(failures) == ["a -> one, two: preparation", "b -> one, two: preparation"]
    # Another one stays one of its own.
    first, second, *_ = failures
    other = replace(second.problems[0], message="is slow.")
    second = replace(second, problems=(other,))
    assert places([first, second]) == ["a -> one: preparation", "a -> two: preparation"]


@pytest.mark.parametrize(("toml", "target"), [(TOML, " -> one"), (SEVERAL_CHIPS, "")])
def test_a_target_is_named_beside_the_key_of_a_model_with_several(
    project: Path, toml: str, target: str
) -> None:
    job, *_ = plan(configured(project, toml)).jobs
    problem = Problem.at(job.models[0].key, Kind.SOURCE_FAILED, "does not run.")
    assert places([failure(job, problem)]) == [f"tool.epcontext.models[0] (models/a.onnx){target}"]


def test_no_key_that_a_folder_decides_is_a_remedy(project: Path) -> None:
    make_folder(project / "models" / "llama")
    toml = 'models = ["models/llama"]\ntargets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }'
    (job,) = plan(configured(project, toml)).jobs
    own, decided = Setting(job.models[0].key / "name"), Setting(job.models[0].key / "cut")
    problem = Problem(Kind.COMPILE_FAILED, "", "does not compile.", settings=(own, decided))
    (problem,) = job.located(BuildError(problem)).problems
    assert problem.settings == (own,)


def test_a_problem_for_one_of_several_chips_names_it_and_its_model(project: Path) -> None:
    (job,) = plan(configured(project, SEVERAL_CHIPS)).jobs
    one = replace(job, chip="soc_model 60")
    error = one.located(BuildError(Problem(Kind.NOT_RUN, "", "it is not there.")))
    (problem,) = job.located(error).problems
    assert str(problem).startswith("a -> qnn (soc_model 60): EPC404\n")

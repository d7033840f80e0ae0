"""Which problems of failed jobs are reported once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hatch_epcontext.errors import Kind, Problem
from hatch_epcontext.jobs.artifact import Failure
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.run import problems_of
from tests.results import configured

TOML = """
models = ["models/a.onnx", "models/b.onnx"]
[targets.one]
provider = "cpu"
[targets.two]
provider = "cpu"
"""


def failures(root: Path) -> list[Failure]:
    """The same failure of each job in a step of its own, with a location that names the job."""

    def problem(job: Job) -> Problem:
        location = f"{job.location}: preparation"
        return Problem(
            Kind.COMPILE_FAILED, location, "does not work.", log=f"took {len(job.name)} s"
        )

    return [Failure(job, (problem(job),)) for job in plan(configured(root, TOML)).jobs]


def test_the_same_failure_for_several_targets_is_one_for_each_model(project: Path) -> None:
    assert [each.location for each in problems_of(failures(project))] == [
        "a -> one, two: preparation",
        "b -> one, two: preparation",
    ]


def test_another_failure_stays_one_of_its_own(project: Path) -> None:
    first, second, *_ = failures(project)
    other = replace(second.problems[0], message="is slow.")
    found = problems_of([first, replace(second, problems=(other,))])
    assert [each.location for each in found] == ["a -> one: preparation", "a -> two: preparation"]


def test_the_only_target_of_a_model_is_not_named(project: Path) -> None:
    (job,) = plan(configured(project)).jobs
    problem = Problem.at(job.models[0].key, Kind.SOURCE_FAILED, "does not run.")
    (found,) = problems_of([Failure(job, (problem,))])
    assert str(found).startswith("tool.epcontext.models[0] (models/a.onnx): EPC209")

"""Which problems of failed jobs are reported once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import FailedJob, Result
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.run import IncompleteError
from tests.results import configured

TOML = """
models = ["models/a.onnx", "models/b.onnx"]
[targets.one]
provider = "cpu"
[targets.two]
provider = "cpu"
"""


def failure(job: Job, problem: Problem) -> FailedJob:
    """The failure of ``job`` by an error with ``problem``."""
    with pytest.raises(BuildError) as raised, job.locating():
        raise BuildError(problem)
    return FailedJob(job, raised.value.problems)


def failures(root: Path) -> list[FailedJob]:
    """The same failure of each job in a step of its own."""

    def problem(job: Job) -> Problem:
        log = f"took {len(job.name)} s"
        return Problem(Kind.COMPILE_FAILED, "", "does not work.", log=log, step="preparation")

    return [failure(job, problem(job)) for job in plan(configured(root, TOML)).jobs]


def problems_of(failures: Sequence[FailedJob]) -> tuple[Problem, ...]:
    return IncompleteError(Result((), (), tuple(failures))).problems


def test_the_same_failure_for_several_targets_is_one_for_each_model(project: Path) -> None:
    found = problems_of(failures(project))
    assert [(each.location, each.targets) for each in found] == [
        ("a", ("one", "two")),
        ("b", ("one", "two")),
    ]
    assert [each.where() for each in found] == [
        "a -> one, two: preparation",
        "b -> one, two: preparation",
    ]


def test_another_failure_stays_one_of_its_own(project: Path) -> None:
    first, second, *_ = failures(project)
    other = replace(second.problems[0], message="is slow.")
    found = problems_of([first, replace(second, problems=(other,))])
    assert [each.where() for each in found] == ["a -> one: preparation", "a -> two: preparation"]


def test_the_only_target_of_a_model_is_not_named(project: Path) -> None:
    (job,) = plan(configured(project)).jobs
    problem = Problem.at(job.models[0].key, Kind.SOURCE_FAILED, "does not run.")
    (found,) = problems_of([failure(job, problem)])
    assert str(found).startswith("tool.epcontext.models[0] (models/a.onnx): EPC209")


def test_a_target_is_named_beside_the_key_of_a_model_with_several(project: Path) -> None:
    first, *_ = plan(configured(project, TOML)).jobs
    problem = Problem.at(first.models[0].key, Kind.SOURCE_FAILED, "does not run.")
    (found,) = problems_of([failure(first, problem)])
    assert (found.targets, found.where()) == (
        ("one",),
        "tool.epcontext.models[0] (models/a.onnx) -> one",
    )


def test_a_problem_for_one_of_several_chips_names_it_and_its_model(project: Path) -> None:
    toml = """
    targets.qnn.provider = "qnn"
    targets.qnn.provider-options = { soc_model = "60", htp_arch = "73" }
    models = ["models/a.onnx"]
    """
    (job,) = plan(configured(project, toml)).jobs
    one = replace(job, chip="soc_model 60")
    with pytest.raises(BuildError) as raised, job.locating(), one.locating():
        raise BuildError(Problem(Kind.NOT_RUN, "", "it is not there."))
    assert str(raised.value.problems[0]).startswith("a -> qnn (soc_model 60): EPC404\n")

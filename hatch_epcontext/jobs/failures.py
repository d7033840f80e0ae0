"""The problems of all failed jobs: one that several targets of a model have is reported once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hatch_epcontext.errors import Problem, merged
from hatch_epcontext.jobs.artifact import Failure
from hatch_epcontext.jobs.plan import Job

_TARGETS = "\0"
"""Stands for the targets in the location of a problem; no name has it."""


def problems_of(failures: Iterable[Failure]) -> tuple[Problem, ...]:
    """The problems of ``failures``, each with the targets that have it."""
    problems = (each for failure in failures for each in _of_job(failure))
    return tuple(map(_located, merged(problems)))


def _of_job(failure: Failure) -> Iterator[Problem]:
    job = failure.job
    of_any = replace(job, target=replace(job.target, name=_TARGETS))
    for each in failure.problems:
        location = each.location.replace(job.location, of_any.location, 1)
        # Where there is only one target, its name says nothing.
        is_named = each.key is None or _has_other_targets(job)
        targets = (job.target.name,) if is_named else ()
        yield replace(each, location=location, targets=each.targets or targets)


def _has_other_targets(job: Job) -> bool:
    return any(len(model.targets) > 1 for model in job.models)


def _located(problem: Problem) -> Problem:
    if problem.key is not None:
        return problem
    location = problem.location.replace(_TARGETS, ", ".join(problem.targets))
    return replace(problem, location=location)

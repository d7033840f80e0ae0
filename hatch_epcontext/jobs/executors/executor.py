"""What an executor does for the jobs of a build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hatch_epcontext.config.settings import Model
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record, Refused
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.worker.results import Context, Validation


class Executor(Protocol):
    """Compiles and validates jobs; several threads use it at the same time."""

    @property
    def at_once(self) -> int:
        """How many jobs it runs at the same time."""

    def versions(self, job: Job) -> Mapping[str, str]:
        """The versions of everything that can change what is compiled for ``job``.

        Raises BuildError if machines differ in them, or if none can compile it.
        """

    def reason_not_to_run(self, job: Job) -> str | None:
        """Why the job's result cannot be run there, if that is known without the EP."""

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Compile ``job`` with ``recipe`` into ``folder``, which it makes.

        Raises BuildError for problems that no other recipe can solve.
        """

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Validate the ``context`` of ``model`` in ``artifact``; raises BuildError when that fails."""

    def finished(self, job: Job) -> None:
        """Free what was kept for ``job``, which has ended, with a result or an error."""

    def stop(self) -> None:
        """Stop everything that runs, and start nothing more: each call then raises BuildError."""

    def close(self) -> None:
        """Free everything that it holds, when all jobs have ended."""

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""

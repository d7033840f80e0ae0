"""What came of a build: its models as they were found, and each job's artifact, or what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hatch_epcontext.artifact import Artifact, Proof
from hatch_epcontext.config import Model
from hatch_epcontext.errors import Problem
from hatch_epcontext.plan import Job
from hatch_epcontext.protocol import ModelFacts


@dataclass(frozen=True)
class Source:
    """A source model as this build found it."""

    model: Model
    facts: ModelFacts
    sha256: str

    @property
    def size(self) -> int:
        """Bytes of the model's file and its external data."""
        folder = self.model.path.parent
        names = (self.model.path.name, *self.facts.external_data)
        return sum((folder / name).stat().st_size for name in names)


@dataclass(frozen=True)
class Built:
    """A job that is done: its artifact, and the proof of each of its models.

    ``saved``: bytes by which the artifact is smaller than its models would be that share nothing.
    """

    job: Job
    artifact: Artifact
    proofs: Mapping[str, Proof]
    cached: bool
    saved: int = 0


@dataclass(frozen=True)
class Failure:
    """A job that failed, and what is wrong with it."""

    job: Job
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Result:
    """What a plan came to, models and jobs in the plan's order."""

    sources: tuple[Source, ...]
    built: tuple[Built, ...]
    failures: tuple[Failure, ...] = ()

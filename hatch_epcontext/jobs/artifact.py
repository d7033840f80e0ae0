"""A job's result: files in a folder with a record, and the search that led to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import hatch_epcontext
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.boards import BoardRun
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.recipe import Record
from hatch_epcontext.jobs.search import Attempt, Search
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.worker.results import Answer, ModelFacts, Validated, Validation

GENERATOR = "hatch-epcontext"

GENERATED_BY = f"{GENERATOR} {hatch_epcontext.__version__}"
"""What manifests and reports give as their generator."""

PACKAGE = "package"
"""The folder below staging that becomes the model package: cached artifacts go straight to it."""


@dataclass(frozen=True)
class Source:
    """A source model as this build found it.

    ``records``: of its file and those of its external data, by name in the model's folder.
    """

    model: Model
    facts: ModelFacts
    sha256: str
    records: Mapping[str, FileRecord]
    origin: FileRecord | None = None

    @property
    def identity(self) -> str:
        """The hex sha256 of its content and sizes, whatever bytes a release of onnx writes for a cut."""
        model = self.model
        return value_sha256([model.content or self.sha256, model.dims, model.shapes])

    @property
    def license(self) -> str | None:
        """The license that the configuration gives, or else the model itself."""
        return self.model.license or self.facts.license

    @property
    def files(self) -> tuple[Path, ...]:
        """The model's file, and those of its external data."""
        return tuple(self.model.path.parent / name for name in self.records)

    @property
    def users_files(self) -> Mapping[Path, FileRecord]:
        """`files`, or the file from which the build wrote the model."""
        if self.model.origin is not None and self.origin is not None:
            return {self.model.origin: self.origin}
        return dict(zip(self.files, self.records.values(), strict=True))

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(record.size for record in self.records.values())


@dataclass(frozen=True)
class Built:
    """A finished ``job``, as the winner of its ``search`` compiled it into ``folder``, and what
    onnxruntime-genai answers with a language model.
    """

    job: Job
    folder: Path
    search: Search
    cached: bool
    answers: tuple[Answer, ...] = ()

    @property
    def attempt(self) -> Attempt:
        """The attempt that won."""
        winner = self.search.winner
        assert winner is not None, "a finished job has one"
        return winner

    @property
    def record(self) -> Record:
        """That of its artifact."""
        record = self.attempt.record
        assert record is not None, "an attempt without an artifact does not win"
        return record

    @property
    def validated(self) -> Mapping[str, Validated]:
        """How each of its models was validated, and when, by name."""
        return self.search.validated(self.attempt)

    @property
    def validations(self) -> Mapping[str, Validation]:
        """How each of its models was validated, by name."""
        return {name: one.validation for name, one in self.validated.items()}


@dataclass(frozen=True)
class FailureReport:
    """A failed job: the names of its ``models``, and its problems."""

    target: str
    provider: str
    models: tuple[str, ...]
    group: str | None
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, job: Job, problems: tuple[Problem, ...]) -> FailureReport:
        """The failure of ``job`` with these ``problems``."""
        names = tuple(model.name for model in job.models)
        return cls(job.target.name, job.target.provider.name, names, job.group, problems)


@dataclass(frozen=True)
class Result:
    """The result of a plan, with models and jobs in the plan's order.

    ``boards``: what reports of boards say of the models and targets, by the names of both.
    """

    sources: tuple[Source, ...]
    built: tuple[Built, ...]
    failures: tuple[FailureReport, ...] = ()
    boards: Mapping[tuple[str, str], tuple[BoardRun, ...]] = field(default_factory=dict)

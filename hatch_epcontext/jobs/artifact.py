"""A job's result: files in a folder with a record, and the search that led to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Problem
from hatch_epcontext.files import FileRecord, is_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import CORRECTIONS, RewriteName
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.worker.results import (
    Context,
    ModelFacts,
    Preparation,
    Simplifier,
    Validated,
    Validation,
)

if TYPE_CHECKING:
    from hatch_epcontext.jobs.search import Attempt, Search

GENERATOR = "hatch-epcontext"
"""The name that manifests and reports give as their generator, followed by the version."""


PACKAGE = "package"
"""The folder below staging that becomes the model package: cached artifacts go straight to their place."""


Nodes = tuple[str, ...]
"""The names of nodes, sorted."""


@dataclass(frozen=True)
class Change:
    """A change of a job's prepared models: rewriting, or unrolling.

    ``refused``: the nodes that the EP refuses in each model; None for all, if it compiled nothing.
    """

    kind: Literal["rewrite", "unroll"]
    refused: tuple[Nodes, ...] | None


@dataclass(frozen=True)
class Recipe:
    """One way to compile a job.

    ``fuse``: whether scales are folded into the weights of convolutions. ``changes`` are applied to the
    prepared models one after the other. ``options``: the EP's, in addition to the target's.
    ``takes_control_flow``: whether a model is compiled although preparation leaves control flow in it.
    ``corrections``: the rewrites for the EP's number format, see `number_format`; they come last.
    ``dequantize``: whether dynamic quantization is undone although the target does not require it.
    """

    simplifier: Simplifier
    fuse: bool = True
    changes: tuple[Change, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    takes_control_flow: bool = True
    corrections: tuple[RewriteName, ...] = ()
    dequantize: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the models are compiled as the target requires, with its options."""
        changed = self.changes or self.options or self.last_corrections or self.dequantize
        return self.fuse and not changed

    @property
    def name(self) -> str:
        """What it does with the models, in a few words."""
        words = {"rewrite": "rewriting", "unroll": "unrolling"}
        parts = ["dequantized"] if self.dequantize else []
        parts += [] if self.fuse else ["without fusing"]
        parts += (f"with {name} = {value}" for name, value in self.options)
        parts += dict.fromkeys(words[change.kind] for change in self.changes)
        parts += ["rewriting for accuracy"] if self.last_corrections else []
        simplified = f"simplified by {self.simplifier}" if self.simplifier != "none" else "as it is"
        return ", ".join(parts) or simplified

    def form_of(self, job: Job) -> Job:
        """``job`` as this recipe compiles and validates it."""
        return job.dequantized if self.dequantize else job

    @property
    def last_corrections(self) -> frozenset[RewriteName]:
        """Its corrections in the last group of `CORRECTIONS`; none if they are for all models."""
        groups = (
            frozenset(self.corrections).intersection(group) for group in reversed(CORRECTIONS)
        )
        return next(filter(None, groups), frozenset())

    def with_change(
        self, kind: Literal["rewrite", "unroll"], refused: tuple[Nodes, ...] | None
    ) -> Recipe:
        """This recipe with one more `Change`."""
        return dataclasses.replace(self, changes=(*self.changes, Change(kind, refused)))

    def with_corrections(self, names: tuple[RewriteName, ...]) -> Recipe:
        """This recipe with more rewrites for the EP's number format."""
        return dataclasses.replace(self, corrections=(*self.corrections, *names))


@dataclass(frozen=True)
class Refused:
    """Why a recipe gave no artifact: the simplifier fails or leaves ``control_flow`` (``"prepare"``), there
    is nothing to change (``"change"``), or the EP refuses the result (``"compile"``).

    ``rewrites``: what was done to the models. ``is_accident``: whether another build may not meet it.
    """

    step: Literal["prepare", "change", "compile"]
    problems: tuple[Problem, ...] = ()
    control_flow: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    is_accident: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for what no build writes, but a cache may contain."""
        if not (self.problems or self.control_flow or self.step == "change"):
            raise ValueError("it has a refusal without a reason")


@dataclass(frozen=True)
class Times:
    """Seconds that the models of a job took to prepare and to compile."""

    prepare: float
    compile: float


@dataclass(frozen=True)
class Record:
    """What a job compiled with ``recipe``. ``preparations`` and ``contexts``: one for each of its models, in
    order; ``files``: by name in the artifact's folder; ``versions``: of the packages that compiled it;
    ``search``: the key of the search that tried the recipe.
    """

    recipe: Recipe
    preparations: tuple[Preparation, ...]
    contexts: tuple[Context, ...]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]
    search: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for what no build writes, but a cache may contain."""
        names = [context.model_file for context in self.contexts]
        if len(self.preparations) != len(names) or not self.files.keys() >= {*names}:
            raise ValueError("it has models without a preparation or a file")
        if self.search and not is_sha256(self.search):
            raise ValueError("it has a search that is no key")


@dataclass(frozen=True)
class Artifact:
    """A job's result on disk."""

    folder: Path
    record: Record

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.record.files.values())


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
    """A finished job, in the form that won its ``search``, and its artifact."""

    job: Job
    artifact: Artifact
    search: Search
    cached: bool

    @property
    def attempt(self) -> Attempt:
        """The attempt that won."""
        winner = self.search.winner
        assert winner is not None, "a finished job has one"
        return winner

    @property
    def validated(self) -> Mapping[str, Validated]:
        """How each of its models was validated, and when, by name."""
        return self.search.validations_of(self.attempt)

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
    """The result of a plan, with models and jobs in the plan's order."""

    sources: tuple[Source, ...]
    built: tuple[Built, ...]
    failures: tuple[FailureReport, ...] = ()

"""A job's result: files in a folder with a record, and how each of its models was validated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Literal

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Problem
from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import REMEDIES, RewriteName
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.providers import Product
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Context,
    Emulation,
    ModelFacts,
    Simplifier,
)

GENERATOR = "hatch-epcontext"
"""The name that manifests and reports give as their generator, followed by the version."""


PACKAGE = "package"
"""The folder below staging that becomes the model package: cached artifacts go straight to their place."""


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared: the simplifier, the nodes before and after.

    ``failed``: the simplifiers that were tried first and failed.
    ``precision``: how its numbers were changed, in words.
    ``rewrites``: what was rewritten.
    ``options``: those with which the EP compiles more nodes.
    ``tried``: other recipes, each with its result.
    ``remedies``: the rewrites for the EP's number format that changed something.
    """

    simplifier: Simplifier
    nodes_before: int
    nodes: int
    control_flow: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    precision: str | None = None
    rewrites: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    remedies: tuple[RewriteName, ...] = ()


Operators = tuple[str, ...]
"""Operators, as `graph.operator` writes them, sorted."""


@dataclass(frozen=True)
class Change:
    """A change of a job's prepared models: rewriting, or unrolling.

    ``refused``: the operators that the EP refuses in each model; None for all, if it names none.
    """

    kind: Literal["rewrite", "unroll"]
    refused: tuple[Operators, ...] | None


@dataclass(frozen=True)
class Recipe:
    """One way to compile a job.

    ``fuse``: whether scales are folded into the weights of convolutions. ``changes`` are applied to the
    prepared models one after the other. ``options``: the EP's, in addition to the target's.
    ``takes_control_flow``: whether a model is compiled although preparation leaves control flow in it.
    ``remedies``: the rewrites for the EP's number format, see `number_format`; they come last.
    ``dequantize``: whether dynamic quantization is undone although the target does not require it.
    """

    simplifier: Simplifier
    fuse: bool = True
    changes: tuple[Change, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    takes_control_flow: bool = True
    remedies: tuple[RewriteName, ...] = ()
    dequantize: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the models are compiled as the target requires, with its options."""
        changed = self.changes or self.options or self.last_remedies or self.dequantize
        return self.fuse and not changed

    def form_of(self, job: Job) -> Job:
        """``job`` as this recipe compiles and validates it: one of its `Job.forms`."""
        return job.dequantized if self.dequantize else job

    @property
    def last_remedies(self) -> frozenset[RewriteName]:
        """Those of its remedies that are in the last group of `REMEDIES`; none if they are for all models."""
        groups = (frozenset(self.remedies).intersection(each) for each in reversed(REMEDIES))
        return next(filter(None, groups), frozenset())

    @property
    def unrolls(self) -> bool:
        """Whether something is unrolled."""
        return any(each.kind == "unroll" for each in self.changes)

    def with_change(
        self, kind: Literal["rewrite", "unroll"], refused: tuple[Operators, ...] | None
    ) -> Recipe:
        """This recipe with one more `Change`."""
        return dataclasses.replace(self, changes=(*self.changes, Change(kind, refused)))


@dataclass(frozen=True)
class Refused:
    """Why a recipe gave no artifact: the simplifier fails or leaves ``control_flow`` (``"prepare"``), there
    is nothing to change (``"change"``), or the EP refuses the result (``"compile"``).

    ``rewrites``: what was done to the models.
    """

    step: Literal["prepare", "change", "compile"]
    problems: tuple[Problem, ...] = ()
    control_flow: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Seconds that the models of a job took to prepare and to compile."""

    prepare: float
    compile: float


@dataclass(frozen=True)
class Record:
    """What a job compiled with ``recipe``. ``preparations`` and ``contexts``: one for each of its models, in
    order; ``files``: by name in the artifact's folder; ``versions``: of the packages that compiled it.
    """

    recipe: Recipe
    product: Product
    preparations: tuple[Preparation, ...]
    contexts: tuple[Context, ...]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]
    times: Times


class ValidationStatus(Enum):
    """How a context was validated."""

    RAN = "ran"
    """It was loaded and run on its EP."""
    RAN_ON_CPU = "ran-on-cpu"
    """It is an optimized graph, and was run on the CPU EP instead of its own."""
    RAN_ALONE = "ran-alone"
    """It shares weights or is for several chips: its files were checked, and the same model, compiled alone
    for each chip, was run."""
    STRUCTURE = "structure"
    """Only its files were checked."""
    NOT_VALIDATED = "not-validated"
    """Validation is switched off."""

    @property
    def label(self) -> str:
        """The status for a table."""
        return {
            ValidationStatus.RAN: "ran",
            ValidationStatus.RAN_ON_CPU: "ran on the CPU only",
            ValidationStatus.RAN_ALONE: "ran alone",
            ValidationStatus.STRUCTURE: "NOT run",
            ValidationStatus.NOT_VALIDATED: "NOT validated",
        }[self]


_MIN_GIVEN = 4
"""The number of given inputs from which they are representative."""


@dataclass(frozen=True)
class Validation:
    """How a context was validated; ``agreements`` is empty unless outputs were compared.

    ``reason``: why it was not run as the app will run it, or was not compared.
    ``samples``: the names of the inputs that were compared; ``synthetic`` if they were generated.
    ``warnings``: disagreements for inputs that the app may never have.
    ``emulation``: what the EP's number format makes of the model.
    ``float_form_db``: the decibels by which the integers of the source on the CPU differ from its float
    form, if the comparison was with that.
    ``simulated``: whether a simulator of the device ran it.
    """

    status: ValidationStatus
    agreements: tuple[Agreement, ...] = ()
    reason: str | None = None
    samples: tuple[str, ...] = ()
    synthetic: bool = True
    warnings: tuple[str, ...] = ()
    emulation: Emulation | None = None
    float_form_db: float | None = None
    simulated: bool = False

    @property
    def label(self) -> str:
        """The status for a table, and whether outputs were compared."""
        if self.status is ValidationStatus.RAN:
            if self.sensitive:
                return "ran, sensitive"
            if not self.compared:
                return "ran, not compared"
            few = f" ({count(len(self.samples), 'input')})" if self.few else ""
            return f"ran and agrees{' (synthetic)' if self.synthetic else few}"
        return self.status.label

    @property
    def few(self) -> bool:
        """Whether too few inputs were given to represent others: only the given ones are run and emulated."""
        return not self.synthetic and len(self.samples) < _MIN_GIVEN

    @property
    def compared(self) -> tuple[Agreement, ...]:
        """The agreements of the outputs whose comparison is conclusive."""
        return tuple(
            a
            for a in self.agreements
            if a.status in (AgreementStatus.AGREES, AgreementStatus.SENSITIVE)
        )

    @property
    def sensitive(self) -> bool:
        """Whether other inputs may disagree."""
        return any(each.status is AgreementStatus.SENSITIVE for each in self.agreements)

    @property
    def margin(self) -> float:
        """The smallest number of decibels by which an output, run or emulated, is above its limit."""
        found = [each.margin for each in self.compared]
        if self.emulation is not None and self.emulation.seen:
            found.append(self.emulation.margin)
        return min((each for each in found if each is not None), default=math.inf)

    @property
    def inconclusive(self) -> tuple[Agreement, ...]:
        """The agreements of the outputs whose comparison is inconclusive."""
        return tuple(a for a in self.agreements if a.status is AgreementStatus.INCONCLUSIVE)

    @property
    def cosine(self) -> float | None:
        """The smallest of the outputs' cosine similarities, if there is one."""
        return min((a.cosine for a in self.compared if a.cosine is not None), default=None)

    @property
    def snr(self) -> float | None:
        """The smallest signal-to-noise ratio of an output, in decibels; None if all are equal."""
        return min((a.snr for a in self.compared if a.snr is not None), default=None)


@dataclass(frozen=True)
class ValidationRun:
    """A validation; the seconds that it took to open a session on the context, None if it opened none; and
    the day on which it ran, such as ``"2026-11-23"``, empty if it did not run.
    """

    validation: Validation
    load: float | None = None
    day: str = ""


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
    """A finished job: its artifact, and the validation of each of its models by name.

    ``saved``: bytes by which the artifact is smaller than its models compiled alone for each chip; 0 if
    they were not compiled alone.
    ``loads``: the seconds to open a session on each model that validation opened; ``days``: when it ran them.
    """

    job: Job
    artifact: Artifact
    validations: Mapping[str, Validation]
    cached: bool
    saved: int = 0
    loads: Mapping[str, float] = field(default_factory=dict)
    days: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FailedJob:
    """A failed job, and its problems."""

    job: Job
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Result:
    """The result of a plan, with models and jobs in the plan's order."""

    sources: tuple[Source, ...]
    built: tuple[Built, ...]
    failures: tuple[FailedJob, ...] = ()

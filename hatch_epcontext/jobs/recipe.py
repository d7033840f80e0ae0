"""The ways to compile a job, and what they make of it: a record, or why it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from hatch_epcontext.errors import Problem
from hatch_epcontext.files import FileRecord, is_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import ALWAYS, CORRECTIONS, RewriteName
from hatch_epcontext.graph.operators import StaticFormat
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.worker.results import Context, Preparation, Simplifier

Nodes = tuple[str, ...]
"""The names of nodes, sorted."""


@dataclass(frozen=True)
class Change:
    """A change of a job's prepared models.

    ``nodes``: those to rewrite, to unroll, or to leave to the CPU in each model; None for all. ``names``: the
    rewrites of a correction.
    """

    kind: Literal["rewrite", "unroll", "correct", "leave"]
    nodes: tuple[Nodes, ...] | None = None
    names: tuple[RewriteName, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """One way to compile a job.

    ``fuse``: whether scales are folded into the weights of convolutions. ``changes`` are applied to the
    prepared models one after the other. ``options``: the EP's, in addition to the target's.
    ``takes_control_flow``: whether a model is compiled although preparation leaves control flow in it.
    ``corrections``: the rewrites for the EP's number format, see `number_format`; they come last.
    ``dequantize``: whether dynamic quantization is undone although the target does not require it.
    ``left``: the nodes of each model that the CPU computes, which the EP computes wrong; after all else.
    """

    simplifier: Simplifier
    fuse: bool = True
    changes: tuple[Change, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    takes_control_flow: bool = True
    corrections: tuple[RewriteName, ...] = ()
    dequantize: bool = False
    left: tuple[Nodes, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the models are compiled as the target requires, with its options."""
        changes = (self.changes, self.options, self.last_corrections, self.left)
        return self.fuse and not self.dequantize and not any(changes)

    @property
    def name(self) -> str:
        """What it does with the models, in a few words."""
        words = {"rewrite": "rewriting", "unroll": "unrolling"}
        parts = ["dequantized"] if self.dequantize else []
        parts += [] if self.fuse else ["without fusing"]
        parts += (f"with {name} = {value}" for name, value in self.options)
        parts += dict.fromkeys(words[change.kind] for change in self.changes)
        parts += ["rewriting for accuracy"] if self.last_corrections else []
        parts += ["leaving nodes to the CPU"] if self.left else []
        simplified = f"simplified by {self.simplifier}" if self.simplifier != "none" else "as it is"
        return ", ".join(parts) or simplified

    @property
    def all_changes(self) -> tuple[Change, ...]:
        """All changes of the prepared models, in order."""
        corrections = (Change("correct", names=self.corrections),) if self.corrections else ()
        left = (Change("leave", self.left),) if self.left else ()
        return (*self.changes, *corrections, *left)

    @property
    def before_changes(self) -> Recipe:
        """How this recipe prepares models: with the rewrites for all, and no other change."""
        corrections = tuple(name for name in self.corrections if name in ALWAYS)
        return dataclasses.replace(self, changes=(), fuse=True, corrections=corrections, left=())

    @property
    def to_last_change(self) -> Recipe:
        """This recipe up to its last change: without the rewrites for all models if these come after it, so
        that they do not hide that it did nothing.
        """
        is_complete = self.last_corrections or self.left or not self.changes
        return self if is_complete else dataclasses.replace(self, corrections=())

    def job_of(self, job: Job) -> Job:
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
        self, kind: Literal["rewrite", "unroll"], nodes: tuple[Nodes, ...] | None
    ) -> Recipe:
        """This recipe with one more `Change`."""
        return dataclasses.replace(self, changes=(*self.changes, Change(kind, nodes)))

    def with_corrections(self, names: tuple[RewriteName, ...]) -> Recipe:
        """This recipe with more rewrites for the EP's number format."""
        return dataclasses.replace(self, corrections=(*self.corrections, *names))


@dataclass(frozen=True)
class Stop:
    """Why a recipe gave no artifact, and in which `Step`.

    In ``"prepare"`` the simplifier fails or leaves ``control_flow``, in ``"change"`` nothing changes or the
    worker fails, in ``"compile"`` the EP or a check refuses the result.

    ``rewrites``: what was done to the models. ``is_accident``: whether another build may not meet it.
    ``quantized``: the format of a model's static quantization. ``nodes``: those that the EP refuses, of the
    only model; None if that is unknown.
    """

    step: Literal["prepare", "change", "compile"]
    problems: tuple[Problem, ...] = ()
    control_flow: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    is_accident: bool = False
    quantized: StaticFormat | None = None
    nodes: tuple[Nodes, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what no build writes, but a cache may contain."""
        if not (self.problems or self.control_flow or self.step == "change"):
            raise ValueError("it stopped without a reason")


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

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files.values())

    def __post_init__(self) -> None:
        """Raise ValueError for what no build writes, but a cache may contain."""
        names = [context.model_file for context in self.contexts]
        if len(self.preparations) != len(names) or not self.files.keys() >= {*names}:
            raise ValueError("it has models without a preparation or a file")
        if self.search and not is_sha256(self.search):
            raise ValueError("it has a search that is no key")

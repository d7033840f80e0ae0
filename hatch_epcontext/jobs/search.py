"""The search for a recipe: what is tried for a job, in which order, and which attempt wins.

A `Recipe` says how to prepare and to compile the models of a job. An `Attempt` is a recipe, tried: it has the
record of its artifact, or it was refused, by the simplifier or by the execution provider (EP). Its `Verdict`
says what validation showed.

`next_recipe` goes through `STAGES`. It reads nothing but the search: what earlier builds tried leads to the
same recipes as if this build had tried it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal, NamedTuple

from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.errors import Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.number_format import (
    ALWAYS,
    FOR_KERNELS,
    FOR_RANGES,
    RewriteName,
)
from hatch_epcontext.jobs.artifact import Nodes, Recipe, Record, Refused
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import (
    FEW_SAMPLES,
    GAIN,
    SIMPLIFIERS,
    AgreementStatus,
    Coverage,
    Validation,
)

_ROUNDS = 3
"""How often rewriting, and unrolling, change a model: an EP may also refuse the result of a rewrite."""


_MAX_REASONS = 8
"""The most reasons why rewrites did not apply that a note has."""


@dataclass(frozen=True)
class Verdict:
    """How near an attempt is to the CPU: ``margin`` in decibels above the limits, negative beyond them.

    It is sensitive if other inputs may differ. ``in_format``: whether an emulation of the number format shows
    why; ``gap``: the decibels by which a run is worse than its emulation; ``in_layers``: whether layers have
    inexact kernels.
    """

    status: Literal["agrees", "sensitive", "differs", "not-run"]
    margin: float = math.inf
    gap: float = 0.0
    in_format: bool = False
    in_layers: bool = False

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against the attempt."""
        return self.status in ("agrees", "not-run")

    @property
    def differs(self) -> bool:
        """Whether an output is beyond its limits."""
        return self.status == "differs"

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels of the EP are less exact than its number format."""
        return self.gap >= GAIN

    def is_worth(self, other: Verdict | None) -> bool:
        """Whether outputs are so much nearer than in ``other``, which does not agree, that changes pay."""
        if other is None or other.agrees:
            return False
        is_closer = self.margin >= other.margin and self.gap < other.gap - GAIN
        return is_closer or self.margin >= other.margin + GAIN


@dataclass(frozen=True)
class Attempt:
    """One recipe, tried: the record of its artifact, which has ``key``, or why it was refused.

    ``validations``: of its artifact, by model, up to one that differs; empty if it was not validated as the
    job requires. ``day``: of the earlier build that tried it, as ``"2026-11-23"``; empty if this one did.
    ``required``: see `Search`; empty if it is the same whatever is required.
    """

    recipe: Recipe
    key: str
    record: Record | None = None
    refused: Refused | None = None
    validations: Mapping[str, Validation] = field(default_factory=dict)
    day: str = ""
    required: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """What validation says of it; None before that."""
        if not self.validations:
            return None
        validations = self.validations.values()
        margin = min(validation.margin for validation in validations)
        agreements = [a for validation in validations for a in validation.agreements]
        if any(agreement.differs for agreement in agreements):
            # Nothing is known about the cause.
            gap = max((a.gap for a in agreements if a.gap is not None), default=math.inf)
            return Verdict("differs", margin, gap, in_format=True, in_layers=True)
        emulations = [v.emulation for v in validations if v.emulation is not None]
        # Simulators are slow with large models, for which only few inputs are emulated: rewrites for kernels
        # are tried only if these differ.
        small = (
            v
            for v in validations
            if not (v.synthetic and v.emulation and 0 < v.emulation.samples <= FEW_SAMPLES)
        )
        is_sensitive = any(a.status is AgreementStatus.SENSITIVE for a in agreements)
        return Verdict(
            "sensitive" if is_sensitive else "agrees" if agreements else "not-run",
            max(0.0, margin),
            max((a.gap or 0.0 for v in small for a in v.agreements), default=0.0),
            any(emulation.in_format for emulation in emulations),
            any(emulation.inexact for emulation in emulations),
        )

    @property
    def stopped_in(self) -> str | None:
        """The step that refused it, see `Refused`; None if it has an artifact."""
        return self.refused.step if self.refused else None

    @property
    def control_flow(self) -> tuple[str, ...]:
        """The control flow because of which it was not compiled."""
        return self.refused.control_flow if self.refused else ()

    @property
    def coverages(self) -> tuple[Coverage, ...]:
        """How much of each model was compiled; empty for optimized graphs."""
        contexts = self.record.contexts if self.record else ()
        return tuple(context.coverage for context in contexts if context.coverage is not None)

    @property
    def uncovered(self) -> int:
        """The number of nodes that are left to the CPU."""
        return sum(len(coverage.uncovered) for coverage in self.coverages)

    @property
    def share(self) -> float:
        """The smallest compiled share of any of the models."""
        return min((coverage.share for coverage in self.coverages), default=0.0)

    @property
    def is_whole(self) -> bool:
        """Whether no node is left to the CPU but on purpose, as far as that is known."""
        return self.record is not None and all(
            context.coverage.share == 1 for context in self.record.contexts if context.coverage
        )

    @property
    def may_ship(self) -> bool:
        """Whether it has an artifact that may be shipped: an unrolled one only if it is whole."""
        unrolls = any(change.kind == "unroll" for change in self.recipe.changes)
        return self.is_whole or (self.record is not None and not unrolls)

    @property
    def may_improve(self) -> bool:
        """Whether other forms of the models may give a better result."""
        return self.stopped_in == "compile" or (self.record is not None and not self.is_whole)

    @property
    def quality(self) -> tuple[bool, bool, bool, float, int]:
        """Larger is better: whether it may be shipped, is whole, and computes as its source does; then how
        much was compiled, and in how few parts.
        """
        parts = sum(coverage.partitions for coverage in self.coverages)
        return self.may_ship, self.is_whole, not self.recipe.dequantize, self.share, -parts

    @property
    def refused_nodes(self) -> tuple[Nodes, ...] | None:
        """The nodes that are left to the CPU in each of the models.

        None if nothing was compiled: then all may be the cause, and a change applies to all that it handles.
        """
        if self.refused:
            return None
        return tuple(tuple(sorted(node.name for node in c.uncovered)) for c in self.coverages)

    def recipe_with(self, kind: Literal["rewrite", "unroll"]) -> Recipe:
        """Its recipe with one more change of what the EP leaves or refuses."""
        return self.recipe.with_change(kind, self.refused_nodes)

    @property
    def declined(self) -> tuple[Declined, ...]:
        """Why rewrites left nodes as they are."""
        if self.refused:
            return self.refused.declined
        preparations = self.record.preparations if self.record else ()
        return tuple(declined for model in preparations for declined in model.declined)

    @property
    def differences(self) -> tuple[Problem, ...]:
        """The problems of outputs that differ from the CPU's."""
        validations = self.validations.values()
        return tuple(replace(p, step="validation") for v in validations for p in v.problems)

    @property
    def notes(self) -> Iterator[str]:
        """Its result, for a report."""
        refused, names = self.refused, ["dequantized"] if self.recipe.dequantize else []
        if refused is None:
            done = self.record.preparations if self.record else ()
            names += dict.fromkeys(name for p in done for name in (*p.options, *p.rewrites))
            result = f"{count(self.uncovered, 'node')} on the CPU"
            if self.differences:
                result = _first_line(self.differences[0].message)
                if self.verdict and self.verdict.margin <= -1:
                    result = f"{result}, {-self.verdict.margin:.0f} dB beyond the limits"
            elif self.verdict is not None and math.isfinite(self.verdict.margin):
                result = f"{result}, {self.verdict.margin:.0f} dB above the limits"
        elif refused.step == "change":
            yield from (problem.message for problem in refused.problems)
            reasons = Counter((d.rewrite, d.operator, d.reason) for d in self.declined)
            for (rewrite, operator, reason), number in reasons.most_common(_MAX_REASONS):
                yield f"{rewrite} does not apply to {number} {operator}: {reason}"
            return
        elif refused.step == "prepare":
            for problem in refused.problems:
                yield f"{self.recipe.simplifier} failed: {' '.join(problem.message.split())}"
            return
        else:
            names += refused.rewrites
            result = _first_line(refused.problems[0].message)
        yield f"{'; '.join(names) or 'unmodified'}: {result}"


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".:")


def most_complete(attempts: Iterable[Attempt]) -> Attempt:
    """The one with the best `Attempt.quality`; among equals the first, which changes least.

    It need not agree with the CPU; if nothing was compiled, it is one that was refused.
    """
    return max(attempts, key=lambda a: (a.stopped_in in (None, "compile"), a.quality))


@dataclass(frozen=True)
class Form:
    """The attempts of one form of a job, quantized or dequantized, by the phases of the stages."""

    search: Search
    provider: Provider
    attempts: Mapping[str, list[Attempt]]

    def all(self, *phases: str) -> list[Attempt]:
        """The attempts of these ``phases``, in order."""
        return [attempt for phase in phases for attempt in self.attempts[phase]]

    def enough(self, *phases: str) -> list[Attempt]:
        """Those of ``phases`` that may win, in order."""
        return list(filter(self.search.is_enough, self.all(*phases)))

    def helpful(self, *names: RewriteName) -> tuple[RewriteName, ...]:
        """Those of ``names`` that help in the EP's number format."""
        settings = self.search.settings
        format_ = self.provider.number_format(settings.device, settings.provider_options)
        helpful = format_.rewrites if format_ and self.provider.product == "context" else ()
        return tuple(name for name in names if name in helpful)

    @property
    def covering(self) -> Attempt:
        """The attempt that covers most, before any changes for accuracy."""
        return most_complete(self.all("prepare", "cover"))

    @property
    def nearest(self) -> Attempt:
        """`covering`, or what changes for accuracy have brought sufficiently nearer to the CPU."""
        nearest = self.covering
        for attempt in self.enough("correct"):
            if attempt.verdict and attempt.verdict.is_worth(nearest.verdict):
                nearest = attempt
        return nearest

    @property
    def candidates(self) -> list[Attempt]:
        """The attempts that may win, before the model is compiled in other ways, the best first."""
        enough = self.enough("prepare", "cover", "correct")
        return sorted(enough, key=lambda attempt: attempt.quality, reverse=True)


def _leaves_nodes(form: Form) -> bool:
    """The EP leaves nodes to the CPU, or refuses the model."""
    return form.covering.may_improve


def _is_inexact(form: Form) -> bool | Attempt:
    """Results differ from the CPU's, or may differ for other inputs."""
    if not form.search.compares or not form.search.is_enough(form.covering):
        return False
    for attempt in (form.covering, *form.enough("correct")):
        if attempt.verdict is None:
            return attempt
    return form.nearest.verdict is not None and not form.nearest.verdict.agrees


def _is_wrong_in_kernels(form: Form) -> bool | Attempt:
    """They still do, because the EP's kernels are less exact than its number format."""
    candidates = form.candidates if form.search.compares else []
    for attempt in candidates:
        if attempt.verdict is None:
            return attempt
        if attempt.verdict.agrees or not attempt.verdict.in_kernels:
            return False
    for attempt in form.enough("restart"):
        if attempt.verdict is None or attempt.verdict.agrees:
            return False if attempt.verdict else attempt
    return bool(candidates)


def _simplified(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """A library that simplifies the graph, the next one if it fails or leaves control flow; at last none."""
    if own and own[-1].stopped_in != "prepare":
        return None
    basic = form.search.settings.optimization != "none"
    others = (SIMPLIFIERS if basic else ("none",))[len(own) :]
    leaving = [attempt for attempt in own if attempt.control_flow]
    # Without a simplifier at least as much control flow would stay.
    if others and not (others[0] == "none" and leaving):
        # EPs for fixed shapes compile no control flow, so the next simplifier may do better.
        takes_control_flow = not form.provider.static_shapes
        corrections = form.helpful(*ALWAYS)
        return Recipe(others[0], takes_control_flow=takes_control_flow, corrections=corrections)
    if not leaving:
        return None
    least = min(leaving, key=lambda attempt: len(attempt.control_flow))
    return replace(least.recipe, takes_control_flow=True)


def _with_options(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Options with which the EP compiles more operators."""
    more, last = form.provider.more_coverage, form.covering
    if more is None or last.recipe.options:
        return None
    # If it refuses everything, it is unknown which operators they would help.
    left = {node.op for coverage in last.coverages for node in coverage.uncovered}
    are_set = not more.options.keys().isdisjoint(form.search.settings.provider_options)
    if are_set or left.isdisjoint(more.operators):
        return None
    return replace(last.recipe, options=tuple(sorted(more.options.items())))


def _rewritten(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#rewrites) of these nodes, in up to three rounds."""
    last = own[-1] if own else form.covering
    return last.recipe_with("rewrite") if last.may_improve else None


def _unrolled(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Loops and recurrent layers unrolled, if nothing is left to the CPU then, and rewrites of these."""
    if not form.search.settings.unroll_limit:
        return None
    if not own:
        return form.covering.recipe_with("unroll")
    kinds = [attempt.recipe.changes[-1].kind for attempt in own]
    if own[-1].stopped_in == "change" and kinds[-1] == "rewrite":
        return own[-2].recipe_with("unroll")
    is_last = not own[-1].may_improve or kinds.count("rewrite") == _ROUNDS - 1
    return None if is_last else own[-1].recipe_with("rewrite")


def _in_range(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#results-that-differ) that keep values in the range of the number format."""
    verdict, names = form.nearest.verdict, form.helpful(*FOR_RANGES)
    # A kernel may also be wrong for some values only, which these avoid.
    helps = verdict is not None and (verdict.in_kernels or verdict.in_format)
    return form.nearest.recipe.with_corrections(names) if names and helps else None


def _layers_unrolled(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Layers whose kernels are inexact, unrolled."""
    verdict, recipe = form.nearest.verdict, form.nearest.recipe.with_change("unroll", None)
    # The emulation also has the faults of a layer whose kernel is known.
    helps = verdict and verdict.in_layers and (verdict.in_kernels or verdict.differs)
    return recipe if form.search.settings.unroll_limit and helps else None


def _around_kernels(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Rewrites around other inexact kernels."""
    verdict, names = form.nearest.verdict, form.helpful(*FOR_KERNELS)
    helps = verdict is not None and verdict.in_kernels
    return form.nearest.recipe.with_corrections(names) if names and helps else None


def _together(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """All rewrites for accuracy together."""
    applied = {
        name
        for attempt in form.all("correct")
        if attempt.stopped_in != "change"
        for name in attempt.recipe.corrections
    }
    names = (name for name in form.helpful(*FOR_RANGES, *FOR_KERNELS) if name in applied)
    return form.covering.recipe.with_corrections(tuple(names))


def _unfused(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with nothing folded into the weights of convolutions."""
    is_fused = form.search.settings.optimization == "basic"
    return replace(_without_rewrites(form), fuse=False) if is_fused else None


def _only_unrolled(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with all loops and recurrent layers unrolled."""
    recipe = _without_rewrites(form).with_change("unroll", None)
    return recipe if form.search.settings.unroll_limit else None


def _without_rewrites(form: Form) -> Recipe:
    """The recipe of the best candidate without its rewrites, which may be the cause."""
    corrections = form.helpful(*ALWAYS)
    return replace(form.candidates[0].recipe, changes=(), fuse=True, corrections=corrections)


@dataclass(frozen=True)
class Stage:
    """One way to find the next recipe; the docstrings of its functions are in ``docs/what-compiles.md``.

    ``applies``: its precondition, or an attempt whose verdict decides about that; None for always.
    ``propose``: the recipe that follows from a form and the stage's own attempts, at most ``rounds``.
    """

    phase: Literal["prepare", "cover", "correct", "restart"]
    applies: Callable[[Form], bool | Attempt] | None
    propose: Callable[[Form, Sequence[Attempt]], Recipe | None]
    rounds: int = 1


STAGES = (
    Stage("prepare", None, _simplified, rounds=len(SIMPLIFIERS) + 1),
    Stage("cover", _leaves_nodes, _with_options),
    Stage("cover", _leaves_nodes, _rewritten, rounds=_ROUNDS),
    Stage("cover", _leaves_nodes, _with_options),
    Stage("cover", _leaves_nodes, _unrolled, rounds=2 * _ROUNDS - 1),
    Stage("correct", _is_inexact, _in_range),
    Stage("correct", _is_inexact, _layers_unrolled),
    Stage("correct", _is_inexact, _around_kernels),
    Stage("correct", _is_inexact, _together),
    Stage("restart", _is_wrong_in_kernels, _unfused),
    Stage("restart", _is_wrong_in_kernels, _only_unrolled),
)
"""All ways to find a recipe, in order."""


@dataclass(frozen=True)
class Win:
    """The attempt that won a search: its key, and the notes on what else was tried; see `Preparation`."""

    key: str
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """The attempts for a job, those of earlier builds too, and which ones won: one stored document.

    ``compares``: whether results decide what else is tried. ``is_dynamic``: whether dynamic quantization may
    be undone. ``required``: identifies what validation requires. ``attempts`` and ``validations``: by their
    keys. ``winners``: by the `terms` under which they won.
    """

    settings: CompileSettings
    min_coverage: float = 1.0
    compares: bool = True
    is_dynamic: bool = False
    required: str = ""
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    validations: Mapping[str, Validation] = field(default_factory=dict)
    winners: Mapping[str, Win] = field(default_factory=dict)

    @property
    def terms(self) -> str:
        """Identifies what the job requires of a winner."""
        return value_sha256([self.required, self.min_coverage])

    def is_enough(self, attempt: Attempt) -> bool:
        """Whether ``attempt`` may be shipped, and compiles as much as the job requires."""
        shares = [coverage.share for coverage in attempt.coverages]
        return attempt.may_ship and all(share >= self.min_coverage for share in shares)

    def won_by(self, winner: Attempt, tried: Iterable[Attempt]) -> Search:
        """The search with its ``winner``, and the notes on what else was ``tried``."""
        win = self.winners.get(self.terms)
        if win is not None and win.key == winner.key:
            return self
        win = Win(winner.key, notes(tried, winner))
        return replace(self, winners={**self.winners, self.terms: win})

    def to_store(self, day: str) -> Search:
        """What later builds may use, of a build of this ``day``: all but accidents."""
        attempts = {
            key: replace(attempt, validations={}, day=attempt.day or day)
            for key, attempt in self.attempts.items()
            if not (attempt.refused and attempt.refused.is_accident)
        }
        return replace(self, attempts=attempts)

    def to_share(self) -> Search:
        """What other machines may use: no refusals, which may have causes there."""
        return replace(self, attempts={key: a for key, a in self.attempts.items() if a.record})

    def joined(self, other: Search) -> Search:
        """The search with what only the ``other`` one for the same job knows."""
        return replace(
            self,
            attempts={**other.attempts, **self.attempts},
            validations={**other.validations, **self.validations},
            winners={**other.winners, **self.winners},
        )

    def adding(self, attempt: Attempt) -> Search:
        """The search with ``attempt``, instead of what was known about it."""
        return replace(self, attempts={**self.attempts, attempt.key: attempt})


def notes(attempts: Iterable[Attempt], other_than: Attempt) -> tuple[str, ...]:
    """The results of all ``attempts`` but one, for a report."""
    others = (attempt for attempt in attempts if attempt.key != other_than.key)
    return tuple(dict.fromkeys(note for attempt in others for note in attempt.notes))


class Next(NamedTuple):
    """What follows from a search: a ``recipe`` to try, or an ``attempt`` whose verdict decides about that; or
    at its end the ``winner``, which covers enough and does not differ, if there is one.

    ``tried``: the attempts that follow from the stages, in order.
    """

    tried: Sequence[Attempt]
    recipe: Recipe | None = None
    attempt: Attempt | None = None
    winner: Attempt | None = None


def next_recipe(search: Search) -> Next:
    """What to try next. It follows from the search alone."""
    win = search.winners.get(search.terms)
    if win is not None and (won := search.attempts.get(win.key)):
        if (verdict := won.verdict) is None:
            return Next((), attempt=won)
        if not verdict.differs:
            return Next((), winner=won)
    tried: list[Attempt] = []
    for dequantize in (False, True) if search.is_dynamic else (False,):
        if step := _next_in_form(search, tried, dequantize=dequantize):
            return step
        whole = (attempt.verdict for attempt in tried if attempt.is_whole)
        if any(verdict and not verdict.differs for verdict in whole):
            break
    winner: Attempt | None = None
    enough = filter(search.is_enough, tried)
    for attempt in sorted(enough, key=lambda attempt: attempt.quality, reverse=True):
        # Nodes that a correction adds are no better coverage.
        if (
            winner is not None
            and attempt.quality != winner.quality
            and (not winner.recipe.last_corrections or attempt.uncovered > winner.uncovered)
        ):
            break
        if attempt.verdict is None:
            return Next(tried, attempt=attempt)
        is_nearer = winner is None or attempt.verdict.is_worth(winner.verdict)
        if is_nearer and not attempt.verdict.differs:
            winner = attempt
    return Next(tried, winner=winner)


def _next_in_form(search: Search, tried: list[Attempt], *, dequantize: bool) -> Next | None:
    """What follows for a form of the job; None at its end. ``tried`` gets its attempts."""
    known = {attempt.recipe: attempt for attempt in search.attempts.values()}
    provider = PROVIDERS[search.settings.provider]
    form = Form(search, provider, {stage.phase: [] for stage in STAGES})
    for stage in STAGES:
        own: list[Attempt] = []
        while len(own) < stage.rounds:
            applies = stage.applies is None or stage.applies(form)
            if isinstance(applies, Attempt):
                return Next(tried, attempt=applies)
            recipe = stage.propose(form, own) if applies else None
            if recipe is None:
                break
            recipe = replace(recipe, dequantize=dequantize)
            if any(attempt.recipe == recipe for attempt in tried):
                break
            if recipe not in known:
                return Next(tried, recipe)
            attempt = known[recipe]
            for attempts in (own, form.attempts[stage.phase], tried):
                attempts.append(attempt)
            if attempt.is_whole and (verdict := attempt.verdict) is None:
                return Next(tried, attempt=attempt)
            if attempt.is_whole and verdict and verdict.agrees:
                return Next(tried, winner=attempt)
        # ONNX Runtime optimizes any graph: there is nothing else to change.
        is_done = tried[-1].stopped_in == "prepare" or provider.product != "context"
        if stage.phase == "prepare" and is_done:
            return None
    return None

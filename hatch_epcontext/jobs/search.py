"""The search for a recipe: what is tried for a job, in which order, and which attempt wins.

A `Recipe` says how to prepare and to compile the models of a job. An `Attempt` is a recipe, tried: it has the
record of its artifact, or it was refused, by the simplifier or by the execution provider (EP). A `Verdict`
says what validation showed of it. The `Search` is all that is known of the job: report, manifest, notes and
errors are views of it.

`next_recipe` goes through `STAGES`. It reads nothing but the search: what earlier builds tried leads to the
same recipes as if this build had tried it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal

from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.errors import Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Declined, NodeFacts
from hatch_epcontext.graph.number_format import ALWAYS, FOR_KERNELS, FOR_RANGES, RewriteName
from hatch_epcontext.jobs.recipe import Nodes, Recipe, Record, Stop, Times
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import (
    FEW_SAMPLES,
    GAIN,
    NOTHING,
    AgreementStatus,
    Coverage,
    Nearness,
    Simplifier,
    Validated,
)

SIMPLIFIERS: tuple[Simplifier, ...] = ("onnxruntime", "onnxslim", "none")
"""The libraries that simplify a graph, in the order in which they are tried.

ONNX Runtime is the most reliable: of the 1441 of ONNX's own test models that ONNX Runtime 1.31 can
run, its basic optimizations broke none, and onnxslim 0.1 about a hundred. But it crashes on some
models with constant conditions, which onnxslim simplifies.
"""

_ROUNDS = 3
"""How often rewriting, and unrolling, change a model: an EP may also refuse the result of a rewrite."""

_PATIENCE, _SHORT = 4.0, 30.0
"""How many times longer than compiling and one run a search goes on although a result may be shipped; and the
seconds that it may always take.
"""

_MAX_REASONS = 8
"""The most reasons why rewrites did not apply that a note has."""


@dataclass(frozen=True)
class Verdict:
    """How near an attempt is to the CPU: ``margin`` in decibels above the limits, negative beyond them.

    It is sensitive if other inputs may differ, and beaten if another recipe is as near. ``in_format``:
    whether an emulation of the number format shows why; ``gap``: the decibels by which a run is worse than
    its emulation; ``in_layers``: whether layers have inexact kernels.
    """

    status: Literal["agrees", "sensitive", "beaten", "differs", "not-run"]
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
        """Whether an output is beyond its limits, or it cannot be run, or was not run to its end."""
        return self.status in ("differs", "beaten")

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels of the EP are less exact than its number format."""
        return self.gap >= GAIN

    @property
    def nearness(self) -> Nearness:
        """Its margin and gap."""
        return Nearness(self.margin, self.gap)

    def is_worth(self, other: Verdict) -> bool:
        """Whether outputs are so much nearer than in ``other``, which does not agree, that changes pay."""
        return not other.agrees and self.nearness.is_worth(other.nearness)


@dataclass(frozen=True)
class Attempt:
    """One recipe, tried: the record of its artifact, or why it has none.

    ``dropped``: the rewrites that were wrong and left out, each with the reason; ``declined``: why others
    left refused nodes as they are. ``times``: of preparing and compiling; None if only the artifact was in
    a cache. ``validations``: of the models of its artifact, by what `Terms` calls the comparison.
    ``day``: of the earlier build that tried it, as ``"2026-11-23"``; empty if this one did.
    ``compared``: the comparisons that its stop depends on; empty if it is the same for all.
    """

    recipe: Recipe
    record: Record | None = None
    stop: Stop | None = None
    dropped: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()
    times: Times | None = None
    validations: Mapping[str, Validated] = field(default_factory=dict)
    day: str = ""
    compared: Mapping[str, str] = field(default_factory=dict)

    @property
    def stopped_in(self) -> str | None:
        """The step that stopped it, see `Stop`; None if it has an artifact."""
        return self.stop.step if self.stop else None

    @property
    def control_flow(self) -> tuple[str, ...]:
        """The control flow because of which it was not compiled."""
        return self.stop.control_flow if self.stop else ()

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
        """Whether other recipes may give a better result."""
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

        None if the EP compiled nothing and does not say which it refuses: then all may be the cause, and a
        change applies to all that it handles.
        """
        if self.stop:
            return self.stop.nodes
        return tuple(tuple(sorted(self._changed_names(c.uncovered))) for c in self.coverages)

    def _changed_names(self, nodes: Iterable[NodeFacts]) -> set[str]:
        """The names of ``nodes``, and of those that corrections, which come last, have made them of."""
        names = {node.name for node in nodes}
        if self.recipe.corrections:
            names |= {name.rpartition("/")[0] for name in names} - {""}
        return names

    def recipe_with(self, kind: Literal["rewrite", "unroll"]) -> Recipe:
        """Its recipe with one more change of what the EP leaves or refuses.

        If it has changed what the EP named, and that still compiles nothing, all may be the cause.
        """
        is_again = self.stop and self.recipe.changes
        return self.recipe.with_change(kind, None if is_again else self.refused_nodes)

    def notes(self, validations: Mapping[str, Validated]) -> Iterator[str]:
        """Its result, for a report; ``validations``: those that count, by model."""
        stop, names = self.stop, ["dequantized"] if self.recipe.dequantize else []
        if stop is None:
            done = self.record.preparations if self.record else ()
            names += dict.fromkeys(name for p in done for name in (*p.options, *p.rewrites))
            result = f"{count(self.uncovered, 'node')} on the CPU"
            verdict = verdict_of(validations)
            if problems := differences_in(validations):
                result = _first_line(problems[0].message)
                if verdict and NOTHING < verdict.margin <= -1:
                    result = f"{result}, {-verdict.margin:.0f} dB beyond the limits"
            elif verdict is not None and math.isfinite(verdict.margin):
                result = f"{result}, {verdict.margin:.0f} dB above the limits"
                if verdict.status == "beaten":
                    result = f"{result}, no nearer than another recipe: not all samples were run"
        elif stop.step == "change":
            yield from self.dropped
            reasons = Counter((d.rewrite, d.operator, d.reason) for d in self.declined)
            for (rewrite, operator, reason), number in reasons.most_common(_MAX_REASONS):
                if rewrite == "decompose":
                    yield f"no rewrite is for {operator}: {reason}"
                else:
                    yield f"{rewrite} does not apply to {number} {operator}: {reason}"
            return
        elif stop.step == "prepare":
            for problem in stop.problems:
                yield f"{self.recipe.simplifier} failed: {' '.join(problem.message.split())}"
            return
        else:
            names += stop.rewrites
            result = _first_line(stop.problems[0].message)
        yield f"{'; '.join(names) or 'unmodified'}: {result}"


def verdict_of(validated: Mapping[str, Validated]) -> Verdict | None:
    """What the validations of an attempt's models say of it; None if it has none yet."""
    validations = [one.validation for one in validated.values()]
    if not validations:
        return None
    margin = min(validation.margin for validation in validations)
    if any(validation.failures for validation in validations):
        return Verdict("differs", margin)
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
    gap = max((a.gap or 0.0 for v in small for a in v.agreements), default=0.0)
    if any(one.beaten for one in validated.values()):
        return Verdict("beaten", margin, gap)
    is_sensitive = any(a.status is AgreementStatus.SENSITIVE for a in agreements)
    return Verdict(
        "sensitive" if is_sensitive else "agrees" if agreements else "not-run",
        max(0.0, margin),
        gap,
        any(emulation.in_format for emulation in emulations),
        any(emulation.inexact for emulation in emulations),
    )


def differences_in(validated: Mapping[str, Validated]) -> tuple[Problem, ...]:
    """The problems of outputs that differ from the CPU's, in the validations of an attempt's models."""
    validations = [one.validation for one in validated.values()]
    problems = (p for v in validations for p in (*v.failures, *v.problems))
    return tuple(replace(problem, step="validation") for problem in problems)


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".:")


def most_complete(attempts: Iterable[Attempt]) -> Attempt:
    """The one with the best `Attempt.quality`; among equals the first, which changes least.

    It need not agree with the CPU; if nothing was compiled, it is one that was refused.
    """
    return max(attempts, key=lambda a: (a.stopped_in in (None, "compile"), a.quality))


class _UnvalidatedError(Exception):
    """What follows depends on the verdict on ``attempt``, which has none yet."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt


@dataclass(frozen=True)
class Form:
    """The attempts of one form of a job, quantized or dequantized, by the phases of the stages."""

    search: Search
    provider: Provider
    attempts: Mapping[str, list[Attempt]]

    def verdict(self, attempt: Attempt) -> Verdict:
        """The verdict on ``attempt``; raises _UnvalidatedError if there is none yet."""
        return self.search.verdict(attempt)

    def all(self, *phases: str) -> list[Attempt]:
        """The attempts of these ``phases``, in order."""
        return [attempt for phase in phases for attempt in self.attempts[phase]]

    def enough(self, *phases: str) -> list[Attempt]:
        """Those of ``phases`` that may win, in order."""
        return list(filter(self.search.is_enough, self.all(*phases)))

    def helpful(self, *names: RewriteName) -> tuple[RewriteName, ...]:
        """Those of ``names`` that help with the EP, and in its number format."""
        settings = self.search.settings
        format_ = self.provider.number_format(settings.device, settings.provider_options)
        is_compiled = self.provider.product == "context"
        helpful = {*self.provider.rewrites, *(format_.rewrites if format_ and is_compiled else ())}
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
            before = self.verdict(nearest)
            if self.verdict(attempt).is_worth(before):
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


def _is_inexact(form: Form) -> bool:
    """Results differ from the CPU's, or may differ for other inputs."""
    if not (form.search.compares and form.search.is_enough(form.covering)):
        return False
    verdict = form.verdict(form.nearest)
    return not verdict.agrees and (verdict.differs or not form.search.is_spent)


def _differs(form: Form) -> bool:
    """All results differ from the CPU's."""
    if not (form.search.compares and form.search.is_enough(form.covering)):
        return False
    attempts = (form.covering, *form.enough("correct", "restart"))
    return all(form.verdict(attempt).differs for attempt in attempts)


def _is_wrong_in_kernels(form: Form) -> bool:
    """They still do, because the EP's kernels are less exact than its number format."""
    candidates = form.candidates if form.search.compares else []
    if any(v.agrees or not v.in_kernels for v in map(form.verdict, candidates)):
        return False
    if form.search.is_spent and not all(form.verdict(a).differs for a in candidates):
        return False
    restarted = map(form.verdict, form.enough("restart"))
    return bool(candidates) and not any(verdict.agrees for verdict in restarted)


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
    if len(own) == 1 and last.stopped_in == "change" and form.covering.stop:
        return form.covering.recipe.with_change("rewrite", None)
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
    verdict, names = form.verdict(form.nearest), form.helpful(*FOR_RANGES)
    # A kernel may also be wrong for some values only, which these avoid.
    helps = verdict.in_kernels or verdict.in_format
    return form.nearest.recipe.with_corrections(names) if names and helps else None


def _layers_unrolled(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Layers whose kernels are inexact, unrolled."""
    verdict = form.verdict(form.nearest)
    recipe = form.nearest.recipe.with_change("unroll", None)
    # The emulation also has the faults of a layer whose kernel is known.
    helps = verdict.in_layers and (verdict.in_kernels or verdict.differs)
    return recipe if form.search.settings.unroll_limit and helps else None


def _around_kernels(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Rewrites around other inexact kernels."""
    names, helps = form.helpful(*FOR_KERNELS), form.verdict(form.nearest).in_kernels
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


def _all_rewritten(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#rewrites) of all nodes that have one, in up to three rounds."""
    if not own:
        return form.covering.recipe.with_change("rewrite", None)
    return own[-1].recipe_with("rewrite") if own[-1].may_improve else None


def _unfused(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with nothing folded into the weights of convolutions."""
    is_fused = form.search.settings.optimization == "basic"
    return replace(_without_rewrites(form), fuse=False) if is_fused else None


def _only_unrolled(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with all loops and recurrent layers unrolled."""
    recipe = _without_rewrites(form).with_change("unroll", None)
    return recipe if form.search.settings.unroll_limit else None


def _left(form: Form, own: Sequence[Attempt]) -> Recipe | None:
    """Nodes whose values the number format cannot represent, left to the CPU."""
    attempts = (form.covering, *form.enough("correct", "restart"))
    last = own[-1] if own else max(attempts, key=lambda a: form.verdict(a).margin)
    if last.record is None or not form.verdict(last).differs:
        return None
    validations = form.search.validations_of(last)
    before = last.recipe.left or tuple(() for _ in last.record.contexts)
    left = []
    for context, nodes in zip(last.record.contexts, before, strict=True):
        validated = validations.get(context.model)
        culprit = validated.validation.culprit if validated else None
        left.append(tuple(sorted({*nodes, *([culprit.name] if culprit else ())})))
    return replace(last.recipe, left=tuple(left)) if any(left) else None


def _without_rewrites(form: Form) -> Recipe:
    """The recipe of the best candidate without its rewrites, which may be the cause."""
    corrections = form.helpful(*ALWAYS)
    return replace(form.candidates[0].recipe, changes=(), fuse=True, corrections=corrections)


@dataclass(frozen=True)
class Stage:
    """One way to find the next recipe; the docstrings of its functions are in ``docs/what-compiles.md``.

    ``applies``: its precondition; None for always. ``propose``: the recipe that follows from a form and the
    stage's own attempts, at most ``rounds``.
    """

    phase: Literal["prepare", "cover", "correct", "restart", "leave"]
    applies: Callable[[Form], bool] | None
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
    Stage("restart", _differs, _all_rewritten, rounds=_ROUNDS),
    Stage("leave", _differs, _left, rounds=2 * _ROUNDS),
)
"""All ways to find a recipe, in order."""


@dataclass(frozen=True)
class Terms:
    """What a job requires of a winner: the smallest compiled share of its models, and what identifies how the
    results of each are compared, by its name.
    """

    min_coverage: float = 1.0
    compared: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identifies them."""
        return value_sha256(self)


@dataclass(frozen=True)
class Search:
    """The attempts for a job in order, those of earlier builds too, and which ones won: one stored document.

    ``compares``: whether results decide what else is tried. ``is_dynamic``: whether dynamic quantization may
    be undone. ``winners``: the recipes of those that won, by the key of the `Terms` of that time. A winner is
    a decision: accidents that led to it are not stored, and nobody needs to meet them again. ``is_patient``:
    whether it may last for any time.
    """

    settings: CompileSettings
    terms: Terms = Terms()
    compares: bool = True
    is_dynamic: bool = False
    attempts: tuple[Attempt, ...] = ()
    winners: Mapping[str, Recipe] = field(default_factory=dict)
    is_patient: bool = False

    @property
    def winner(self) -> Attempt | None:
        """The attempt that has won under the present terms."""
        return self.attempt_with(self.winners.get(self.terms.key))

    def attempt_with(self, recipe: Recipe | None) -> Attempt | None:
        """The attempt with ``recipe``, if there is one."""
        return next((attempt for attempt in self.attempts if attempt.recipe == recipe), None)

    def is_enough(self, attempt: Attempt) -> bool:
        """Whether ``attempt`` may be shipped, and compiles as much as the job requires."""
        shares = [coverage.share for coverage in attempt.coverages]
        return attempt.may_ship and all(share >= self.terms.min_coverage for share in shares)

    def validations_of(self, attempt: Attempt) -> Mapping[str, Validated]:
        """Those of the models of ``attempt`` under the present terms, by name, up to one that differs; empty
        if one is missing.
        """
        validations: dict[str, Validated] = {}
        for context in attempt.record.contexts if attempt.record else ():
            validated = attempt.validations.get(self.terms.compared.get(context.model, ""))
            if validated is None:
                return {}
            validations[context.model] = validated
            if validated.validation.differs:
                break
        return validations

    def verdict(self, attempt: Attempt) -> Verdict:
        """What validation says of ``attempt``; raises _UnvalidatedError before that."""
        verdict = verdict_of(self.validations_of(attempt))
        if verdict is None:
            raise _UnvalidatedError(attempt)
        return verdict

    @property
    def seconds(self) -> float:
        """What the attempts took to prepare, compile and validate, unless an earlier cache has them."""
        compiling = (a.times.prepare + a.times.compile for a in self.attempts if a.times)
        validating = (v.seconds for a in self.attempts for v in self.validations_of(a).values())
        return sum(compiling) + sum(validating)

    @property
    def is_spent(self) -> bool:
        """Whether it has lasted so long that a result which may be shipped is good enough."""
        once = (
            a.times.compile + sum(v.run for v in self.validations_of(a).values())
            for a in self.attempts
            if a.times
        )
        limit = max(_SHORT, _PATIENCE * max(once, default=0.0))
        return not self.is_patient and self.seconds > limit

    def differences(self, attempt: Attempt) -> tuple[Problem, ...]:
        """The problems of outputs of ``attempt`` that differ from the CPU's."""
        return differences_in(self.validations_of(attempt))

    def notes(self, other_than: Attempt) -> tuple[str, ...]:
        """The results of all attempts but one, for a report."""
        others = (attempt for attempt in self.attempts if attempt.recipe != other_than.recipe)
        notes = (note for a in others for note in a.notes(self.validations_of(a)))
        return tuple(dict.fromkeys((*notes, *self._left_out())))

    @property
    def best_note(self) -> str:
        """The result of the attempt that is nearest to the CPU until now, or covers most."""

        def rank(attempt: Attempt) -> tuple[bool, float, float]:
            verdict = verdict_of(self.validations_of(attempt))
            return verdict is not None, verdict.margin if verdict else 0.0, attempt.share

        best = max(self.attempts, key=rank)
        return next(best.notes(self.validations_of(best)), "nothing is compiled")

    def _left_out(self) -> Iterator[str]:
        """What is not tried because the search has lasted long enough."""
        if self.is_spent:
            outcome = next_recipe(replace(self, winners={}, is_patient=True))
            if isinstance(outcome, Try):
                reason = (
                    f"the search has taken {self.seconds:.0f} s, and this result may be shipped"
                )
                yield f"{outcome.recipe.name}: not tried, because {reason}"

    def adding(self, attempt: Attempt) -> Search:
        """The search with ``attempt``, instead of what is known about its recipe."""
        known = {other.recipe: other for other in self.attempts}
        return replace(self, attempts=tuple({**known, attempt.recipe: attempt}.values()))

    def without(self, attempt: Attempt) -> Search:
        """The search without ``attempt``."""
        others = (other for other in self.attempts if other.recipe != attempt.recipe)
        return replace(self, attempts=tuple(others))

    def won_by(self, winner: Attempt) -> Search:
        """The search with its ``winner`` under the present terms."""
        return replace(self, winners={**self.winners, self.terms.key: winner.recipe})

    def to_store(self, day: str) -> Search:
        """What later builds may use, of a build of this ``day``: all but accidents."""
        attempts = (
            replace(
                attempt,
                day=attempt.day or day,
                validations={
                    compared: validated
                    for compared, validated in attempt.validations.items()
                    if not validated.is_accident
                },
            )
            for attempt in self.attempts
            if not (attempt.stop and attempt.stop.is_accident)
        )
        return replace(self, attempts=tuple(attempts))

    def to_share(self) -> Search:
        """What other machines may use: no refusals, which may have causes there."""
        return replace(self, attempts=tuple(a for a in self.attempts if a.record))

    def joined(self, other: Search) -> Search:
        """The search with what only the ``other`` one for the same job knows."""
        known = {attempt.recipe: attempt for attempt in self.attempts}
        for attempt in other.attempts:
            own = known.setdefault(attempt.recipe, attempt)
            if own.record == attempt.record:
                validations = {**attempt.validations, **own.validations}
                known[attempt.recipe] = replace(own, validations=validations)
        winners = {**other.winners, **self.winners}
        return replace(self, attempts=tuple(known.values()), winners=winners)


@dataclass(frozen=True)
class Try:
    """A ``recipe`` is to be tried."""

    recipe: Recipe


@dataclass(frozen=True)
class Validate:
    """What follows depends on the verdict on ``attempt``. ``to_beat``: how near the best of the others is."""

    attempt: Attempt
    to_beat: Nearness | None = None


@dataclass(frozen=True)
class Won:
    """``attempt`` covers enough and does not differ: nothing else needs to be tried."""

    attempt: Attempt


@dataclass(frozen=True)
class Lost:
    """None of the ``attempts`` wins, and there is no other recipe."""

    attempts: tuple[Attempt, ...]


def next_recipe(search: Search) -> Try | Validate | Won | Lost:
    """What to do next. It follows from nothing but the search."""
    try:
        return _next(search)
    except _UnvalidatedError as unvalidated:
        return Validate(unvalidated.attempt, _to_beat(search, unvalidated.attempt))


def _to_beat(search: Search, attempt: Attempt) -> Nearness | None:
    """How near the best of those is that may win, and cover as much as ``attempt``; None if there is none."""
    verdicts = (
        verdict_of(search.validations_of(other))
        for other in search.attempts
        if other.is_whole and other.recipe.dequantize == attempt.recipe.dequantize
    )
    rivals = [verdict.nearness for verdict in verdicts if verdict and not verdict.differs]
    best = max(rivals, key=lambda rival: (rival.margin, -rival.gap), default=None)
    return best if attempt.is_whole and best and math.isfinite(best.margin) else None


def _next(search: Search) -> Try | Won | Lost:
    if (winner := search.winner) and not search.verdict(winner).differs:
        return Won(winner)
    attempts: tuple[Attempt, ...] = ()
    for dequantize in (False, True) if search.is_dynamic else (False,):
        outcome = _next_in_form(search, attempts, dequantize=dequantize)
        if not isinstance(outcome, Lost):
            return outcome
        attempts = outcome.attempts
        whole = (attempt for attempt in attempts if attempt.is_whole)
        if any(not search.verdict(attempt).differs for attempt in whole):
            break
    winner = _best(search, attempts)
    return Won(winner) if winner else Lost(attempts)


def _best(search: Search, attempts: Iterable[Attempt]) -> Attempt | None:
    """The nearest to the CPU of the ``attempts`` that cover most; None if all of these differ."""
    best: Attempt | None = None
    enough = filter(search.is_enough, attempts)
    for attempt in sorted(enough, key=lambda attempt: attempt.quality, reverse=True):
        # Nodes that a correction adds are no better coverage.
        if (
            best is not None
            and attempt.quality != best.quality
            and (not best.recipe.last_corrections or attempt.uncovered > best.uncovered)
        ):
            break
        verdict = search.verdict(attempt)
        if not verdict.differs and (best is None or verdict.is_worth(search.verdict(best))):
            best = attempt
    return best


def _next_in_form(
    search: Search, earlier: tuple[Attempt, ...], *, dequantize: bool
) -> Try | Won | Lost:
    """What follows for a form of the job after the ``earlier`` attempts for others."""
    provider = PROVIDERS[search.settings.provider]
    form, attempts = Form(search, provider, {stage.phase: [] for stage in STAGES}), [*earlier]
    for stage in STAGES:
        own: list[Attempt] = []
        while len(own) < stage.rounds and (stage.applies is None or stage.applies(form)):
            proposed = stage.propose(form, own)
            recipe = proposed and replace(proposed, dequantize=dequantize)
            if recipe is None or any(attempt.recipe == recipe for attempt in attempts):
                break
            if (attempt := search.attempt_with(recipe)) is None:
                return Try(recipe)
            for group in (own, form.attempts[stage.phase], attempts):
                group.append(attempt)
            if attempt.is_whole and search.verdict(attempt).agrees:
                return Won(attempt)
        # ONNX Runtime optimizes any graph: there is nothing else to change.
        is_done = attempts[-1].stopped_in == "prepare" or provider.product != "context"
        if stage.phase == "prepare" and is_done:
            break
    return Lost(tuple(attempts))

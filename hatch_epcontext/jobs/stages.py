"""The order in which recipes are tried for a job, and which attempt wins.

`next_recipe` goes through `STAGES`. It reads nothing but the search: what earlier builds tried leads to the
same recipes as if this build had tried it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import ALWAYS, FOR_KERNELS, FOR_RANGES, RewriteName
from hatch_epcontext.jobs.recipe import Recipe
from hatch_epcontext.jobs.search import Attempt, Search, Verdict, most_complete
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.worker.results import Nearness, Simplifier

SIMPLIFIERS: tuple[Simplifier, ...] = ("onnxruntime", "onnxslim", "none")
"""The libraries that simplify a graph, in the order in which they are tried.

ONNX Runtime is the most reliable: of the 1441 of ONNX's own test models that ONNX Runtime 1.31 can
run, its basic optimizations broke none, and onnxslim 0.1 about a hundred. But it crashes on some
models with constant conditions, which onnxslim simplifies.
"""

_ROUNDS = 3
"""How often rewriting, and unrolling, change a model: an EP may also refuse the result of a rewrite."""


class _UnvalidatedError(Exception):
    """What follows depends on the verdict on ``attempt``, which has none yet."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt


def _verdict(search: Search, attempt: Attempt) -> Verdict:
    """The verdict on ``attempt``; raises _UnvalidatedError if there is none yet."""
    if (verdict := search.verdict(attempt)) is None:
        raise _UnvalidatedError(attempt)
    return verdict


@dataclass(frozen=True)
class _Form:
    """One form of a job, as it is or dequantized, with its attempts ``by_phase`` of the stages.

    ``earlier``: the attempts of the other form before it. ``is_spent``: whether a result which may be shipped
    is good enough.
    """

    search: Search
    provider: Provider
    earlier: tuple[Attempt, ...]
    dequantize: bool
    is_spent: bool
    by_phase: Mapping[str, list[Attempt]]

    def verdict(self, attempt: Attempt) -> Verdict:
        """As `_verdict`."""
        return _verdict(self.search, attempt)

    def all(self, *phases: str) -> list[Attempt]:
        """The attempts of these ``phases``, in order."""
        return [attempt for phase in phases for attempt in self.by_phase[phase]]

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Those of all phases, after the ``earlier`` ones."""
        return (*self.earlier, *self.all(*self.by_phase))

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
    def is_compared(self) -> bool:
        """Whether `covering` may win, and results decide."""
        return self.search.compares and self.search.is_enough(self.covering)

    @property
    def later(self) -> tuple[Attempt, ...]:
        """`covering`, and those of changes for accuracy that may win."""
        return (self.covering, *self.enough("correct", "restart"))

    @property
    def candidates(self) -> list[Attempt]:
        """The attempts that may win, before the model is compiled in other ways, the best first."""
        return _best(self.search, self.all("prepare", "cover", "correct"))[1]


def _leaves_nodes(form: _Form) -> bool:
    """The EP leaves nodes to the CPU, or refuses the model."""
    return form.covering.may_improve


def _is_inexact(form: _Form) -> bool:
    """Results differ from the CPU's, or may differ for other inputs."""
    if not form.is_compared:
        return False
    verdict = form.verdict(form.nearest)
    return not verdict.agrees and (verdict.loses or not form.is_spent)


def _differs(form: _Form) -> bool:
    """All results differ from the CPU's."""
    return form.is_compared and all(form.verdict(attempt).loses for attempt in form.later)


def _is_wrong_in_kernels(form: _Form) -> bool:
    """No result agrees, because the EP's kernels are less exact than its number format."""
    candidates = map(form.verdict, form.candidates if form.search.compares else [])
    # What is beaten was not run to its end: its gap says nothing.
    verdicts = [verdict for verdict in candidates if verdict.status != "beaten"]
    # One agrees, or the format is the cause.
    if not verdicts or any(verdict.agrees or not verdict.in_kernels for verdict in verdicts):
        return False
    # One is good enough.
    if form.is_spent and not all(verdict.loses for verdict in verdicts):
        return False
    return not any(form.verdict(attempt).agrees for attempt in form.enough("restart"))


def _simplified(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
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


def _with_options(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
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


def _rewritten(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#rewrites) of these nodes, in up to three rounds."""
    last = own[-1] if own else form.covering
    if len(own) == 1 and last.stopped_in == "change" and form.covering.stop:
        # The nodes that the EP names have no rewrite, or theirs failed: others may be the cause.
        return form.covering.recipe.with_change("rewrite", None)
    return last.recipe_with("rewrite") if last.may_improve else None


def _unrolled(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """Loops and recurrent layers unrolled, if nothing is left to the CPU then, and rewrites of these."""
    if not form.search.settings.unroll_limit:
        return None
    if not own:
        return form.covering.recipe_with("unroll")
    *before, last = own
    kinds = [attempt.recipe.changes[-1].kind for attempt in own]
    if last.stopped_in == "change" and kinds[-1] == "rewrite":
        # No rewrite is for what the unrolling before it has left: unroll that too.
        return before[-1].recipe_with("unroll")
    is_last = not last.may_improve or kinds.count("rewrite") == _ROUNDS - 1
    return None if is_last else last.recipe_with("rewrite")


def _in_range(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#results-that-differ) that keep values in the range of the number format."""
    verdict, names = form.verdict(form.nearest), form.helpful(*FOR_RANGES)
    # A kernel may also be wrong for some values only, which these avoid.
    helps = verdict.in_kernels or verdict.in_format
    return form.nearest.recipe.with_corrections(names) if names and helps else None


def _layers_unrolled(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """Layers whose kernels are inexact, unrolled."""
    verdict = form.verdict(form.nearest)
    recipe = form.nearest.recipe.with_change("unroll", None)
    # The emulation also has the faults of a layer whose kernel is known.
    helps = verdict.in_layers and (verdict.in_kernels or verdict.loses)
    return recipe if form.search.settings.unroll_limit and helps else None


def _around_kernels(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """Rewrites around other inexact kernels."""
    names, helps = form.helpful(*FOR_KERNELS), form.verdict(form.nearest).in_kernels
    return form.nearest.recipe.with_corrections(names) if names and helps else None


def _together(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """All rewrites for accuracy together."""
    applied = {
        name
        for attempt in form.all("correct")
        if attempt.stopped_in != "change"
        for name in attempt.recipe.corrections
    }
    names = (name for name in form.helpful(*FOR_RANGES, *FOR_KERNELS) if name in applied)
    return form.covering.recipe.with_corrections(tuple(names))


def _all_rewritten(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """[Rewrites](#rewrites) of all nodes that have one, in up to three rounds."""
    if not own:
        return form.covering.recipe.with_change("rewrite", None)
    return own[-1].recipe_with("rewrite") if own[-1].may_improve else None


def _unfused(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with nothing folded into the weights of convolutions."""
    is_fused = form.search.settings.optimization == "basic"
    return replace(_without_rewrites(form), fuse=False) if is_fused else None


def _only_unrolled(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """The simplified model, with all loops and recurrent layers unrolled."""
    recipe = _without_rewrites(form).with_change("unroll", None)
    return recipe if form.search.settings.unroll_limit else None


def _leaving_nodes(form: _Form, own: Sequence[Attempt]) -> Recipe | None:
    """Nodes whose values the number format cannot represent, left to the CPU."""
    if own and own[-1].record:
        last = own[-1]
    else:
        # What an EP refuses without some nodes, it may take without others, that are farther from the CPU.
        nearest = sorted(form.later, key=lambda a: form.verdict(a).margin, reverse=True)
        last = nearest[min(len(own), len(nearest) - 1)]
    if last.record is None or not form.verdict(last).loses:
        return None
    validated = form.search.validated(last)
    before = last.recipe.left or tuple(() for _ in last.record.contexts)
    left = []
    for context, nodes in zip(last.record.contexts, before, strict=True):
        # After a model that differs none was run.
        of_model = validated.get(context.model)
        culprit = of_model.validation.culprit if of_model else None
        left.append(tuple(sorted({*nodes, *([culprit.name] if culprit else ())})))
    return replace(last.recipe, left=tuple(left)) if any(left) else None


def _without_rewrites(form: _Form) -> Recipe:
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
    applies: Callable[[_Form], bool] | None
    propose: Callable[[_Form, Sequence[Attempt]], Recipe | None]
    rounds: int = 1


STAGES = (
    Stage("prepare", None, _simplified, rounds=len(SIMPLIFIERS) + 1),
    Stage("cover", _leaves_nodes, _with_options),
    Stage("cover", _leaves_nodes, _rewritten, rounds=_ROUNDS),
    # What compiles only after rewriting says only then which operators it leaves.
    Stage("cover", _leaves_nodes, _with_options),
    Stage("cover", _leaves_nodes, _unrolled, rounds=2 * _ROUNDS - 1),
    Stage("correct", _is_inexact, _in_range),
    Stage("correct", _is_inexact, _layers_unrolled),
    Stage("correct", _is_inexact, _around_kernels),
    Stage("correct", _is_inexact, _together),
    Stage("restart", _is_wrong_in_kernels, _unfused),
    Stage("restart", _is_wrong_in_kernels, _only_unrolled),
    Stage("restart", _differs, _all_rewritten, rounds=_ROUNDS),
    Stage("leave", _differs, _leaving_nodes, rounds=2 * _ROUNDS),
)
"""All ways to find a recipe, in order."""


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


def next_recipe(search: Search, *, is_patient: bool = False) -> Try | Validate | Won | Lost:
    """What to do next, which follows from nothing but the search; if ``is_patient``, however long it is."""
    try:
        return _next(search, is_spent=search.is_spent and not is_patient)
    except _UnvalidatedError as unvalidated:
        return Validate(unvalidated.attempt, _to_beat(search, unvalidated.attempt))


def _to_beat(search: Search, attempt: Attempt) -> Nearness | None:
    """How near the best of those is that may win, and cover as much as ``attempt``; None if there is none."""
    verdicts = (
        search.verdict(other)
        for other in search.attempts
        if other.is_whole and other.recipe.dequantize == attempt.recipe.dequantize
    )
    nearnesses = [verdict.nearness for verdict in verdicts if verdict and not verdict.loses]
    best = max(nearnesses, key=lambda n: (-n.unusual, n.margin, -n.gap), default=None)
    return best if attempt.is_whole and best and math.isfinite(best.margin) else None


def _next(search: Search, *, is_spent: bool) -> Try | Won | Lost:
    if (winner := search.winner) and not _verdict(search, winner).loses:
        return Won(winner)
    provider, attempts = PROVIDERS[search.settings.provider], tuple[Attempt, ...]()
    for dequantize in (False, True) if search.is_dynamic else (False,):
        phases: dict[str, list[Attempt]] = {stage.phase: [] for stage in STAGES}
        outcome = _next_in_form(_Form(search, provider, attempts, dequantize, is_spent, phases))
        if not isinstance(outcome, Lost):
            return outcome
        attempts = outcome.attempts
        whole = (attempt for attempt in attempts if attempt.is_whole)
        if any(not _verdict(search, attempt).loses for attempt in whole):
            break
    winner, _ = _best(search, attempts)
    return Won(winner) if winner else Lost(attempts)


def _best(search: Search, attempts: Iterable[Attempt]) -> tuple[Attempt | None, list[Attempt]]:
    """The nearest to the CPU of the ``attempts`` that cover most; None if all of these differ. And those that
    were asked for that, the best coverage first: what covers less only if all before it differ.
    """
    enough = filter(search.is_enough, attempts)
    best: Attempt | None = None
    asked: list[Attempt] = []
    for attempt in sorted(enough, key=lambda attempt: attempt.quality, reverse=True):
        if best and _covers_less(attempt, best):
            break
        asked.append(attempt)
        verdict = _verdict(search, attempt)
        if not verdict.loses and (best is None or verdict.is_worth(_verdict(search, best))):
            best = attempt
    return best, asked


def _covers_less(attempt: Attempt, best: Attempt) -> bool:
    """Whether ``attempt``, whose quality is not better, covers less than ``best``."""
    if attempt.quality == best.quality:
        return False
    # Nodes that a correction adds are no better coverage.
    return not best.recipe.last_corrections or attempt.uncovered > best.uncovered


def _next_in_form(form: _Form) -> Try | Won | Lost:
    """What follows for ``form``: what its stages ask for, one after the other."""
    for stage in STAGES:
        if (outcome := _next_in_stage(form, stage)) is not None:
            return outcome
        # ONNX Runtime optimizes any graph: there is nothing else to change.
        is_done = form.attempts[-1].stopped_in == "prepare" or not form.provider.has_coverage
        if stage.phase == "prepare" and is_done:
            break
    return Lost(form.attempts)


def _next_in_stage(form: _Form, stage: Stage) -> Try | Won | None:
    """What follows from ``stage``, whose attempts ``form`` gets; None if they are all made, and none wins."""
    own: list[Attempt] = []
    while len(own) < stage.rounds and (stage.applies is None or stage.applies(form)):
        proposed = stage.propose(form, own)
        recipe = proposed and replace(proposed, dequantize=form.dequantize)
        if recipe is None or any(attempt.recipe == recipe for attempt in form.attempts):
            return None
        if (attempt := form.search.attempt_with(recipe)) is None:
            return Try(recipe)
        own.append(attempt)
        form.by_phase[stage.phase].append(attempt)
        if attempt.is_whole and form.verdict(attempt).agrees:
            return Won(attempt)
    return None

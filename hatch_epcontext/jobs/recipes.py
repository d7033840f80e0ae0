"""All recipes by which a job can be compiled, and when each of them is tried.

A job is a model, or a group of models that share weights, for one target. A `Recipe` defines how to prepare
it (simplifier, changes) and how to compile it (options of the execution provider, the EP). An `Attempt` is a
recipe that was tried. Its result is an `Artifact`, which is whole if no node is left to the CPU; or it is
`Refused`: the simplifier or the EP refuses or crashes, or there is nothing to change. All other errors end
the job: a broken model, a killed worker, a full disk.

`recipes` yields them in this order; each depends on the attempts so far:

1. Simplifiers, until one works; no simplifier if none works.
2. Options with which the EP compiles operators that it otherwise leaves to the CPU.
3. Rewrites of what the EP leaves or refuses, and then of what it leaves of those, with these options too.
4. Loops and recurrent layers unrolled, and rewrites of these.
5. If the best attempt covers enough, but disagrees with the CPU or may do so: rewrites for the EP's number
   format, unrolling of layers whose kernels are inexact, and rewrites around other kernels, one more at a
   time; each is kept if it brings the outputs nearer. At last all rewrites together.
6. If it still disagrees, or is less exact than its number format: less invasive and unrolled forms of it.
7. If nothing is whole and agrees: all of these once more for a dynamically quantized model, with its
   quantization undone, unless its table has a key for that. Among attempts that cover enough but are not
   whole, those of the quantized model come first.

`try_recipes` stops at the first attempt that is whole and agrees with the CPU. An attempt that only covers
enough, or may disagree for other inputs, is chosen after all were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hatch_epcontext.errors import BuildError, Kind, Setting
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import ALWAYS, FOR_RANGES, REMEDIES, RewriteName
from hatch_epcontext.jobs.artifact import Artifact, Operators, Recipe, Refused
from hatch_epcontext.jobs.coverage import reaches_minimum
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import GAIN, SIMPLIFIERS, Coverage, Simplifier

_MAX_ROUNDS = 3
"""How often step 3, and step 4, change a model: an EP may also refuse the result of a rewrite."""


@dataclass(frozen=True)
class Assessment:
    """How near an attempt is to the CPU: ``margin`` in decibels above the limits, negative beyond them.

    ``agrees``: also true if it cannot be run or compared on this machine; false if it differs, or may differ
    for other inputs. In that case: ``in_format``, whether an emulation of the number format shows it;
    ``gap``, the decibels by which a run is worse than its emulation, if there is one; ``in_layers``, whether
    it has layers whose kernels are inexact.
    """

    agrees: bool
    margin: float
    in_format: bool = True
    gap: float = math.inf
    in_layers: bool = True

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels of the EP are less exact than its number format."""
        return self.gap >= GAIN

    def is_worth(self, before: Assessment) -> bool:
        """Whether the outputs are so much nearer than ``before`` that the change is worthwhile."""
        closer = self.margin >= before.margin and self.gap < before.gap - GAIN
        return closer or self.margin >= before.margin + GAIN

    @property
    def differs(self) -> bool:
        """Whether an output is beyond its limits."""
        return self.margin < 0


@dataclass(frozen=True)
class Attempt:
    """A recipe that was tried: its artifact, or why there is none. ``key``: the artifact's in the cache."""

    recipe: Recipe
    key: str
    result: Artifact | Refused
    cached: bool = False

    @property
    def is_prepared(self) -> bool:
        """Whether its simplifier works, even if control flow kept its result from being compiled."""
        return self.stopped_in != "prepare" or bool(self.control_flow)

    @property
    def stopped_in(self) -> str | None:
        """The step that refused it, see `Refused`; None if it has an artifact."""
        return self.result.step if isinstance(self.result, Refused) else None

    @property
    def has_crashed(self) -> bool:
        """Whether a process has crashed."""
        problems = self.result.problems if isinstance(self.result, Refused) else ()
        return bool(problems) and all(each.kind is Kind.WORKER_CRASHED for each in problems)

    @property
    def artifact(self) -> Artifact:
        """The artifact of an attempt that was not refused."""
        assert isinstance(self.result, Artifact), "only what was compiled has one"
        return self.result

    @property
    def is_whole(self) -> bool:
        """Whether no node is left to the CPU, as far as that is known."""
        return isinstance(self.result, Artifact) and not self.uncovered

    @property
    def may_be_taken(self) -> bool:
        """Whether it has an artifact that may be shipped: an unrolled one only if it is whole."""
        return isinstance(self.result, Artifact) and (self.is_whole or not self.recipe.unrolls)

    @property
    def can_be_helped(self) -> bool:
        """Whether other forms of the models may give a better result."""
        return self.stopped_in == "compile" or (self.stopped_in is None and not self.is_whole)

    @property
    def uncovered(self) -> int:
        """The number of nodes that are left to the CPU."""
        return sum(len(each.uncovered) for each in self._coverages)

    @property
    def share(self) -> float:
        """The smallest compiled share of any of the models."""
        return min((each.share for each in self._coverages), default=0.0)

    @property
    def quality(self) -> tuple[bool, bool, bool, float, int]:
        """Larger is better: whether it may be shipped, is whole, and computes as its source does; then how
        much was compiled, and in how few parts.
        """
        parts = sum(each.partitions for each in self._coverages)
        is_source = not self.recipe.dequantize
        return self.may_be_taken, self.is_whole, is_source, self.share, -parts

    @property
    def uncovered_operators(self) -> tuple[Operators, ...] | None:
        """The operators that are left to the CPU in each of the models.

        None if nothing was compiled: then all may be the cause, and a change applies to all that it handles.
        """
        if isinstance(self.result, Refused):
            return None
        return tuple(tuple(sorted({n.op for n in each.uncovered})) for each in self._coverages)

    @property
    def _coverages(self) -> tuple[Coverage, ...]:
        contexts = self.result.record.contexts if isinstance(self.result, Artifact) else ()
        return tuple(each.coverage for each in contexts if each.coverage is not None)

    @property
    def control_flow(self) -> tuple[str, ...]:
        """The control flow because of which it was not compiled, see `Recipe`."""
        return self.result.control_flow if isinstance(self.result, Refused) else ()

    def notes(self, disagreement: BuildError | None, margin: float | None = None) -> Iterator[str]:
        """Its result, for a report; ``disagreement``: of its outputs with the CPU's, if any.

        ``margin``: the decibels by which they are above the limits, if they were compared.
        """
        names = ["dequantized"] if self.recipe.dequantize else []
        if isinstance(self.result, Artifact):
            done = self.result.record.preparations
            names += dict.fromkeys(n for each in done for n in (*each.options, *each.rewrites))
            result = f"{count(self.uncovered, 'node')} on the CPU"
            if disagreement is not None:
                result = _first_line(disagreement.problems[0].message)
            elif margin is not None and math.isfinite(margin):
                result = f"{result}, {margin:.0f} dB above the limits"
            yield f"{'; '.join(names) or 'unmodified'}: {result}"
        elif self.stopped_in == "prepare":
            crashed, simplifier = self.has_crashed, self.recipe.simplifier
            # Do not show the signal: another recipe may succeed.
            text = f"{simplifier} crashes on this model, in a process of its own"
            for problem in self.result.problems:
                message = " ".join(problem.message.splitlines())
                yield text if crashed else f"{simplifier} failed: {message}"
        elif self.stopped_in == "change":
            yield from (problem.message for problem in self.result.problems)
        else:
            result = _first_line(self.result.problems[0].message)
            if self.has_crashed:
                result = "the EP crashes on this model, in a process of its own"
            yield f"{'; '.join((*names, *self.result.rewrites)) or 'unmodified'}: {result}"


Judge = Callable[[Attempt], Assessment]
"""Validates an attempt."""


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".")


def best(attempts: Sequence[Attempt]) -> Attempt:
    """The one with the best `Attempt.quality`; among equals the first, which changes least.

    It need not agree with the CPU; if nothing was compiled, it is one that was refused.
    """
    return max(attempts, key=lambda each: (each.stopped_in in (None, "compile"), each.quality))


def recipes(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Yield the recipes for ``job``, in the order above.

    ``attempts``: those of this form of the job so far; `try_recipes` appends the attempt of each recipe
    before it takes the next one. ``judge`` is that of `try_recipes`.
    """
    yield from _simplifiers(job, attempts)
    if attempts[-1].stopped_in == "prepare":
        return
    if job.target.provider.product != "context":
        # ONNX Runtime optimizes any graph: there is nothing to rewrite.
        return
    yield from _options(job, attempts)
    yield from _rewrites(attempts)
    yield from _options(job, attempts)
    yield from _unrolled(job, attempts)
    # For groups and contexts for several chips, other jobs are compared: see `Job.alone`.
    if job.group is None and not job.has_several_chips:
        yield from _remedies(job, attempts, judge)
        yield from _other_forms(job, attempts, judge)


def try_recipes(
    job: Job,
    attempts: list[Attempt],
    make: Callable[[Recipe, int], Attempt],
    judge: Judge,
    *,
    dynamic: bool = False,
) -> Attempt | None:
    """Try the recipes for ``job`` until one is whole and agrees with the CPU; None if none is.

    ``attempts`` gets what ``make`` returns for each recipe and its number. ``dynamic``: whether a model is
    dynamically quantized.
    """
    for form in job.forms if dynamic else (job,):
        own: list[Attempt] = []
        for found in recipes(form, own, judge):
            recipe, number = replace(found, dequantize=form is not job), len(attempts)
            attempt = make(recipe, number)
            if attempt.stopped_in == "prepare" and attempt.has_crashed:
                # The crash may be transient; a second one is the simplifier's own fault. An EP's crash is a
                # refusal.
                attempt = make(recipe, number)
            own.append(attempt)
            attempts.append(attempt)
            if attempt.is_whole and judge(attempt).agrees:
                return attempt
        if any(each.is_whole and not judge(each).differs for each in own):
            return None
    return None


def refusal(job: Job, attempts: Sequence[Attempt]) -> tuple[Attempt, BuildError]:
    """The EP's error for the first form that it refuses, without dynamic quantization if that was undone;
    or the error of the last simplifier, if none works.
    """
    refused = [each for each in attempts if each.stopped_in == "compile"]
    refused.sort(key=lambda each: not each.recipe.dequantize)
    first = (refused or attempts[-1:])[0]
    assert isinstance(first.result, Refused), "called where something was compiled"
    problem, *others = first.result.problems
    has_sizes = all(model.dims or model.shapes for model in job.models)
    if refused and has_sizes and not job.target.settings.static_shapes:
        # Only the user knows whether the model may have fixed sizes.
        cause = (
            "The target leaves dimensions open; the EP may compile the model with the configured sizes (not "
            "tried):"
        )
        fixed = Setting(job.target.key / "static-shapes", True)
        settings = (*problem.settings, fixed)
        problem = replace(problem, causes=(*problem.causes, cause), settings=settings)
    return first, BuildError(problem, *others)


def _simplifiers(job: Job, attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """The libraries that simplify the graph: the next one if one fails, or leaves control flow."""
    # EPs for fixed shapes compile no control flow, so the next simplifier may do better.
    takes_control_flow = not job.target.provider.static_shapes
    for simplifier in _simplifiers_of(job):
        if simplifier == "none" and any(each.is_prepared for each in attempts):
            # Without a simplifier at least as much control flow would stay.
            break
        yield Recipe(
            simplifier, takes_control_flow=takes_control_flow, remedies=_wanted(job, ALWAYS)
        )
        if attempts[-1].stopped_in != "prepare":
            return
    prepared = [each for each in attempts if each.is_prepared]
    if prepared:
        least = min(prepared, key=lambda each: len(each.control_flow))
        yield replace(least.recipe, takes_control_flow=True)


def _simplifiers_of(job: Job) -> tuple[Simplifier, ...]:
    return SIMPLIFIERS if job.target.settings.optimization != "none" else ("none",)


def _options(job: Job, attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """Options of the EP with which it compiles operators that it otherwise leaves to the CPU.

    Not if it refuses everything: then it is unknown which operators they would help.
    """
    more, last = job.target.provider.more_coverage, best(attempts)
    if (
        more is None
        or last.recipe.options
        or not more.options.keys().isdisjoint(job.target.settings.provider_options)
    ):
        return
    if any(more.operators.intersection(each) for each in last.uncovered_operators or ()):
        recipe = replace(last.recipe, options=tuple(sorted(more.options.items())))
        if _is_new(recipe, attempts):
            yield recipe


def _rewrites(attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """Rewrites of what the EP leaves or refuses in the best attempt, then in the last one."""
    last = best(attempts)
    for _ in range(_MAX_ROUNDS):
        if not last.can_be_helped:
            return
        yield last.recipe.with_change("rewrite", last.uncovered_operators)
        last = attempts[-1]


def _unrolled(job: Job, attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """Loops and recurrent layers of known length, unrolled; the EP may refuse their bodies too."""
    last = best(attempts)
    if not last.can_be_helped or not job.target.settings.unroll_limit:
        return
    yield last.recipe.with_change("unroll", last.uncovered_operators)
    for _ in range(_MAX_ROUNDS - 1):
        last = attempts[-1]
        if not last.can_be_helped:
            return
        yield last.recipe.with_change("rewrite", last.uncovered_operators)
        if attempts[-1].stopped_in == "change":
            yield last.recipe.with_change("unroll", last.uncovered_operators)


def _wanted(job: Job, names: Sequence[RewriteName]) -> tuple[RewriteName, ...]:
    """Those of ``names`` that help in the EP's number format."""
    settings, provider = job.target.settings, job.target.provider
    format_ = provider.number_format(settings.device, settings.provider_options)
    if format_ is None or provider.product != "context":
        return ()
    return tuple(name for name in names if name in format_.rewrites)


def _remedies(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Forms that compute more exactly in the EP's number format or with its kernels, if they help."""
    found = best(attempts)
    if not _is_enough(job, found):
        return
    plain, applied = found.recipe, list[RewriteName]()
    for group in REMEDIES:
        verdict = judge(found)
        if verdict.agrees:
            return
        unrolled = found.recipe.with_change("unroll", None)
        # The emulation also has the faults of a layer whose kernel is known.
        in_kernels = verdict.in_kernels or verdict.differs
        is_inexact = group is not FOR_RANGES and in_kernels and verdict.in_layers
        if is_inexact and job.target.settings.unroll_limit and _is_new(unrolled, attempts):
            yield unrolled
            found = _nearer(job, found, attempts[-1], judge)
            verdict = judge(found)
        names = _wanted(job, group)
        # A kernel may also be wrong for some values only: rewrites for ranges avoid these.
        if not names or not (verdict.in_kernels or (group is FOR_RANGES and verdict.in_format)):
            continue
        yield replace(found.recipe, remedies=(*found.recipe.remedies, *names))
        if attempts[-1].stopped_in != "change":
            applied += names
        found = _nearer(job, found, attempts[-1], judge)
    # Two rewrites may help only together: one for the range of values, and one for a kernel.
    together = replace(plain, remedies=(*plain.remedies, *applied))
    if not judge(found).agrees and _is_new(together, attempts):
        yield together


def _is_new(recipe: Recipe, attempts: Sequence[Attempt]) -> bool:
    return all(each.recipe != recipe for each in attempts)


def _nearer(job: Job, found: Attempt, last: Attempt, judge: Judge) -> Attempt:
    """``last`` if it is sufficiently nearer to the CPU than ``found``, else ``found``."""
    return last if _is_enough(job, last) and judge(last).is_worth(judge(found)) else found


def _other_forms(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Forms for which the EP may give right results where it gave wrong ones.

    Scales that are folded into the weights of convolutions cost accuracy in float16, and some EPs compute
    loops and recurrent layers wrong. They start from the simplified model: rewrites may be the cause too.
    """
    enough = acceptable(job, attempts)
    verdicts = [judge(each) for each in enough]
    if not enough or any(each.agrees or not each.in_kernels for each in verdicts):
        return
    plain = replace(enough[0].recipe, changes=(), fuse=True, remedies=_wanted(job, ALWAYS))
    if job.target.settings.optimization == "basic":
        yield replace(plain, fuse=False)
        # Only for partial attempts: `try_recipes` ends at a whole one.
        if _is_enough(job, attempts[-1]) and judge(attempts[-1]).agrees:
            return
    unrolled = plain.with_change("unroll", None)
    if job.target.settings.unroll_limit and _is_new(unrolled, attempts):
        yield unrolled


def _is_enough(job: Job, attempt: Attempt) -> bool:
    return attempt.may_be_taken and reaches_minimum(attempt.artifact.record.contexts, job.target)


def chosen(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Attempt | None:
    """The one that covers most among the ``attempts`` that cover enough and do not differ, if there is one.

    Among equals it is the one nearest to the CPU, if that is worth the additional changes.
    """
    found: Attempt | None = None
    for each in acceptable(job, attempts):
        if found is not None and each.quality != found.quality:
            break
        verdict = judge(each)
        if verdict.differs:
            continue
        if found is None or (not judge(found).agrees and verdict.is_worth(judge(found))):
            found = each
    return found


def acceptable(job: Job, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The ``attempts`` that cover enough, those that cover most first."""
    enough = [each for each in attempts if _is_enough(job, each)]
    return sorted(enough, key=lambda each: each.quality, reverse=True)

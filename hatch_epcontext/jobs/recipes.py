"""All ways in which a job is ever compiled, and when each of them is tried.

A job is a model, or a group of models that share weights, for one target. A `Recipe` is how to prepare it
(simplifier, changes) and how to compile it (options of the execution provider, the EP). An `Attempt` is a
recipe that was tried. Its result is an `Artifact`, which is whole if no node is left to the CPU; or it is
`Refused`: the simplifier or the EP refuses or crashes, or there is nothing to change. All other errors end
the job: a broken model, a killed worker, a full disk.

`recipes` reads as the list. Each next one is chosen by what the attempts so far have shown:

1. Simplifiers, until one works; without one only where none does.
2. Options with which the EP takes operators that it leaves without them.
3. Rewrites of what the EP leaves or refuses, and then of what it leaves of those, with these options too.
4. Loops and recurrent layers unrolled, and rewrites of these.
5. Where the best attempt covers enough, and disagrees with the CPU or may do so: rewrites for the number
   format of the EP, layers unrolled whose kernels are inexact, and rewrites around other kernels, one more at
   a time; each is kept if it brings the outputs nearer. At last all rewrites together.
6. Where it still disagrees, or is less exact than its number format: less invasive and unrolled forms of it.
7. Where nothing is whole without a difference: all of these once more for a model that is dynamically
   quantized, with that undone, unless its table has a key for it. Of what covers only enough, that of
   the quantized model comes first.

`try_recipes` stops at the first attempt that is whole and agrees with the CPU. What only covers enough, or
may disagree for other inputs, is chosen when all were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hatch_epcontext.errors import BuildError, Setting
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.number_format import ALWAYS, FOR_RANGES, REMEDIES, RewriteName
from hatch_epcontext.jobs.artifact import CRASHES, Artifact, Operators, Recipe, Refused
from hatch_epcontext.jobs.coverage import reaches_minimum
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import GAIN, SIMPLIFIERS, Coverage, Simplifier

_MAX_ROUNDS = 3
"""How often a model is changed in step 3, and in step 4: an EP can refuse what a rewrite leaves, too."""


@dataclass(frozen=True)
class Assessment:
    """How near an attempt is to the CPU: ``margin`` in decibels above the limits, less than 0 where it is
    beyond them.

    ``agrees``: also true where it cannot be run or compared on this machine; false where it differs, or
    may differ for other inputs. Where it may: ``in_format``, whether an emulation of the number format says
    so; ``gap``, the decibels by which a run is worse than its emulation, as far as there is one;
    ``in_layers``, whether there are layers in it whose kernels are inexact.
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
        """Whether the outputs are so much nearer than ``before`` that it is worth what was changed."""
        closer = self.margin >= before.margin and self.gap < before.gap - GAIN
        return closer or self.margin >= before.margin + GAIN

    @property
    def differs(self) -> bool:
        """Whether an output is beyond its limits."""
        return self.margin < 0


NOT_COMPARED = Assessment(True, math.inf)


@dataclass(frozen=True)
class Attempt:
    """A recipe that was tried: its artifact, or why there is none. ``key`` is the artifact's in the cache."""

    recipe: Recipe
    key: str
    result: Artifact | Refused
    cached: bool = False

    @property
    def is_prepared(self) -> bool:
        """Whether its simplifier works, also where its result was not compiled because of control flow."""
        return self.stopped_in != "prepare" or bool(self.control_flow)

    @property
    def stopped_in(self) -> str | None:
        """The step that has refused it, see `Refused`; None if it has an artifact.

        In ``"prepare"`` the simplifier failed, or left control flow; in ``"change"`` there was nothing to
        change; in ``"compile"`` the EP has refused everything.
        """
        return self.result.step if isinstance(self.result, Refused) else None

    @property
    def has_crashed(self) -> bool:
        """Whether a process has crashed."""
        problems = self.result.problems if isinstance(self.result, Refused) else ()
        return bool(problems) and all(each.kind in CRASHES for each in problems)

    @property
    def artifact(self) -> Artifact:
        """What was compiled, where nothing has refused it."""
        assert isinstance(self.result, Artifact), "only what was compiled has one"
        return self.result

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to the CPU, as far as that is known."""
        return isinstance(self.result, Artifact) and not self.uncovered

    @property
    def may_be_taken(self) -> bool:
        """Whether it has an artifact that a wheel may get: what is unrolled only if it is whole."""
        return isinstance(self.result, Artifact) and (self.is_whole or not self.recipe.unrolls)

    @property
    def can_be_helped(self) -> bool:
        """Whether other forms of the models can give a better result."""
        return self.stopped_in == "compile" or (self.stopped_in is None and not self.is_whole)

    @property
    def uncovered(self) -> int:
        """The number of nodes that are left to the CPU."""
        return sum(len(each.uncovered) for each in self._coverages)

    @property
    def share(self) -> float:
        """How much of the models was compiled: of that of which least was."""
        return min((each.share for each in self._coverages), default=0.0)

    @property
    def quality(self) -> tuple[bool, bool, bool, float, int]:
        """The larger the better: what may be taken, what is whole, and what computes as its source does; then
        how much was compiled, and in how few parts.
        """
        parts = sum(each.partitions for each in self._coverages)
        is_source = not self.recipe.dequantize
        return self.may_be_taken, self.is_whole, is_source, self.share, -parts

    @property
    def uncovered_operators(self) -> tuple[Operators, ...] | None:
        """The operators that are left to the CPU in each of the models.

        None if nothing was compiled: then all may be to blame, and a change applies to all that it knows.
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
        """The operators for which it was not compiled, see `Recipe`."""
        return self.result.control_flow if isinstance(self.result, Refused) else ()

    def notes(self, disagreement: BuildError | None, margin: float | None = None) -> Iterator[str]:
        """What came out of it, for a report; ``disagreement``: that of its outputs with the CPU's, if any.

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
            # Without the signal, which only alarms where another recipe succeeds.
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
    """The one with the best `Attempt.quality`; of equals the first, which changes least.

    It need not agree with the CPU, and where nothing was compiled it is one that the EP has refused.
    """
    return max(attempts, key=lambda each: (each.stopped_in in (None, "compile"), each.quality))


def recipes(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Yield the recipes for ``job``, in the order above.

    ``attempts`` are those of this form of it so far: `try_recipes` adds the attempt of each recipe before it
    asks for the next one. ``judge`` is that of `try_recipes`.
    """
    yield from _simplifiers(job, attempts)
    if attempts[-1].stopped_in == "prepare":
        return
    if job.target.provider.product != "context":
        # ONNX Runtime's own optimized graph refuses nothing that could be written in another way.
        return
    yield from _options(job, attempts)
    yield from _rewrites(attempts)
    yield from _options(job, attempts)
    yield from _unrolled(job, attempts)
    # Of groups and of contexts for several chips other jobs are compared: see `Job.alone`.
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

    ``attempts`` gets what ``make`` gives for each recipe and its number. ``dynamic``: whether a model is
    dynamically quantized.
    """
    for form in job.forms if dynamic else (job,):
        own: list[Attempt] = []
        for found in recipes(form, own, judge):
            recipe, number = replace(found, dequantize=form is not job), len(attempts)
            attempt = make(recipe, number)
            if attempt.stopped_in == "prepare" and attempt.has_crashed:
                # Perhaps by chance. What happens again is the simplifier's own fault; an EP's crash is a
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
    """What the EP reports of the first form that it refuses, without dynamic quantization if that was undone;
    or the last simplifier, if none works.
    """
    refused = [each for each in attempts if each.stopped_in == "compile"]
    refused.sort(key=lambda each: not each.recipe.dequantize)
    first = (refused or attempts[-1:])[0]
    assert isinstance(first.result, Refused), "called where something was compiled"
    problem, *others = first.result.problems
    has_sizes = all(model.dims or model.shapes for model in job.models)
    if refused and has_sizes and not job.target.settings.static_shapes:
        # Not tried: only its user knows whether a model may have fixed sizes.
        cause = "The target leaves dimensions open; the EP may take the model with the sizes that are given:"
        fixed = Setting(job.target.key / "static-shapes", True)
        settings = (*problem.settings, fixed)
        problem = replace(problem, causes=(*problem.causes, cause), settings=settings)
    return first, BuildError(problem, *others)


def _simplifiers(job: Job, attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """The libraries that simplify the graph: the next one where one fails, or leaves control flow."""
    # EPs for fixed shapes compile no control flow, so the next simplifier may do better.
    takes_control_flow = not job.target.provider.static_shapes
    for simplifier in _simplifiers_of(job):
        if simplifier == "none" and any(each.is_prepared for each in attempts):
            # It would leave as much control flow as any of them.
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
    """Options of the EP with which it takes operators that it leaves without them.

    Not where it refuses everything: then no operator is known for which they would help.
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
    """Rewrites of what the EP leaves or refuses in the best attempt, and then in the last one."""
    last = best(attempts)
    for _ in range(_MAX_ROUNDS):
        if not last.can_be_helped:
            return
        yield last.recipe.with_change("rewrite", last.uncovered_operators)
        last = attempts[-1]


def _unrolled(job: Job, attempts: Sequence[Attempt]) -> Iterator[Recipe]:
    """Loops and recurrent layers of known length, step by step; what was inside an EP can refuse too."""
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
    """Those of ``names`` that avoid something of the number format of the EP, and that are not left out."""
    settings, provider = job.target.settings, job.target.provider
    format_ = provider.number_format(settings.device, settings.provider_options)
    if format_ is None or provider.product != "context":
        return ()
    return tuple(
        each for each in names if each in format_.rewrites and each not in settings.without_rewrites
    )


def _remedies(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Forms that compute more exactly in the number format of the EP, or on it, as far as each helps."""
    found = best(attempts)
    if not _is_enough(job, found):
        return
    plain, applied = found.recipe, list[RewriteName]()
    for group in REMEDIES:
        verdict = judge(found)
        if verdict.agrees:
            return
        unrolled = found.recipe.with_change("unroll", None)
        # What is wrong in a layer is also in the emulation, as far as its kernel is known.
        in_kernels = verdict.in_kernels or verdict.differs
        is_inexact = group is not FOR_RANGES and in_kernels and verdict.in_layers
        if is_inexact and job.target.settings.unroll_limit and _is_new(unrolled, attempts):
            yield unrolled
            found = _nearer(job, found, attempts[-1], judge)
            verdict = judge(found)
        names = _wanted(job, group)
        # A kernel may also be wrong for some values only, which those for ranges avoid.
        if not names or not (verdict.in_kernels or (group is FOR_RANGES and verdict.in_format)):
            continue
        yield replace(found.recipe, remedies=(*found.recipe.remedies, *names))
        if attempts[-1].stopped_in != "change":
            applied += names
        found = _nearer(job, found, attempts[-1], judge)
    # Two may help only together: one for the range of values, and one for a kernel.
    together = replace(plain, remedies=(*plain.remedies, *applied))
    if not judge(found).agrees and _is_new(together, attempts):
        yield together


def _is_new(recipe: Recipe, attempts: Sequence[Attempt]) -> bool:
    return all(each.recipe != recipe for each in attempts)


def _nearer(job: Job, found: Attempt, last: Attempt, judge: Judge) -> Attempt:
    """``last`` if it is enough nearer to the CPU than ``found``, or else that."""
    return last if _is_enough(job, last) and judge(last).is_worth(judge(found)) else found


def _other_forms(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Iterator[Recipe]:
    """Forms in which an EP may compute rightly what it computes wrong.

    Scales that are folded into the weights of convolutions cost accuracy in float16, and some EPs compute
    loops and recurrent layers wrong. They start from the simplified model: rewrites may be to blame too.
    """
    enough = acceptable(job, attempts)
    verdicts = [judge(each) for each in enough]
    if not enough or any(each.agrees or not each.in_kernels for each in verdicts):
        return
    plain = replace(enough[0].recipe, changes=(), fuse=True, remedies=_wanted(job, ALWAYS))
    if job.target.settings.optimization == "basic":
        yield replace(plain, fuse=False)
        # In parts: at a whole one `try_recipes` ends.
        if _is_enough(job, attempts[-1]) and judge(attempts[-1]).agrees:
            return
    unrolled = plain.with_change("unroll", None)
    if job.target.settings.unroll_limit and _is_new(unrolled, attempts):
        yield unrolled


def _is_enough(job: Job, attempt: Attempt) -> bool:
    return attempt.may_be_taken and reaches_minimum(attempt.artifact.record.contexts, job.target)


def chosen(job: Job, attempts: Sequence[Attempt], judge: Judge) -> Attempt | None:
    """Of the ``attempts`` that cover enough and do not differ the one that covers most, if there is one.

    Of those that cover as much it is the one nearest to the CPU, if that is worth what was changed more.
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

"""Why a job has no artifact: outputs that differ, nodes that are left to the CPU, or how it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import Advice, BuildError, Key, Kind, Problem, Setting
from hatch_epcontext.graph.facts import Declined, NodeFacts, describe_nodes, freeze
from hatch_epcontext.graph.operators import DYNAMIC_QUANTIZATION, REPEATING, is_of_integers
from hatch_epcontext.jobs.notes import notes
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.search import Attempt, Search
from hatch_epcontext.shipped import CPU_EP
from hatch_epcontext.text import listing
from hatch_epcontext.worker.results import NOTHING, Coverage

_CPU = "cpu"
"""The provider for the CPU, and the usual name of its target."""

_QDQ = (
    "Quantize the float model anew in the QDQ format, whose operators compute with floats: EPs have few "
    "operators for integers, such as QLinearConv (not tried)."
)
"""What to do about a model with operators for integers."""

_MAX_GROUPS = 8
"""The most lines of nodes that a message has: those of the main graph come before those inside loops."""

_OF_THE_EP = (
    *(Kind.NOTHING_COMPILED, Kind.LOW_COVERAGE, Kind.COMPILE_FAILED, Kind.WORKER_CRASHED),
    Kind.OUTPUT_DIFFERS,
)
"""The kinds of problems that a model has with an EP, and not with the CPU's."""


def failure(
    job: Job, search: Search, attempts: Sequence[Attempt], jobs: Iterable[Job] = ()
) -> BuildError:
    """Why none of the ``attempts`` of ``search`` wins: the disagreement nearest to the limits, the nodes that
    are left to the CPU, or the EP's refusal, in that order. ``jobs``: those of the build.
    """
    leaving = [attempt for attempt in attempts if attempt.recipe.left]
    agreeing = [a for a in leaving if search.validated(a) and not search.differences(a)]
    differing = [] if agreeing else [a for a in attempts if search.differences(a)]
    if differing:
        cause = max(
            differing, key=lambda a: verdict.margin if (verdict := search.verdict(a)) else NOTHING
        )
        problems = _differences(job, search, cause, leaving)
    elif covering := [attempt for attempt in attempts if attempt.may_ship]:
        # The best of all forms: it leaves the user least to solve.
        cause = max(agreeing or covering, key=lambda attempt: attempt.share)
        problems = _low_coverages(job, search, cause, attempts)
    else:
        # Without dynamic quantization, if that was undone; or of the last simplifier, if none works.
        stopped = [attempt for attempt in attempts if attempt.stopped_in == "compile"]
        stopped.sort(key=lambda attempt: not attempt.recipe.dequantize)
        cause = (stopped or attempts[-1:])[0]
        problems = _problems_of_stop(job, cause)
    first, *others = (_with_own_keys(job, problem) for problem in problems)
    if cause.day and not job.target.from_cache:
        again = f"This was tried before ({cause.day}); {PREFIX}NO_CACHE=1 tries it again."
        first = replace(first, message=f"{first.message}\n{again}")
    first = replace(first, notes=notes(search, cause))
    if not differing and not agreeing:
        first = _with_unrolling(first, job, attempts)
    if _is_broken(job, cause, attempts):
        hint = (
            "ONNX Runtime cannot open the model for the CPU either. Export it anew, for a newer opset, or "
            "convert it with onnx.version_converter (not tried)."
        )
        first = replace(first, hint=hint, settings=())
    elif cause.stopped_in != "prepare" and first.kind in _OF_THE_EP:
        first = _with_last_remedy(first, job, jobs)
    return BuildError(first, *others)


def _differences(
    job: Job, search: Search, cause: Attempt, leaving: Iterable[Attempt]
) -> tuple[Problem, ...]:
    """The outputs of ``cause`` that differ; ``leaving``: the attempts that leave nodes to the CPU."""
    problems = search.differences(cause)
    stops = (attempt.stop for attempt in leaving if attempt.stop)
    if not any(p.kind is Kind.NOTHING_COMPILED for stop in stops for p in stop.problems[:1]):
        return problems
    # Nothing is left that the EP computes right.
    what = f"{job.target.provider.ep} computes no node of the model right"
    return tuple(
        replace(p, kind=Kind.NOTHING_COMPILED, message=f"{what}: {p.message}") for p in problems
    )


def _low_coverages(
    job: Job, search: Search, cause: Attempt, attempts: Iterable[Attempt]
) -> tuple[Problem, ...]:
    """The models of which ``cause`` leaves too much to the CPU, with what all ``attempts`` know of it."""
    declined = {
        (reason.node, reason.operator, reason.rewrite): reason
        for attempt in attempts
        for reason in attempt.declined
    }
    job, contexts = cause.recipe.job_of(job), search.contexts_of(cause)
    # One value at the key, that all models keep.
    key = job.target.key_of("min-coverage")
    limit = Setting(key, math.floor(100 * cause.share) / 100)
    return tuple(
        replace(p, settings=tuple(limit if s.key == key else s for s in p.settings))
        for model, context in zip(job.models, contexts, strict=True)
        if (p := low_coverage(context.coverage, job.target, model, [*declined.values()]))
    )


def _is_broken(job: Job, cause: Attempt, attempts: Iterable[Attempt]) -> bool:
    """Whether no simplifier takes the models of ``job``, and the EP refuses them as they are."""
    stops = (a.stop for a in attempts if a.stop and a.stop.step == "prepare")
    is_broken = any(stop.problems and not stop.is_accident for stop in stops)
    has_simplifiers = job.target.settings.optimization != "none"
    is_refused = cause.stopped_in == "compile" and cause.recipe.simplifier == "none"
    return is_broken and has_simplifiers and is_refused


def _with_unrolling(problem: Problem, job: Job, attempts: Iterable[Attempt]) -> Problem:
    """``problem``, with a limit that allows to unroll what the EP refuses, if that is known to help first."""
    target = job.target
    larger = [reason for a in attempts for reason in a.declined if reason.nodes]
    operators = {reason.operator for reason in larger}
    number = sum({reason.rewrite: reason.nodes for reason in larger}.values())
    # Rewriting the result may add some.
    limit = math.ceil(1.1 * number / 1000) * 1000
    if not target.settings.unroll_limit:
        uncovered = (node for a in attempts for c in a.coverages for node in c.uncovered)
        operators = {node.op for node in uncovered} & REPEATING
        limit = CompileSettings.unroll_limit
    if not operators:
        return problem
    hint = f"Unroll the nodes of {listing(sorted(operators))} into a copy for each iteration"
    hint += f": about {number:,} nodes (not tried)." if number else " (not tried)."
    rest = f" Or: {_as_clause(problem.hint)}" if problem.hint else ""
    settings = (Setting(target.key_of("unroll-limit"), limit), *problem.settings)
    return replace(problem, hint=f"{hint}{rest}", settings=settings)


def _with_last_remedy(problem: Problem, job: Job, jobs: Iterable[Job]) -> Problem:
    """``problem``, with the settings that leave the models of ``job`` to the CPU."""
    by_name = {other.target.name: other.target for other in (job, *jobs)}
    names = [name for name, target in by_name.items() if target.provider.ep == CPU_EP]
    if job.target.name in names or not (names or _CPU not in by_name):
        return problem
    missing = () if names else (Setting(Key(("targets", _CPU, "provider")), _CPU),)
    own = {model.key: Setting(model.key / "targets", names[:1] or [_CPU]) for model in job.models}
    remedy = "Or, at last, compile the model only for the CPU (targets)."
    settings = (*problem.settings, *missing, *own.values())
    return replace(problem, causes=(*problem.causes, remedy), settings=settings)


def _with_own_keys(job: Job, problem: Problem) -> Problem:
    """``problem``, which may come from a build of another project, with the keys of this one."""

    def own(key: Key) -> Key:
        kind, *rest = key.parts or ("",)
        if kind == "targets":
            return Key(("targets", job.target.name, *rest[1:]))
        if kind != "models" or any(
            model.key.contains(key) and model.key.model == key.model for model in job.models
        ):
            return key
        model = job.models[0].key
        return replace(model, parts=(*model.parts, *rest[1:]))

    settings = (replace(setting, key=own(setting.key)) for setting in problem.settings)
    return replace(problem, settings=tuple(settings))


def _problems_of_stop(job: Job, attempt: Attempt) -> tuple[Problem, ...]:
    """The EP's problems with ``attempt``, or those of the last simplifier, if none works."""
    first, *others = attempt.stop.problems if attempt.stop else ()
    # Those of a folder of onnxruntime-genai are its own.
    has_sizes = all((model.dims or model.shapes) and not model.genai for model in job.models)
    settings = job.target.settings
    if attempt.stopped_in == "compile" and has_sizes and not settings.static_shapes:
        # Only the user knows whether the model may have fixed sizes.
        cause = (
            "The target leaves dimensions open; the EP may compile the model with the configured sizes (not "
            "tried)."
        )
        fixed = Setting(job.target.key_of("static-shapes"), True)
        first = replace(first, causes=(*first.causes, cause), settings=(*first.settings, fixed))
    quantized = attempt.stop.quantized if attempt.stop else None
    if quantized == "QOperator":
        first = replace(first, causes=(*first.causes, f"Or {_as_clause(_QDQ)}"))
    if quantized == "QDQ" and settings.dequantize != "all" and not settings.quantize:
        cause = "Or undo the quantization, which makes the model larger (not tried)."
        floats = Setting(job.target.key_of("dequantize"), "all")
        first = replace(first, causes=(*first.causes, cause), settings=(floats, *first.settings))
    return first, *others


def low_coverage(
    coverage: Coverage | None, target: Target, model: Model, declined: Sequence[Declined] = ()
) -> Problem | None:
    """The problem if less of ``model`` was compiled than ``target`` requires.

    ``declined``: why rewrites left nodes as they are. Most optimized graphs have no coverage.
    """
    if coverage is None or coverage.share >= target.min_coverage:
        return None
    missing = tuple(n for n in coverage.uncovered if not n.waived)
    coverage = replace(coverage, uncovered=missing)
    hint, settings = _advice(coverage, target, model.key)
    groups = [*describe_nodes(_with_declined(node, declined) for node in coverage.uncovered)]
    shown = [f"\n  {nodes}" for nodes in groups[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        shown.append(f"\n  and {len(groups) - _MAX_GROUPS} more operators")
    left = f" {groups[0]}." if len(groups) == 1 else "".join(shown)
    verb = "compiled" if target.provider.product == "context" else "takes"
    return Problem(
        Kind.LOW_COVERAGE,
        "",
        f"{target.provider.ep} {verb} {coverage.compiled} of {coverage.nodes} nodes "
        f"({coverage.share:.1%}), and min-coverage is {target.min_coverage:.1%}. "
        f"Left to the CPU:{left}",
        f"{hint} Or accept it with min-coverage.",
        settings=(
            *settings,
            Setting(target.key_of("min-coverage"), math.floor(100 * coverage.share) / 100),
        ),
    )


def _advice(coverage: Coverage, target: Target, model: Key) -> Advice:
    """What to do about the uncovered nodes."""
    nodes = coverage.uncovered
    which = "them" if all(node.deciders for node in nodes) else "some of them"
    if advice := freeze((node.deciders for node in nodes), which, model):
        return advice
    # With any other value the build has tried it.
    if target.settings.dequantize is False and any(n.op in DYNAMIC_QUANTIZATION for n in nodes):
        hint = (
            "The model is dynamically quantized: it measures its activations while it runs, which "
            f"{target.provider.ep} cannot do. Undo the quantization (not tried)."
        )
        return hint, (Setting(target.key_of("dequantize"), True),)
    if any(is_of_integers(node.op.rpartition(".")[2]) for node in nodes):
        return _QDQ, ()
    is_quantized = any(node.op.endswith("DequantizeLinear") for node in nodes)
    if is_quantized and target.settings.dequantize != "all" and not target.settings.quantize:
        hint = "Undo the quantization of the weights, which makes the model larger (not tried)."
        return hint, (Setting(target.key_of("dequantize"), "all"),)
    return "Change the model at these nodes (not tried).", ()


def _as_clause(sentence: str) -> str:
    """``sentence``, to go on after a word."""
    return f"{sentence[0].lower()}{sentence[1:]}"


def _with_declined(node: NodeFacts, declined: Sequence[Declined]) -> NodeFacts:
    """``node``, with the reasons why rewrites leave it too."""
    own = (reason for reason in declined if (reason.node, reason.operator) == (node.name, node.op))
    reasons = [
        # Which only says why there is no rewrite.
        reason.reason
        if reason.rewrite == "decompose"
        else f"{reason.rewrite} does not apply: {reason.reason}"
        for reason in own
    ]
    return replace(node, reason="; ".join(filter(None, (node.reason, *reasons))) or None)

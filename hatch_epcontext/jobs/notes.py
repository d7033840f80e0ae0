"""What a search has found so far, in lines for reports, errors and progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hatch_epcontext.jobs.search import Attempt, Search
from hatch_epcontext.jobs.stages import Try, next_recipe
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import NOTHING

_MAX_REASONS = 8
"""The most reasons why rewrites did not apply that a note has."""


def notes(search: Search, other_than: Attempt) -> tuple[str, ...]:
    """The results of all attempts but one, and what was not tried."""
    others = (attempt for attempt in search.attempts if attempt.recipe != other_than.recipe)
    lines = (line for attempt in others for line in _notes_on(search, attempt))
    return tuple(dict.fromkeys((*lines, *_untried(search))))


def best_note(search: Search) -> str:
    """The result of the attempt that is nearest to the CPU until now, or covers most."""

    def rank(attempt: Attempt) -> tuple[bool, float, float]:
        verdict = search.verdict(attempt)
        return verdict is not None, verdict.margin if verdict else 0.0, attempt.share

    best = max(search.attempts, key=rank)
    return next(_notes_on(search, best), "nothing is compiled")


def _untried(search: Search) -> Iterator[str]:
    """What is not tried because ``search`` has lasted long enough."""
    if search.is_spent:
        outcome = next_recipe(replace(search, winners={}), is_patient=True)
        if isinstance(outcome, Try):
            yield (
                f"{outcome.recipe.name}: not tried, because this result may be shipped, and compiling and "
                f"running the other recipes takes about {search.seconds:.0f} s by estimate"
            )


def _notes_on(search: Search, attempt: Attempt) -> Iterator[str]:
    """The result of ``attempt``; several lines if nothing was compiled."""
    stop, recipe = attempt.stop, attempt.recipe
    if stop and stop.step == "prepare":
        for problem in stop.problems:
            yield f"{recipe.simplifier} failed: {' '.join(problem.message.split())}"
    elif stop and stop.step == "change":
        for problem in stop.problems:
            yield f"{recipe.name}: {_first_line(problem.message)}"
        yield from attempt.dropped
        reasons = Counter((d.rewrite, d.operator, d.reason) for d in attempt.declined)
        for (rewrite, operator, reason), number in reasons.most_common(_MAX_REASONS):
            if rewrite == "decompose":
                yield f"no rewrite is for {operator}: {reason}"
            else:
                yield f"{rewrite} does not apply to {number} {operator}: {reason}"
    else:
        done = attempt.record.preparations if attempt.record else ()
        changes = (name for p in done for name in (*p.options, *p.rewrites))
        names = ["dequantized"] if recipe.dequantize else []
        names += stop.rewrites if stop else dict.fromkeys(changes)
        result = _first_line(stop.problems[0].message) if stop else _result(search, attempt)
        yield f"{'; '.join(names) or 'unmodified'}: {result}"


def _result(search: Search, attempt: Attempt) -> str:
    """How near the artifact of ``attempt`` is to the CPU, or without a comparison what it covers."""
    verdict = search.verdict(attempt)
    if problems := search.differences(attempt):
        result = _first_line(problems[0].message)
        if verdict and NOTHING < verdict.margin <= -1:
            result = f"{result}, {-verdict.margin:.0f} dB beyond the limits"
        return result
    result = f"{count(attempt.uncovered, 'node')} on the CPU"
    if verdict is not None and math.isfinite(verdict.margin):
        result = f"{result}, {verdict.margin:.0f} dB above the limits"
        if verdict.status == "beaten":
            result = f"{result}, no nearer than another recipe: not all samples were run"
    return result


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0].rstrip(".:")

"""Compiling a job again, rewritten, where an EP refuses it as it is; the best result is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.preparation import Prepared, Rewritten
from hatch_epcontext.providers import MoreCoverage
from hatch_epcontext.text import count
from hatch_epcontext.worker.facts import Coverage

if TYPE_CHECKING:
    from hatch_epcontext.worker.requests import CompileReply

REFUSALS = frozenset(
    {
        Kind.NOTHING_COMPILED,
        Kind.COMPILE_FAILED,
        Kind.WORKER_CRASHED,
        Kind.WRONG_RESULT,
        Kind.NOT_EMBEDDABLE,
    }
)
"""The problems that another form of the model can solve."""

_BY_CHANCE = frozenset(
    {
        Kind.INTERRUPTED,
        Kind.SYSTEM_ERROR,
        Kind.WORKER_KILLED,
        Kind.WORKER_LOST,
    }
)
"""What says nothing about a form of the model: a weaker result would stay in the cache."""

_MOST_ROUNDS = 3
"""How often a model is rewritten: what one rewrite leaves, an EP can refuse too."""

Refused = frozenset[str] | None
"""The operators that an EP refuses in a model; None for all, where the EP does not say which."""

Compile = Callable[[Sequence[Prepared], Path], "CompileReply"]
"""Compiles the prepared models of a job into a folder, which it makes; raises BuildError."""

Rewrite = Callable[[int, Prepared, Refused], Rewritten]
"""Prepares the model with that index again, in a form without what is refused; raises BuildError."""


@dataclass(frozen=True)
class Attempt:
    """One way in which a job was compiled, and its result: the reply, or else the error."""

    prepared: tuple[Prepared, ...]
    folder: Path
    reply: CompileReply | None = None
    error: BuildError | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to the CPU."""
        return self.reply is not None and not self.uncovered

    @property
    def can_be_helped(self) -> bool:
        """Whether another form of the models can give a better result."""
        if self.error is not None:
            return all(problem.kind in REFUSALS for problem in self.error.problems)
        return not self.is_whole

    @property
    def uncovered(self) -> int:
        """The number of nodes that are left to the CPU."""
        return sum(len(each.uncovered) for each in self._coverages)

    @property
    def quality(self) -> tuple[bool, float, int]:
        """The larger the better: how much was compiled, then in how few parts."""
        share = min((each.share for each in self._coverages), default=0.0)
        return self.reply is not None, share, -sum(each.partitions for each in self._coverages)

    @property
    def refused(self) -> tuple[Refused, ...]:
        """The operators that the EP refuses in each of the models."""
        if self.reply is None:
            return (None,) * len(self.prepared)
        return tuple(frozenset(node.op for node in each.uncovered) for each in self._coverages)

    @property
    def _coverages(self) -> tuple[Coverage, ...]:
        contexts = () if self.reply is None else self.reply.contexts
        return tuple(each.coverage for each in contexts if each.coverage is not None)

    def describe(self) -> str:
        """The way and its result."""
        done = (each.preparation for each in self.prepared)
        names = dict.fromkeys(name for each in done for name in (*each.options, *each.rewrites))
        if self.error is not None and self.error.problems[0].kind is Kind.WORKER_CRASHED:
            # Another way can be right: then no signal must alarm who reads the report.
            result = "the EP crashes on this form, in a process of its own"
        elif self.error is not None:
            result = self.error.problems[0].message.split("\n", 1)[0].rstrip(".")
        else:
            result = f"{count(self.uncovered, 'node')} left to the CPU"
        return f"{'; '.join(names) or 'as it is'}: {result}"


@dataclass(frozen=True)
class Ways:
    """How to compile a job, and the forms in which it is tried, the gentlest first.

    The result of ``unroll`` counts only if it leaves nothing to the CPU. ``options``: those that are tried
    where an EP leaves nodes, the operators for which they are tried, and how to compile with them.
    """

    compile: Compile
    rewrite: Rewrite
    unroll: Rewrite | None = None
    options: tuple[MoreCoverage, Compile] | None = None


def compile_best(
    prepared: Sequence[Prepared], folder: Path, scratch: Callable[[], Path], ways: Ways
) -> tuple[tuple[Prepared, ...], CompileReply]:
    """Compile the models ``prepared`` into ``folder``, in another form if the EP refuses them as they are.

    Returns the prepared models of the best result, with what else was tried, and the reply. ``scratch()``
    is a new path for a folder. Raises the BuildError of the first way, with what else was tried, if no
    other one works.
    """
    first = _attempt(tuple(prepared), folder, ways.compile)
    if not first.can_be_helped:
        return _result(first, ())
    notes: list[str] = []
    attempts = [first]
    current = first
    other = _with_options(first, ways, scratch)
    if other is not None and ways.options is not None:
        attempts.append(other)
        if other.quality > first.quality:
            ways, current = replace(ways, compile=ways.options[1]), other
    attempts += _rewritten(current, ways, scratch, notes)
    # The first of equals is the gentlest.
    best = max(attempts, key=lambda each: each.quality)
    if best.can_be_helped and ways.unroll is not None:
        unrolled = _unrolled(best, ways, scratch, notes)
        attempts += unrolled
        best = next((each for each in unrolled if each.is_whole), best)
    # The first way is described by what it raised.
    failed = attempts if best.reply is not None else attempts[1:]
    notes += [each.describe() for each in failed if each is not best]
    for each in attempts:
        if each is not best:
            shutil.rmtree(each.folder, ignore_errors=True)
    if best is not first and best.reply is not None:
        best.folder.rename(folder)
    return _result(best, tuple(dict.fromkeys(notes)))


def _rewritten(
    first: Attempt, ways: Ways, scratch: Callable[[], Path], notes: list[str]
) -> Iterator[Attempt]:
    """Compile the models of ``first`` rewritten, as long as that can help."""
    last = first
    for _ in range(_MOST_ROUNDS):
        if not last.can_be_helped:
            return
        again = _again(last, ways.rewrite, scratch, ways.compile, notes)
        if again is None:
            return
        yield again
        last = again


def _unrolled(
    best: Attempt, ways: Ways, scratch: Callable[[], Path], notes: list[str]
) -> list[Attempt]:
    """The models of ``best`` unrolled; what was inside a loop, an EP can refuse too."""
    unroll = ways.unroll
    assert unroll is not None, "only then it is asked for"
    found: list[Attempt] = []
    attempt = _again(best, unroll, scratch, ways.compile, notes)
    while attempt is not None:
        found.append(attempt)
        if not attempt.can_be_helped or len(found) == _MOST_ROUNDS:
            break
        rewritten = _again(attempt, ways.rewrite, scratch, ways.compile, notes)
        attempt = rewritten or _again(attempt, unroll, scratch, ways.compile, notes)
    return found


def compile_unrolled(
    prepared: Sequence[Prepared], folder: Path, compile_: Compile, unroll: Rewrite
) -> tuple[tuple[Prepared, ...], CompileReply]:
    """Compile the models ``prepared`` into ``folder`` with everything unrolled that can be.

    Returns the unrolled models, and the reply. Raises BuildError if there is nothing to unroll, or if the
    EP leaves some of it to the CPU.
    """
    unrolled = [unroll(index, each, None).prepared for index, each in enumerate(prepared)]
    if not any(unrolled):
        message = "there is no loop and no layer to unroll."
        raise BuildError(Problem(Kind.COMPILE_FAILED, "", message))
    models = tuple(new or old for new, old in zip(unrolled, prepared, strict=True))
    attempt = Attempt(models, folder, reply=compile_(models, folder))
    if not attempt.is_whole:
        raise BuildError(Problem(Kind.COMPILE_FAILED, "", f"{attempt.describe()}."))
    return _result(attempt, ("as it is: the results differ from the CPU's",))


def _attempt(prepared: tuple[Prepared, ...], folder: Path, compile_: Compile) -> Attempt:
    try:
        return Attempt(prepared, folder, reply=compile_(prepared, folder))
    except BuildError as error:
        _raise_if_by_chance(error)
        return Attempt(prepared, folder, error=error)


def _raise_if_by_chance(error: BuildError) -> None:
    if any(problem.kind in _BY_CHANCE for problem in error.problems):
        raise error


def _with_options(first: Attempt, ways: Ways, scratch: Callable[[], Path]) -> Attempt | None:
    """The models of ``first`` compiled with other options; None if they are not for what it leaves."""
    if ways.options is None or first.reply is None:
        return None
    more, compile_ = ways.options
    if not any(refused and refused & more.operators for refused in first.refused):
        return None
    options = tuple(f"{name} = {value}" for name, value in more.options.items())
    prepared = (
        replace(each, preparation=replace(each.preparation, options=options))
        for each in first.prepared
    )
    return _attempt(tuple(prepared), scratch(), compile_)


def _again(
    before: Attempt,
    rewrite: Rewrite,
    scratch: Callable[[], Path],
    compile_: Compile,
    notes: list[str],
) -> Attempt | None:
    """The models of ``before`` compiled in another form; None if there is no other one."""
    prepared = list(before.prepared)
    changed = False
    for index, (each, refused) in enumerate(zip(before.prepared, before.refused, strict=True)):
        if refused is not None and not refused:
            continue
        try:
            rewritten = rewrite(index, each, refused)
        except BuildError as error:
            _raise_if_by_chance(error)
            notes.append(error.problems[0].message)
            continue
        notes += rewritten.notes
        if rewritten.prepared is not None:
            prepared[index] = rewritten.prepared
            changed = True
    return _attempt(tuple(prepared), scratch(), compile_) if changed else None


def _result(best: Attempt, notes: tuple[str, ...]) -> tuple[tuple[Prepared, ...], CompileReply]:
    if best.reply is None:
        assert best.error is not None, "it failed"
        raise with_notes(best.error, notes)
    prepared = tuple(
        replace(each, preparation=replace(each.preparation, tried=notes)) for each in best.prepared
    )
    return prepared, best.reply


def with_notes(error: BuildError, notes: tuple[str, ...]) -> BuildError:
    """``error`` with what else was tried."""
    if not notes:
        return error
    tried = "".join(f"\nAlso tried: {note}" for note in notes)
    first, *others = error.problems
    return type(error)(replace(first, message=first.message + tried), *others)

"""What is known of a job: the recipes that were tried, and which one won.

A `Recipe` says how to prepare and to compile the models of a job. An `Attempt` is a recipe, tried: it has the
record of its artifact, or why it stopped: in the simplifier, in a change, or in the execution provider (EP).
A `Verdict` says what validation showed of it. The `Search` is all that is known of the job: report, manifest,
notes and errors are views of it. What follows from it is in `stages`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Literal

from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.errors import Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import INSIDE, Cost, Declined, NodeFacts
from hatch_epcontext.jobs.recipe import Nodes, Recipe, Record, Stop, Times
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.worker.results import (
    FEW_SAMPLES,
    GAIN,
    SENSITIVE,
    Context,
    Coverage,
    Nearness,
    Validated,
    Validation,
)

_PATIENCE, _SHORT = 4.0, 10.0
"""How many times longer than compiling and one run a search goes on although a result may be shipped; and the
seconds that it may always take. Both by estimate: two builds decide the same.
"""

_COMPILED = Cost(nodes=1_000, values=70 * 10**6)
"""About how many nodes and values of a model are compiled in a second: measured with QNN, on one core. Of 15
models that take more than 0.35 s, 14 take half to twice as long.
"""


@dataclass(frozen=True)
class Verdict:
    """How near an attempt is to the CPU: ``margin`` in decibels above the limits, negative beyond them.

    It is sensitive if other inputs may differ, and beaten if another recipe is as near. ``in_format``:
    whether an emulation of the number format shows why; ``gap``: the decibels by which a run is worse than
    its emulation; ``in_layers``: whether layers have inexact kernels; ``unusual``: for how many samples that
    an app may never have they differ; ``sample``: the name of the one in which the target is worst.
    """

    status: Literal["agrees", "sensitive", "beaten", "differs", "not-run"]
    margin: float = math.inf
    gap: float = 0.0
    in_format: bool = False
    in_layers: bool = False
    unusual: int = 0
    sample: str = ""

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against the attempt."""
        return self.status in ("agrees", "not-run")

    @property
    def loses(self) -> bool:
        """Whether an output is beyond its limits, or it cannot be run, or another recipe is as near."""
        return self.status in ("differs", "beaten")

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels of the EP are less exact than its number format."""
        return self.gap >= GAIN

    @property
    def nearness(self) -> Nearness:
        """Its margin and gap, the worst sample, and the number of unusual ones that differ."""
        return Nearness(self.margin, self.gap, self.sample, self.unusual)

    def is_worth(self, other: Verdict) -> bool:
        """Whether outputs are so much nearer than in ``other``, which does not agree, or right for so many
        more samples, that changes pay.
        """
        if other.agrees or self.status == "beaten":
            return False
        is_wider = self.unusual < other.unusual and self.margin >= other.margin - GAIN
        return is_wider or self.nearness.is_worth(other.nearness)


@dataclass(frozen=True)
class Attempt:
    """One recipe, tried: the record of its artifact, or why it has none.

    ``dropped``: the rewrites that were wrong and left out, each with the reason; ``declined``: why others
    left nodes as they are. ``times``: of preparing and compiling; None if only the artifact was in
    a cache. ``validated``: how the models of its artifact were, by the keys of comparisons, see `Terms`.
    ``day``: of the earlier build that tried it, as ``"2026-11-23"``; empty if this one did.
    ``comparisons``: those that its stop depends on; empty if it is the same for all.
    """

    recipe: Recipe
    record: Record | None = None
    stop: Stop | None = None
    dropped: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()
    times: Times | None = None
    validated: Mapping[str, Validated] = field(default_factory=dict)
    day: str = ""
    comparisons: Mapping[str, str] = field(default_factory=dict)

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
    def nodes_to_change(self) -> tuple[Nodes, ...] | None:
        """The nodes of each model that are left to the CPU, or that the EP refuses.

        None if it compiled nothing and does not say which it refuses: then all may be the cause, and a change
        applies to all that it handles.
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
        is_again = self.stop is not None and len(self.recipe.changes) > 0
        return self.recipe.with_change(kind, None if is_again else self.nodes_to_change)


def _verdict_of(validated: Collection[Validated]) -> Verdict | None:
    """What the validations of an attempt's models say of it; None if it has none yet."""
    validations = [one.validation for one in validated]
    if not validations:
        return None
    margin = min(validation.margin for validation in validations)
    if any(validation.failures for validation in validations):
        return Verdict("differs", margin)
    if any(validation.differs for validation in validations):
        gaps = (a.gap for validation in validations for a in validation.agreements)
        gap = max((gap for gap in gaps if gap is not None), default=math.inf)
        # Nothing is known about the cause.
        return Verdict("differs", margin, gap, in_format=True, in_layers=True)
    gap = max(map(_gap_of, validations))
    if any(one.beaten for one in validated):
        return Verdict("beaten", margin, gap)
    is_compared = any(validation.agreements for validation in validations)
    unusual = sum(one.unusual for one in validated)
    emulations = [v.emulation for v in validations if v.emulation is not None]
    # Rare samples near their limits make no model sensitive, but rewrites may help them.
    is_near = bool(emulations) and margin < SENSITIVE
    is_sensitive = unusual or is_near or any(validation.sensitive for validation in validations)
    return Verdict(
        "sensitive" if is_sensitive else "agrees" if is_compared else "not-run",
        # No run is beyond the limits; an emulation may be.
        max(0.0, margin),
        gap,
        in_format=bool(unusual) or any(emulation.in_format for emulation in emulations),
        in_layers=any(emulation.inexact for emulation in emulations),
        unusual=unusual,
        sample=min(validated, key=lambda one: one.validation.margin).worst,
    )


def _gap_of(validation: Validation) -> float:
    """The decibels by which the run of a model is worse than its emulation; 0 if that was on few inputs."""
    emulation = validation.emulation
    if validation.synthetic and emulation and 0 < emulation.samples <= FEW_SAMPLES:
        # Simulators are slow with large models, for which only few inputs are emulated: rewrites for kernels
        # are tried only if these differ.
        return 0.0
    return max((agreement.gap or 0.0 for agreement in validation.agreements), default=0.0)


def most_complete(attempts: Iterable[Attempt]) -> Attempt:
    """The one with the best `Attempt.quality`; among equals the first, which changes least.

    It need not agree with the CPU; if nothing was compiled, it has no artifact.
    """
    return max(attempts, key=lambda a: (a.stopped_in in (None, "compile"), a.quality))


@dataclass(frozen=True)
class Terms:
    """What a job requires of a winner: the smallest compiled share of its models, and the key of how the
    results of each are compared, by its name.
    """

    min_coverage: float = 1.0
    comparisons: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identifies them."""
        return value_sha256(self)


@dataclass(frozen=True)
class Search:
    """The attempts for a job in order, those of earlier builds too, and which ones won: one stored document.

    ``compares``: whether results decide what else is tried. ``is_dynamic``: whether dynamic quantization may
    be undone. ``winners``: the recipes of those that won, by the key of the `Terms` of that time. A winner is
    a decision: accidents that led to it are not stored, and nobody needs to meet them again.
    """

    settings: CompileSettings
    terms: Terms = Terms()
    compares: bool = True
    is_dynamic: bool = False
    attempts: tuple[Attempt, ...] = ()
    winners: Mapping[str, Recipe] = field(default_factory=dict)

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

    def validated(self, attempt: Attempt) -> Mapping[str, Validated]:
        """How the models of ``attempt`` were under the present terms, by name, up to one that differs; empty
        if one was not.
        """
        by_name: dict[str, Validated] = {}
        for context in attempt.record.contexts if attempt.record else ():
            validated = attempt.validated.get(self.terms.comparisons[context.model])
            if validated is None:
                return {}
            by_name[context.model] = validated
            if validated.validation.differs:
                break
        return by_name

    def contexts_of(self, attempt: Attempt) -> Iterator[Context]:
        """The models of the artifact of ``attempt``; nodes that its recipe leaves to the CPU are the source's
        own, with the reasons, and not the Loops around them.
        """
        culprits = {
            culprit.name: culprit
            for other in self.attempts
            for validated in other.validated.values()
            if (culprit := validated.validation.culprit) is not None
        }
        for context in attempt.record.contexts if attempt.record else ():
            if (coverage := context.coverage) is None or not attempt.recipe.left:
                yield context
                continue
            uncovered = tuple(
                culprits.get(node.name, node)
                for node in coverage.uncovered
                if node.name.partition(INSIDE)[0] not in culprits or INSIDE not in node.name
            )
            yield replace(context, coverage=replace(coverage, uncovered=uncovered))

    def verdict(self, attempt: Attempt) -> Verdict | None:
        """What validation says of ``attempt``; None before that."""
        return _verdict_of(self.validated(attempt).values())

    @property
    def seconds(self) -> float:
        """About what it takes to compile and to run the attempts, as estimated from their graphs."""
        return sum(map(self._seconds_of, self.attempts))

    @property
    def is_spent(self) -> bool:
        """Whether one more attempt would last so long that a result which may be shipped is good enough."""
        compiled = (attempt for attempt in self.attempts if attempt.record)
        first = next((self._seconds_of(attempt, runs=1) for attempt in compiled), 0.0)
        return self.seconds + first > max(_SHORT, _PATIENCE * first)

    def _seconds_of(self, attempt: Attempt, runs: int | None = None) -> float:
        """The `seconds` of ``attempt``, with as many ``runs`` of each model as given, or as there were."""
        if attempt.record is None:
            return 0.0
        provider, validated = PROVIDERS[self.settings.provider], self.validated(attempt)
        seconds = 0.0
        for preparation, context in zip(
            attempt.record.preparations, attempt.record.contexts, strict=True
        ):
            number = runs or (validated[context.model].runs if context.model in validated else 0)
            cost = preparation.cost
            # Unrolled it has more nodes than its source.
            compiled = replace(cost, nodes=max(cost.nodes, preparation.nodes))
            seconds += compiled.seconds_at(_COMPILED) + number * provider.seconds_of_run(cost)
        return seconds

    def differences(self, attempt: Attempt) -> tuple[Problem, ...]:
        """The problems of outputs of ``attempt`` that differ from the CPU's."""
        validations = [one.validation for one in self.validated(attempt).values()]
        problems = (p for v in validations for p in (*v.failures, *v.problems))
        return tuple(replace(problem, step="validate") for problem in problems)

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
                validated={
                    comparison: validated
                    for comparison, validated in attempt.validated.items()
                    if not validated.is_accident
                },
            )
            for attempt in self.attempts
            if not (attempt.stop and attempt.stop.is_accident)
        )
        return replace(self, attempts=tuple(attempts))

    def to_share(self) -> Search:
        """What other machines may use: none that stopped, which may have causes here."""
        return replace(self, attempts=tuple(a for a in self.attempts if a.record))

    def joined(self, other: Search) -> Search:
        """The search with what only the ``other`` one for the same job knows."""
        known = {attempt.recipe: attempt for attempt in self.attempts}
        for attempt in other.attempts:
            own = known.setdefault(attempt.recipe, attempt)
            if own.record == attempt.record:
                validated = {**attempt.validated, **own.validated}
                known[attempt.recipe] = replace(own, validated=validated)
        winners = {**other.winners, **self.winners}
        return replace(self, attempts=tuple(known.values()), winners=winners)

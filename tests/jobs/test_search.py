"""Which recipes are tried, and which attempt wins; the tests say what an EP makes of each recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.files import FileRecord
from hatch_epcontext.graph.facts import Cost, NodeFacts
from hatch_epcontext.graph.number_format import FOR_KERNELS, FOR_RANGES, WHOLE
from hatch_epcontext.jobs.failure import failure
from hatch_epcontext.jobs.notes import notes
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.recipe import Recipe, Record, Stop, Times
from hatch_epcontext.jobs.search import Attempt, Search, Terms
from hatch_epcontext.jobs.stages import Lost, Try, Validate, Won, next_recipe
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Context,
    Coverage,
    Emulation,
    Preparation,
    Validated,
    Validation,
    ValidationStatus,
)
from tests.results import configured

Outcome = Sequence[str] | Stop
"""The operators that are left to the CPU of ten nodes; or why nothing was compiled."""


def stop(step: Any, kind: Kind = Kind.COMPILE_FAILED, message: str = "it fails.") -> Stop:
    is_accident = kind is Kind.WORKER_CRASHED
    return Stop(step, (Problem(kind, "", message),), is_accident=is_accident)


COMPARED = "a comparison"
"""The key of how the results of the only model are compared."""

NO = stop("compile")
CRASH = stop("compile", Kind.WORKER_CRASHED)
NO_SIMPLIFIER = stop("prepare")
NOTHING = Stop("change")


def leaves(*operators: str) -> Stop:
    return Stop("prepare", control_flow=operators)


SIMULATED = PROVIDERS["qnn"].simulator_speed.multiply_adds
"""The multiply-adds that the simulator runs in a second."""

MORE = PROVIDERS["qnn"].more_coverage
assert MORE is not None
OPTIONS = tuple(sorted(MORE.options.items()))


def name_of(recipe: Recipe) -> str:
    """What the recipe adds to the plain one, in order."""
    parts = {
        "floats": recipe.dequantize,
        recipe.simplifier: recipe.simplifier != "onnxruntime",
        "unfused": not recipe.fuse,
        "options": recipe.options == OPTIONS,
    }
    names = [name for name, is_part in parts.items() if is_part]
    names += [change.kind for change in recipe.changes]
    for name, group in {"ranges": FOR_RANGES, "kernels": FOR_KERNELS}.items():
        names += [name] if set(group).intersection(recipe.corrections) else []
    names += [f"left {name}" for nodes in recipe.left for name in nodes]
    return " ".join(names) or "plain"


def agreement(status: AgreementStatus, margin: float | None = None, reason: str = "") -> Agreement:
    return Agreement("y", 0.1, None, status=status, margin=margin, reason=reason)


AGREES = Validation(ValidationStatus.RAN, (agreement(AgreementStatus.AGREES),))


def wrong(margin: float | None = None, gap: float | None = None) -> Validation:
    found = replace(agreement(AgreementStatus.DIFFERS, margin, "differs from the CPU's"), gap=gap)
    problem = Problem(Kind.OUTPUT_DIFFERS, "", "the output 'y' differs from the CPU's:")
    return Validation(ValidationStatus.RAN, (found,), problems=(problem,))


def sensitive(margin: float, gap: float = 12, samples: int = 9) -> Validation:
    emulation = Emulation("float16", "here", samples, reason="it is small", in_format=True)
    found = replace(agreement(AgreementStatus.SENSITIVE, margin), gap=gap)
    return Validation(ValidationStatus.RAN, (found,), emulation=emulation)


WRONG = wrong()


@dataclass
class Ep:
    """What an EP makes of recipes, by their names, and how that validates; of all others nothing.

    ``contexts``: the number of contexts, if not one; ``added``: of nodes that the recipe adds to ten.
    ``seconds``: that each of the ``runs`` of a validation takes by estimate; ``times``: what was measured.
    ``unusual``: for how many samples that an app may never have results differ.
    """

    outcomes: Mapping[str, Outcome]
    validations: Mapping[str, Validation] = field(default_factory=dict)
    seconds: int = 0
    runs: int = 1
    times: Times = Times(0, 1)
    contexts: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    compiled: list[Recipe] = field(default_factory=list)
    validated: list[str] = field(default_factory=list)
    to_beat: list[float | None] = field(default_factory=list)
    unusual: Mapping[str, int] = field(default_factory=dict)

    @property
    def tried(self) -> list[str]:
        """The names of the recipes, without corrections and layers that are not there."""
        return [
            name
            for recipe in self.compiled
            if (name := name_of(recipe)) in self.outcomes
            or not (
                recipe.last_corrections or (recipe.changes and recipe.changes[-1].kind == "unroll")
            )
        ]

    def finish(self, search: Search) -> Search:
        while True:
            outcome = next_recipe(search)
            if isinstance(outcome, Try):
                search = search.adding(self._compile(outcome.recipe))
            elif isinstance(outcome, Validate):
                self.to_beat.append(outcome.to_beat.margin if outcome.to_beat else None)
                search = search.adding(self._validate(outcome.attempt))
            else:
                return search.won_by(outcome.attempt) if isinstance(outcome, Won) else search

    def winner(self, search: Search) -> Attempt | None:
        return self.finish(search).winner

    def _compile(self, recipe: Recipe) -> Attempt:
        self.compiled.append(recipe)
        name = name_of(recipe)
        outcome = self.outcomes.get(name, NOTHING)
        if isinstance(outcome, Stop) and outcome.control_flow and recipe.takes_control_flow:
            outcome = self.outcomes.get(f"{name} at last", outcome)
        if isinstance(outcome, Stop):
            dropped = ("Clip: it differs",) if outcome.step == "change" else ()
            return Attempt(recipe, stop=outcome, dropped=dropped)
        nodes = tuple(NodeFacts(f"n{index}", op) for index, op in enumerate(outcome))
        number = 10 + self.added.get(name, 0)
        coverage = Coverage(number, number - len(nodes), self.contexts.get(name, 1), nodes)
        done = Preparation(
            recipe.simplifier,
            *(9, 9),
            rewrites=tuple(c.kind for c in recipe.changes),
            cost=Cost(multiply_adds=self.seconds * SIMULATED),
        )
        contexts = (Context("a", "a.onnx", (), (), coverage),)
        files = {"a.onnx": FileRecord(1, "")}
        return Attempt(recipe, Record(recipe, (done,), contexts, files, {}), times=self.times)

    def _validate(self, attempt: Attempt) -> Attempt:
        name = name_of(attempt.recipe)
        self.validated.append(name)
        validation, unusual = self.validations.get(name, AGREES), self.unusual.get(name, 0)
        validated = Validated(validation, runs=self.runs, unusual=unusual)
        return replace(attempt, validated={COMPARED: validated})


def search_for(provider: str = "qnn", **settings: Any) -> Search:
    found = PROVIDERS[provider]
    assert found.ep
    search = {name: settings.pop(name) for name in ("is_dynamic", "compares") if name in settings}
    terms = Terms(settings.pop("min_coverage", 1.0), {"a": COMPARED})
    device = found.devices[0]
    of = CompileSettings(provider=provider, ep=found.ep, device=device, **settings)
    return Search(of, terms, **search)


PARTIAL = ("MatMulInteger", "Gather")
Q = ("QuantizeLinear",)


@pytest.mark.parametrize(
    ("outcomes", "validations", "settings", "tried"),
    [
        # The last recipe is always the winner. A whole one that agrees costs nothing more.
        ({"plain": ()}, {}, {}, ["plain"]),
        # Simplifiers.
        ({"plain": NO_SIMPLIFIER, "onnxslim": ()}, {}, {}, ["plain", "onnxslim"]),
        (
            {"plain": NO_SIMPLIFIER, "onnxslim": NO_SIMPLIFIER, "none": ()},
            *({}, {}),
            ["plain", "onnxslim", "none"],
        ),
        # Options; where everything is refused before it is rewritten they come after that.
        ({"plain": Q, "options": ()}, {}, {}, ["plain", "options"]),
        (
            {"plain": (*Q, "Clip"), "options": ("Clip",), "options rewrite": ()},
            *({}, {}),
            ["plain", "options", "options rewrite"],
        ),
        (
            {"plain": Q, "options": (*Q, "If"), "rewrite": ()},
            *({}, {}),
            ["plain", "options", "rewrite"],
        ),
        (
            {"plain": CRASH, "rewrite": Q, "options rewrite": ()},
            *({}, {}),
            ["plain", "rewrite", "rewrite rewrite", "options rewrite"],
        ),
        (
            {"plain": Q, "rewrite": ()},
            {},
            {"provider_options": dict(OPTIONS)},
            ["plain", "rewrite"],
        ),
        # Rewrites.
        ({"plain": ("Clip",), "rewrite": ()}, {}, {}, ["plain", "rewrite"]),
        ({"plain": CRASH, "rewrite": ()}, {}, {}, ["plain", "rewrite"]),
        (
            {"plain": ("Clip", "If"), "rewrite": ("If",), "rewrite rewrite": ()},
            *({}, {}),
            ["plain", "rewrite", "rewrite rewrite"],
        ),
        # Loops. What was inside one, an EP can refuse too.
        ({"plain": ("GRU",), "unroll": ()}, {}, {}, ["plain", "rewrite", "unroll"]),
        (
            {"plain": ("Loop",), "unroll": ("Clip",), "unroll rewrite": ()},
            *({}, {}),
            ["plain", "rewrite", "unroll", "unroll rewrite"],
        ),
        (
            {"plain": ("Loop",), "unroll": ("Loop",), "unroll unroll": ()},
            *({}, {}),
            ["plain", "rewrite", "unroll", "unroll rewrite", "unroll unroll"],
        ),
        # Rewrites for accuracy, until it agrees; those that hardly help are not kept.
        (
            {"plain": (), "ranges": (), "ranges kernels": ()},
            {"plain": sensitive(3), "ranges": sensitive(9)},
            {},
            ["plain", "ranges", "ranges kernels"],
        ),
        (
            {"plain": (), "ranges": (), "kernels": ()},
            {"plain": sensitive(2), "ranges": sensitive(7)},
            {},
            ["plain", "ranges", "kernels"],
        ),
        ({"plain": (), "kernels": ()}, {"plain": wrong()}, {}, ["plain", "kernels"]),
        # They may help only together.
        (
            {"plain": (), "ranges": (), "kernels": (), "ranges kernels": ()},
            {"plain": WRONG, "ranges": WRONG, "kernels": WRONG},
            {},
            ["plain", "ranges", "kernels", "ranges kernels"],
        ),
        # Layers with inexact kernels come before other kernels.
        (
            {"plain": (), "unroll": (), "kernels": (), "unfused": ()},
            {"plain": WRONG, "kernels": WRONG},
            {},
            ["plain", "unroll"],
        ),
        # The simplified model again.
        ({"plain": (), "unfused": ()}, {"plain": WRONG}, {}, ["plain", "unfused"]),
        ({"plain": (), "unfused": ()}, {"plain": WRONG}, {"unroll_limit": 0}, ["plain", "unfused"]),
        ({"plain": (), "unfused": ()}, {"plain": sensitive(4)}, {}, ["plain", "unfused"]),
        (
            {"none": (), "none unroll": ()},
            {"none": WRONG},
            {"optimization": "none"},
            ["none", "none unroll"],
        ),
        (
            {"plain": Q, "options": (), "options unroll": (), "unfused options": ()},
            {"options": WRONG, "options unroll": WRONG},
            {},
            ["plain", "options", "options unroll", "unfused options"],
        ),
        # Without its dynamic quantization.
        ({"plain": PARTIAL, "rewrite": ()}, {}, {"is_dynamic": True}, ["plain", "rewrite"]),
        (
            {"plain": CRASH, "floats": ()},
            *({}, {"is_dynamic": True}),
            ["plain", "rewrite", "floats"],
        ),
        (
            {"plain": PARTIAL, "floats": ("Gather",), "floats rewrite": ()},
            *({}, {"is_dynamic": True, "min_coverage": 0.9}),
            ["plain", "rewrite", "floats", "floats rewrite"],
        ),
    ],
)
def test_each_recipe_follows_from_what_the_ones_before_it_have_shown(
    outcomes: Mapping[str, Outcome],
    validations: Mapping[str, Validation],
    settings: Mapping[str, Any],
    tried: list[str],
) -> None:
    ep = Ep(outcomes, validations)
    winner = ep.winner(search_for(**settings))
    assert ep.tried == tried
    assert winner is not None
    assert name_of(winner.recipe) == tried[-1]
    # What covers too little is not run.
    assert ep.validated == [name for name in tried if outcomes.get(name) == ()]


HALF = {"min_coverage": 0.5}


@pytest.mark.parametrize(
    ("outcomes", "validations", "settings", "winner"),
    [
        # The least invasive of equals.
        ({"plain": ("If",), "rewrite": ("Clip",)}, {}, HALF, "plain"),
        ({"plain": ("If",), "rewrite": ("Clip", "If")}, {}, HALF, "plain"),
        ({"plain": ("If",), "rewrite": CRASH}, {}, HALF, "plain"),
        # An unrolled model only if it is whole.
        ({"plain": ("GRU", "If"), "unroll": ("If",)}, {}, HALF, "plain"),
        # What differs leads back to what was compiled before.
        ({"plain": ("If",), "rewrite": ()}, {"rewrite": WRONG}, HALF, "plain"),
        # What may differ wins before what differs, and the nearest if that is worth the changes.
        ({"plain": (), "ranges": ()}, {"plain": WRONG, "ranges": sensitive(4)}, {}, "ranges"),
        (
            {"plain": (), "ranges": (), "kernels": ()},
            {"plain": sensitive(2), "ranges": sensitive(7), "kernels": sensitive(8)},
            {},
            "kernels",
        ),
        # What is whole comes before what only covers enough, and of that the model's own form.
        ({"plain": PARTIAL, "floats": ()}, {}, {**HALF, "is_dynamic": True}, "floats"),
        ({"plain": PARTIAL, "floats": ("Gather",)}, {}, {**HALF, "is_dynamic": True}, "plain"),
        (
            {"plain": PARTIAL, "floats": ("Gather",)},
            *({}, {"is_dynamic": True, "min_coverage": 0.9}),
            "floats",
        ),
        (
            {"plain": PARTIAL, "floats": ()},
            *({"floats": WRONG}, {**HALF, "is_dynamic": True}),
            "plain",
        ),
        ({"plain": PARTIAL, "floats": ()}, {}, {"is_dynamic": False}, None),
        # Nothing.
        ({"plain": (), "unfused": ()}, {"plain": WRONG, "unfused": WRONG}, {}, None),
        (dict.fromkeys(("plain", "onnxslim", "none"), NO_SIMPLIFIER), {}, {}, None),
    ],
)
def test_the_winner_covers_most_and_does_not_differ(
    outcomes: Mapping[str, Outcome],
    validations: Mapping[str, Validation],
    settings: Mapping[str, Any],
    winner: str | None,
) -> None:
    found = Ep(outcomes, validations).winner(search_for(**settings))
    assert (found and name_of(found.recipe)) == winner


def test_fewer_contexts_are_better() -> None:
    ep = Ep({"plain": ("If",), "rewrite": ("Where",)}, contexts={"plain": 2})
    winner = ep.winner(search_for(min_coverage=0.5))
    assert winner is not None
    assert name_of(winner.recipe) == "rewrite"


@pytest.mark.parametrize(("margin", "winner"), [(1, "plain"), (15, "ranges")])
def test_the_nodes_of_a_correction_are_no_better_coverage(margin: float, winner: str) -> None:
    ep = Ep(
        {"plain": ("If",), "ranges": ("If",)},
        {"plain": sensitive(8), "ranges": sensitive(margin)},
        added={"ranges": 10},
    )
    found = ep.winner(search_for(min_coverage=0.5))
    assert found is not None
    assert name_of(found.recipe) == winner


@pytest.mark.parametrize(
    "validation", [sensitive(3, gap=1), sensitive(3, gap=12, samples=8), wrong(gap=1)]
)
def test_kernels_are_not_rewritten_if_the_format_is_the_cause_or_the_model_is_large(
    validation: Validation,
) -> None:
    ep = Ep({"plain": (), "kernels": ()}, {"plain": validation})
    ep.finish(search_for())
    names = {name_of(recipe) for recipe in ep.compiled if recipe.last_corrections}
    assert names == {"ranges"}


@pytest.mark.parametrize(
    ("provider", "compares"), [("qnn", False), ("cpu", True)], ids=["group", "optimized"]
)
def test_results_decide_nothing_for_groups_and_optimized_graphs(
    provider: str, compares: bool
) -> None:
    ep = Ep({"plain": (), "unfused": ()}, {"plain": WRONG})
    assert ep.winner(search_for(provider, compares=compares)) is None
    assert ep.tried == ep.validated == ["plain"]


def test_a_change_gets_the_nodes_that_were_refused() -> None:
    ep = Ep({"plain": ("If", "Clip", "If"), "rewrite": CRASH, "rewrite rewrite": ()})
    ep.finish(search_for())
    changes = ep.compiled[-1].changes
    assert [change.nodes for change in changes] == [(("n0", "n1", "n2"),), None]


@pytest.mark.parametrize("outcome", [NO, NOTHING])
def test_a_change_of_what_the_ep_names_is_one_of_all_if_that_does_not_help(
    outcome: Outcome,
) -> None:
    named = replace(NO, nodes=(("n1",),))
    ep = Ep({"plain": named, "rewrite": outcome, "rewrite rewrite": ()})
    ep.finish(search_for())
    refused = [[change.nodes for change in attempt.changes] for attempt in ep.compiled]
    assert refused[1] == [(("n1",),)]
    assert None in refused[2]


def test_what_leaves_the_least_control_flow_is_compiled_in_the_end() -> None:
    ep = Ep(
        {
            "plain": leaves("If", "Loop"),
            "onnxslim": leaves("If"),
            "onnxslim at last": NO,
            "onnxslim unroll": (),
        }
    )
    ep.finish(search_for())
    assert ep.tried == [
        *("plain", "onnxslim", "onnxslim"),
        *("onnxslim rewrite", "onnxslim unroll"),
    ]


def test_what_else_was_tried_is_noted() -> None:
    crash = stop("prepare", Kind.WORKER_CRASHED, "it fails:\n  y  cosine   0.8")
    ep = Ep(
        {"plain": crash, "onnxslim": ("GRU", "If"), "onnxslim unroll": (), "unfused onnxslim": ()},
        {"onnxslim unroll": WRONG},
    )
    search = ep.finish(search_for(min_coverage=0.5))
    assert search.winner is not None
    assert notes(search, search.winner)[:3] == (
        "onnxruntime failed: it fails: y cosine 0.8",
        "Clip: it differs",
        "unroll: the output 'y' differs from the CPU's",
    )


def test_a_change_in_which_the_worker_fails_is_noted() -> None:
    crash = stop("change", Kind.WORKER_CRASHED, "the worker crashed:\nsee the log")
    search = Ep({"plain": ("If",), "rewrite": crash}).finish(search_for(min_coverage=0.5))
    assert search.winner is not None
    assert notes(search, search.winner)[0] == "rewriting: the worker crashed"


def test_validation_gets_what_is_to_beat_of_what_may_be_shipped() -> None:
    margins = {"plain": sensitive(3), "ranges": sensitive(10), "ranges kernels": sensitive(11)}
    ep = Ep({**dict.fromkeys(margins, ()), "unfused": ()}, margins)
    ep.finish(search_for())
    assert ep.to_beat == [None, 3, 10, 11]
    differing = Ep({"plain": (), "kernels": ()}, {"plain": wrong()})
    differing.finish(search_for())
    assert differing.to_beat == [None, None]
    partial = Ep({"plain": ("If",), "rewrite": ()}, {"plain": sensitive(3)})
    partial.finish(search_for(min_coverage=0.5))
    assert partial.to_beat == [None]


@pytest.mark.parametrize(
    ("unusual", "winner"),
    [({"plain": 3, "ranges": 1}, "ranges"), ({"plain": 3, "ranges": 3}, "plain"), ({}, "plain")],
)
def test_what_differs_for_fewer_samples_far_from_the_ordinary_wins(
    unusual: Mapping[str, int], winner: str
) -> None:
    near = replace(AGREES, agreements=(agreement(AgreementStatus.AGREES, 40.0),))
    validations = dict.fromkeys(("plain", "ranges"), near)
    ep = Ep({"plain": (), "ranges": ()}, validations, unusual=unusual)
    search = ep.finish(search_for())
    assert ep.to_beat == [None, *([40] if unusual else [])]
    assert [name_of(recipe) for recipe in ep.compiled] == [
        "plain",
        *(["ranges"] if unusual else []),
    ]
    assert search.winner is not None
    assert name_of(search.winner.recipe) == winner


def test_what_covers_less_is_not_run_while_what_covers_more_may_win() -> None:
    ep = Ep({"plain": ("If",), "rewrite": ()}, {"rewrite": sensitive(4)})
    winner = ep.winner(search_for(min_coverage=0.5))
    assert winner is not None
    assert (name_of(winner.recipe), ep.validated) == ("rewrite", ["rewrite"])


def test_the_next_validation_knows_the_sample_in_which_the_best_one_is_worst() -> None:
    ep = Ep({"plain": (), "ranges": ()}, {"plain": sensitive(3), "ranges": sensitive(4)})
    search = ep.finish(search_for())
    first, second = (attempt for attempt in search.attempts if attempt.record)
    ran = {COMPARED: Validated(sensitive(3), worst="16 frames")}
    search = search.adding(replace(first, validated=ran)).adding(replace(second, validated={}))
    outcome = next_recipe(replace(search, winners={}))
    assert isinstance(outcome, Validate)
    assert outcome.to_beat is not None
    assert (outcome.to_beat.margin, outcome.to_beat.sample) == (3, "16 frames")


def test_what_is_beaten_is_not_shipped_and_noted() -> None:
    ep = Ep({"plain": (), "ranges": ()}, {"plain": sensitive(3), "ranges": sensitive(4)})
    search = ep.finish(search_for())
    first, second = (attempt for attempt in search.attempts if attempt.record)
    beaten = {COMPARED: Validated(sensitive(4), beaten=True)}
    search = replace(search.adding(replace(second, validated=beaten)), winners={})
    assert next_recipe(search) == Won(first)
    # What was not run does not count as right.
    warns = replace(first, validated={COMPARED: Validated(sensitive(3), unusual=2)})
    assert next_recipe(search.adding(warns)) == Won(warns)
    # Nor does it show that kernels are exact.
    small = replace(second, validated={COMPARED: Validated(sensitive(4, gap=0), beaten=True)})
    fused = tuple(attempt for attempt in search.adding(small).attempts if attempt.recipe.fuse)
    following = next_recipe(replace(search, attempts=fused))
    assert isinstance(following, Try)
    assert not following.recipe.fuse
    note = "no nearer than another recipe: not all samples were run"
    assert any(note in line for line in notes(search, first))


@pytest.mark.parametrize(
    ("first", "seconds", "runs", "tried"),
    [
        (sensitive(3), 4, 1, ["plain", "ranges", "kernels", "unfused"]),
        (sensitive(3), 16, 2, ["plain", "ranges"]),
        (sensitive(3), 16, 4, ["plain"]),
        (wrong(), 16, 4, ["plain", "ranges", "kernels", "unfused", "rewrite"]),
    ],
)
def test_a_search_that_lasts_long_by_estimate_goes_on_only_if_results_differ(
    first: Validation, seconds: int, runs: int, tried: list[str]
) -> None:
    outcomes: dict[str, Outcome] = dict.fromkeys(("plain", "ranges", "kernels", "unfused"), ())
    # What is measured decides nothing: all builds of a model choose the same recipe.
    for times in (Times(0, 1), Times(1e4, 1e4)):
        ep = Ep(outcomes, dict.fromkeys(outcomes, first), seconds, runs, times)
        search = ep.finish(search_for())
        assert ep.tried == tried
        if search.winner is not None:
            left_out = [note for note in notes(search, search.winner) if "not tried" in note]
            assert len(left_out) == (len(tried) < 4)


# Of later builds.


def stored(search: Search) -> Search:
    """What a later build reads."""
    return from_json(to_json(search.to_store("2026-11-23")), Search)


def test_a_later_build_tries_only_what_is_not_known() -> None:
    outcomes: dict[str, Outcome] = {"plain": ("If", "If"), "rewrite": NO, "unroll": ("If",)}
    first = Ep(outcomes).finish(search_for())
    assert isinstance(next_recipe(first), Lost)
    again = Ep(outcomes)
    assert again.winner(stored(first)) is None
    assert not again.compiled + again.validated
    less = again.winner(replace(stored(first), terms=Terms(0.5, {"a": COMPARED})))
    assert less is not None
    assert (name_of(less.recipe), less.day) == ("plain", "2026-11-23")
    assert (again.compiled, again.validated) == ([], ["plain"])


def test_accidents_are_not_stored_and_what_has_won_stays() -> None:
    outcomes: dict[str, Outcome] = {"plain": CRASH, "rewrite": ()}
    known = stored(Ep(outcomes).finish(search_for()))
    again = Ep(outcomes)
    winner = again.winner(known)
    assert winner is not None
    assert name_of(winner.recipe) == "rewrite"
    assert again.compiled == []
    # With other terms it may be another one.
    again.finish(replace(known, terms=Terms(0.5, {"a": COMPARED})))
    assert again.tried == ["plain"]


def test_a_winner_that_could_not_be_run_loses_where_it_differs() -> None:
    not_run = Validation(ValidationStatus.STRUCTURE)
    outcomes: dict[str, Outcome] = {"plain": (), "unfused": ()}
    known = Ep(outcomes, {"plain": not_run}).finish(search_for())
    here = Ep(outcomes, {"plain": WRONG})
    unknown = tuple(replace(attempt, validated={}) for attempt in known.attempts)
    other = here.winner(replace(known, attempts=unknown))
    assert other is not None
    assert (here.tried, here.validated) == (["unfused"], ["plain", "unfused"])
    assert name_of(other.recipe) == "unfused"


def test_the_rewrites_that_an_ep_needs_in_any_number_format_are_applied_without_one() -> None:
    ep = Ep({"plain": ()})
    ep.finish(search_for(provider_options={"enable_htp_fp16_precision": "0"}))
    assert [recipe.corrections for recipe in ep.compiled] == [
        ("transposed-outputs", "pool-padding", "quantized-signs", *WHOLE)
    ]


def test_what_compiles_and_cannot_be_run_loses_to_what_can(project: Path) -> None:
    failing = Validation(ValidationStatus.RAN, failures=stop("validation").problems)
    outcomes: dict[str, Outcome] = {"plain": ("If",), "rewrite": ("If", "If")}
    ep = Ep(outcomes, {"plain": failing})
    other = ep.winner(replace(search_for(), terms=Terms(0.5, {"a": COMPARED})))
    assert other is not None
    assert name_of(other.recipe) == "rewrite"
    problem = why(job_of(project), Ep({"plain": ()}, {"plain": failing}))
    assert (problem.kind, problem.step) == (Kind.COMPILE_FAILED, "validate")
    assert problem.causes == ("Or, at last, compile the model only for the CPU (targets).",)


def test_refusals_are_not_shared() -> None:
    search = Ep({"plain": NO, "rewrite": ()}).finish(search_for())
    assert [name_of(a.recipe) for a in search.to_share().attempts] == ["rewrite"]


# Of searches that nothing wins.


def job_of(project: Path, keys: str = "", provider: str = "qnn") -> Job:
    toml = f'targets.t.provider = "{provider}"\nmodels = [{{ path = "models/a.onnx"{keys} }}]'
    (job,) = plan(configured(project, toml)).jobs
    return job


def why(job: Job, ep: Ep, **settings: Any) -> Problem:
    search = ep.finish(search_for(job.target.settings.provider, **settings))
    return problem_of(job, search)


def problem_of(job: Job, search: Search, jobs: Sequence[Job] = ()) -> Problem:
    outcome = next_recipe(search)
    assert isinstance(outcome, Lost)
    (problem,) = failure(job, search, outcome.attempts, jobs).problems
    return problem


@pytest.mark.parametrize(
    ("outcomes", "kind", "message", "tried"),
    [
        (
            {"plain": ("If", "If"), "rewrite": ("If",)},
            *(Kind.LOW_COVERAGE, "9 of 10 nodes"),
            "unmodified: 2 nodes on the CPU",
        ),
        (
            {"plain": NO, "rewrite": CRASH},
            *(Kind.COMPILE_FAILED, "it fails."),
            "unmodified: it fails",
        ),
        (
            dict.fromkeys(("plain", "onnxslim", "none"), NO_SIMPLIFIER),
            *(Kind.COMPILE_FAILED, "it fails."),
            "onnxruntime failed: it fails.",
        ),
        # Of both forms the one that covers most.
        (
            {"plain": PARTIAL, "floats": ("Gather",)},
            *(Kind.LOW_COVERAGE, "9 of 10 nodes"),
            "unmodified: 2 nodes on the CPU",
        ),
        (
            {"plain": PARTIAL, "floats": ("Gather",) * 3},
            *(Kind.LOW_COVERAGE, "8 of 10 nodes"),
            "dequantized: 3 nodes on the CPU",
        ),
        (
            {"plain": PARTIAL, "floats": CRASH},
            *(Kind.LOW_COVERAGE, "8 of 10 nodes"),
            "dequantized: it fails",
        ),
    ],
)
def test_the_error_is_that_of_the_attempt_that_leaves_the_user_least_to_solve(
    project: Path, outcomes: Mapping[str, Outcome], kind: Kind, message: str, tried: str
) -> None:
    problem = why(job_of(project), Ep(outcomes), is_dynamic="floats" in outcomes)
    assert problem.kind is kind
    assert message in problem.message
    assert any(tried in note for note in problem.notes)


def test_the_difference_that_is_nearest_to_the_limits_is_the_error(project: Path) -> None:
    ep = Ep({"plain": (), "unfused": ()}, {"plain": wrong(-9), "unfused": wrong(-3)})
    problem = why(job_of(project), ep)
    assert (problem.kind, problem.step) == (Kind.OUTPUT_DIFFERS, "validate")
    assert (
        "unmodified: the output 'y' differs from the CPU's, 9 dB beyond the limits" in problem.notes
    )


@pytest.mark.parametrize(
    ("targets", "remedy"),
    [
        ("", ['targets.cpu.provider = "cpu"', 'models[0].targets = ["cpu"]']),
        ('targets.any.provider = "cpu"', ['models[0].targets = ["any"]']),
        ('targets.cpu.provider = "openvino"', []),
    ],
)
def test_the_last_remedy_is_the_cpu(project: Path, targets: str, remedy: list[str]) -> None:
    toml = f'targets.t.provider = "qnn"\n{targets}\nmodels = ["models/a.onnx"]'
    job, *others = plan(configured(project, toml)).jobs
    differs = Ep({"plain": ()}, {"plain": wrong(-9)})
    for ep in (Ep({"plain": ("GRU",)}), Ep({"plain": NO}), differs):
        problem = problem_of(job, ep.finish(search_for("qnn")), others)
        settings = [str(setting) for setting in problem.settings if "min-" not in str(setting)]
        assert settings == [f"tool.epcontext.{setting}" for setting in remedy]


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        (", dims = { n = 1 }", True),
        (", dims = { n = 1 }, targets.t.static-shapes = true", False),
        ("", False),
    ],
)
def test_what_an_ep_refuses_may_compile_with_the_sizes_that_are_known(
    project: Path, keys: str, advised: bool
) -> None:
    problem = why(job_of(project, keys, "openvino"), Ep({"plain": NO}))
    settings = [str(setting) for setting in problem.settings if "cpu" not in str(setting)]
    assert settings == (["tool.epcontext.targets.t.static-shapes = true"] if advised else [])
    assert len(problem.causes) == 1 + advised


def test_what_an_earlier_build_tried_has_its_day_and_the_keys_of_this_project(
    project: Path,
) -> None:
    job = job_of(project)
    theirs = Key(("models", 7), "other/a.onnx"), Key(("targets", "other"))
    settings = (Setting(theirs[0] / "cut"), Setting(theirs[1] / "profiles"))
    problem = Problem(Kind.COMPILE_FAILED, "", "it fails.", "Set:", settings=settings)
    search = stored(Ep({"plain": Stop("compile", (problem,))}).finish(search_for()))
    problem = problem_of(job, search)
    again = "This was tried before (2026-11-23); HATCH_EPCONTEXT_NO_CACHE=1 tries it again."
    assert problem.message == f"it fails.\n{again}"
    assert [str(setting) for setting in problem.settings[:2]] == [
        "tool.epcontext.models[0].cut",
        "tool.epcontext.targets.t.profiles",
    ]
    assert problem.settings[0].key.model == "models/a.onnx"


def test_a_group_gets_a_coverage_that_all_its_models_keep(project: Path) -> None:
    member = 'path = "models/a.onnx", share-weights = "g"'
    toml = f"""
    targets.qnn = {{ provider = "qnn", chip = "snapdragon-x-elite" }}
    models = [{{ {member} }}, {{ name = "b", {member} }}]
    """
    (job,) = plan(configured(project, toml)).jobs
    ep = Ep({"plain": ("If", "Clip")})
    plain = next(attempt for attempt in ep.finish(search_for()).attempts if attempt.record)
    assert plain.record is not None
    (context,) = plain.record.contexts
    assert context.coverage is not None
    worse = replace(context, coverage=replace(context.coverage, compiled=5))
    record = replace(
        plain.record, contexts=(context, worse), preparations=plain.record.preparations * 2
    )
    problems = failure(job, search_for(), [replace(plain, record=record)]).problems
    assert [problem.settings[0].value for problem in problems] == [0.5, 0.5]


def test_what_is_around_a_node_that_is_left_is_not_named() -> None:
    culprit = NodeFacts("top", "TopK", "has an error of 49 %")
    ep = Ep({"plain": (), "left top": PARTIAL}, {"plain": replace(wrong(), culprit=culprit)})
    search = ep.finish(search_for(min_coverage=0.0))
    winner = search.winner
    assert winner is not None
    assert winner.record is not None
    (context,) = winner.record.contexts
    assert context.coverage is not None
    left = [("top", "Loop"), ("top/inside", "TopK"), ("top/inside/Reshape", "Reshape"), ("a", "If")]
    uncovered = tuple(NodeFacts(*node) for node in left)
    context = replace(context, coverage=replace(context.coverage, uncovered=uncovered))
    winner = replace(winner, record=replace(winner.record, contexts=(context,)))
    (shown,) = search.contexts_of(winner)
    assert shown.coverage is not None
    assert shown.coverage.uncovered == (culprit, NodeFacts("a", "If"))


def test_nodes_of_a_form_farther_from_the_cpu_are_left_if_the_ep_refuses_the_nearest() -> None:
    """So with ONNX's If, of which one form has a node that the number format has not."""
    culprits = {"plain": "product", "ranges": "quotient"}
    differing = {
        name: replace(wrong(margin), culprit=NodeFacts(culprits[name], "Mul"))
        for name, margin in (("plain", -13.0), ("ranges", -3.0))
    }
    ep = Ep(
        {"plain": (), "ranges": (), "ranges left quotient": NO, "left product": PARTIAL}, differing
    )
    winner = ep.winner(search_for(min_coverage=0.0))
    assert ep.tried[-2:] == ["ranges left quotient", "left product"]
    assert winner is not None
    assert name_of(winner.recipe) == "left product"

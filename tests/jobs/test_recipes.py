"""Which recipes are tried, and which result is taken; what each recipe gives is said by the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import record_file, record_files
from hatch_epcontext.graph.number_format import REMEDIES
from hatch_epcontext.jobs.artifact import (
    Artifact,
    Built,
    Preparation,
    Recipe,
    Record,
    Refused,
    Source,
    Times,
)
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.job import JobRunner
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Context,
    Coverage,
    Emulation,
    ModelFacts,
    NodeFacts,
    Validation,
    ValidationStatus,
)
from tests.conftest import needs_qnn

pytestmark = needs_qnn

Outcome = Sequence[str] | Refused | Problem
"""The operators that are left to the CPU of ten nodes; or what ends the attempt."""

CRASH = Refused("compile", (Problem(Kind.WORKER_CRASHED, "a -> npu", "the compiler crashed."),))
TOML = """
models = [{ path = "models/a.onnx", validate = { tolerance = { cosine = 0.9 } } }]
[targets.qnn]
provider = "qnn"
"""


GROUPS = dict(zip(("ranges", "barrier"), REMEDIES, strict=True))


def name_of(recipe: Recipe) -> str:
    """A short name: of floats or not, the simplifier if it is not the first, the options, changes and groups
    of remedies.
    """
    parts: list[str] = ["floats"] if recipe.dequantize else []
    parts += [] if recipe.simplifier == "onnxruntime" else [recipe.simplifier]
    parts += [] if recipe.fuse else ["unfused"]
    parts += [f"{name}={value}" for name, value in recipe.options]
    parts += [each.kind for each in recipe.changes]
    parts += [name for name, group in GROUPS.items() if not {*group}.isdisjoint(recipe.remedies)]
    return " ".join(parts) or "plain"


@dataclass
class Compiler:
    """Gives each recipe its outcome, by its name, and nothing to change for others.

    ``wrong``: the recipes whose results differ from the CPU's; ``sensitive``: those whose results may differ
    for other inputs, each with its margin; ``gap`` and ``gap_of_wrong``: see `Validation`;
    ``emulated``: so many samples were.
    """

    outcomes: Mapping[str, Outcome]
    wrong: Sequence[str] = ()
    sensitive: Mapping[str, float] = field(default_factory=dict)
    gap: float = 0.0
    gap_of_wrong: float | None = None
    emulated: int = 9
    contexts: Mapping[str, int] = field(default_factory=dict)
    recipes: list[Recipe] = field(default_factory=list)
    validated: list[str] = field(default_factory=list)
    at_once: int = 1
    stopped: bool = False
    no_device: str | None = None

    @property
    def tried(self) -> list[str]:
        """Without remedies and layers that are not there."""
        return [
            name
            for each in self.recipes
            if (name := name_of(each)) in self.outcomes
            or not (each.last_remedies or (each.changes and each.changes[-1].kind == "unroll"))
        ]

    def versions(self, job: Job) -> Mapping[str, str]:
        return {}

    def reason_not_to_run(self, job: Job) -> str | None:
        return self.no_device

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        self.recipes.append(recipe)
        name = name_of(recipe)
        outcome = self.outcomes.get(name)
        if outcome is None:
            message = "Clip: it differs (not taken)"
            return Refused("change", (Problem(Kind.COMPILE_FAILED, job.location, message),))
        if isinstance(outcome, Refused):
            return outcome
        if isinstance(outcome, Problem):
            raise BuildError(outcome)
        folder.mkdir(parents=True)
        (folder / "a_ctx.onnx").write_text(name, encoding="utf-8")
        uncovered = tuple(NodeFacts(f"n{index}", op) for index, op in enumerate(outcome))
        coverage = Coverage(10, 10 - len(outcome), self.contexts.get(name, 1), uncovered)
        done = [] if recipe.fuse else ["unfused"]
        done += [each.kind for each in recipe.changes]
        preparation = Preparation(recipe.simplifier, 9, 9, rewrites=tuple(done))
        return Record(
            recipe,
            "context",
            (preparation,),
            (Context("a", "a_ctx.onnx", (), (), coverage),),
            record_files(folder),
            {},
            Times(0, 0),
        )

    def validate(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        name = (artifact.folder / "a_ctx.onnx").read_text(encoding="utf-8")
        self.validated.append(name)
        if name in self.wrong:
            status = AgreementStatus.DIFFERS
            if name == "plain":
                status = AgreementStatus.OTHER_SHAPE
            wrong = Agreement("y", 0.1, None, status=status, reason=f"{name} is wrong.")
            return Validation(ValidationStatus.RAN, (wrong,), gap=self.gap_of_wrong)
        if name in self.sensitive:
            found = Agreement(
                "y", 0.1, 1.0, status=AgreementStatus.SENSITIVE, margin=self.sensitive[name]
            )
            emulation = Emulation(
                *("float16", "here", self.emulated),
                reason="it is small",
                in_format=True,
            )
            return Validation(ValidationStatus.RAN, (found,), emulation=emulation, gap=self.gap)
        return Validation(ValidationStatus.RAN)

    def finished(self, job: Job) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Builder:
    """Builds the only job of the project."""

    project: Path
    staging: Path

    toml: str = TOML
    dynamic: bool = False

    def job(self, keys: str = "") -> Job:
        toml = f"{self.toml}{keys}\n"
        (job,) = plan(load(self.project, parse(toml), {}, {})).jobs
        return job

    def build(self, compiler: Compiler, keys: str = "", cache: Path | None = None) -> Built:
        job = self.job(keys)
        (model,) = job.models
        record = record_file(model.path)
        facts = ModelFacts((), (), (), dynamic=self.dynamic)
        source = Source(model, facts, record.sha256, {model.path.name: record})
        kept = Cache(cache, pytest.fail)
        runner = JobRunner(
            {model.name: source}, kept, kept.index, compiler, self.staging, pytest.fail
        )
        return runner.run(job)

    def name(self, built: Built) -> str:
        """The recipe of what was built, whose files are what was compiled with it."""
        name = name_of(built.artifact.record.recipe)
        assert (built.artifact.folder / "a_ctx.onnx").read_text(encoding="utf-8") == name
        return name


@pytest.fixture
def builder(project: Path, tmp_path: Path) -> Builder:
    return Builder(project, tmp_path / "staging")


@pytest.mark.parametrize(
    ("outcomes", "tried", "taken"),
    [
        # A whole result costs nothing more.
        ({"plain": ()}, ["plain"], "plain"),
        ({"plain": ("Clip",), "rewrite": ()}, ["plain", "rewrite"], "rewrite"),
        (
            {"plain": ("Clip", "If"), "rewrite": ("If",), "rewrite rewrite": ()},
            ["plain", "rewrite", "rewrite rewrite"],
            "rewrite rewrite",
        ),
        ({"plain": CRASH, "rewrite": ()}, ["plain", "rewrite"], "rewrite"),
        (
            {"plain": ("GRU",), "unroll": ()},
            ["plain", "rewrite", "unroll"],
            "unroll",
        ),
        # What was inside a loop, an EP can refuse too.
        (
            {"plain": ("Loop",), "unroll": ("Clip",), "unroll rewrite": ()},
            ["plain", "rewrite", "unroll", "unroll rewrite"],
            "unroll rewrite",
        ),
        (
            {"plain": ("Loop",), "unroll": ("Loop",), "unroll unroll": ()},
            ["plain", "rewrite", "unroll", "unroll rewrite", "unroll unroll"],
            "unroll unroll",
        ),
    ],
)
def test_each_recipe_follows_from_what_the_ones_before_it_have_shown(
    builder: Builder, outcomes: Mapping[str, Outcome], tried: list[str], taken: str
) -> None:
    compiler = Compiler(outcomes)
    assert builder.name(builder.build(compiler)) == taken
    assert compiler.tried == tried
    assert compiler.validated == [taken]


def test_what_was_chosen_where_it_could_not_be_run_is_searched_again_where_it_differs(
    builder: Builder, tmp_path: Path
) -> None:
    outcomes: dict[str, Outcome] = {"plain": (), "unfused": ()}
    cache = tmp_path / "cache"
    first = builder.build(Compiler(outcomes, no_device="no device"), cache=cache)
    assert (builder.name(first), first.cached) == ("plain", False)
    compiler = Compiler(outcomes, wrong=["plain"])
    second = Builder(builder.project, tmp_path / "second")
    assert second.name(second.build(compiler, cache=cache)) == "unfused"
    assert compiler.tried == ["unfused"]
    assert compiler.validated == ["plain", "unfused"]
    # And that is the choice from then on.
    third = Builder(builder.project, tmp_path / "third")
    again = Compiler(outcomes, wrong=["plain"])
    assert third.name(third.build(again, cache=cache)) == "unfused"
    assert again.tried == again.validated == []


def test_a_change_gets_the_operators_that_were_refused(builder: Builder) -> None:
    compiler = Compiler({"plain": ("If", "Clip", "If"), "rewrite": CRASH, "rewrite rewrite": ()})
    builder.build(compiler)
    changes = compiler.recipes[-1].changes
    assert [each.refused for each in changes] == [(("Clip", "If"),), None]


@pytest.mark.parametrize("other", [("Clip",), ("Clip", "If"), CRASH])
def test_the_least_invasive_of_equals_is_taken(builder: Builder, other: Outcome) -> None:
    compiler = Compiler({"plain": ("If",), "rewrite": other})
    assert builder.name(builder.build(compiler, "min-coverage = 0.5")) == "plain"


def test_fewer_contexts_are_better(builder: Builder) -> None:
    compiler = Compiler({"plain": ("If",), "rewrite": ("Where",)}, contexts={"plain": 2})
    assert builder.name(builder.build(compiler, "min-coverage = 0.5")) == "rewrite"


def test_unrolling_does_not_count_if_something_is_left(builder: Builder) -> None:
    compiler = Compiler({"plain": ("GRU", "If"), "unroll": ("If",)})
    built = builder.build(compiler, "min-coverage = 0.5")
    assert builder.name(built) == "plain"
    (preparation,) = built.artifact.record.preparations
    assert preparation.tried == ("Clip: it differs (not taken)", "unroll: 1 node on the CPU")


def test_too_little_coverage_is_an_error_with_what_was_tried(builder: Builder) -> None:
    compiler = Compiler({"plain": ("If", "If"), "rewrite": ("If",)})
    with pytest.raises(BuildError) as raised:
        builder.build(compiler)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.LOW_COVERAGE
    assert "9 of 10 nodes" in problem.message
    assert problem.tried[0] == "unmodified: 2 nodes on the CPU"
    assert compiler.validated == []


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        ("dims = { batch = 1 }", True),
        ("dims = { batch = 1 }, static-shapes = true", False),
        ("name = 'a'", False),
    ],
)
def test_what_an_ep_refuses_may_compile_with_the_sizes_that_are_known(
    builder: Builder, keys: str, advised: bool
) -> None:
    builder.toml = f"""
    targets.openvino.provider = "openvino"
    models = [{{ path = "models/a.onnx", {keys} }}]
    """
    with pytest.raises(BuildError) as raised:
        builder.build(Compiler({"plain": CRASH}))
    (problem,) = raised.value.problems
    settings = [str(each) for each in problem.settings]
    assert settings == (["tool.epcontext.targets.openvino.static-shapes = true"] if advised else [])
    assert bool(problem.causes) is advised


def test_the_first_error_stands_if_nothing_helps(builder: Builder) -> None:
    with pytest.raises(BuildError) as raised:
        builder.build(Compiler({"plain": CRASH, "rewrite": CRASH}))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.WORKER_CRASHED
    assert problem.message == "the compiler crashed."
    assert problem.tried[0] == "unmodified: the EP crashes on this model, in a process of its own"


PARTIAL = ("MatMulInteger", "Gather")


@pytest.mark.parametrize(
    ("outcomes", "keys", "taken"),
    [
        ({"plain": (), "floats": ()}, "", "plain"),
        ({"plain": PARTIAL, "rewrite": (), "floats": ()}, "", "rewrite"),
        ({"plain": CRASH, "floats": ()}, "", "floats"),
        ({"plain": PARTIAL, "floats": ("Gather",), "floats rewrite": ()}, "", "floats rewrite"),
        # What is whole comes before what only covers enough, and of that the source's own form.
        ({"plain": PARTIAL, "floats": ()}, "min-coverage = 0.5", "floats"),
        ({"plain": PARTIAL, "floats": ("Gather",)}, "min-coverage = 0.5", "plain"),
        ({"plain": PARTIAL, "floats": ("Gather",)}, "min-coverage = 0.9", "floats"),
        ({"plain": PARTIAL, "floats": ()}, "min-coverage = 0.5\ndequantize = false", "plain"),
    ],
)
def test_dynamic_quantization_is_undone_where_nothing_else_is_whole(
    builder: Builder, outcomes: Mapping[str, Outcome], keys: str, taken: str
) -> None:
    builder.dynamic = True
    compiler = Compiler(outcomes)
    built = builder.build(compiler, keys)
    assert builder.name(built) == taken
    # It is validated, reported and validated again as if its table said so.
    undone = taken.startswith("floats")
    assert (built.job.target.settings.dequantize is True) is undone


@pytest.mark.parametrize(("dynamic", "keys"), [(False, ""), (True, "dequantize = false")])
def test_nothing_is_undone_in_a_model_of_floats_or_against_its_table(
    builder: Builder, dynamic: bool, keys: str
) -> None:
    builder.dynamic = dynamic
    compiler = Compiler({"plain": PARTIAL, "floats": ()})
    with pytest.raises(BuildError) as raised:
        builder.build(compiler, keys)
    assert not any(each.dequantize for each in compiler.recipes)
    assert ("dequantize" in str(raised.value)) is dynamic


def test_what_differs_is_not_taken_because_its_floats_are_whole(builder: Builder) -> None:
    builder.dynamic = True
    compiler = Compiler({"plain": PARTIAL, "floats": ()}, wrong=["floats"])
    assert builder.name(builder.build(compiler, "min-coverage = 0.5")) == "plain"
    assert compiler.tried[:2] == ["plain", "rewrite"]


@pytest.mark.parametrize(
    ("floats", "message", "tried"),
    [
        (("Gather",), "9 of 10 nodes", "unmodified: 2 nodes on the CPU"),
        (("Gather",) * 3, "8 of 10 nodes", "dequantized: 3 nodes on the CPU"),
        (
            CRASH,
            "8 of 10 nodes",
            "dequantized: the EP crashes on this model, in a process of its own",
        ),
    ],
)
def test_the_error_is_that_of_the_form_that_covers_most(
    builder: Builder, floats: Outcome, message: str, tried: str
) -> None:
    builder.dynamic = True
    with pytest.raises(BuildError) as raised:
        builder.build(Compiler({"plain": PARTIAL, "floats": floats}))
    (problem,) = raised.value.problems
    assert message in problem.message
    assert tried in problem.tried
    assert "dequantize = " not in str(problem)


def test_the_choice_to_undo_quantization_is_kept(builder: Builder, tmp_path: Path) -> None:
    cache, outcomes = tmp_path / "cache", {"plain": PARTIAL, "floats": ()}
    builder.dynamic = True
    builder.build(Compiler(outcomes), cache=cache)
    again = Compiler(outcomes)
    warm = Builder(builder.project, tmp_path / "warm", dynamic=True)
    built = warm.build(again, cache=cache)
    assert built.cached
    assert built.job.target.settings.dequantize is True
    assert again.tried == again.validated == []
    # Against its table it is not taken from there.
    with pytest.raises(BuildError):
        warm.build(again, "dequantize = false", cache=cache)


@pytest.mark.parametrize("kind", [Kind.WORKER_TIMEOUT, Kind.WORKER_KILLED])
def test_an_accident_ends_the_job(builder: Builder, kind: Kind) -> None:
    accident = Problem(kind, "a -> npu", "it ended.")
    ends: tuple[dict[str, Outcome], ...] = (
        {"plain": accident},
        {"plain": ("If",), "rewrite": accident},
    )
    for outcomes in ends:
        with pytest.raises(BuildError) as raised:
            builder.build(Compiler(outcomes))
        assert raised.value.problems == (accident,)


@pytest.mark.parametrize(
    ("outcomes", "taken"),
    [
        ({"plain": ("QuantizeLinear",), "{}": ()}, "{}"),
        # What is left then is rewritten, and compiled with the same options.
        ({"plain": ("QuantizeLinear", "Clip"), "{}": ("Clip",), "{} rewrite": ()}, "{} rewrite"),
        ({"plain": ("QuantizeLinear",), "{}": ("QuantizeLinear", "If"), "rewrite": ()}, "rewrite"),
        ({"plain": ("Clip",), "rewrite": ()}, "rewrite"),
        # Where everything is refused before it is rewritten they come after that.
        ({"plain": CRASH, "rewrite": ("QuantizeLinear",), "{} rewrite": ()}, "{} rewrite"),
    ],
)
def test_options_with_which_an_ep_takes_more_are_tried_first(
    builder: Builder, outcomes: Mapping[str, Outcome], taken: str
) -> None:
    more = builder.job().target.provider.more_coverage
    assert more is not None
    assert "QuantizeLinear" in more.operators
    options = " ".join(f"{name}={value}" for name, value in sorted(more.options.items()))
    compiler = Compiler({name.format(options): each for name, each in outcomes.items()})
    assert builder.name(builder.build(compiler)) == taken.format(options)


@pytest.mark.parametrize(
    ("wrong", "keys", "tried", "taken"),
    [
        (["plain"], "", ["plain", "unfused"], "unfused"),
        (["plain"], 'optimization = "none"', ["none", "none unroll"], "none unroll"),
        (["plain"], "unroll-limit = 0", ["plain", "unfused"], "unfused"),
    ],
)
def test_what_differs_is_compiled_in_other_forms(
    builder: Builder, wrong: list[str], keys: str, tried: list[str], taken: str
) -> None:
    outcomes: dict[str, Outcome] = {"unfused": (), "none unroll": ()}
    compiler = Compiler({**outcomes, "plain": (), "none": ()}, [*wrong, "none"])
    built = builder.build(compiler, keys)
    assert builder.name(built) == taken
    assert compiler.tried == tried
    assert "is wrong" in built.artifact.record.preparations[0].tried[0]


def test_layers_with_inexact_kernels_are_unrolled_before_other_kernels_are_avoided(
    builder: Builder,
) -> None:
    compiler = Compiler(
        {"plain": [], "unroll": [], "barrier": [], "unfused": []}, wrong=["plain", "barrier"]
    )
    assert builder.name(builder.build(compiler)) == "unroll"
    assert compiler.tried == ["plain", "unroll"]


def test_what_may_differ_is_rewritten_until_it_agrees(builder: Builder) -> None:
    compiler = Compiler(
        {"plain": [], "ranges": [], "ranges barrier": []},
        sensitive={"plain": 3, "ranges": 9},
        gap=12,
    )
    built = builder.build(compiler)
    assert compiler.tried == ["plain", "ranges", "ranges barrier"]
    assert name_of(built.artifact.record.recipe) == "ranges barrier"
    tried = built.artifact.record.preparations[0].tried
    assert any("3 dB above the limits" in each for each in tried)
    assert any("9 dB above the limits" in each for each in tried)


def test_a_rewrite_that_hardly_helps_is_not_kept(builder: Builder) -> None:
    compiler = Compiler(
        {"plain": [], "ranges": [], "barrier": []},
        sensitive={"plain": 2, "ranges": 7, "barrier": 8},
        gap=12,
    )
    built = builder.build(compiler)
    assert compiler.tried[:3] == ["plain", "ranges", "barrier"]
    # All together are refused here.
    assert name_of(built.artifact.record.recipe) == "barrier"
    (agreement,) = built.validations["a"].agreements
    assert agreement.status is AgreementStatus.SENSITIVE


def test_rewrites_for_kernels_are_for_what_is_less_exact_than_its_format(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "barrier": []}, sensitive={"plain": 3}, gap=1)
    builder.build(compiler)
    assert {name_of(each) for each in compiler.recipes if each.last_remedies} == {"ranges"}


def test_kernels_of_large_models_that_are_sensitive_stay(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "barrier": []}, sensitive={"plain": 3}, gap=12, emulated=8)
    builder.build(compiler)
    assert {name_of(each) for each in compiler.recipes if each.last_remedies} == {"ranges"}


def test_kernels_of_large_models_that_differ_are_rewritten(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "barrier": []}, wrong=["plain"], emulated=8)
    built = builder.build(compiler)
    assert name_of(built.artifact.record.recipe) == "barrier"


def test_kernels_are_not_rewritten_where_the_format_itself_differs(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "barrier": []}, wrong=["plain"], gap_of_wrong=1)
    with pytest.raises(BuildError, match="plain is wrong"):
        builder.build(compiler)
    assert {name_of(each) for each in compiler.recipes if each.last_remedies} == {"ranges"}


def test_what_is_less_exact_than_its_format_is_compiled_in_other_forms(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "unfused": []}, sensitive={"plain": 4}, gap=12)
    built = builder.build(compiler)
    assert compiler.tried == ["plain", "unfused"]
    assert name_of(built.artifact.record.recipe) == "unfused"


def test_rewrites_that_help_only_together_are_found(builder: Builder) -> None:
    compiler = Compiler(
        {"plain": [], "ranges": [], "barrier": [], "ranges barrier": []},
        wrong=["plain", "ranges", "barrier"],
    )
    built = builder.build(compiler)
    assert compiler.tried == ["plain", "ranges", "barrier", "ranges barrier"]
    assert name_of(built.artifact.record.recipe) == "ranges barrier"


def test_what_may_differ_is_taken_before_what_differs(builder: Builder) -> None:
    compiler = Compiler({"plain": [], "ranges": []}, wrong=["plain"], sensitive={"ranges": 4})
    built = builder.build(compiler)
    assert name_of(built.artifact.record.recipe) == "ranges"
    # Other forms are for what differs, or is less exact than the number format.
    assert compiler.tried == ["plain", "ranges"]


def test_other_forms_keep_the_options_that_coverage_needs(builder: Builder) -> None:
    more = builder.job().target.provider.more_coverage
    assert more is not None
    options = " ".join(f"{name}={value}" for name, value in sorted(more.options.items()))
    outcomes: dict[str, Outcome] = {"plain": ("QuantizeLinear",), options: ()}
    outcomes |= {f"unfused {options}": (), f"{options} unroll": ()}
    compiler = Compiler(outcomes, [options, f"{options} unroll"])
    assert builder.name(builder.build(compiler)) == f"unfused {options}"
    assert compiler.tried == ["plain", options, f"{options} unroll", f"unfused {options}"]


def test_what_differs_in_every_form_is_an_error(builder: Builder) -> None:
    with pytest.raises(BuildError, match="plain is wrong") as raised:
        builder.build(Compiler({"plain": (), "unfused": ()}, ["plain", "unfused"]))
    assert "Also tried: unfused: unfused is wrong" in str(raised.value)


def test_a_rewrite_that_differs_leads_back_to_what_was_compiled_before(builder: Builder) -> None:
    compiler = Compiler({"plain": ("If",), "rewrite": ()}, ["rewrite"])
    built = builder.build(compiler, "min-coverage = 0.5")
    assert builder.name(built) == "plain"
    assert compiler.validated == ["rewrite", "plain"]


NO_SIMPLIFIER = Refused("prepare", (Problem(Kind.COMPILE_FAILED, "a -> npu", "it fails."),))
NO_REPLY = Refused("prepare", (Problem(Kind.WORKER_CRASHED, "a -> npu", "it crashed."),))


@pytest.mark.parametrize(
    ("outcomes", "tried"),
    [
        ({"plain": NO_SIMPLIFIER, "onnxslim": ()}, ["plain", "onnxslim"]),
        # What happens once can happen by chance.
        ({"plain": NO_REPLY, "onnxslim": ()}, ["plain", "plain", "onnxslim"]),
        (
            {"plain": NO_SIMPLIFIER, "onnxslim": NO_SIMPLIFIER, "none": ()},
            ["plain", "onnxslim", "none"],
        ),
    ],
)
def test_the_next_simplifier_follows_one_that_does_not_work(
    builder: Builder, outcomes: Mapping[str, Outcome], tried: list[str]
) -> None:
    compiler = Compiler(outcomes)
    built = builder.build(compiler)
    assert compiler.tried == tried
    assert builder.name(built) == tried[-1]
    (preparation,) = built.artifact.record.preparations
    assert len(preparation.failed) == len(set(tried)) - 1


def test_the_last_failure_stands_if_no_simplifier_works(builder: Builder) -> None:
    outcomes = dict.fromkeys(("plain", "onnxslim", "none"), NO_SIMPLIFIER)
    with pytest.raises(BuildError, match="it fails") as raised:
        builder.build(Compiler(outcomes))
    assert "Also tried: onnxruntime failed: it fails." in str(raised.value)


def test_what_leaves_the_least_control_flow_is_compiled_in_the_end(builder: Builder) -> None:
    @dataclass
    class Leaving(Compiler):
        def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
            if not recipe.takes_control_flow:
                self.recipes.append(recipe)
                left = ("If", "Loop") if recipe.simplifier == "onnxruntime" else ("If",)
                return Refused("prepare", control_flow=left)
            return super().compile(job, recipe, folder)

    compiler = Leaving({"onnxslim": ()})
    assert builder.name(builder.build(compiler)) == "onnxslim"
    assert compiler.tried == ["plain", "onnxslim", "onnxslim"]
    compiler = Leaving({"onnxslim": CRASH, "onnxslim unroll": ()})
    assert builder.name(builder.build(compiler)) == "onnxslim unroll"
    assert compiler.tried[2:] == ["onnxslim", "onnxslim rewrite", "onnxslim unroll"]


def test_the_choice_is_kept_and_other_limits_validate_again(
    builder: Builder, tmp_path: Path
) -> None:
    outcomes: dict[str, Outcome] = {"plain": (), "unfused": ()}
    first = Compiler(outcomes, ["plain"])
    cache = tmp_path / "cache"
    assert builder.name(builder.build(first, cache=cache)) == "unfused"
    again = Compiler({})
    built = builder.build(again, cache=cache)
    assert (builder.name(built), built.cached) == ("unfused", True)
    assert (again.tried, again.validated) == ([], [])
    # With another tolerance the plain one is looked at again, and not compiled again.
    other = Compiler(outcomes)
    builder.toml = TOML.replace("0.9", "0.8")
    built = builder.build(other, cache=cache)
    assert (builder.name(built), built.cached) == ("plain", True)
    assert (other.tried, other.validated) == ([], ["plain"])


def test_what_a_build_that_requires_less_takes_without_a_search_keeps_what_was_tried(
    builder: Builder, tmp_path: Path
) -> None:
    outcomes: dict[str, Outcome] = {"plain": NO_REPLY, "onnxslim": ("If", "If")}
    cache = tmp_path / "cache"
    with pytest.raises(BuildError):
        builder.build(Compiler(outcomes), cache=cache)
    again = Compiler(outcomes)
    other = Builder(builder.project, tmp_path / "other")
    taken = other.build(again, "min-coverage = 0.5", cache=cache)
    assert (other.name(taken), taken.cached, again.tried) == ("onnxslim", True, [])
    (preparation,) = taken.artifact.record.preparations
    assert preparation.failed == ("onnxruntime crashes on this model, in a process of its own",)
    assert preparation.tried

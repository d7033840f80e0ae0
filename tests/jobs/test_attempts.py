"""Which of several ways to compile a job is kept; the ways themselves are functions of the tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import Preparation
from hatch_epcontext.jobs.attempts import Compile, Refused, Ways, compile_best, compile_unrolled
from hatch_epcontext.jobs.preparation import Prepared, Rewritten
from hatch_epcontext.providers import MoreCoverage
from hatch_epcontext.worker.facts import Context, Coverage, NodeFacts
from hatch_epcontext.worker.requests import CompileReply

SOURCE = Prepared("source", Preparation("onnxruntime", 9, 9), {})
FAILURE = BuildError(Problem(Kind.WORKER_CRASHED, "a -> qnn", "the compiler crashed."))


def reply(*refused: str, nodes: int = 10, contexts: int = 1) -> CompileReply:
    """A reply about one model, of which nodes of the operators ``refused`` are uncovered."""
    uncovered = tuple(NodeFacts(f"n{index}", op) for index, op in enumerate(refused))
    coverage = Coverage(nodes, nodes - len(refused), contexts, uncovered)
    return CompileReply("context", (Context("a", "a_ctx.onnx", (), (), coverage),), 1.0)


class Compiler:
    """Answers by the path of the prepared model, and writes that into the artifact."""

    def __init__(self, folder: Path, results: dict[str, CompileReply | BuildError]) -> None:
        self.folder = folder
        self.results = results
        self.options: tuple[MoreCoverage, Compile] | None = None
        self.asked: list[tuple[str, Refused]] = []
        self.compiled: list[str] = []
        self._numbers = itertools.count()

    def __call__(self, prepared: Sequence[Prepared], folder: Path) -> CompileReply:
        (model,) = prepared
        self.compiled.append(model.path)
        folder.mkdir()
        (folder / "a_ctx.onnx").write_text(model.path, encoding="utf-8")
        result = self.results[model.path]
        if isinstance(result, BuildError):
            raise result
        return result

    def rewrite(self, index: int, prepared: Prepared, refused: Refused) -> Rewritten:
        """The next of the results in their order, if there is one."""
        assert index == 0
        self.asked.append((prepared.path, refused))
        paths = [*self.results, ""]
        path = paths[paths.index(prepared.path) + 1]
        if not path or path == "unrolled":
            return Rewritten(None, ("Clip: it differs (not taken)",))
        return Rewritten(self._form(prepared, path))

    def unroll(self, index: int, prepared: Prepared, refused: Refused) -> Rewritten:
        if "unrolled" not in self.results or prepared.path in ("unrolled", "after"):
            return Rewritten(None)
        return Rewritten(self._form(prepared, "unrolled"))

    def _form(self, prepared: Prepared, path: str) -> Prepared:
        rewrites = (*prepared.preparation.rewrites, path)
        return replace(
            prepared, path=path, preparation=replace(prepared.preparation, rewrites=rewrites)
        )

    def best(self, *, unroll: bool = False) -> tuple[Preparation, CompileReply]:
        ways = Ways(self, self.rewrite, self.unroll if unroll else None, self.options)
        result = self.folder / "result"
        (prepared,), found = compile_best([SOURCE], result, self._scratch, ways)
        assert (result / "a_ctx.onnx").read_text(encoding="utf-8") == prepared.path
        assert [each.name for each in self.folder.iterdir()] == ["result"]
        return prepared.preparation, found

    def _scratch(self) -> Path:
        return self.folder / f"scratch-{next(self._numbers)}"


def test_a_whole_result_costs_nothing_more(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": reply(), "better": reply()})
    assert compiler.best(unroll=True) == (SOURCE.preparation, reply())
    assert (compiler.compiled, compiler.asked) == (["source"], [])


def test_what_is_uncovered_is_rewritten(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": reply("Clip", "If"), "better": reply()})
    preparation, found = compiler.best()
    assert found == reply()
    assert preparation.rewrites == ("better",)
    assert preparation.tried == ("as it is: 2 nodes left to the CPU",)
    assert compiler.asked == [("source", frozenset({"Clip", "If"}))]


def test_what_a_rewrite_leaves_is_rewritten_too(tmp_path: Path) -> None:
    compiler = Compiler(
        tmp_path, {"source": reply("Clip", "If"), "one": reply("If"), "both": reply()}
    )
    preparation, _ = compiler.best()
    assert preparation.rewrites == ("one", "both")
    assert compiler.asked[1] == ("one", frozenset({"If"}))


def test_after_an_error_everything_is_rewritten(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": FAILURE, "better": reply()})
    preparation, _ = compiler.best()
    assert preparation.tried == ("as it is: the EP crashes on this form, in a process of its own",)
    assert compiler.asked == [("source", None)]


@pytest.mark.parametrize("other", [reply("Clip"), reply("Clip", "If"), FAILURE])
def test_the_gentlest_of_equals_is_kept(tmp_path: Path, other: CompileReply | BuildError) -> None:
    compiler = Compiler(tmp_path, {"source": reply("If"), "other": other})
    preparation, found = compiler.best()
    assert found == reply("If")
    assert preparation.rewrites == ()
    assert preparation.tried[-1].startswith("other: ")


def test_fewer_contexts_are_better(tmp_path: Path) -> None:
    compiler = Compiler(
        tmp_path, {"source": reply("If", contexts=2), "other": reply("Where", contexts=1)}
    )
    assert compiler.best()[0].rewrites == ("other",)


def test_unrolling_counts_if_nothing_is_left(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": reply("GRU", "If"), "unrolled": reply()})
    assert compiler.best(unroll=True)[0].rewrites == ("unrolled",)


def test_unrolling_does_not_count_if_something_is_left(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": reply("GRU", "If"), "unrolled": reply("If")})
    preparation, found = compiler.best(unroll=True)
    assert found == reply("GRU", "If")
    assert preparation.rewrites == ()
    assert preparation.tried == (
        "Clip: it differs (not taken)",
        "unrolled: 1 node left to the CPU",
    )


def test_what_was_inside_a_loop_is_rewritten_too(tmp_path: Path) -> None:
    compiler = Compiler(
        tmp_path, {"source": reply("Loop"), "unrolled": reply("Clip"), "after": reply()}
    )
    assert compiler.best(unroll=True)[0].rewrites == ("unrolled", "after")


def test_what_disagrees_is_compiled_unrolled(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"unrolled": reply()})
    (prepared,), found = compile_unrolled([SOURCE], tmp_path / "out", compiler, compiler.unroll)
    assert found == reply()
    assert prepared.preparation.rewrites == ("unrolled",)
    assert prepared.preparation.tried == ("as it is: the results differ from the CPU's",)


@pytest.mark.parametrize(
    "results", [{}, {"unrolled": reply("Softsign")}], ids=["no loop", "partial"]
)
def test_what_cannot_be_unrolled_whole_is_an_error(
    tmp_path: Path, results: dict[str, CompileReply | BuildError]
) -> None:
    compiler = Compiler(tmp_path, results)
    with pytest.raises(BuildError):
        compile_unrolled([SOURCE], tmp_path / "out", compiler, compiler.unroll)


def test_the_first_error_stands_if_nothing_helps(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, {"source": FAILURE, "other": FAILURE})
    with pytest.raises(BuildError) as caught:
        compiler.best()
    (problem,) = caught.value.problems
    assert problem.kind is Kind.WORKER_CRASHED
    lines = problem.message.splitlines()
    assert lines[0] == "the compiler crashed."
    assert lines[-1] == "Also tried: other: the EP crashes on this form, in a process of its own"


@pytest.mark.parametrize("kind", [Kind.WORKER_TIMEOUT, Kind.OUT_OF_MEMORY, Kind.INTERRUPTED])
def test_other_errors_are_no_reason_to_try_again(tmp_path: Path, kind: Kind) -> None:
    failure = BuildError(Problem(kind, "a -> qnn", "it ended."))
    compiler = Compiler(tmp_path, {"source": failure, "better": reply()})
    with pytest.raises(BuildError) as caught:
        compiler.best()
    assert caught.value is failure
    assert compiler.compiled == ["source"]


OPTIONS = MoreCoverage(frozenset({"QuantizeLinear"}), {"offload": "0"})


@pytest.mark.parametrize(
    ("left", "with_options", "expected"),
    [
        (("QuantizeLinear",), (), ("offload = 0",)),
        # What is left then is rewritten, and compiled with the same options.
        (("QuantizeLinear", "Clip"), ("Clip",), ("offload = 0",)),
        # They help nothing, or are not for what is left.
        (("QuantizeLinear",), ("QuantizeLinear", "Clip"), ()),
        (("Clip",), (), ()),
    ],
)
def test_options_with_which_an_ep_takes_more_are_tried_first(
    tmp_path: Path,
    left: tuple[str, ...],
    with_options: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    compiler = Compiler(tmp_path, {"source": reply(*left)})
    other = Compiler(tmp_path, {"source": reply(*with_options), "better": reply()})
    compiler.options = OPTIONS, other
    compiler.rewrite = other.rewrite if with_options == ("Clip",) else compiler.rewrite  # type: ignore[method-assign]
    preparation, _ = compiler.best()
    assert preparation.options == expected
    assert other.compiled[:1] == ([] if left == ("Clip",) else ["source"])
    if with_options == ("Clip",):
        assert (other.compiled, preparation.rewrites) == (["source", "better"], ("better",))


@pytest.mark.parametrize("kind", [Kind.INTERRUPTED, Kind.WORKER_KILLED, Kind.SYSTEM_ERROR])
def test_what_ends_an_attempt_by_chance_ends_the_job(tmp_path: Path, kind: Kind) -> None:
    failure = BuildError(Problem(kind, "a -> qnn", "it ended."))
    compiler = Compiler(tmp_path, {"source": reply("If"), "better": failure})
    with pytest.raises(BuildError) as caught:
        compiler.best()
    assert caught.value is failure


def test_an_attempt_that_takes_too_long_is_none(tmp_path: Path) -> None:
    failure = BuildError(Problem(Kind.WORKER_TIMEOUT, "a -> qnn", "it was stopped."))
    compiler = Compiler(tmp_path, {"source": reply("If"), "better": failure})
    preparation, found = compiler.best()
    assert found == reply("If")
    assert preparation.tried == ("better: it was stopped",)

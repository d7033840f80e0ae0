from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.actions.rewrite import handle
from hatch_epcontext.worker.comparison.runs import write_reference
from hatch_epcontext.worker.reference import reference
from hatch_epcontext.worker.requests import Prepared, RewriteRequest
from hatch_epcontext.worker.results import Preparation
from tests.graph.rewrites.unrolled import recurrent
from tests.models import parsed, save, save_with_data

FOLLOWING = """
(float[2] x) => (float[2] y)
<int64 trips = {3}, bool true = {1}, int64 zero = {0}>
{
    end, rows = Loop (trips, true, x) <body = first (int64 i, bool go, float[2] state)
        => (bool go, float[2] next, float[2] row) { next = Sin (state) row = Exp (next) }>
    shape = Shape (rows)
    length = Gather (shape, zero)
    y = Loop (length, true, end) <body = second (int64 j, bool on, float[2] s)
        => (bool on, float[2] t) { row = Gather (rows, j) t = Sub (s, row) }>
}
"""
"""The second loop is as long as what the first one makes."""


def unroll(
    path: Path,
    folder: Path,
    uncovered: tuple[str, ...] | None = None,
    limit: int = 100,
    *,
    compare: bool = True,
) -> Prepared:
    spec = Model(name="model", key=Key(("models", 0)), path=path)
    folder.mkdir()
    file = folder.with_suffix(".reference")
    written = write_reference(reference(spec, onnx.load(path)), file) if compare else None
    before = Prepared(Preparation("none", 1, 1), str(path), reference=written)
    out = str(folder)
    request = RewriteRequest(spec, before, uncovered, out, True, unroll_limit=limit)
    return handle(request)


def test_a_loop_that_follows_from_another_one_is_unrolled_too(tmp_path: Path) -> None:
    reply = unroll(save(parsed(FOLLOWING), tmp_path / "a.onnx"), tmp_path / "out")
    assert reply.changed
    assert (reply.preparation.rewrites, reply.preparation.control_flow) == (("unroll_loop",), ())
    assert reply.preparation.nodes == len(graph.compute_nodes(onnx.load(reply.path).graph))


def test_only_what_is_not_covered_is_unrolled(tmp_path: Path) -> None:
    path = save(parsed(FOLLOWING), tmp_path / "a.onnx")
    assert not unroll(path, tmp_path / "out", ("another",)).changed


def test_a_length_that_is_not_fixed_is_named(tmp_path: Path) -> None:
    text = """
    (float[4] x) => (float[4] y)
    <bool true = {1}, int64 zero = {0}, float half = {0.5}>
    {
        largest = ArgMax (x)
        trips = Gather (largest, zero)
        y = Loop (trips, true, x) <body = body (int64 i, bool go, float[4] s)
            => (bool go, float[4] t) { t = Neg (s) }>
    }
    """
    path = save(parsed(text), tmp_path / "a.onnx")
    reply = unroll(path, tmp_path / "out", compare=False)
    assert not reply.changed
    assert [declined.reason for declined in reply.declined] == [
        "its number of iterations 'trips' is computed"
    ]


def test_a_layer_with_an_unknown_activation_is_named(tmp_path: Path) -> None:
    path = save(recurrent("RNN", activations=["Cubed"]), tmp_path / "a.onnx")
    reply = unroll(path, tmp_path / "out", compare=False)
    reason = "its activation 'Cubed' is not known"
    assert reply.declined == (Declined(reason, "unroll_recurrent", "RNN", "layer"),)
    assert reply.dropped == ()


def test_the_limit_is_named(tmp_path: Path) -> None:
    path = save(parsed(FOLLOWING), tmp_path / "a.onnx")
    reply = unroll(path, tmp_path / "out", limit=5)
    assert not reply.changed
    loops = [(reason.operator, reason.nodes) for reason in reply.declined]
    assert loops == [("Loop", 15)]
    assert "more than unroll-limit" in reply.declined[0].reason


def test_a_rule_that_fails_while_nodes_are_counted_takes_nothing_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(node: onnx.NodeProto, scope: Scope, builder: Builder) -> list[str]:
        if builder.limit is not None and builder.limit > 5:
            raise RuntimeError
        for _ in range(6):
            builder.add("Neg", *node.input)
        return [builder.add("Sin", *node.input)]

    def doubled(node: onnx.NodeProto, scope: Scope, builder: Builder) -> list[str]:
        return [builder.add("Add", node.input[0], node.input[0])]

    rewrites = (
        Rewrite("sum_as_add", frozenset({"Sum"}), doubled),
        Rewrite("longer", frozenset({"Sin"}), longer),
    )
    monkeypatch.setattr("hatch_epcontext.worker.actions.rewrite.UNROLLS", rewrites)
    text = "(float[2] x) => (float[2] y) { twice = Sum (x, x) y = Sin (twice) }"
    reply = unroll(save(parsed(text), tmp_path / "a.onnx"), tmp_path / "out", limit=5)
    assert reply.preparation.rewrites == ("sum_as_add",)
    assert [(declined.rewrite, declined.nodes) for declined in reply.declined] == [("longer", 0)]


def test_a_layer_with_external_data_is_unrolled(tmp_path: Path) -> None:
    path = save_with_data(recurrent("GRU"), tmp_path / "a.onnx")
    reply = unroll(path, tmp_path / "out", ("layer",))
    assert reply.preparation.rewrites == ("unroll_recurrent",)


def test_what_changes_the_results_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(node: onnx.NodeProto, scope: Scope, builder: Builder) -> list[str]:
        return [builder.add("Add", *node.input)]

    wrong = Rewrite("sub_as_add", frozenset({"Sub"}), faulty)
    monkeypatch.setattr("hatch_epcontext.worker.actions.rewrite.UNROLLS", (wrong,))
    text = "(float[2] x, float[2] z) => (float[2] y) { y = Sub (x, z) }"
    reply = unroll(save(parsed(text), tmp_path / "a.onnx"), tmp_path / "out")
    assert not reply.changed
    assert "sub_as_add" in reply.dropped[0]

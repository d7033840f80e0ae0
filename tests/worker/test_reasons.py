"""Reasons for uncovered nodes: from the EP's log, from types and ranks, and from what decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hatch_epcontext.graph.facts import NodeFacts
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker import reasons
from hatch_epcontext.worker.reasons import ask, describe_refused, with_reasons
from tests.conftest import needs_qnn
from tests.models import interrupted, network, parsed, save
from tests.worker.actions.test_compile import X_ELITE, target


def explain(text: str, logged: Mapping[str, str]) -> list[NodeFacts]:
    graph = parsed(text, check=False).graph
    uncovered = [NodeFacts(node.name, node.op_type) for node in graph.node]
    return list(with_reasons(uncovered, logged, graph, graph, PROVIDERS["qnn"]))


@pytest.mark.parametrize(
    ("type_", "reason"),
    [
        ("int16[2, 4]", "the EP does not support int16"),
        ("float[1, 1, 1, 1, 1, 1]", "it has a tensor of rank 6, and the EP takes at most 5"),
        ("int32[2, 4]", None),
    ],
)
def test_where_the_ep_gives_no_reason_its_limits_may(type_: str, reason: str | None) -> None:
    text = f"({type_} x) => ({type_} y) {{ [neg] y = Neg (x) }}"
    for expected, logged in ((reason, {"neg": ""}), ("its own", {"neg": "its own"})):
        assert [facts.reason for facts in explain(text, logged)] == [expected]


@pytest.mark.parametrize("token", [False, True])
def test_an_input_that_decides_is_named_unless_it_is_an_index(token: bool) -> None:
    text = f"""(float[4, 1, 3] x, int64[1] length, float[9, 2] table, float[1, 6, 3] w, float[1, 6, 2] r)
    => (float[] y) {{
        [cast] n = Cast <to = 6> (length)
        [gru] y = GRU (x, w, r, , n)
        {"[gather] z = Gather (table, length)" if token else ""} }}"""
    found = explain(text, {"gru": "a reason"})[1]
    if token:
        assert (found.reason, found.deciders) == ("a reason", {})
    else:
        assert found.reason == "a reason; the input 'length' decides 'n'"
        assert found.deciders == {"length": ()}


def test_an_input_that_the_node_reads_itself_decides_nothing_else() -> None:
    text = """(float[1, 9, 2] cache, float[1, 1, 2] rows, int64[1] at) => (float[] y)
    { [scatter] y = TensorScatter (cache, rows, at) }"""
    (found,) = explain(text, {"scatter": "a reason"})
    assert found.reason == "a reason; it reads the input 'at'"


@needs_qnn
def test_the_ep_is_asked_without_compiling_or_printing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save(interrupted(), tmp_path / "a.onnx")
    assert ask(path, target("qnn", X_ELITE)) == {"hardmax": "the EP does not have this operator"}
    assert "LogNodeSupport" not in "".join(capfd.readouterr())
    sentence, names = describe_refused(path, target("qnn", X_ELITE))
    assert [each.name for each in tmp_path.iterdir()] == ["a.onnx"]
    assert sentence == "It refuses Hardmax hardmax (the EP does not have this operator)."
    assert names == ("hardmax",)


def test_an_ep_that_logs_no_reasons_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasons, "open_session", lambda *_: pytest.fail("it was asked"))
    path = save(network(1), tmp_path / "a.onnx")
    assert ask(path, target("cpu")) == {}

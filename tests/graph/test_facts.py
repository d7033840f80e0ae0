from __future__ import annotations

from hatch_epcontext.graph.facts import short_name


def test_a_long_name_of_a_node_is_its_end() -> None:
    assert short_name("/encoder/layers.0/attention/MatMul") == "/encoder/layers.0/attention/MatMul"
    long = "/model/encoder/layers.0/self_attention/query/MatMul"
    assert short_name(long) == ".../layers.0/self_attention/query/MatMul"
    assert short_name("x" * 60) == "..." + "x" * 37

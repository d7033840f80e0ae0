from __future__ import annotations

import onnx

from hatch_epcontext.graph.builder import Builder, Outputs
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import Rewritten, apply, rewrites
from hatch_epcontext.graph.scope import Scope
from tests.models import parsed


@rewrites("Neg", "Abs")
def to_erf(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    if node.op_type == "Abs":
        return Declined("it is positive") if node.input[0] == "x" else None
    return [builder.add("Erf", node.input[0])]


MODEL = "(float[2] x) => (float[2] y) { [one] a = Abs (x) [two] b = Abs (a) [three] y = Neg (b) }"
ALL = frozenset({"Neg", "Abs"})
POSITIVE = Declined("it is positive", "to_erf", "Abs", "one")


def test_a_rewrite_has_the_name_of_its_rule_and_declines_with_a_reason() -> None:
    model = parsed(MODEL)
    assert apply(model, [to_erf], ALL, {}) == Rewritten(("to_erf",), 1, (POSITIVE,))
    assert [node.op_type for node in model.graph.node] == ["Abs", "Abs", "Erf"]


def test_only_operators_that_are_allowed_are_replaced() -> None:
    assert apply(parsed(MODEL), [to_erf], frozenset({"Abs"}), {}) == Rewritten((), 0, (POSITIVE,))


def test_a_node_that_is_kept_stays_and_what_a_rewrite_adds_may_be_replaced() -> None:
    @rewrites("Abs")
    def to_neg(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        return [builder.add("Neg", node.input[0])]

    model = parsed(
        "(float[2] x) => (float[2] y) { [odd] a = Abs(x) [one] b = Abs(a) [two] y = Neg(b) }"
    )
    done = apply(model, [to_neg, to_erf], ALL, {}, kept={"one", "two"})
    assert done == Rewritten(("to_neg", "to_erf"), 2)
    nodes = [(node.name, node.op_type) for node in model.graph.node]
    assert nodes == [("odd/Neg/Erf", "Erf"), ("one", "Abs"), ("two", "Neg")]


def test_an_operator_that_the_opset_does_not_have_is_a_reason() -> None:
    model = parsed(MODEL, 8)
    reason = "the model's opset 8 has no Erf"
    done = apply(model, [to_erf], frozenset({"Neg"}), {})
    assert done == Rewritten((), 0, (Declined(reason, "to_erf", "Neg", "three"),))
    assert model == parsed(MODEL, 8)

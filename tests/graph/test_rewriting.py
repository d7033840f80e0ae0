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
    assert apply(model, [to_erf], ALL, {}) == Rewritten(("to_erf",), (POSITIVE,))
    assert [node.op_type for node in model.graph.node] == ["Abs", "Abs", "Erf"]


def test_only_what_is_refused_is_replaced() -> None:
    assert apply(parsed(MODEL), [to_erf], frozenset({"Abs"}), {}) == Rewritten((), (POSITIVE,))


def test_an_operator_that_the_opset_does_not_have_is_a_reason() -> None:
    model = parsed(MODEL, 8)
    reason = "the model's opset 8 has no Erf"
    done = apply(model, [to_erf], frozenset({"Neg"}), {})
    assert done == Rewritten((), (Declined(reason, "to_erf", "Neg", "three"),))
    assert model == parsed(MODEL, 8)

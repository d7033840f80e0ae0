"""What the providers say of operators that an EP computes wrong, and what the sweep found."""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import sweep
from benchmarks.sweep import Case, Result
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.number_format import Fault, RewriteName
from hatch_epcontext.graph.rewrites.precise import PRECISE
from hatch_epcontext.graph.rewriting import apply
from hatch_epcontext.graph.rounding import decisive
from hatch_epcontext.providers import PROVIDERS
from tests.conftest import needs_qnn

FORMAT = PROVIDERS["qnn"].number_format("npu", {})
assert FORMAT is not None
FAULTS = FORMAT.faults
RESULTS = sweep.read(sweep.table("qnn"))
WRONG = [case for case in sweep.cases() if RESULTS[case.name].status == "wrong"]


def explains(fault: Fault, case: Case, result: Result) -> bool:
    main = onnx.load_model_from_string(case.model()).graph
    constants = {each.name: numpy_helper.to_array(each) for each in main.initializer}
    operators = [node.op_type for node in main.node]
    for number, node in enumerate(main.node):
        texts = {each.name: each.s.decode() for each in node.attribute if each.s}
        if not fault.concerns(node.op_type, len(node.input), texts):
            continue
        if fault.whole != (case.x.dtype.kind in "iu"):
            continue
        if fault.behind and not fault.behind.intersection(operators[:number]):
            continue
        if fault.exponent is not None:
            exponent = constants.get(node.input[1])
            if exponent is None or not np.allclose(exponent, fault.exponent, rtol=1e-3, atol=0):
                continue
        if fault.logarithm:
            x = [example[0] for example in result.examples]
            operands = (np.asarray(constants.get(name, x), np.float64) for name in node.input)
            logarithms = decisive(fault, [*operands])
            if ((fault.low <= logarithms) & (logarithms <= fault.high)).any():
                return True
            continue
        operand = node.input[fault.operand]
        low, high = result.low, result.high
        if operand in constants:
            low, high = float(constants[operand].min()), float(constants[operand].max())
        if operand not in ("x", *constants) or low is None or high is None:
            return True
        if low <= fault.high and fault.low <= high:
            return True
    return False


REWRITES = [name for name in PRECISE if name in {*FORMAT.rewrites, *PROVIDERS["qnn"].rewrites}]


class Rewritten(Case):
    """A case of which a build computes other nodes."""

    def model(self) -> bytes:
        model, _ = rewritten(super().model(), tuple(REWRITES))
        return model


@functools.cache
def rewritten(model: bytes, names: tuple[RewriteName, ...]) -> tuple[bytes, tuple[str, ...]]:
    """The ``model`` after the rewrites ``names``, and those of them that changed it."""
    changed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    if graph.opset(changed) < 8:
        return model, ()
    applied = apply(changed, [PRECISE[name] for name in names], None, {}).names
    return changed.SerializeToString(), applied


def is_avoided(case: Case) -> bool:
    """Whether a rewrite that needs no fault of its nodes changes it, as that of several that are fused."""
    needed = {*REWRITES} - {fault.rewrite for fault in FAULTS if f"{fault.operator}(" in case.nodes}
    _, applied = rewritten(case.model(), tuple(REWRITES))
    return not needed.isdisjoint(applied)


def test_each_case_of_the_sweep_has_a_result() -> None:
    assert {case.name for case in sweep.cases()} == RESULTS.keys()
    assert not [name for name, each in RESULTS.items() if each.status == "crashed"]


def test_the_sweep_found_each_fault_and_no_other() -> None:
    unknown = {case.name for case in WRONG if not is_avoided(case)}
    not_found = list(FAULTS)
    for case in WRONG:
        for fault in FAULTS:
            if explains(fault, case, RESULTS[case.name]):
                unknown.discard(case.name)
                not_found = [each for each in not_found if each is not fault]
    assert unknown == set()
    assert not_found == []


def test_each_rewrite_has_a_case_that_is_wrong_without_it() -> None:
    changed = (rewritten(case.model(), (name,))[1] for case in WRONG for name in REWRITES)
    found = {name for names in changed for name in names}
    # Errors of the EP, and values of other memory, which may be right.
    assert {*REWRITES} - found == {"transposed-outputs", "pool-padding", "quantized-signs"}


@needs_qnn
def test_what_leaves_float16_on_the_way_is_right_after_rewrites() -> None:
    cases = [*sweep.on_the_way()]
    assert {RESULTS[case.name].status for case in cases} == {"wrong"}
    changed = [Rewritten(**vars(case)) for case in cases]
    wrong = {case.name: result for case, result in sweep.sweep("qnn", changed) if result.wrong}
    assert wrong == {}


def test_one_name_of_a_rewrite_stands_for_one_operator_or_for_fused_ones() -> None:
    named = {(fault.rewrite, fault.operator) for fault in FAULTS if fault.rewrite}
    assert named == {
        ("square", "Pow"),
        ("clip-inputs", "Clip"),
        ("unfuse-activation", "Sigmoid"),
        ("unfuse-activation", "Tanh"),
        *(("small-angle", operator) for operator in ("Atan", "Sin", "Tan")),
        ("truncate", "Div"),
        ("modulo", "Mod"),
        ("truth", "Cast"),
        ("bytes", "Cast"),
        ("split-integers", "Cast"),
        ("indices", "GatherElements"),
        ("indices", "ScatterElements"),
        ("indices", "ScatterND"),
        ("reciprocals", "Div"),
        ("scaled-square", "ReduceL2"),
        ("scaled-division", "Reciprocal"),
        *(
            ("comparison", operator)
            for operator in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
        ),
        *(("floor", operator) for operator in ("Exp", "Mish", "Pow", "Softplus")),
    }


def test_ranges_are_from_low_to_high() -> None:
    assert all(fault.low <= fault.high for fault in FAULTS)


def test_a_fault_of_an_attribute_is_none_of_nodes_with_other_values() -> None:
    resize, *_ = [fault for fault in FAULTS if fault.operator == "Resize"]
    assert resize.concerns("Resize", 3, {"mode": "nearest", "nearest_mode": "floor"})
    assert not resize.concerns("Resize", 3, {"mode": "linear", "nearest_mode": "floor"})
    assert not resize.concerns("Resize", 3, {})
    assert not resize.concerns("Upsample", 3, {"nearest_mode": "floor"})
    (clip,) = [fault for fault in FAULTS if fault.operator == "Clip"]
    assert clip.concerns("Clip", 1, {})
    assert not clip.concerns("Clip", 3, {})


@needs_qnn
def test_the_simulator_squares_negative_zero_wrong_by_a_power_only() -> None:
    power, product = (
        Case("y = Pow(x, 2)", sweep.ALL),
        Case("y = Mul(x, x)", sweep.ALL),
    )
    results = {case.name: result for case, result in sweep.sweep("qnn", [power, product])}
    assert results[product.name].status == "right"
    assert results[product.name].values == 63488
    found = results[power.name]
    assert (found.status, found.wrong) == ("wrong", 1)
    ((x, exact, got),) = found.examples
    assert (x, exact, got) == (0, 0, -4)
    assert str(x) == "-0.0"

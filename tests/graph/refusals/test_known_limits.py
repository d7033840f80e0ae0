"""What an EP cannot compile of a source graph, and what the message suggests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Kind, Problem
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.refusals.conditions import advice
from hatch_epcontext.worker.actions.check import not_compilable
from hatch_epcontext.worker.configured import fix_constants
from tests.worker.actions.test_compile import target

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
ML = "ai.onnx.ml"
SPEC = Model("m", Path("m.onnx"), Key() / "models" / 0)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), op, domain=domain, **attributes)


def value(name: str, dtype: int = FLOAT, shape: Sequence[int | None] = (1, 4)) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weights])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph, opset_imports=opsets)


def problems(
    given: onnx.ModelProto, provider: str = "qnn", min_coverage: float = 1.0, cut: Cut = SPEC.cut
) -> list[Problem]:
    npu = replace(
        target(provider),
        name="npu",
        key=Key() / "targets" / "npu",
        min_coverage=min_coverage,
    )
    return list(not_compilable(given, replace(SPEC, cut=cut), [npu]))


MATMUL = node("MatMul", "x w", "y")
SEQUENCE = helper.make_value_info(
    "z", helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
)
LABELS = {"keys_int64s": [0, 1], "values_strings": ["a", "b"]}
TREE = node("TreeEnsembleRegressor", "x", "t", ML)


def tail(last: onnx.NodeProto, output: Any) -> onnx.ModelProto:
    return model([MATMUL, last], [value("x")], [output])


@pytest.mark.parametrize("provider", ["qnn", "openvino", "tensorrt", "vitisai"])
@pytest.mark.parametrize(
    ("given", "word"),
    [
        (tail(node("LabelEncoder", "y", "z", ML, **LABELS), value("z", STRING)), "strings: 'z'"),
        (tail(node("ZipMap", "y", "z", ML), SEQUENCE), "a sequence: 'z'"),
        (tail(node("SplitToSequence", "y", "z"), SEQUENCE), "a sequence: 'z'"),
        (tail(node("Scaler", "y", "z", ML), value("z")), "an operator of ai.onnx.ml"),
    ],
)
def test_a_tail_that_no_npu_takes_is_refused_with_the_tensor_to_keep(
    given: onnx.ModelProto, word: str, provider: str
) -> None:
    (problem,) = problems(given, provider)
    assert problem.kind is Kind.NOT_COMPILABLE
    assert word in problem.message
    assert str(problem.settings[0]) == 'tool.epcontext.models[0].cut = { outputs = ["y"] }'


def test_a_head_of_strings_is_refused_with_the_tensor_to_begin_with() -> None:
    head = node("LabelEncoder", "s", "x", ML, keys_strings=["a"], values_floats=[1.0])
    given = model([head, MATMUL], [value("s", STRING)], [value("y")])
    (problem,) = problems(given)
    assert problem.settings[0].value == {"inputs": ["x"]}


def test_what_the_model_was_cut_to_stays_cut() -> None:
    (problem,) = problems(tail(node("Scaler", "y", "z", ML), value("z")), cut=Cut(("x",), ("z",)))
    assert problem.settings[0].value == {"inputs": ["x"], "outputs": ["y"]}


def test_a_part_does_not_begin_with_a_sequence() -> None:
    branch = helper.make_graph([node("Identity", "s", "t")], "b", [], [SEQUENCE])
    branch.output[0].name = "t"
    given = model(
        [
            node("SplitToSequence", "x", "s"),
            # Nothing in the graph says that it makes a sequence.
            node("If", "c", "u", then_branch=branch, else_branch=branch),
            node("SequenceAt", "u i", "v"),
            node("MatMul", "v w", "y"),
        ],
        [value("x"), value("c", TensorProto.BOOL, []), value("i", INT64, [])],
        [value("y")],
    )
    (problem,) = problems(given)
    assert problem.settings[0].value is None
    # The part after the sequence.
    given.graph.node[1].CopyFrom(node("Identity", "s", "u"))
    (problem,) = problems(given)
    assert problem.settings[0].value == {"inputs": ["v"]}


def test_a_model_that_is_all_trees_gets_the_cpu_provider_and_no_cut() -> None:
    casts = node("Identity", "t", "z")
    (problem,) = problems(model([TREE, casts], [value("x")], [value("z")]))
    assert "(an ensemble of trees" in problem.message
    assert 'provider = "cpu"' in (problem.hint or "")
    assert problem.settings == ()


def test_the_cpu_and_an_unknown_ep_refuse_nothing() -> None:
    given = model([TREE], [value("x")], [value("t")])
    assert problems(given, "cpu") == problems(given, "plugin") == []


def test_min_coverage_counts() -> None:
    last = node("Scaler", "y", "z", ML)
    given = model([MATMUL, node("Relu", "y", "r"), last], [value("x")], [value("z"), value("r")])
    assert problems(given, min_coverage=0.7)
    assert problems(given, min_coverage=0.6) == []


def test_what_is_between_parts_that_can_be_compiled_is_to_be_cut_away() -> None:
    nodes = [MATMUL, node("Scaler", "y", "s", ML), node("MatMul", "s w", "z")]
    (problem,) = problems(model(nodes, [value("x")], [value("z")]))
    assert "Keep only the part before or after them" in (problem.hint or "")
    assert [str(each) for each in problem.settings] == [
        "tool.epcontext.models[0].cut",
        f"{problem.settings[1].key} = 0.6",
    ]


def test_what_only_constants_need_is_not_refused() -> None:
    inner = node("NonZero", "shape", "n")
    nodes = [MATMUL, node("Shape", "y", "shape"), inner, node("Reshape", "n two", "m")]
    assert problems(model(nodes, [value("x")], [value("m", INT64, [None])])) == []


def test_what_no_output_needs_is_not_refused() -> None:
    given = model([MATMUL, node("NonZero", "y", "n")], [value("x")], [value("y")])
    assert problems(given) == []


def test_shapes_that_depend_on_data_are_refused_for_fixed_shapes_only() -> None:
    given = tail(node("NonZero", "y", "z"), value("z", INT64, [2, None]))
    (problem,) = problems(given)
    assert "depends on the values of 'y'" in problem.message
    assert problems(given, "openvino") == []
    fixed = tail(node("NonZero", "y", "z"), value("z", INT64, [2, 4]))
    assert problems(fixed) == []


def test_an_input_that_decides_a_shape_is_to_be_frozen_and_then_nothing_is_refused() -> None:
    nodes = [MATMUL, node("Reshape", "y size", "z")]
    inputs = [value("x"), value("size", INT64, [2])]
    given = model(nodes, inputs, [value("z", FLOAT, [None, None])])
    (problem,) = problems(given)
    assert "'size'" in (problem.hint or "")
    assert [str(each) for each in problem.settings] == ["tool.epcontext.models[0].constants.size"]
    fix_constants(given, Model("m", Path("m"), SPEC.key, constants={"size": [2, 2]}))
    assert problems(given) == []


def test_data_that_decides_a_shape_is_not_to_be_frozen() -> None:
    nodes = [MATMUL, node("Cast", "y", "size", to=INT64), node("Reshape", "y size", "z")]
    (problem,) = problems(model(nodes, [value("x")], [value("z", FLOAT, [None] * 4)]))
    assert "Freeze" not in (problem.hint or "")


def _choosing(condition: Sequence[onnx.NodeProto], inputs: Sequence[Any]) -> onnx.ModelProto:
    branches = [
        helper.make_graph([node(op, "x", f"{op}_")], op, [], [value(f"{op}_")])
        for op in ("Relu", "Neg")
    ]
    last = node("If", "c", "z", then_branch=branches[0], else_branch=branches[1])
    return model([*condition, last], [value("x"), *inputs], [value("z")])


def test_the_input_that_decides_a_condition_is_named_with_what_it_is_compared_with() -> None:
    rate = node("Constant", "", "rate", value_int=16000)
    del rate.input[:]
    given = _choosing([rate, node("Equal", "sr rate", "c")], [value("sr", INT64, [])])
    found = advice(given.graph, SPEC.key)
    assert found is not None
    assert "'sr' (compared with 16000)" in found[0]
    assert str(found[1][0]) == "tool.epcontext.models[0].constants = { sr = 16000 }"


def test_a_condition_on_data_gives_no_advice() -> None:
    nodes = [node("ReduceMax", "x", "top", keepdims=0), node("Greater", "top limit", "c")]
    assert advice(_choosing(nodes, [value("limit", FLOAT, [])]).graph, SPEC.key) is None


def test_a_loop_with_a_computed_count_is_refused_and_one_with_a_fixed_count_is_not() -> None:
    body = helper.make_graph(
        [node("Identity", "go", "more"), node("Relu", "s", "t")],
        "body",
        [value("i", INT64, []), value("go", TensorProto.BOOL, []), value("s")],
        [value("more", TensorProto.BOOL, []), value("t")],
    )
    nodes = [
        node("ReduceMax", "x", "top", keepdims=0),
        node("Cast", "top", "n", to=INT64),
        helper.make_node("Loop", ["n", "", "x"], ["z"], "loop", body=body),
    ]
    (problem,) = problems(model(nodes, [value("x")], [value("z")]))
    assert "depends on 'n'" in problem.message
    nodes[-1].input[0] = "four"
    fixed = model(nodes, [value("x")], [value("z")])
    fixed.graph.initializer.append(numpy_helper.from_array(np.array(4), "four"))
    assert problems(fixed) == []


def test_a_refused_model_fails_before_anything_is_compiled(tmp_path: Path) -> None:
    from hatch_epcontext.errors import ModelError
    from hatch_epcontext.worker.actions import check
    from hatch_epcontext.worker.requests import CheckRequest

    path = tmp_path / "m.onnx"
    onnx.save(tail(node("Scaler", "y", "z", ML), value("z")), path)
    spec = Model("m", path, SPEC.key)
    npu = target("qnn")
    check.handle(CheckRequest((spec,)))
    trees = tmp_path / "trees.onnx"
    onnx.save(model([TREE, node("ZipMap", "t", "z", ML)], [value("x")], [SEQUENCE]), trees)
    with pytest.raises(ModelError, match="an ensemble of trees"):
        check.handle(CheckRequest((Model("m", trees, SPEC.key, targets=(npu,)),)))
    with pytest.raises(ModelError) as caught:
        check.handle(CheckRequest((replace(spec, targets=(npu,)),)))
    assert [each.kind for each in caught.value.problems] == [Kind.NOT_COMPILABLE]

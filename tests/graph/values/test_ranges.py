from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.graph.values.ranges import input_ranges
from tests.models import value, weights

I64, F32, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


def stored(name: str, values: object, dtype: type = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def ranges(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    *tensors: onnx.TensorProto,
    output: int = F32,
) -> dict[str, Range]:
    """The ranges of the inputs of a model whose last node computes ``y``."""
    return input_ranges(unchecked(nodes, inputs, [value("y", None, output)], tensors))


def unchecked(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    tensors: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """A model of opset 17 whose outputs need no shape."""
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def index(high: float, low: float = 0, usual: float | None = None) -> Range:
    return Range(low, high, known=True, usual=usual, whole=True)


def test_members_of_a_stored_range_are_bounded() -> None:
    found = ranges(
        [
            helper.make_node("Equal", ["range", "i"], ["is"]),
            helper.make_node("OneHot", ["j", "depth", "values"], ["z"]),
            helper.make_node("Cast", ["is"], ["y"], to=F32),
        ],
        [value("i", [2, 1], TensorProto.INT32), value("j", [2], I64)],
        stored("range", range(257), np.int32),
        stored("depth", 9),
        stored("values", [0, 1], np.float32),
    )
    assert found == {"i": index(256), "j": index(8)}


def test_indices_are_bounded_by_the_size_of_the_axis() -> None:
    found = ranges(
        [
            helper.make_node("Cast", ["i"], ["wide"], to=I64),
            helper.make_node("Gather", ["table", "wide"], ["row"]),
            helper.make_node("Gather", ["row", "j"], ["y"], axis=-1),
        ],
        [value("i", [1], TensorProto.INT32), value("j", [1], I64)],
        weights("table", 7, 3),
    )
    assert found == {"i": index(6), "j": index(2)}


@pytest.mark.parametrize(
    ("nodes", "high"),
    [
        ([helper.make_node("Add", ["i", "three"], ["k"])], 3),
        ([helper.make_node("Mul", ["three", "i"], ["k"])], 2),
        ([helper.make_node("Div", ["i", "three"], ["k"])], 18),
        ([helper.make_node("Concat", ["i", "three"], ["k"], axis=0)], 6),
        ([helper.make_node("Clip", ["i", "", "three"], ["k"])], 255),
        (
            [
                helper.make_node("Less", ["i", "zero"], ["negative"]),
                helper.make_node("Not", ["negative"], ["positive"]),
                helper.make_node("Cast", ["negative"], ["is negative"], to=I64),
                helper.make_node("Cast", ["positive"], ["is positive"], to=I64),
                helper.make_node("Add", ["i", "size"], ["from the end"]),
                helper.make_node("Mul", ["is negative", "from the end"], ["a"]),
                helper.make_node("Mul", ["i", "is positive"], ["b"]),
                helper.make_node("Add", ["a", "b"], ["k"]),
            ],
            6,
        ),
    ],
    ids=["add", "mul", "div", "concat", "clip", "negative indices"],
)
def test_indices_are_followed_through_arithmetic(nodes: list[onnx.NodeProto], high: int) -> None:
    found = ranges(
        [*nodes, helper.make_node("Gather", ["table", "k"], ["y"])],
        [value("i", [1], I64)],
        weights("table", 7, 3),
        stored("three", [3]),
        stored("zero", 0),
        stored("size", [7]),
    )
    assert found["i"].high == high
    assert found["i"].low == (-3 if high == 3 else 0)


@pytest.mark.parametrize(("size", "expected"), [(6, index(6)), (0, index(0, -6))])
def test_indices_that_are_subtracted_are_bounded(size: int, expected: Range) -> None:
    found = ranges(
        [
            helper.make_node("Sub", ["size", "i"], ["k"]),
            helper.make_node("Gather", ["table", "k"], ["y"]),
        ],
        [value("i", [1], I64)],
        weights("table", 7, 3),
        stored("size", [size]),
    )
    assert found == {"i": expected}


def test_the_sum_of_two_inputs_stays_within_a_table() -> None:
    found = ranges(
        [
            helper.make_node("Add", ["i", "j"], ["k"]),
            helper.make_node("Gather", ["table", "k"], ["y"]),
        ],
        [value("i", [4], I64), value("j", [4], I64)],
        weights("table", 7, 3),
    )
    assert found["i"].high + found["j"].high == 6


def test_indices_into_a_computed_shape_and_inside_a_branch_are_bounded() -> None:
    row = helper.make_node("Gather", ["table", "i"], ["t"])
    then = helper.make_graph([row], "then", [], [value("t", None)])
    other = helper.make_graph(
        [helper.make_node("Gather", ["table", "j"], ["e"])], "else", [], [value("e", None)]
    )
    found = ranges(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["table"]),
            helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        ],
        [value("x", [5, 2]), value("i", [1], I64), value("j", [1], I64), value("c", [], BOOL)],
        weights("w", 2, 3),
    )
    assert found["i"] == found["j"] == index(4)


def test_scattered_indices_and_axes_are_bounded() -> None:
    found = ranges(
        [
            helper.make_node("ScatterElements", ["x", "i", "u"], ["a"], axis=1),
            helper.make_node("GatherND", ["a", "j"], ["b"]),
            helper.make_node("CumSum", ["a", "axis"], ["c"]),
            helper.make_node("TopK", ["c", "k"], ["d", "places"]),
            helper.make_node("Concat", ["b", "b"], ["y"], axis=0),
        ],
        [
            value("x", [6, 4]),
            value("i", [6, 1], I64),
            value("u", [6, 1]),
            value("j", [3, 2], I64),
            value("axis", [], I64),
            value("k", [1], I64),
        ],
    )
    assert (found["i"], found["j"], found["axis"]) == (index(3), index(3), index(1))
    assert found["k"] == index(4, 1, 4)


def test_a_length_is_up_to_the_size_that_it_measures() -> None:
    found = ranges(
        [
            helper.make_node("Shape", ["x"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "one"], ["size"]),
            helper.make_node("Range", ["zero", "size", "one"], ["positions"]),
            helper.make_node("Less", ["positions", "n"], ["mask"]),
            helper.make_node("Cast", ["mask"], ["y"], to=F32),
        ],
        [value("x", [1, 24, 3]), value("n", [1], I64)],
        stored("zero", 0),
        stored("one", 1),
    )
    assert found["n"] == index(24, 1, 24)


def test_a_length_that_is_clipped_to_the_size_is_bounded_by_no_mask() -> None:
    found = ranges(
        [
            helper.make_node("Shape", ["x"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "one"], ["size"]),
            helper.make_node("Range", ["zero", "size", "one"], ["positions"]),
            helper.make_node("Min", ["n_lengths", "most"], ["lengths"]),
            helper.make_node("Less", ["positions", "lengths"], ["mask"]),
            helper.make_node("Cast", ["mask"], ["y"], to=F32),
        ],
        [value("x", [1, 24, 3]), value("n_lengths", [1], I64)],
        stored("zero", 0),
        stored("one", 1),
        stored("most", 24),
    )
    assert found["n_lengths"].low == 1
    assert np.isfinite(found["n_lengths"].high)


def test_a_length_that_counts_positions_is_that_of_the_input_after_which_it_is_called() -> None:
    found = ranges(
        [
            helper.make_node("ReduceMax", ["x_lengths"], ["most"], keepdims=0),
            helper.make_node("Range", ["zero", "most", "one"], ["positions"]),
            helper.make_node("Less", ["positions", "x_lengths"], ["mask"]),
            helper.make_node("Cast", ["mask"], ["y"], to=F32),
        ],
        [value("style", [1, 256]), value("x", [1, 32], I64), value("x_lengths", [1], I64)],
        stored("zero", 0),
        stored("one", 1),
    )
    assert found["x_lengths"] == index(32, 1, 32)


def test_the_lengths_of_a_recurrent_layer_are_up_to_its_steps() -> None:
    found = ranges(
        [helper.make_node("GRU", ["x", "w", "r", "", "n"], ["y"], hidden_size=2)],
        [value("x", [9, 1, 2]), value("n", [1], TensorProto.INT32)],
        weights("w", 1, 6, 2),
        weights("r", 1, 6, 2),
    )
    assert found["n"] == index(9, 1, 9)


@pytest.mark.parametrize("name", ["attention_mask", "other"])
def test_masks_are_of_ones(name: str) -> None:
    found = ranges(
        [
            helper.make_node("Cast", [name], ["m"], to=F32),
            helper.make_node("Sub", ["one", "m"], ["not"]),
            helper.make_node("Mul", ["not", "hidden"], ["bias"]),
            helper.make_node("Add", ["x", "bias"], ["y"]),
        ],
        [value(name, [1, 4], I64), value("x", [1, 4])],
        stored("one", 1, np.float32),
        stored("hidden", -1e4, np.float32),
    )
    assert found[name] == index(1, 0, 1)
    assert found["x"].is_open


def test_floats_have_the_range_that_is_clipped_or_quantized() -> None:
    found = ranges(
        [
            helper.make_node("Clip", ["a", "low", "high"], ["c"]),
            helper.make_node("QuantizeLinear", ["b", "scale", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
            helper.make_node("Add", ["c", "d"], ["y"]),
        ],
        [value("a", [2]), value("b", [2])],
        stored("low", -1, np.float32),
        stored("high", 6, np.float32),
        stored("scale", 0.5, np.float32),
        stored("zero", 100, np.uint8),
    )
    assert found == {"a": Range(-1, 6, known=True), "b": Range(-50, 77.5, known=True)}


def test_floats_that_become_indices_are_whole() -> None:
    found = ranges(
        [
            helper.make_node("Cast", ["x"], ["i"], to=I64),
            helper.make_node("Gather", ["table", "i"], ["y"]),
        ],
        [value("x", [2])],
        weights("table", 7, 3),
    )
    assert found["x"] == index(6)


@pytest.mark.parametrize(
    ("shape", "factor", "high"),
    [([1, 3, 16, 16], 1.0, 1), ([1, 3, 16, 16], 1 / 255, 255), ([1, 2, 16, 16], 1.0, None)],
)
def test_images_are_not_negative(shape: list[int], factor: float, high: float | None) -> None:
    found = ranges(
        [
            helper.make_node("Mul", ["x", "factor"], ["scaled"]),
            helper.make_node("Conv", ["scaled", "w"], ["y"]),
        ],
        [value("x", shape)],
        stored("factor", factor, np.float32),
        weights("w", 4, shape[1], 3, 3),
    )
    expected = Range(-8, 8, known=False) if high is None else Range(0, high, known=False)
    assert found["x"] == expected


def test_integers_that_nothing_bounds_are_bytes() -> None:
    found = ranges(
        [
            helper.make_node("Cast", ["i"], ["a"], to=F32),
            helper.make_node("Cast", ["j"], ["b"], to=F32),
            helper.make_node("Add", ["a", "b"], ["y"]),
        ],
        [value("i", [3], I64), value("j", [3], TensorProto.INT8)],
    )
    assert found["i"] == Range(0, 255, known=False, whole=True)
    assert found["j"] == Range(-128, 127, known=False, whole=True)


def test_a_number_is_the_one_with_which_it_is_compared() -> None:
    found = ranges(
        [helper.make_node("Equal", ["rate", "known"], ["y"])],
        [value("rate", [], I64)],
        stored("known", 16000),
        output=BOOL,
    )
    assert found["rate"] == index(16000, 16000)


def test_open_sizes_are_those_that_are_given() -> None:
    made = unchecked(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        [value("x", ["n", 2]), value("i", [1], I64)],
        [value("y", None)],
    )
    sized = [TensorFacts("x", "float32", (5, 2)), TensorFacts("i", "int64", (1,))]
    assert input_ranges(made, sized)["i"] == index(4)


def test_an_invalid_graph_bounds_nothing() -> None:
    made = unchecked(
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [value("i", [1], I64)],
        [value("y", None)],
        [weights("table", 7, 3)],
    )
    del made.graph.node[0].input[0]
    made.graph.node.append(helper.make_node("Mul", ["loop", "i"], ["loop"]))
    made.graph.node.append(helper.make_node("Add", ["i"], ["sum"]))
    made.graph.node.append(helper.make_node("Cast", ["i"], ["c"], to=[1.0]))
    assert input_ranges(made)["i"] == Range(0, 255, known=False, whole=True)


def test_positions_boxes_and_caches_of_fused_operators_are_bounded() -> None:
    microsoft = "com.microsoft"
    found = ranges(
        [
            helper.make_node(
                "RotaryEmbedding", ["x", "position", "cos", "sin"], ["r"], domain=microsoft
            ),
            helper.make_node(
                "GroupQueryAttention",
                ["x", "k", "v", "past", "past", "lengths", "total"],
                ["a"],
                domain=microsoft,
            ),
            helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["y"]),
        ],
        [
            value("x", [1, 4, 8]),
            value("position", [1, 4], I64),
            value("k", [1, 4, 8]),
            value("v", [1, 4, 8]),
            value("past", [1, 1, 6, 8]),
            value("lengths", [1], TensorProto.INT32),
            value("total", [], TensorProto.INT32),
            value("boxes", [1, 20, 4]),
            value("scores", [1, 2, 20]),
            value("most", [1], I64),
            value("iou", [1]),
        ],
        weights("cos", 32, 4),
        weights("sin", 32, 4),
        output=I64,
    )
    assert found["position"] == index(31)
    assert (found["lengths"], found["total"]) == (index(9, 0, 9), index(10, 1, 10))
    assert (found["most"], found["iou"]) == (index(20, 1, 20), Range(0, 1, known=True))


def test_a_loop_runs_a_few_rounds_and_passes_on_what_it_gets() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["again"]),
            helper.make_node("Gather", ["table", "inside"], ["row"]),
            helper.make_node("Identity", ["inside"], ["next"]),
        ],
        "body",
        [value("round", [], I64), value("go", [], BOOL), value("inside", [1], I64)],
        [value("again", [], BOOL), value("next", [1], I64), value("row", [1, 3])],
    )
    found = ranges(
        [helper.make_node("Loop", ["rounds", "", "i"], ["last", "y"], body=body)],
        [value("rounds", [], I64), value("i", [1], I64)],
        weights("table", 7, 3),
    )
    assert found == {"rounds": index(8, 1, 8), "i": index(6)}

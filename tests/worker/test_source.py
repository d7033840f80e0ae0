from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.worker.inputs import dummy_inputs, samples_of
from hatch_epcontext.worker.source import check_ranges, fix_inputs, ranges_for, typed_graph
from tests.models import of_any_rank, parsed, shapes

MODEL = Key(("models", 0))


def two_inputs() -> onnx.ModelProto:
    """``y = x * scale``, with a shared dimension and a an input of one number."""
    return parsed("""(float[n, 4] x, float[n, ?] z, float[1] scale) => (float[n, 4] y) {
            m = Mul (x, scale)
            y = Add (m, z) }""")


def spec(**settings: Any) -> Model:
    return Model("a", Path("a.onnx"), MODEL, **settings)


def problem(made: onnx.ModelProto, **settings: Any) -> Problem:
    with pytest.raises(ModelError) as raised:
        fix_inputs(made, spec(**settings))
    (found,) = raised.value.problems
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dims": {"n": 3}}, {"x": [3, 4], "z": [3, ""], "scale": [1], "y": [3, 4]}),
        # A whole shape fixes its dimensions everywhere.
        ({"shapes": {"z": (2, 4)}}, {"x": [2, 4], "z": [2, 4], "scale": [1], "y": [2, 4]}),
    ],
)
def test_sizes_are_fixed_in_all_tensors(settings: Any, expected: dict[str, Any]) -> None:
    made = two_inputs()
    fix_inputs(made, spec(**settings))
    assert shapes(made) == expected


@pytest.mark.parametrize("shape", [(2, 4), (3,), ()])
def test_an_unknown_rank_takes_every_shape(shape: tuple[int, ...]) -> None:
    made, configured = of_any_rank(), spec(shapes={"x": shape})
    fix_inputs(made, configured)
    assert graph.facts(made.graph.input[0]).shape == shape
    # Sizes of dummy inputs only.
    for model in (made, of_any_rank()):
        assert dummy_inputs([graph.facts(model.graph.input[0])], configured)["x"].shape == shape


def test_open_shapes_are_checked_and_stay_open() -> None:
    made = two_inputs()
    sizes: dict[str, Any] = {"dims": {"n": 3}, "shapes": {"z": (3, 4)}}
    fix_inputs(made, spec(**sizes, constants={"scale": 2}, static_shapes=False))
    assert shapes(made) == {"x": ["n", 4], "z": ["n", ""], "y": ["n", 4]}
    inputs = list(map(graph.facts, made.graph.input))
    feeds = dummy_inputs(inputs, spec(**sizes, static_shapes=False))
    assert {name: array.shape for name, array in feeds.items()} == {"x": (3, 4), "z": (3, 4)}
    found = problem(two_inputs(), shapes={"x": (1, 5)}, static_shapes=False)
    assert "the shape [1, 5] does not fit the input" in found.message


def test_constants_become_initializers_of_the_inputs_dtype() -> None:
    made = two_inputs()
    fix_inputs(made, spec(constants={"scale": 2}))
    assert [each.name for each in made.graph.input] == ["x", "z"]
    (stored,) = made.graph.initializer
    array = numpy_helper.to_array(stored)
    assert array.dtype == np.float32
    assert array.tolist() == [2.0]


@pytest.mark.parametrize(
    ("settings", "location", "kind", "message"),
    [
        ({"dims": {"m": 1}}, "models[0].dims.m", Kind.UNKNOWN_INPUT, "has no open dimension 'm'"),
        ({"shapes": {"w": (1,)}}, "models[0].shapes.w", Kind.UNKNOWN_INPUT, "has no input 'w'"),
        (
            {"shapes": {"x": (1,)}},
            "models[0].shapes.x",
            Kind.VALUE_MISMATCH,
            "the shape [1] does not fit the input, which has the shape n x 4",
        ),
        (
            {"shapes": {"x": (1, 5)}},
            "models[0].shapes.x",
            Kind.VALUE_MISMATCH,
            "the shape [1, 5] does not fit the input, which has the shape n x 4",
        ),
        (
            {"shapes": {"x": (1, 4), "z": (2, 4)}},
            "models[0].shapes.z",
            Kind.VALUE_MISMATCH,
            "'n' is 2 in this shape, but 1 elsewhere",
        ),
        (
            {"dims": {"n": 2}, "shapes": {"x": (1, 4)}},
            "models[0].shapes.x",
            Kind.VALUE_MISMATCH,
            "'n' is 1 in this shape",
        ),
        ({"constants": {"w": 1}}, "models[0].constants.w", Kind.UNKNOWN_INPUT, "has no input 'w'"),
        (
            {"constants": {"scale": "x"}},
            "models[0].constants.scale",
            Kind.VALUE_MISMATCH,
            "does not fit the input",
        ),
        (
            {"constants": {"scale": [1, 2]}},
            "models[0].constants.scale",
            Kind.VALUE_MISMATCH,
            "has the shape [2]",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_an_error(
    settings: dict[str, Any], location: str, kind: Kind, message: str
) -> None:
    found = problem(two_inputs(), **settings)
    assert found.location == f"tool.epcontext.{location}"
    assert found.kind is kind
    assert message in found.message


def test_a_number_that_is_too_large_for_the_dtype_is_an_error() -> None:
    made = parsed("(int8[1] x) => (int8[1] y) { y = Identity (x) }")
    found = problem(made, constants={"x": 1000})
    assert "does not fit the input, which has the dtype int8" in found.message


IDS = "(int64[1, 5] i, float[1, 5] x) => (int64[1, 5] y, float[1, 5] z) { y = Add (i, i) z = Neg (x) }"


def test_all_samples_are_within_the_ranges_that_the_app_keeps() -> None:
    made = parsed(IDS)
    settings = spec(validate=ValidateTable(ranges={"i": (-3, 999), "x": (0.5, 2)}))
    inputs = [graph.facts(value) for value in graph.inputs(made.graph)]
    check_ranges(inputs, settings)
    ranges = ranges_for(typed_graph(made, settings), inputs, settings)
    for sample in samples_of(inputs, settings, ranges):
        assert not sample.far
        assert sample.feeds["i"].min() >= -3
        assert sample.feeds["i"].max() <= 999
        assert sample.feeds["x"].min() >= 0.5
        assert sample.feeds["x"].max() <= 2
    first = samples_of(inputs, settings, ranges)[0].feeds["i"]
    assert (first.min(), first.max()) == (-3, 999)


def test_ranges_of_the_app_have_neighbours_and_inputs_that_differ_by_little() -> None:
    made = parsed("(float[1, 8] a, float[1, 8] b) => (float[1, 8] y) { y = Sub (a, b) }")
    settings = spec(validate=ValidateTable(ranges={"a": (30, 37), "b": (33, 42)}))
    inputs = [graph.facts(value) for value in graph.inputs(made.graph)]
    ranges = ranges_for(typed_graph(made, settings), inputs, settings)
    far = [sample for sample in samples_of(inputs, settings, ranges) if sample.has_offset]
    assert [[*sample.far] for sample in far] == [["a", "b"]] * 2
    for sample, share in zip(far, (1 / 1000, 1 / 4000), strict=True):
        both = np.concatenate([sample.feeds["a"], sample.feeds["b"]])
        assert both.min() >= 33
        assert both.max() <= 37
        assert 0.5 < both.std() / (37 * share) < 1.5


def test_ranges_of_the_app_have_values_whose_squares_differ_by_little() -> None:
    made = parsed(
        """(float[1, 64] x) => (float[1, 1] y) { q = Mul (x, x) m = ReduceMean <axes = [1]> (q)
            a = ReduceMean <axes = [1]> (x) p = Mul (a, a) y = Sub (m, p) }"""
    )
    settings = spec(validate=ValidateTable(ranges={"x": (0, 255)}))
    inputs = [graph.facts(value) for value in graph.inputs(made.graph)]
    ranges = ranges_for(typed_graph(made, settings), inputs, settings)
    (near,) = (sample for sample in samples_of(inputs, settings, ranges) if sample.has_offset)
    x = near.feeds["x"]
    assert 200 < x.min() < x.max() <= 255
    assert x.std() < 10


@pytest.mark.parametrize(
    ("ranges", "kind"),
    [
        ({"j": (0, 1)}, Kind.UNKNOWN_INPUT),
        ({"i": (0.5, 1)}, Kind.VALUE_MISMATCH),
        ({"i": (0, 2.0**70)}, Kind.VALUE_MISMATCH),
    ],
)
def test_ranges_are_those_of_inputs(ranges: dict[str, tuple[float, float]], kind: Kind) -> None:
    inputs = [graph.facts(value) for value in graph.inputs(parsed(IDS).graph)]
    with pytest.raises(ModelError) as raised:
        check_ranges(inputs, spec(validate=ValidateTable(ranges=ranges)))
    (found,) = raised.value.problems
    assert found.kind is kind
    assert found.location == f"tool.epcontext.models[0].validate.ranges.{next(iter(ranges))}"

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dequantize import dequantize
from hatch_epcontext.graph.side_by_side import add_floats
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.conftest import newer_runtime
from tests.graph.test_dequantize import (
    BY_HAND,
    embedding,
    feeds_of,
    quantized,
    recurrent,
    run,
)
from tests.models import network


def copied(made: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(made.SerializeToString())


def errors(both: onnx.ModelProto, floats: onnx.ModelProto) -> list[float]:
    """The errors of the float operators, relative to the largest result, and without a step."""
    undone = add_floats(both, floats)
    assert undone
    session = open_session(both.SerializeToString(), cpu_options())
    names = [each.name for each in session.get_outputs()]
    values = dict(zip(names, session.run(names, feeds_of(both)), strict=True))
    found = []
    for each in undone:
        integers, by_floats = values[each.integers], values[each.floats]
        step = values[each.step] if each.step else 0
        excess = np.maximum(np.abs(integers - by_floats) - step, 0)
        found.append(float(excess.max() / np.abs(integers).max()))
    return found


@pytest.mark.parametrize(
    "source",
    [pytest.param(network(3), marks=newer_runtime, id="network"), recurrent(), embedding()],
    ids=["network", "recurrent", "embedding"],
)
def test_float_operators_differ_from_what_onnx_runtime_quantized_by_rounding_only(
    tmp_path: Path, source: onnx.ModelProto
) -> None:
    made = quantized(source, tmp_path)
    floats = copied(made)
    dequantize(floats)
    outputs, wanted = [each.name for each in made.graph.output], run(made, feeds_of(made))
    both = copied(made)
    assert max(errors(both, floats)) < 1e-5
    # What the source computes itself is not changed.
    for one, other in zip(wanted, run(both, feeds_of(made)), strict=False):
        np.testing.assert_array_equal(one, other)
    assert [each.name for each in both.graph.output][: len(outputs)] == outputs


@pytest.mark.parametrize("name", BY_HAND)
def test_other_float_operators_differ_by_rounding_only(name: str) -> None:
    made = copied(BY_HAND[name])
    floats = copied(made)
    dequantize(floats)
    assert max(errors(made, floats)) < 1e-5


@pytest.mark.parametrize("name", BY_HAND)
def test_each_weight_that_is_wrong_by_one_percent_is_seen(name: str) -> None:
    made = copied(BY_HAND[name])
    floats = copied(made)
    dequantize(floats)
    before = {each.name for each in made.graph.initializer}
    stored = [
        index
        for index, each in enumerate(floats.graph.initializer)
        if each.name not in before and len(each.dims) > 1
    ]
    assert stored
    for index in stored:
        wrong = copied(floats)
        tensor = wrong.graph.initializer[index]
        values = graph.array_of(tensor)
        assert values is not None
        tensor.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(1.01), tensor.name))
        assert max(errors(copied(made), wrong)) > 1e-3

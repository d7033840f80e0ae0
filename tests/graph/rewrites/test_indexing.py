from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.indexing import (
    reverse_sequence_as_gather,
    scatter_as_matmul,
    slice_as_gather,
    tensor_scatter_as_where,
)
from hatch_epcontext.graph.rewriting import Rewrite
from tests.graph.rewrites.equal import operators, reasons, rewritten
from tests.models import parsed

REVERSING = """(float[2, 4, 3] x) => (float[2, 4, 3] y) <int64[%d] lengths = {%s}>
{ y = ReverseSequence <batch_axis = %d, time_axis = %d> (x, lengths) }"""


@pytest.mark.parametrize(
    "lengths", [(2, "4, 4", 0, 1), (2, "3, 3", 0, 1), (4, "2, 2, 2, 2", 1, 0), (2, "1, 1", 0, 1)]
)
def test_a_sequence_is_reversed_by_a_gather(lengths: tuple[int, str, int, int]) -> None:
    after = rewritten(parsed(REVERSING % lengths), reverse_sequence_as_gather)
    assert operators(after) == ["Gather"]


@pytest.mark.parametrize(
    ("shape", "update", "attributes"),
    [
        ([2, 3, 7, 4], [2, 3, 1, 4], ""),
        ([2, 3, 7, 4], [2, 3, 3, 4], "<axis = 2>"),
        ([2, 7, 4], [2, 2, 4], '<mode = "circular">'),
        ([2, 7, 3, 4], [2, 1, 3, 4], '<axis = 1, mode = "circular">'),
    ],
)
@pytest.mark.parametrize("places", [[4, 1], [0, 0], None])
def test_a_cache_is_written_from_computed_places_on(
    shape: list[int], update: list[int], attributes: str, places: list[int] | None
) -> None:
    if "circular" in attributes and places:
        places = [9, 6]
    model = parsed(
        f"""(float{shape} x, float{update} u, bool[2] c) => (float{shape} y) {{
            at = Where (c, i, i)
            y = TensorScatter {attributes} (x, u{", at" if places else ""}) }}""",
        24,
        i=places or [0, 0],
    )
    assert "TensorScatter" not in operators(rewritten(model, tensor_scatter_as_where))


def scattering(
    wide: str, shape: list[int], rows: list[int], kind: str, data: Any = None, axis: int = 0
) -> onnx.ModelProto:
    """Rows joined with those at computed indices, which count from both ends; ``wide`` makes them wide."""
    stored: dict[str, Any] = {} if data is None else {"x": np.full(shape, data, np.float32)}
    return parsed(
        f"""(int64[{rows[0]}] i, float{rows} u{"" if stored else f", float{shape} x"}) => (float{shape} y) {{
            near = Mod <fmod = 1> (i, count)
            column = Unsqueeze (near, last)
            wide = {wide} (column, counts)
            y = ScatterElements <axis = {axis}, reduction = "{kind}"> (x, wide, u) }}""",
        18,
        count=[shape[axis]],
        last=np.arange(1, len(rows)),
        counts=rows if wide != "Tile" else [1, *rows[1:]],
        **stored,
    )


@pytest.mark.parametrize("wide", ["Expand", "Tile", "Reshape"])
@pytest.mark.parametrize(("kind", "neutral"), [("add", 0), ("max", -np.inf)])
@pytest.mark.parametrize(("shape", "rows"), [([4, 3], [9, 3]), ([2, 3, 2], [5, 3, 2]), ([4], [9])])
def test_rows_are_scattered_by_a_product_or_a_maximum(
    wide: str, kind: str, neutral: float, shape: list[int], rows: list[int]
) -> None:
    if wide == "Reshape":
        shape, rows = [*shape[:1], *[1] * len(shape[1:])], [*rows[:1], *[1] * len(rows[1:])]
    for data in (None, 0.5, neutral):
        model = scattering(wide, shape, rows, kind, data)
        after = operators(rewritten(model, scatter_as_matmul))
        joining = {"add": ("MatMul", "Add"), "max": ("ReduceMax", "Max")}[kind]
        assert "ScatterElements" not in after
        assert joining[0] in after
        assert (joining[1] in after) == (data != neutral)


def slicing(offset: int, step: int = 1, shape: str = "2, 3") -> onnx.ModelProto:
    """Three of ten columns from a place that is computed."""
    return parsed(
        f"""(float[2, 10] x, int64[1] i) => (float[{shape}] y) <int64 low = {{0}}, int64 high = {{3}},
        int64[1] offset = {{{offset}}}, int64[1] length = {{{3 * step}}}, int64[1] axes = {{-1}},
        int64[1] steps = {{{step}}}> {{
            a = Abs (x)
            j = Clip (i, low, high)
            start = Add (j, offset)
            end = Add (start, length)
            y = Slice (a, start, end, axes, steps) }}"""
    )


@pytest.mark.parametrize(("offset", "step"), [(1, 1), (-9, 1), (0, 2)])
def test_a_slice_at_a_computed_place_is_a_gather(offset: int, step: int) -> None:
    after = operators(rewritten(slicing(offset, step), slice_as_gather))
    assert "Slice" not in after
    assert "Gather" in after


TWO_AXES = """(float[2, 9] x, int64[2] i) => (float[1, 3] y) <int64[2] n = {1, 3}{}>
{ end = Add (i, n) y = Slice (x, i, end{}) }"""


@pytest.mark.parametrize(
    ("rewrite", "model", "expected"),
    [
        (tensor_scatter_as_where, parsed("""(int64[2, 5] x, int64[2, 3] u) => (int64[2, 5] y)
            { y = TensorScatter <axis = 1> (x, u) }""", 24),
         ["it writes several rows that are no matrices of floats"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [9, 3], "none"), ["its reduction is none"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [9, 3], "mul"), ["its reduction is mul"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [9, 2], "add"),
         ["it does not scatter whole rows"]),
        (scatter_as_matmul, scattering("Expand", [4, 3], [4, 3], "add", axis=1),
         ["it is not along the first axis"]),
        (scatter_as_matmul, parsed("""(float[4, 3] x, int64[9, 3] i, float[9, 3] u) => (float[4, 3] y)
            { y = ScatterElements <reduction = "add"> (x, i, u) }""", 18),
         ["it does not scatter whole rows"]),
        (reverse_sequence_as_gather, parsed(REVERSING % (2, "4, 3", 0, 1)), ["its lengths differ"]),
        (slice_as_gather, slicing(1, shape="2, n"), ["the length of its result is not fixed"]),
        *((slice_as_gather, parsed(TWO_AXES.replace("{}", stored, 1).replace("{}", axes)),
           ["its start has 2 axes"]) for stored, axes in ((", int64[2] axes = {0, 1}", ", axes"), ("", ""))),
        # It is not at a computed place.
        (slice_as_gather, parsed("""(float[4] x) => (float[2] y)
            <int64[1] start = {1}, int64[1] end = {3}> { y = Slice (x, start, end) }"""), []),
    ],
)  # fmt: skip
def test_what_a_rewrite_is_not_for_stays_and_the_reason_is_named(
    rewrite: Rewrite, model: onnx.ModelProto, expected: list[str]
) -> None:
    assert reasons(model, rewrite) == expected

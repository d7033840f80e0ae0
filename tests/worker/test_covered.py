"""Which values were compared, and what is said of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.facts import Far, InFloats, Range, TensorFacts
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.advice import warning
from hatch_epcontext.worker.comparison.compare import compare_runs
from hatch_epcontext.worker.comparison.runs import ReferenceRun
from hatch_epcontext.worker.covered import (
    compared_values,
    describe_values,
    with_arithmetic,
)
from hatch_epcontext.worker.results import AgreementStatus, InputValues
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import parsed, save
from tests.worker.test_reference import HALF, clipped, referred

QNN = PROVIDERS["qnn"]
FORMAT = QNN.number_format("npu", {})
BYTES = Range(0, 255, False, whole=True)


def run(far: Mapping[str, Far] | None = None, **feeds: Any) -> ReferenceRun:
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    return ReferenceRun("a", (arrays,), usual=not far, far=far or {})


@pytest.mark.parametrize(
    ("feeds", "text"),
    [
        ({"i": [1, 7], "x": [0.5]}, "inputs as in the sample 'a', 'x' of 0.5,"),
        ({"i": [1, 7]}, "inputs as in the sample 'a', 'i' from 1 to 7,"),
        ({"m": [True]}, "inputs as in the sample 'a'"),
    ],
)
def test_a_sample_is_named_with_its_floats_or_its_integers(
    feeds: dict[str, Any], text: str
) -> None:
    assert describe_values(run(**feeds), []) == text


def test_the_ends_of_what_was_compared_are_those_of_all_runs() -> None:
    runs = [run(i=[1, 7], x=[0.5], m=[True]), run(i=[-3, 2], x=[np.inf], m=[False])]
    assert compared_values(runs, {}) == (
        InputValues("i", -3, 7, whole=True),
        InputValues("x", 0.5, 0.5),
    )
    assert [each.name for each in compared_values(runs, {"x": "y"})] == ["i"]


@pytest.mark.parametrize(
    ("dtype", "range_", "ends"),
    [
        ("int64", BYTES, (-(2.0**31), 2.0**31 - 1)),
        ("uint32", BYTES, (0, 2.0**31 - 1)),
        ("int32", BYTES, None),
        ("int32", Range(0, 255, False, whole=True, floats=InFloats()), (-131008, 131008)),
        (
            "int32",
            Range(0, 255, False, whole=True, floats=InFloats(2, several=True)),
            (-131008, 131008),
        ),
        # Two bytes, of which one counts 256.
        ("uint8", Range(0, 255, False, whole=True, floats=InFloats(512, several=True)), None),
        ("int32", Range(0, 255, False, whole=True, floats=InFloats(0.5, -50)), (-261916, 262116)),
        ("int64", Range(0, 9, True, whole=True), None),
        ("int64", Range(5, 7, True, whole=True, loose=True), (-(2.0**31), 2.0**31 - 1)),
        # It decides, and has no other values of interest.
        ("int64", Range(7, 7, True, whole=True, loose=True), None),
    ],
)
def test_the_arithmetic_ends_where_the_provider_declares_it(
    dtype: str, range_: Range, ends: tuple[float, float] | None
) -> None:
    values, inputs = [InputValues("i", 0, 9, whole=True)], [TensorFacts("i", dtype, (4,))]
    (found,) = with_arithmetic(values, inputs, {"i": range_}, QNN, FORMAT)
    assert ((found.least, found.most) if found.most else None) == ends
    (found,) = with_arithmetic(values, inputs, {"i": range_}, PROVIDERS["cpu"], None)
    assert not found.most


@pytest.mark.parametrize(
    ("range_", "expected"),
    [
        (BYTES, False),
        (replace(BYTES, reach=2.0**53), True),
        (replace(BYTES, reach=3600), False),
        # As integers times a million.
        (replace(BYTES, reach=3600, gain=1e6), True),
        (replace(BYTES, reach=8e6, floats=InFloats()), True),
        (replace(BYTES, reach=8e6, floats=InFloats(several=True)), True),
        # The end is that of a sum.
        (replace(BYTES, reach=8e6, floats=InFloats(2e-3, several=True)), False),
        (replace(BYTES, floats=InFloats(2, several=True, wide=True)), True),
        # A difference in years, and in days.
        (replace(BYTES, gain=2, floats=InFloats(2 / 31557600, several=True)), True),
        (replace(BYTES, gain=2, floats=InFloats(2 / 86400, several=True)), False),
        (Range(0, 9, True, whole=True, reach=2.0**53), False),
    ],
)
def test_values_beyond_the_arithmetic_count_only_if_the_graph_expects_them(
    range_: Range, expected: bool
) -> None:
    values, inputs = [InputValues("i", 0, 9, whole=True)], [TensorFacts("i", "int64", (4,))]
    (found,) = with_arithmetic(values, inputs, {"i": range_}, QNN, FORMAT)
    assert found.expected == expected


def test_a_warning_names_only_values_that_no_run_has_that_agreed() -> None:
    agreed = [run(i=[0, 255], x=[-4.0, 4.0])]
    large, kelvin = Far(-1000, 1000), Far(centers=(293.15,), spreads=(0.3,), shape=(1,))
    far = run({"i": large}, i=[-7, 90, -1], x=[3.0, 3.0])
    assert describe_values(far, agreed) == "'i' below 0, such as -7,"
    far = run({"i": large, "x": kelvin}, i=[-7, 90, 999], x=[292.875, 293.5])
    text = "'i' below 0, such as -7, or above 255, such as 999, and 'x' within 0.6 of 293.15"
    assert describe_values(far, agreed) == text
    loud = run({"x": Far(centers=(0.0,), spreads=(8000.0,))}, x=[-9000.0, 8000.0])
    text = "'x' below -1, such as -9000, or above 1, such as 8000,"
    assert describe_values(loud, [run(x=[-0.25, 1.0])]) == text
    larger = run({"x": Far(256.0, 512.0)}, x=[300.0, 400.0])
    assert describe_values(larger, agreed) == "'x' above 256, such as 512,"
    both = run(dict.fromkeys(("x", "z"), Far(256.0, 512.0)), x=[300.0], z=[400.0])
    assert describe_values(both, agreed) == "'x' and 'z' above 256, such as 512,"
    mixed = run({"i": Far(256.0, 512.0), "j": Far(-1000, 1000)}, i=[400], j=[-7, 90])
    assert describe_values(mixed, agreed) == "'i' above 256, such as 512, and 'j' from -7 to 90"
    # Constants of several elements are no span.
    gps = Far(centers=(48.1, 11.5), spreads=(0.5, 0.1), shape=(2,))
    assert describe_values(run({"x": gps}, x=[48, 11]), []) == "'x' within 1 of 48.1 and 11.5"
    near = Far(0.0, 40.0, centers=(37.0,), spreads=(0.037,), is_offset=True)
    text = "'x' with differences below 0.2 % of the values"
    assert describe_values(run({"x": near}, x=[37.1, 37]), []) == text
    rate = Far(centers=(8000.0,), spreads=(0.0,))
    assert describe_values(run({"i": rate}, i=[8000]), []) == "'i' of 8000"
    assert describe_values(run(i=[1], x=[1.0]), agreed) == "inputs as in the sample 'a', 'x' of 1,"


def test_a_difference_far_from_the_ordinary_is_a_warning(tmp_path: Path) -> None:
    made = parsed("(float[1, 64] x) => (float[1, 64] y) <float k = {300}> { y = Sub (x, k) }")
    _, expected = referred(made, tmp_path)
    far = [each for each in expected.runs if each.far]
    assert [[*each.far] for each in far] == [["x"], ["x"]]
    session = open_session(save(clipped(made, 310), tmp_path / "changed.onnx"), cpu_options())
    found = compare_runs(session, expected, HALF, [expected.runs[0], far[1]])
    assert found.agreements[0].status is AgreementStatus.AGREES
    assert found.unusual == ()
    (values,) = compared_values(found.agreed, {})
    assert (values.low < 0, values.high > 299) == (True, True)
    session = open_session(save(clipped(made, 0.1), tmp_path / "other.onnx"), cpu_options())
    found = compare_runs(session, expected, HALF, [far[1]])
    assert found.difference is None
    (difference,) = found.unusual
    text = warning(difference, describe_values(difference.run, found.agreed))
    assert text.startswith("'x' within 0.6 of 300 may")
    assert "may give wrong answers: of 'y', " in text
    caused = warning(difference, "'x' of 5", "Sub y has an error of 33 %")
    assert caused.endswith("(at least 20 dB). Sub y has an error of 33 %")


def test_values_around_a_constant_are_judged_by_their_own_outputs(tmp_path: Path) -> None:
    made = parsed("(float[1, 64] x) => (float[1, 64] y) <float k = {300}> { y = Sub (x, k) }")
    _, expected = referred(made, tmp_path)
    near = next(
        each
        for each in expected.runs
        if each.far and float(np.ptp(each.feeds["x"].astype(float))) < 3
    )
    (y,) = (outputs["y"] for outputs in near.outputs)
    shifted = {"y": np.add(y, np.float32(0.2))}
    (agreement,) = expected.compare(near, 0, shifted, HALF)
    assert agreement.snr is not None
    assert agreement.snr < 10


def test_values_on_which_an_ep_fails_are_a_warning(tmp_path: Path) -> None:
    made = parsed(
        "(float[1, 8] x, int32[1, 8] i) => (float[1, 8] y) { y = GatherElements <axis = 1> (x, i) }"
    )
    _, expected = referred(made, tmp_path)
    far = next(each for each in expected.runs if each.far)
    smaller = parsed(
        """(float[1, 8] x, int32[1, 8] i) => (float[1, 8] y) <int64[1] a = {1}, int64[1] b = {6}>
        { s = Slice (x, a, b, a) y = GatherElements <axis = 1> (s, i) }"""
    )
    session = open_session(save(smaller, tmp_path / "changed.onnx"), cpu_options())
    (difference,) = compare_runs(session, expected, HALF, [far]).unusual
    text = warning(difference, describe_values(difference.run, []))
    assert text.startswith("'i' from -6 to 1 may give wrong answers: of 'y', the EP fails (")


def variance() -> onnx.ModelProto:
    """The mean of squares less the square of the mean."""
    return parsed(
        """(float[1, 64] x) => (float[1, 1] y) {
            q = Mul (x, x) m = ReduceMean <axes = [1]> (q)
            a = ReduceMean <axes = [1]> (x) p = Mul (a, a)
            y = Sub (m, p) }"""
    )


def test_the_smallest_floats_that_differ_are_named(tmp_path: Path) -> None:
    _, expected = referred(variance(), tmp_path)
    larger = [each for each in expected.runs if each.is_larger]
    session = open_session(save(clipped(variance(), 40), tmp_path / "changed.onnx"), cpu_options())
    found = compare_runs(session, expected, HALF, [expected.runs[0], *larger])
    (difference,) = found.unusual
    assert describe_values(difference.run, found.agreed) == "'x' above 32, such as 128,"

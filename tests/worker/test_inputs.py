from __future__ import annotations

import dataclasses
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Kind, ModelError
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.worker.inputs import check_inputs, dummy_inputs
from tests.worker.test_samples import spec

X = TensorFacts("x", "float32", (2, "n"))


@pytest.mark.parametrize(
    "dtype",
    [
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("float4_e2m1fn", "int8", "uint64", "int4", "uint2", "bool"),
    ],
)
def test_synthetic_inputs_have_the_shape_and_dtype(dtype: str) -> None:
    tensor = TensorFacts("x", dtype, (2, 3))
    for kind in ("ones", "zeros", "random"):
        array = dummy_inputs([tensor], spec(kind))["x"]
        assert (array.shape, array.dtype.name) == ((2, 3), dtype)
    assert (dummy_inputs([tensor], spec("ones"))["x"] == 1).all()
    assert (dummy_inputs([tensor], spec("zeros"))["x"] == 0).all()


def test_a_file_may_have_other_sizes_than_the_dummy_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.zeros((2, 7), np.float32))
    sizes = dataclasses.replace(spec(tmp_path / "inputs.npz"), dims={"n": 3}, static_shapes=False)
    assert dummy_inputs([X], sizes)["x"].shape == (2, 7)
    generated = dataclasses.replace(sizes, validate=ValidateTable(inputs="ones"))
    assert dummy_inputs([X], generated)["x"].shape == (2, 3)


@pytest.mark.parametrize(
    ("dtype", "ranges", "values"),
    [
        # Indices of any table.
        ("int64", {}, {0, 1}),
        ("int64", {"x": Range(2, 4, known=True, whole=True)}, {2, 3, 4}),
        ("string", {}, {"alpha", "beta"}),
    ],
)
def test_random_inputs_have_all_values_of_their_range(
    dtype: str, ranges: dict[str, Range], values: set[Any]
) -> None:
    array = dummy_inputs([TensorFacts("x", dtype, (100,))], spec("random"), ranges)["x"]
    assert set(array.tolist()) == values
    single = dummy_inputs([TensorFacts("x", dtype, ())], spec("random"), ranges)["x"]
    assert isinstance(single, np.ndarray)
    assert (single.dtype, single.shape) == (array.dtype, ())


def test_a_dtype_that_cannot_be_generated_is_an_error() -> None:
    with pytest.raises(ModelError, match="which cannot be generated") as raised:
        dummy_inputs([TensorFacts("x", "sequence_type", (1,))], spec("random"))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.INVALID_INPUTS
    assert problem.location == "tool.epcontext.models[0].validate.inputs"


def test_an_invalid_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "inputs.npz"
    np.savez_compressed(path, x=np.zeros((2, 7), np.float32))
    whole = path.read_bytes()
    damaged = whole[:60] + bytes(8) + whole[68:]
    np.save(tmp_path / "single.npy", np.zeros(2))
    single = (tmp_path / "single.npy").read_bytes()
    for contents in (
        single,
        b"text",
        b"",
        b"PK\x03\x04 and no more",
        whole[: len(whole) // 2],
        damaged,
    ):
        path.write_bytes(contents)
        with pytest.raises(ModelError, match=r"is not an \.npz (file|of plain arrays)") as raised:
            dummy_inputs([X], spec(path))
        # NumPy's own advice is to load the file without any protection.
        assert "pickle" not in str(raised.value)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README", b"text")
    with pytest.raises(ModelError, match=r"is not an \.npz of plain arrays"):
        dummy_inputs([X], spec(path))


def test_an_array_that_promises_more_than_any_memory_is_an_error(tmp_path: Path) -> None:
    header = (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000)}".ljust(117) + "\n"
    )
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    (tmp_path / "plain.npz").write_bytes(array)
    with zipfile.ZipFile(tmp_path / "archive.npz", "w") as archive:
        archive.writestr("x.npy", array)
    for name in ("plain.npz", "archive.npz"):
        with pytest.raises(ModelError, match=r"is not an \.npz (file|of plain arrays)"):
            dummy_inputs([X], spec(tmp_path / name))


@pytest.mark.parametrize(
    ("sizes", "shapes", "place", "advice"),
    [
        ({"dims": {"n": 3}}, [(2, 3), (2, 7)], "dims.n", "dims.n = 7"),
        ({"dims": {"n": 3}}, [(2, 5), (2, 7)], "dims.n", "dims.n"),
        ({"shapes": {"x": (2, 3)}}, [(4, 7)], "shapes.x", "shapes.x = [2, 7]"),
    ],
)
def test_samples_of_other_sizes_are_an_error_at_the_sizes(
    tmp_path: Path, sizes: dict[str, Any], shapes: list[Any], place: str, advice: str
) -> None:
    for number, shape in enumerate(shapes):
        np.savez(tmp_path / f"{number}.npz", x=np.zeros(shape, np.float32))
    model = dataclasses.replace(spec(tmp_path), **sizes)
    fixed = dataclasses.replace(X, shape=(2, 3))
    with pytest.raises(ModelError, match="samples of other sizes: ") as raised:
        check_inputs([fixed], model, [X])
    (problem,) = raised.value.problems
    assert problem.location == f"tool.epcontext.models[0].{place}"
    assert str(problem.settings[0]) == f"tool.epcontext.models[0].{advice}"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with a path of that kind")
def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "inputs.npz")
    for path in (tmp_path, tmp_path / "inputs.npz"):
        with pytest.raises(ModelError, match="a pipe or a device"):
            dummy_inputs([X], spec(path))

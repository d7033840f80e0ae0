from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.errors import Key
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.worker.dummy.given import given_samples
from hatch_epcontext.worker.recorder import SAMPLES, _array, _Kept

Array = np.ndarray[Any, Any]


def keep(process: Path, *arrays: Array) -> list[Array]:
    """Offer each of ``arrays`` as a sample; the kept ones, in order."""
    kept = _Kept({"name": "a"})
    for each in arrays:
        kept.begin({"x": each}, process)
    files = sorted((process / "a").iterdir(), key=lambda file: int(file.stem.split("-")[0]))
    found = []
    for file in files:
        with np.load(file, allow_pickle=False) as archive:
            found.append(archive["x"])
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_sample_and_the_most_different_ones_are_kept(tmp_path: Path, order: int) -> None:
    noise = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    loud, quiet, silent, constant = 1000 * noise, 1e-4 * noise, 0 * noise, 0 * noise + 1
    others = [noise * (1 + index / 1000) for index in range(200)]
    rare = [loud, quiet, silent, constant]
    found = keep(tmp_path, noise, *(others + rare)[::order])
    assert len(found) == SAMPLES
    assert np.array_equal(found[0], noise)
    for each in rare:
        assert any(np.array_equal(each, one) for one in found)


def test_equal_samples_are_kept_once(tmp_path: Path) -> None:
    assert len(keep(tmp_path, *[np.ones(3)] * 20)) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 1, 1, 9]), np.array([1, 2, 3, 9])),
        (np.array(["a", "bc"], object), np.array(["a", "a"], object)),
        (np.array([True, False]), np.array([True, True])),
        (np.zeros((0, 3), np.float32), np.ones((1, 3), np.float32)),
        (np.array([np.nan, 1.0]), np.array([np.inf, 1.0])),
    ],
)
def test_values_of_all_types_are_told_apart_and_read_back(
    tmp_path: Path, one: Array, other: Array
) -> None:
    found = keep(tmp_path, one, other)
    assert len(found) == 2
    assert found[0].tolist() == one.tolist() or np.isnan(found[0]).any()


@pytest.mark.parametrize(
    ("type_", "packed", "numbers"),
    [
        # The first value is in the lowest bits of a byte.
        ("INT4", [0x81, 0x0F], [1, -8, -1]),
        ("UINT4", [0x81, 0x0F], [1, 8, 15]),
        ("INT2", [0b01_11_10_00, 0b01], [0, -2, -1, 1, 1]),
        ("FLOAT4E2M1", [0x71, 0x0A], [0.5, 6, -1]),
        ("FLOAT8E5M2", [0x3E, 0xC0], [1.5, -2]),
        ("BFLOAT16", [0xC0, 0x3F, 0x00, 0xC0], [1.5, -2]),
    ],
)
def test_types_that_numpy_lacks_are_kept_by_value(
    tmp_path: Path, type_: str, packed: list[int], numbers: list[float]
) -> None:
    number = TensorProto.DataType.Value(type_)
    shape = (len(numbers), 1)
    tensor = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, number)
    ctypes.memmove(tensor.data_ptr(), bytes(packed), len(packed))
    keep(tmp_path, _array(tensor, tensor.data_type()))
    dtype = helper.tensor_dtype_to_np_dtype(number).name
    ((_, sample),) = given_samples(tmp_path / "a", [TensorFacts("x", dtype, shape)], Key())
    assert sample["x"].astype(float).ravel().tolist() == numbers


def test_steps_of_a_sample_that_is_no_longer_kept_are_removed(tmp_path: Path) -> None:
    kept = _Kept({"name": "a"})
    same = np.full(4, 2.0)
    kept.begin({"x": np.ones(4)}, tmp_path)
    sequence = kept.begin({"x": same}, tmp_path)
    kept.add({"x": same}, sequence)
    assert (tmp_path / "a" / "2-2.npz").exists()
    for index in range(2, 10):
        kept.begin({"x": np.full(4, 1e3 * 10.0**index)}, tmp_path)
    kept.add({"x": same}, sequence)
    assert not list((tmp_path / "a").glob("2-*.npz"))

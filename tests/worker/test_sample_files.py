from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.errors import Key, ModelError
from hatch_epcontext.graph.dtypes import numpy_dtype
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.worker.inputs import read_samples

KEY = Key(("models", 0)) / "quantize" / "inputs"
INPUTS = (TensorFacts("x", "float32", (1, 3)), TensorFacts("n", "int64", ()))


def arrays(x: Any, n: Any, dtype: type[Any] = np.float32) -> dict[str, Any]:
    return {"x": np.zeros(x, dtype), "n": np.zeros(n, np.int64)}


def found(path: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(each["x"].shape, each["n"].shape) for _, each in read_samples(path, INPUTS, KEY)]


def names(path: Path) -> list[str]:
    return [name for name, _ in read_samples(path, INPUTS, KEY)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_arrays_of_types_that_numpy_lacks_keep_their_values(tmp_path: Path, dtype: str) -> None:
    array = np.array([[1, -2, 3]], numpy_dtype(dtype))
    raw = np.concatenate([array, array]).view(f"V{array.itemsize}")
    np.savez(tmp_path / "all.npz", x=raw)
    tensor = TensorFacts("x", dtype, (1, 3))
    samples = [sample["x"] for _, sample in read_samples(tmp_path, [tensor], KEY)]
    assert [sample.tolist() for sample in samples] == [array.tolist()] * 2


@pytest.mark.parametrize(
    ("x", "n", "number"), [((1, 3), (), 1), ((4, 3), (4,), 4), ((4, 1, 3), (4,), 4)]
)
def test_an_archive_has_as_many_as_its_first_axis(
    tmp_path: Path, x: tuple[int, ...], n: tuple[int, ...], number: int
) -> None:
    np.savez(tmp_path / "all.npz", **arrays(x, n))
    assert found(tmp_path / "all.npz") == [((1, 3), ())] * number


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (arrays((4, 3), (2,)), "different numbers of samples for its inputs: 4 for 'x', 2 for 'n'"),
        (arrays((1, 4), ()), r"float32 [1, 4] for the input 'x', which takes float32 1 x 3"),
        (arrays((1, 3), (), np.float64), "float64 [1, 3] for the input 'x'"),
        (arrays((0, 3), ()), "float32 [0, 3] for the input 'x'"),
        ({"x": np.zeros((1, 3), np.float32)}, "no array for the input 'n'"),
    ],
)
def test_samples_that_do_not_fit_are_an_error(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **given)
    with pytest.raises(ModelError) as raised:
        found(tmp_path)
    assert message in str(raised.value)
    assert "models[0].quantize.inputs" in str(raised.value)


def test_a_folder_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no sample: no \.npz"):
        found(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"is not an \.npz file"):
        found(tmp_path)


def test_samples_are_in_the_order_of_their_numbers_and_have_the_names_of_their_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a-10", "a-9", "b/a-1"):
        np.savez(tmp_path / f"{name}.npz", **arrays((1, 3), ()))
    (tmp_path / "notes.txt").touch()
    assert names(tmp_path) == ["a-9", "a-10", "b/a-1"]
    np.savez(tmp_path / "b" / "a-1.npz", **arrays((2, 3), (2,)))
    assert names(tmp_path / "b" / "a-1.npz") == ["a-1[0]", "a-1[1]"]

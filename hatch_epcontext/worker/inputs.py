"""Dummy inputs: made up, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from hatch_epcontext.errors import ModelError, Problem
from hatch_epcontext.protocol import ModelSpec, TensorFacts

Arrays = dict[str, NDArray[np.generic]]

SEED = 20240229


def dummy_inputs(kind: str, inputs: Sequence[TensorFacts], spec: ModelSpec) -> Arrays:
    """An array for each of ``inputs``, of its shape and dtype; open dimensions count as 1.

    ``kind``: ``"ones"``, ``"zeros"``, ``"random"`` (the same in every run: floats are normal, integers
    and booleans 0 or 1), or the path of an ``.npz`` or of a folder with ``input_*.pb``. Raises
    ModelError when the file does not hold what the model takes, or a dtype cannot be made up.
    """
    if kind in ("ones", "zeros", "random"):
        rng = np.random.default_rng(SEED)
        return {each.name: _made_up(kind, each, rng, spec) for each in inputs}
    path = Path(kind)
    found = _from_folder(path, inputs, spec) if path.is_dir() else _from_npz(path, spec)
    return {each.name: _checked(found, each, path, spec) for each in inputs}


def _refuse(spec: ModelSpec, what: str, fix: str = "") -> ModelError:
    return ModelError(Problem(f"{spec.key}.inputs", what, fix))


def _made_up(
    kind: str, tensor: TensorFacts, rng: np.random.Generator, spec: ModelSpec
) -> NDArray[np.generic]:
    shape = tuple(size if isinstance(size, int) else 1 for size in tensor.shape)
    try:
        dtype = np.dtype(tensor.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise _refuse(
            spec,
            f"the input {tensor.name!r} is {tensor.dtype}, which cannot be made up.",
            "Give an .npz with an array for each input.",
        )
    if kind == "ones":
        return np.ones(shape, dtype)
    if kind == "zeros":
        return np.zeros(shape, dtype)
    if dtype.kind == "f":
        return np.asarray(rng.standard_normal(shape)).astype(dtype)
    return np.asarray(rng.integers(0, 2, shape)).astype(dtype)


def _from_npz(path: Path, spec: ModelSpec) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise _refuse(spec, f"{path.name} is not an .npz of plain arrays: {error}.") from None


def _from_folder(path: Path, inputs: Sequence[TensorFacts], spec: ModelSpec) -> Arrays:
    """ONNX's test data: ``input_<n>.pb`` by the name inside, or else for the n-th input."""
    found: Arrays = {}
    names = [each.name for each in inputs]
    for file in sorted(path.glob("input_*.pb")):
        try:
            tensor = onnx.load_tensor(file)
            array = onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            raise _refuse(spec, f"{file.name} is not an ONNX tensor: {error}.") from None
        number = file.stem.removeprefix("input_")
        if tensor.name in names:
            found[tensor.name] = array
        elif number.isdigit() and int(number) < len(names):
            found[names[int(number)]] = array
    return found


def _checked(
    found: Mapping[str, NDArray[np.generic]], tensor: TensorFacts, path: Path, spec: ModelSpec
) -> NDArray[np.generic]:
    if tensor.name not in found:
        raise _refuse(
            spec,
            f"{path.name} has no array for the input {tensor.name!r}.",
            f"It has: {', '.join(sorted(found)) or 'none'}.",
        )
    array = found[tensor.name]
    if array.dtype.name != tensor.dtype or not (
        len(array.shape) == len(tensor.shape)
        and all(
            not isinstance(size, int) or size == given
            for given, size in zip(array.shape, tensor.shape, strict=True)
        )
    ):
        wanted = " x ".join(str(size) for size in tensor.shape)
        raise _refuse(
            spec,
            f"{path.name} has {array.dtype.name} {list(array.shape)} for the input "
            f"{tensor.name!r}, which takes {tensor.dtype} {wanted}.",
        )
    return array

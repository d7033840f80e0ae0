"""What is fed to a model: dummy inputs, made up or read from a file, and its constants."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import onnx

from hatch_epcontext.errors import ModelError, Problem
from hatch_epcontext.protocol import ModelSpec, TensorFacts
from hatch_epcontext.tables import MADE_UP
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.tensors import Array, is_float, numpy_dtype

SEED = 20240229

_WORDS = ("alpha", "beta")


def dummy_inputs(
    inputs: Sequence[TensorFacts], spec: ModelSpec, bounds: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """An array for each of ``inputs``, of its shape and dtype, as ``spec.inputs`` says.

    ``"ones"``, ``"zeros"``, ``"random"`` (the same in every run: floats are normal, integers
    below their bound in ``bounds`` or else 0 or 1 like booleans, strings one of two words; open
    dimensions count as 1), or the path of an ``.npz`` or of a folder with ``input_*.pb``. Raises
    ModelError when the file does not hold what the model takes, or a dtype cannot be made up.
    """
    if spec.inputs in MADE_UP:
        rng = np.random.default_rng(SEED)
        limits = bounds or {}
        return {each.name: _sized(each, rng, limits.get(each.name, 2), spec) for each in inputs}
    path = Path(spec.inputs)
    found = _from_folder(path, "input", inputs, spec) if path.is_dir() else _from_npz(path, spec)
    return {each.name: _checked(found, each, path, spec) for each in inputs}


def expected_outputs(outputs: Sequence[TensorFacts], spec: ModelSpec) -> dict[str, Array]:
    """What ONNX's test data say should come out: ``output_*.pb`` beside the inputs, if there are any."""
    path = Path(spec.inputs)
    if spec.inputs in MADE_UP or not path.is_dir():
        return {}
    return _from_folder(path, "output", outputs, spec)


def constant(spec: ModelSpec, value: onnx.ValueInfoProto) -> Array:
    """The constant of ``spec`` for an input, of its dtype, and of its rank if it is a single number.

    Raises TypeError, ValueError or OverflowError when it does not fit the dtype.
    """
    facts = graph.facts(value)
    array: Array = np.asarray(spec.constants[value.name], dtype=numpy_dtype(facts.dtype))
    if len(facts.shape) != array.ndim and array.size == 1:
        array = array.reshape([1] * len(facts.shape))
    return array


def _refuse(spec: ModelSpec, what: str, fix: str = "") -> ModelError:
    return ModelError(Problem(f"{spec.key}.inputs", what, fix))


def _sized(tensor: TensorFacts, rng: np.random.Generator, bound: int, spec: ModelSpec) -> Array:
    try:
        return _made_up(tensor, rng, bound, spec)
    except (ValueError, MemoryError):
        # NumPy's words for sizes that it cannot count, and for those that the machine does not have.
        raise _refuse(
            spec,
            f"the input {tensor.name!r} ({tensor.words}) is too large to be made up on this machine.",
            "See that dims and shapes are what they should be.",
        ) from None


def _made_up(tensor: TensorFacts, rng: np.random.Generator, bound: int, spec: ModelSpec) -> Array:
    shape = tuple(size if isinstance(size, int) else 1 for size in tensor.shape)
    try:
        dtype = numpy_dtype(tensor.dtype)
    except TypeError:
        raise _refuse(
            spec,
            f"the input {tensor.name!r} is {tensor.dtype}, which cannot be made up.",
            "Give an .npz with an array for each input.",
        ) from None
    if tensor.dtype == "string":
        chosen = rng.integers(0, 2, shape) if spec.inputs == "random" else np.zeros(shape, int)
        return np.array(_WORDS, dtype=object)[chosen]
    if spec.inputs == "zeros":
        return np.zeros(shape, dtype)
    if spec.inputs == "ones":
        return np.ones(shape, dtype)
    if is_float(dtype) or dtype.kind == "c":
        return np.asarray(rng.standard_normal(shape)).astype(dtype)
    return np.asarray(rng.integers(0, max(bound, 1), shape)).astype(dtype)


_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    BadZipFile,
    zlib.error,
    # A single array, which is no archive: the one before Python 3.11, the other since.
    AttributeError,
    TypeError,
)


def _from_npz(path: Path, spec: ModelSpec) -> dict[str, Array]:
    try:
        # Opened here, for NumPy leaves open what it cannot read.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except _UNREADABLE as error:
        raise _refuse(spec, f"{path.name} is not an .npz of plain arrays: {error}.") from None
    # NumPy's own strings are of a fixed length; ONNX Runtime wants Python's.
    return {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in found.items()}


def _from_folder(
    path: Path, what: str, tensors: Sequence[TensorFacts], spec: ModelSpec
) -> dict[str, Array]:
    """ONNX's test data: ``<what>_<n>.pb`` by the name inside, or else for the n-th tensor."""
    found: dict[str, Array] = {}
    names = [each.name for each in tensors]
    for file in sorted(path.glob(f"{what}_*.pb")):
        try:
            tensor = onnx.load_tensor(file)
            array = onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            raise _refuse(spec, f"{file.name} is not an ONNX tensor: {error}.") from None
        number = file.stem.removeprefix(f"{what}_")
        if tensor.data_type == onnx.TensorProto.STRING:
            array = np.array([s.decode() for s in tensor.string_data], object).reshape(array.shape)
        if tensor.name in names:
            found[tensor.name] = array
        elif number.isdigit() and int(number) < len(names):
            found[names[int(number)]] = array
    return found


def _checked(found: Mapping[str, Array], tensor: TensorFacts, path: Path, spec: ModelSpec) -> Array:
    if tensor.name not in found:
        raise _refuse(
            spec,
            f"{path.name} has no array for the input {tensor.name!r}.",
            f"It has: {', '.join(sorted(found)) or 'none'}.",
        )
    array = found[tensor.name]
    if array.dtype != numpy_dtype(tensor.dtype) or not tensor.takes(array.shape):
        raise _refuse(
            spec,
            f"{path.name} has {array.dtype.name} {list(array.shape)} for the input "
            f"{tensor.name!r}, which takes {tensor.dtype} {tensor.words or 'no dimensions'}.",
        )
    return array

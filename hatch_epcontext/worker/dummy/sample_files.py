"""Samples of the inputs of a model in files."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.files import unreadable
from hatch_epcontext.graph.dtypes import Array, is_extended, numpy_dtype
from hatch_epcontext.graph.facts import TensorFacts


def read_samples(
    path: Path, inputs: Sequence[TensorFacts], key: Key
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the samples at ``path``, one at a time: an array for each of ``inputs``, of its dtype and shape.

    ``path`` is an ``.npz``, or a folder of such files, which are read in natural order. Each sample is named
    after its file in the folder, without ``.npz``. An archive whose arrays are longer along the first axis
    than the model's input, or have one axis more, has several samples. Raises ModelError, at ``key``, when
    there is no sample, when an array is missing, has another dtype or shape, or when arrays of one archive
    have different numbers of samples.
    """
    for file in _files(path, key):
        name = file.name if file == path else file.relative_to(path).as_posix()
        samples = list(_split(_read_npz(file, key), file, inputs, key))
        for number, sample in enumerate(samples):
            index = f"[{number}]" if len(samples) > 1 else ""
            yield f"{name.removesuffix('.npz')}{index}", sample


def _files(path: Path, key: Key) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = list(path.rglob("*.npz"))
    if not files:
        message = f"{path.name} has no sample: no .npz."
        hint = "Save one .npz for each sample, with an array for each input: numpy.savez."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))
    return sorted(files, key=_natural)


def _natural(path: Path) -> tuple[list[str | int], Path]:
    """A sorting key with ``a-10`` after ``a-9``."""
    parts = enumerate(re.split(r"([0-9]+)", path.as_posix()))
    return [int(part) if index % 2 else part for index, part in parts], path


def _split(
    arrays: Mapping[str, Array], file: Path, inputs: Sequence[TensorFacts], key: Key
) -> Iterator[dict[str, Array]]:
    parts = {tensor.name: _parts(arrays, tensor, file, key) for tensor in inputs}
    counts = {name: len(of_input) for name, of_input in parts.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{number} for {name!r}" for name, number in counts.items())
        message = f"{file.name} has different numbers of samples for its inputs: {listed}."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message))
    for index in range(next(iter(counts.values()), 1)):
        yield {name: of_input[index] for name, of_input in parts.items()}


def _parts(
    arrays: Mapping[str, Array], tensor: TensorFacts, file: Path, key: Key
) -> Sequence[Array]:
    """The samples of one input in an archive."""
    if tensor.name not in arrays:
        message = f"{file.name} has no array for the input {tensor.name!r}."
        hint = f"It has: {', '.join(sorted(arrays)) or 'none'}."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))
    array, dtype = arrays[tensor.name], numpy_dtype(tensor.dtype)
    # NumPy keeps the bytes of types that it lacks.
    if is_extended(dtype) and array.dtype == np.dtype(f"V{dtype.itemsize}"):
        array = array.view(dtype)
    fits = array.dtype == dtype
    if fits and tensor.takes(array.shape):
        return [array]
    if fits and array.size:
        if tensor.takes(array.shape[1:]):
            return list(array)
        batch = tensor.shape[0] if tensor.shape else 0
        if isinstance(batch, int) and batch and len(array) % batch == 0:
            parts = np.split(array, len(array) // batch)
            if tensor.takes(parts[0].shape):
                return parts
    message = (
        f"{file.name} has {array.dtype.name} {list(array.shape)} for the input {tensor.name!r}, which "
        f"takes {tensor.dtype} {tensor.shape_text or 'no dimensions'}."
    )
    hint = "Save arrays in the shapes of the model's inputs, or several of them along a first axis."
    raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))


_UNREADABLE = (
    OSError,
    # A header can claim any size.
    MemoryError,
    ValueError,
    EOFError,
    BadZipFile,
    zlib.error,
    # For a single array instead of an archive: the first before Python 3.11, the second from it on.
    AttributeError,
    TypeError,
)


def _read_npz(path: Path, key: Key) -> dict[str, Array]:
    """Return the arrays in an ``.npz``; raises ModelError, at ``key``, if it is invalid."""
    _refuse_pipe(path, key)
    try:
        # Opened here, because NumPy does not close a file that it cannot read.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: _plain_array(file[name]) for name in file.files}
    except _UNREADABLE as error:
        message = f"{path.name} is not an .npz of plain arrays: {error}."
        if not is_zipfile(path):
            # NumPy treats any other file as a pickle.
            message = f"{path.name} is not an .npz file."
        hint = "Save it with numpy.savez, with an array for each input."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint)) from None
    # NumPy's strings have a fixed length; ONNX Runtime needs Python's.
    return {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in arrays.items()}


def _plain_array(member: object) -> Array:
    """``member`` of an archive; raises TypeError if it is not an array."""
    if not isinstance(member, np.ndarray):
        raise TypeError("it has other files too")
    return member


def _refuse_pipe(path: Path, key: Key) -> None:
    """Raise ModelError, at ``key``, if ``path`` is not a regular file: reading a pipe may not end."""
    if rejection := unreadable(path):
        message = f"{path.name} {rejection.message}"
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, rejection.hint))

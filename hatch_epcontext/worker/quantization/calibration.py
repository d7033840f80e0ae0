"""The inputs for which a model is quantized, read from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph.arrays import Array, numpy_dtype
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.worker.dummy.inputs import array_for, misfit, read_arrays

Sample = dict[str, Array]


def sample_files(path: Path, key: Key) -> list[Path]:
    """Return the files and folders of samples at ``path``, sorted.

    ``path`` is an ``.npz``, a folder with ``input_*.pb``, or a folder of such files and folders. Raises
    ModelError, at ``key``, when it has none.
    """
    if path.is_file() or _is_test_data(path):
        return [path]
    found = sorted(each for each in path.rglob("*") if each.suffix == ".npz" or _is_test_data(each))
    if not found:
        message = f"{path.name} has no sample: no .npz, and no folder with input_*.pb."
        hint = "Save one .npz for each sample, with an array for each input: numpy.savez."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))
    return found


def _is_test_data(path: Path) -> bool:
    return path.is_dir() and any(path.glob("input_*.pb"))


def samples(path: Path, inputs: Sequence[TensorFacts], key: Key) -> Iterator[Sample]:
    """Yield the samples at ``path``, one at a time: an array for each of ``inputs``, of its dtype and shape.

    An archive whose arrays have more along the first axis than the model takes, or one axis more, has
    several. Raises ModelError, at ``key``, when an array is missing, has another dtype or shape, or when
    arrays of one archive have different numbers of samples.
    """
    for file in sample_files(path, key):
        yield from _split(read_arrays(file, inputs, key), file, inputs, key)


def _split(
    found: Mapping[str, Array], file: Path, inputs: Sequence[TensorFacts], key: Key
) -> Iterator[Sample]:
    parts = {each.name: _parts(found, each, file, key) for each in inputs}
    counts = {name: len(its) for name, its in parts.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{number} for {name!r}" for name, number in counts.items())
        message = f"{file.name} has different numbers of samples for its inputs: {listed}."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message))
    for index in range(next(iter(counts.values()), 0)):
        yield {name: its[index] for name, its in parts.items()}


def _parts(
    found: Mapping[str, Array], tensor: TensorFacts, file: Path, key: Key
) -> Sequence[Array]:
    """The samples of one input in an archive."""
    array = array_for(found, tensor, file, key)
    if array.dtype == numpy_dtype(tensor.dtype) and array.size:
        if tensor.takes(array.shape):
            return [array]
        if tensor.takes(array.shape[1:]):
            return list(array)
        batch = tensor.shape[0] if tensor.shape else 0
        if isinstance(batch, int) and batch and len(array) % batch == 0:
            parts = np.split(array, len(array) // batch)
            if tensor.takes(parts[0].shape):
                return parts
    hint = "Save arrays as the model takes them, or many of them along a first axis."
    raise misfit(array, tensor, file, key, hint)

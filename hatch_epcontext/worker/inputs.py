"""Dummy inputs of a model, generated or from files, and its constants."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import onnx

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem, Setting
from hatch_epcontext.files import unreadable
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Array, is_extended, numpy_dtype
from hatch_epcontext.graph.facts import Range, Size, TensorFacts
from hatch_epcontext.text import MAX_NAMED, listing
from hatch_epcontext.worker.samples import MANY, Sample, given_samples, samples
from hatch_epcontext.worker.synthetic import RANDOM, generated_inputs, generator

_SAME = {"zeros": Range(0.0, 0.0, known=False), "ones": Range(1.0, 1.0, known=False)}
"""The ranges of inputs whose values are all the same, whatever the graph requires."""

MAX_GIVEN = 64
"""The most given samples that are run on the CPU: they and their outputs are in memory at once."""

_MAX_VALUES = 2**29
"""The most values of a generated input: generating them takes 4 GiB."""


def check_inputs(
    inputs: Sequence[TensorFacts], model: Model, open_inputs: Sequence[TensorFacts] = ()
) -> None:
    """Raise ModelError if `dummy_inputs` cannot return an array for each of ``inputs``.

    The samples do not fit the model, or a dtype or size cannot be generated. ``open_inputs``: the inputs
    before ``model`` fixed their sizes, so that the error names these where samples have others.
    """
    if model.validate.inputs not in SYNTHETIC:
        path, key = Path(model.validate.inputs), _key(model)
        try:
            for _ in itertools.islice(read_samples(path, inputs, key), MAX_GIVEN):
                pass
        except ModelError:
            # If they can be read for open sizes, nothing but their sizes is wrong.
            problem = None
            with contextlib.suppress(ModelError):
                read = itertools.islice(read_samples(path, open_inputs, key), MAX_GIVEN)
                problem = _other_sizes(read, open_inputs, model)
            if problem is not None:
                raise ModelError(problem) from None
            raise
        return
    key = _key(model)
    for tensor in sized(inputs, model):
        try:
            numpy_dtype(tensor.dtype)
        except TypeError:
            message = f"the input {tensor.name!r} has the dtype {tensor.dtype}, which cannot be generated."
            raise _invalid(key, message, "Give an .npz with an array for each input.") from None
        if math.prod(size if isinstance(size, int) else 1 for size in tensor.sizes) > _MAX_VALUES:
            message = (
                f"the input {tensor.name!r} ({tensor.shape_text}) is too large to be generated."
            )
            settings = (Setting(model.key_of(name)) for name in ("dims", "shapes"))
            raise _invalid(key, message, "Check the sizes of the model's inputs.", *settings)


def _other_sizes(
    named: Iterable[tuple[str, Mapping[str, Array]]], inputs: Sequence[TensorFacts], model: Model
) -> Problem | None:
    """The problem of ``named`` samples that have other sizes than ``model`` gives to its open ``inputs``."""
    sizes: dict[Key, list[Any]] = {}
    for _, sample in named:
        for tensor, own in zip(inputs, sized(inputs, model), strict=True):
            shape = sample[tensor.name].shape
            for axis, (name, size, fed) in enumerate(
                zip(tensor.sizes, own.sizes, shape, strict=False)
            ):
                # Of a larger batch each row, or several, is a sample.
                is_batch = axis == 0 and isinstance(size, int) and size > 0 and fed % size == 0
                if isinstance(name, int) or not isinstance(size, int) or size == fed or is_batch:
                    continue
                if isinstance(name, str) and tensor.name not in model.shapes:
                    sizes.setdefault(model.key_of("dims") / name, []).append(fed)
                else:
                    sizes.setdefault(model.key_of("shapes") / tensor.name, []).append([*shape])
    if not sizes:
        return None
    fed = ", ".join(
        f"{key.parts[-1]} = {listing(dict.fromkeys(map(str, values)), MAX_NAMED)}"
        for key, values in sizes.items()
    )
    message = f"{Path(model.validate.inputs).name} has samples of other sizes: {fed}."
    hint = (
        "Compile the model for the sizes that the app feeds, or give samples of the compiled size."
    )
    settings = (
        Setting(key, values[0] if all(value == values[0] for value in values) else None)
        for key, values in sizes.items()
    )
    return Problem.at(next(iter(sizes)), Kind.INVALID_INPUTS, message, hint, *settings)


def ignored_inputs(main: onnx.GraphProto, model: Model) -> Iterator[str]:
    """Yield the inputs that are frozen in ``main``, and have other values in the files of
    ``model.validate.inputs``.
    """
    if model.validate.inputs in SYNTHETIC:
        return
    key = _key(model)
    stored = {tensor.name: tensor for tensor in main.initializer}
    ignored = {
        name
        for file in _files(Path(model.validate.inputs), key)
        for name, array in _read_npz(file, key, stored).items()
        if not _repeats(array, graph.array_of(stored[name]))
    }
    yield from sorted(ignored)


def _repeats(array: Array, value: Array | None) -> bool:
    """Whether each sample of ``array`` is ``value``, which is None if it is unknown."""
    if value is None or not value.size:
        return True
    return array.size % value.size == 0 and bool(
        (array.reshape(-1, value.size) == value.ravel()).all()
    )


def dummy_inputs(
    inputs: Sequence[TensorFacts], model: Model, ranges: Mapping[str, Range] | None = None
) -> dict[str, Array]:
    """Return an array for each of ``inputs``, of its shape and dtype, as ``model.validate.inputs`` requires.

    This is ``"ones"``, ``"zeros"``, ``"random"``, or a path: then they are the first sample of
    `read_samples`. Random values are the same in every run, and within their range in ``ranges``: without a
    range, floats have a normal distribution, integers are 0 or 1 like booleans, and strings are one of two
    words. An open dimension gets its size in ``model``, or else 1. Raises ModelError as `check_inputs` does.
    """
    kind = model.validate.inputs
    if kind not in SYNTHETIC:
        _, first = next(read_samples(Path(kind), inputs, _key(model)))
        return first
    check_inputs(inputs, model)
    if kind != "random":
        ranges = {tensor.name: _SAME[kind] for tensor in inputs}
    return generated_inputs(RANDOM, sized(inputs, model), ranges or {}, generator())


def samples_of(
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Mapping[str, Range],
    multiply_adds: int = 1,
    states: Mapping[str, str] = MappingProxyType({}),
    most: int = MANY,
) -> tuple[Sample, ...]:
    """Return different samples, the first of which is what `dummy_inputs` returns.

    Of given files they are the first `MAX_GIVEN`, else see `samples`. Raises ModelError as `dummy_inputs`
    does.
    """
    kind = model.validate.inputs
    if kind in SYNTHETIC:
        first = Sample(kind, (dummy_inputs(inputs, model, ranges),), kind)
        return samples(first, sized(inputs, model), ranges, multiply_adds, states, most)
    read = read_samples(Path(kind), inputs, _key(model))
    return given_samples([*itertools.islice(read, MAX_GIVEN)], states)


def sized(inputs: Sequence[TensorFacts], model: Model) -> list[TensorFacts]:
    """Return ``inputs`` with the sizes that ``model`` has for their open dimensions."""
    shapes = {tensor.name: model.shapes.get(tensor.name, tensor.shape) for tensor in inputs}
    sizes: dict[Size, Size] = dict(model.dims.items())
    for tensor in inputs:
        # A named dimension has one size in the whole model.
        for name, size in zip(tensor.sizes, shapes[tensor.name] or (), strict=False):
            if isinstance(name, str) and isinstance(size, int):
                sizes.setdefault(name, size)
    return [
        replace(tensor, shape=shape and tuple(sizes.get(size, size) for size in shape))
        for tensor, shape in zip(inputs, shapes.values(), strict=True)
    ]


def constant(model: Model, facts: TensorFacts) -> Array:
    """Return the constant of ``model`` for an input, in its dtype; a single number fills a fixed shape, and
    gets the rank of others.

    Raises TypeError, ValueError or OverflowError when it does not fit the dtype.
    """
    dtype = numpy_dtype(facts.dtype)
    if is_extended(dtype):
        # ml_dtypes turns 8 into -8 for int4.
        raise TypeError("NumPy lacks this type; store the value inside the model instead")
    array: Array = np.asarray(model.constants[facts.name], dtype=dtype)
    if facts.is_fixed and not array.ndim:
        array = np.full([size for size in facts.sizes if isinstance(size, int)], array)
    elif facts.shape is not None and len(facts.shape) != array.ndim and array.size == 1:
        array = array.reshape([1] * len(facts.shape))
    return array


def _key(model: Model) -> Key:
    return model.key / "validate" / "inputs"


def _invalid(key: Key, message: str, hint: str | None = None, *settings: Setting) -> ModelError:
    return ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint, *settings))


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
        raise _invalid(key, message, hint)
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
        raise _invalid(key, message)
    for index in range(next(iter(counts.values()), 1)):
        yield {name: of_input[index] for name, of_input in parts.items()}


def _parts(
    arrays: Mapping[str, Array], tensor: TensorFacts, file: Path, key: Key
) -> Sequence[Array]:
    """The samples of one input in an archive."""
    if tensor.name not in arrays:
        message = f"{file.name} has no array for the input {tensor.name!r}."
        hint = f"It has: {', '.join(sorted(arrays)) or 'none'}."
        raise _invalid(key, message, hint)
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
    raise _invalid(key, message, hint)


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


def _read_npz(path: Path, key: Key, names: Container[str] | None = None) -> dict[str, Array]:
    """Return the arrays in an ``.npz``, or those with these ``names``; raises ModelError, at ``key``, if it
    is invalid.
    """
    # Reading a pipe may not end.
    if rejection := unreadable(path):
        message = f"{path.name} {rejection.message}"
        raise _invalid(key, message, rejection.hint)
    try:
        # Opened here, because NumPy does not close a file that it cannot read.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {
                name: _plain_array(file[name])
                for name in file.files
                if names is None or name in names
            }
    except _UNREADABLE as error:
        message = f"{path.name} is not an .npz of plain arrays: {error}."
        if not is_zipfile(path):
            # NumPy treats any other file as a pickle.
            message = f"{path.name} is not an .npz file."
        hint = "Save it with numpy.savez, with an array for each input."
        raise _invalid(key, message, hint) from None
    # NumPy's strings have a fixed length; ONNX Runtime needs Python's.
    return {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in arrays.items()}


def _plain_array(member: object) -> Array:
    """``member`` of an archive; raises TypeError if it is not an array."""
    if not isinstance(member, np.ndarray):
        raise TypeError("it has other files too")
    return member

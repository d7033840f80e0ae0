"""Dummy inputs of a model, generated or read from a file, and its constants."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
import onnx

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem, Setting
from hatch_epcontext.files import unreadable
from hatch_epcontext.graph.arrays import Array, numpy_dtype
from hatch_epcontext.graph.facts import Range, Size, TensorFacts
from hatch_epcontext.worker.dummy.synthetic import RANDOM, ZEROS, Pattern, assumed_range, values

_SEED = 20240229

_SAME = {"zeros": Range(0.0, 0.0, known=False), "ones": Range(1.0, 1.0, known=False)}
"""The ranges of the inputs of which all values are to be the same, whatever the graph says."""

_MAX_VALUES = 2**29
"""Values of a generated input: 4 GiB while they are made."""


def dummy_inputs(
    inputs: Sequence[TensorFacts], model: Model, ranges: Mapping[str, Range] | None = None
) -> dict[str, Array]:
    """Return an array for each of ``inputs``, of its shape and dtype, as ``model.validate.inputs`` says.

    These are ``"ones"``, ``"zeros"``, ``"random"``, or the path of an ``.npz`` or of a folder
    with ``input_*.pb``. Random values are the same in every run, and within their range in ``ranges``:
    without one, floats have a normal distribution, integers are 0 or 1 like booleans, and strings are one
    of two words. An open dimension gets its size in ``model``, or else 1. Raises ModelError when the file
    does not fit the model, or a dtype cannot be generated.
    """
    if model.validate.inputs == "random":
        return generated_inputs(RANDOM, inputs, model, ranges or {})
    if (same := _SAME.get(model.validate.inputs)) is not None:
        return generated_inputs(ZEROS, inputs, model, {each.name: same for each in inputs})
    path, key = Path(model.validate.inputs), _key(model)
    found = read_arrays(path, inputs, key)
    arrays = {each.name: array_for(found, each, path, key) for each in inputs}
    for each in inputs:
        array = arrays[each.name]
        if array.dtype != numpy_dtype(each.dtype) or not each.takes(array.shape):
            raise misfit(array, each, path, key)
    return arrays


def generated_inputs(
    pattern: Pattern,
    inputs: Sequence[TensorFacts],
    model: Model,
    ranges: Mapping[str, Range],
    *,
    number: int = 0,
    steps: int | None = None,
) -> dict[str, Array]:
    """Return synthetic values for ``inputs``; see `dummy_inputs`.

    ``number``: another one gives other random values. With ``steps`` the arrays have a first axis of that
    size, along which signals go on.
    """
    rng = np.random.default_rng([_SEED, number] if number else _SEED)
    more = () if steps is None else (steps,)
    return {
        each.name: _generate(
            pattern, replace(each, shape=(*more, *each.shape)), rng, ranges.get(each.name), model
        )
        for each in sized(inputs, model)
    }


def sized(inputs: Sequence[TensorFacts], model: Model) -> list[TensorFacts]:
    """Return ``inputs`` with the sizes that ``model`` has for their open dimensions."""
    shapes = {e.name: model.shapes.get(e.name, e.shape) for e in inputs}
    sizes: dict[Size, Size] = dict(model.dims.items())
    for each in inputs:
        # A named dimension has one size in the whole model.
        for size, given in zip(each.shape, shapes[each.name], strict=True):
            if isinstance(size, str) and isinstance(given, int):
                sizes.setdefault(size, given)
    return [
        replace(each, shape=tuple(sizes.get(size, size) for size in shapes[each.name]))
        for each in inputs
    ]


def expected_outputs(outputs: Sequence[TensorFacts], model: Model) -> dict[str, Array]:
    """Return the outputs that ONNX's test data record: ``output_*.pb`` beside the inputs, if any."""
    path = Path(model.validate.inputs)
    if model.validate.inputs in SYNTHETIC or not path.is_dir():
        return {}
    return _read_folder(path, "output", outputs, _key(model))


def constant(model: Model, facts: TensorFacts) -> Array:
    """Return the constant of ``model`` for an input: of its dtype, and of its rank if it is one number.

    Raises TypeError, ValueError or OverflowError when it does not fit the dtype.
    """
    array: Array = np.asarray(model.constants[facts.name], dtype=numpy_dtype(facts.dtype))
    if len(facts.shape) != array.ndim and array.size == 1:
        array = array.reshape([1] * len(facts.shape))
    return array


def _key(model: Model) -> Key:
    return model.key / "validate" / "inputs"


def _invalid(model: Model, message: str, hint: str | None = None, *settings: Setting) -> ModelError:
    return ModelError(Problem.at(_key(model), Kind.INVALID_INPUTS, message, hint, *settings))


def _generate(
    pattern: Pattern,
    tensor: TensorFacts,
    rng: np.random.Generator,
    range_: Range | None,
    model: Model,
) -> Array:
    count = math.prod(size if isinstance(size, int) else 1 for size in tensor.shape)
    try:
        if count <= _MAX_VALUES:
            return values(pattern, tensor, range_ or assumed_range(tensor), rng)
    except TypeError:
        raise _invalid(
            model,
            f"the input {tensor.name!r} has the dtype {tensor.dtype}, which cannot be generated.",
            "Give an .npz with an array for each input.",
        ) from None
    except (ValueError, MemoryError):
        # NumPy's errors for a size that it cannot count, and for more memory than there is.
        pass
    raise _invalid(
        model,
        f"the input {tensor.name!r} ({tensor.shape_text}) is too large to be generated.",
        "Check the sizes of the model's inputs.",
        Setting(model.place("dims")),
        Setting(model.place("shapes")),
    )


_UNREADABLE = (
    OSError,
    # A header can promise any size.
    MemoryError,
    ValueError,
    EOFError,
    BadZipFile,
    zlib.error,
    # For a single array instead of an archive: the first before Python 3.11, the second since.
    AttributeError,
    TypeError,
)


def read_arrays(path: Path, inputs: Sequence[TensorFacts], key: Key) -> dict[str, Array]:
    """Return the arrays in an ``.npz`` or a folder; raises ModelError, at ``key``, if it is none."""
    return _read_folder(path, "input", inputs, key) if path.is_dir() else _read_npz(path, key)


def _read_npz(path: Path, key: Key) -> dict[str, Array]:
    """Return the arrays in an ``.npz``; raises ModelError, at ``key``, if it is none."""
    _refuse_pipe(path, key)
    try:
        # Opened here, because NumPy does not close a file that it cannot read.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            found = {name: _plain_array(file[name]) for name in file.files}
    except _UNREADABLE as error:
        message = f"{path.name} is not an .npz of plain arrays: {error}."
        if not is_zipfile(path):
            # NumPy takes any other file for an unsafe format of its own.
            message = f"{path.name} is not an .npz file."
        hint = "Save it with numpy.savez, with an array for each input."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint)) from None
    # NumPy's own strings have a fixed length; ONNX Runtime takes Python's.
    return {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in found.items()}


def _plain_array(found: object) -> Array:
    """``found``, a part of an archive; raises TypeError if it is another file."""
    if not isinstance(found, np.ndarray):
        raise TypeError("it has other files too")
    return found


def _read_folder(
    path: Path, prefix: str, tensors: Sequence[TensorFacts], key: Key
) -> dict[str, Array]:
    """Return ONNX's test data: ``<prefix>_<n>.pb`` for the tensor that it names, or else the n-th.

    Raises ModelError, at ``key``, when a file is no tensor.
    """
    found: dict[str, Array] = {}
    names = [each.name for each in tensors]
    for file in sorted(path.glob(f"{prefix}_*.pb")):
        _refuse_pipe(file, key)
        try:
            tensor = onnx.load_tensor(file)
            array = onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            message = f"{file.name} is not an ONNX tensor: {error}."
            raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message)) from None
        number = file.stem.removeprefix(f"{prefix}_")
        if tensor.data_type == onnx.TensorProto.STRING:
            array = np.array([s.decode() for s in tensor.string_data], object).reshape(array.shape)
        if tensor.name in names:
            found[tensor.name] = array
        elif number.isdigit() and int(number) < len(names):
            found[names[int(number)]] = array
    return found


def _refuse_pipe(path: Path, key: Key) -> None:
    """Raise ModelError, at ``key``, if ``path`` is no file: reading from a pipe would not end."""
    if rejection := unreadable(path):
        message = f"{path.name} {rejection.message}"
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, rejection.hint))


def array_for(found: Mapping[str, Array], tensor: TensorFacts, path: Path, key: Key) -> Array:
    """The array for an input in the file ``path``; raises ModelError, at ``key``, if there is none."""
    if tensor.name not in found:
        message = f"{path.name} has no array for the input {tensor.name!r}."
        hint = f"It has: {', '.join(sorted(found)) or 'none'}."
        raise ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))
    return found[tensor.name]


def misfit(
    array: Array, tensor: TensorFacts, path: Path, key: Key, hint: str | None = None
) -> ModelError:
    """The error at ``key`` for an ``array`` of the file ``path`` that an input does not take."""
    message = (
        f"{path.name} has {array.dtype.name} {list(array.shape)} for the input {tensor.name!r}, which "
        f"takes {tensor.dtype} {tensor.shape_text or 'no dimensions'}."
    )
    return ModelError(Problem.at(key, Kind.INVALID_INPUTS, message, hint))

"""Dummy inputs of a model, generated or from files, and its constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem, Setting
from hatch_epcontext.graph.dtypes import Array, is_extended, numpy_dtype
from hatch_epcontext.graph.facts import Range, Size, TensorFacts
from hatch_epcontext.worker.dummy.sample_files import read_samples
from hatch_epcontext.worker.dummy.synthetic import RANDOM, ZEROS, Pattern, assumed_range, values

_SEED = 20240229

_SAME = {"zeros": Range(0.0, 0.0, known=False), "ones": Range(1.0, 1.0, known=False)}
"""The ranges of inputs whose values are all the same, whatever the graph requires."""

_MAX_VALUES = 2**29
"""The most values of a generated input: generating them takes 4 GiB."""


def check_inputs(inputs: Sequence[TensorFacts], model: Model) -> None:
    """Raise ModelError if `dummy_inputs` cannot return an array for each of ``inputs``.

    The file does not fit the model, or a dtype or size cannot be generated.
    """
    if model.validate.inputs not in SYNTHETIC:
        next(read_samples(Path(model.validate.inputs), inputs, _key(model)))
        return
    for tensor in sized(inputs, model):
        try:
            numpy_dtype(tensor.dtype)
        except TypeError:
            raise _invalid(
                model,
                f"the input {tensor.name!r} has the dtype {tensor.dtype}, which cannot be generated.",
                "Give an .npz with an array for each input.",
            ) from None
        if math.prod(size if isinstance(size, int) else 1 for size in tensor.sizes) > _MAX_VALUES:
            raise _invalid(
                model,
                f"the input {tensor.name!r} ({tensor.shape_text}) is too large to be generated.",
                "Check the sizes of the model's inputs.",
                Setting(model.place("dims")),
                Setting(model.place("shapes")),
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
    if kind == "random":
        return generated_inputs(RANDOM, sized(inputs, model), ranges or {}, generator())
    same = {tensor.name: _SAME[kind] for tensor in inputs}
    return generated_inputs(ZEROS, sized(inputs, model), same, generator())


def generator(number: int = 0) -> np.random.Generator:
    """Random numbers that are the same in every run, for the sample with this ``number``."""
    return np.random.default_rng([_SEED, number] if number else _SEED)


def generated_inputs(
    pattern: Pattern,
    inputs: Iterable[TensorFacts],
    ranges: Mapping[str, Range],
    rng: np.random.Generator,
    *,
    steps: int | None = None,
) -> dict[str, Array]:
    """Return synthetic values for ``inputs``, which are `sized`; see `dummy_inputs`.

    With ``steps`` the arrays have a first axis of that size, along which signals continue.
    """
    if steps is not None:
        inputs = [replace(tensor, shape=(steps, *tensor.sizes)) for tensor in inputs]
    return {
        tensor.name: values(pattern, tensor, ranges.get(tensor.name) or assumed_range(tensor), rng)
        for tensor in inputs
    }


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
    """Return the constant of ``model`` for an input, in its dtype; a single number also gets its rank.

    Raises TypeError, ValueError or OverflowError when it does not fit the dtype.
    """
    dtype = numpy_dtype(facts.dtype)
    if is_extended(dtype):
        # ml_dtypes turns 8 into -8 for int4.
        raise TypeError("NumPy lacks this type; store the value inside the model instead")
    array: Array = np.asarray(model.constants[facts.name], dtype=dtype)
    if facts.shape is not None and len(facts.shape) != array.ndim and array.size == 1:
        array = array.reshape([1] * len(facts.shape))
    return array


def _key(model: Model) -> Key:
    return model.key / "validate" / "inputs"


def _invalid(model: Model, message: str, hint: str | None = None, *settings: Setting) -> ModelError:
    return ModelError(Problem.at(_key(model), Kind.INVALID_INPUTS, message, hint, *settings))

"""Tensors of every ONNX type in sessions: their types, values, and whether they are finite."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.dtypes import Array, Arrays, is_extended, is_float
from hatch_epcontext.worker.results import Agreement, AgreementStatus
from hatch_epcontext.worker.session import open_unoptimized


def run(session: ort.InferenceSession, feeds: Arrays) -> dict[str, Array]:
    """Return the outputs of ``session`` by name, of every dtype that ONNX Runtime runs."""
    outputs = session.get_outputs()
    names = [output.name for output in outputs]
    lacking = any(_numpy_lacks(output.type) for output in outputs)
    mixed = {
        name: _to_value(array) if lacking or is_extended(array.dtype) else array
        for name, array in feeds.items()
    }
    if not lacking:
        return dict(zip(names, session.run(names, mixed), strict=True))
    values = session.run_with_ort_values(names, mixed)
    return {name: _to_array(value) for name, value in zip(names, values, strict=True)}


@functools.cache
def elem_type(type_: str) -> int | None:
    """ONNX's number for ONNX Runtime's name of a type ("tensor(int4)"); None if that is no dense tensor."""
    name = type_.removeprefix("tensor(").removesuffix(")").upper()
    known: dict[str, int] = dict(onnx.TensorProto.DataType.items())
    return known.get(name)


@functools.cache
def _numpy_lacks(type_: str) -> bool:
    """Whether ONNX Runtime cannot return a tensor of ``type_`` as a NumPy array ("tensor(bfloat16)")."""
    number = elem_type(type_)
    return number is not None and is_extended(onnx.helper.tensor_dtype_to_np_dtype(number))


def _to_value(array: Array) -> ort.OrtValue:
    if not is_extended(array.dtype):
        return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
    # As in a file: integers and floats of four bits and fewer share bytes.
    tensor = onnx.numpy_helper.from_array(array)
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), tensor.data_type)
    ctypes.memmove(value.data_ptr(), tensor.raw_data, len(tensor.raw_data))
    return value


def _to_array(value: ort.OrtValue) -> Array:
    if not _numpy_lacks(value.data_type()):
        array: Array = value.numpy()
        return array
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    tensor = onnx.TensorProto(
        data_type=elem_type(value.data_type()), dims=value.shape(), raw_data=raw
    )
    return onnx.numpy_helper.to_array(tensor)


def not_finite(outputs: Arrays, reference: Arrays) -> list[Agreement]:
    """The agreements of outputs with NaN or Inf, unless ``reference`` has them there too.

    With a reference, outputs that it lacks are ignored.
    """
    agreements = []
    for name, output in outputs.items():
        if not is_float(output.dtype) or (reference and name not in reference):
            continue
        bad = ~np.isfinite(output.astype(np.float64))
        if bad.any() and name in reference and reference[name].shape == output.shape:
            bad &= np.isfinite(reference[name].astype(np.float64))
        if bad.any():
            end = " where the CPU has none." if name in reference else "."
            count = f"{int(bad.sum())} of {bad.size} values"
            reason = f"the output {name!r} has NaN or Inf in {count}{end}"
            status = AgreementStatus.NOT_FINITE
            agreements.append(Agreement(name, 0.0, None, status=status, reason=reason))
    return agreements


def value_types(model: onnx.ModelProto, path: Path) -> dict[str, onnx.TypeProto]:
    """The known types of the values of ``model``, which is in the file ``path``.

    onnx infers none after operators of other domains; there ONNX Runtime does.
    """
    main = inference.inferred(model)
    types = {value.name: value.type for value in (*main.value_info, *main.output)}
    if all(node.domain in graph.STANDARD for node in main.node):
        return types
    names = dict.fromkeys(name for node in main.node for name in node.output if name)
    unknown = [name for name in names if name not in types]
    return types | types_of_runtime(model, path, unknown)


def types_of_runtime(
    model: onnx.ModelProto, path: Path, names: Iterable[str]
) -> dict[str, onnx.TypeProto]:
    """The types of the values ``names`` of ``model`` as ONNX Runtime, with its own operators, infers them.

    Empty if it cannot open the model, which is in the file ``path``.
    """
    names = list(names)
    # It reports the types of outputs only.
    extended = graph.with_outputs(model, names)
    try:
        session = open_unoptimized(extended.SerializeToString(), path)
    except Exception:
        # The types stay unknown, and running the model reports why it does not open.
        return {}
    outputs = {output.name: output for output in session.get_outputs()}
    return {
        # It reports no dimensions for an unknown rank too.
        name: onnx.helper.make_tensor_type_proto(number, outputs[name].shape or None)
        for name in names
        if name in outputs and (number := elem_type(outputs[name].type)) is not None
    }

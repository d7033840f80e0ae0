"""Runs sessions: with arrays of every ONNX dtype, and checks that results are finite."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.graph.dtypes import Array, Arrays, is_extended, is_float, numpy_dtype
from hatch_epcontext.worker.results import Agreement, AgreementStatus


def run(session: ort.InferenceSession, feeds: Arrays) -> dict[str, Array]:
    """Return the outputs of ``session`` by name, of every dtype that ONNX Runtime runs."""
    names = [output.name for output in session.get_outputs()]
    lacking = any(_numpy_lacks(output.type) for output in session.get_outputs())
    mixed = {
        name: _to_value(array) if lacking or is_extended(array.dtype) else array
        for name, array in feeds.items()
    }
    if not lacking:
        return dict(zip(names, session.run(names, mixed), strict=True))
    outputs = session.run_with_ort_values(names, mixed)
    return {name: _to_array(value) for name, value in zip(names, outputs, strict=True)}


@functools.cache
def elem_type(type_: str) -> int | None:
    """ONNX's number for ONNX Runtime's name of a type ("tensor(int4)"); None if that is no dense tensor."""
    name = type_.removeprefix("tensor(").removesuffix(")").upper()
    known: dict[str, int] = dict(onnx.TensorProto.DataType.items())
    return known.get(name)


def can_run(dtype: str) -> bool:
    """Whether ONNX Runtime has tensors of a `TensorFacts` dtype."""
    if dtype == "string":
        return True
    number = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([0], number)
    except RuntimeError:
        return False
    return True


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
    """The agreements of outputs with NaN or Inf, unless ``reference`` has them in the same place.

    With a reference, outputs that it lacks are ignored.
    """
    agreements = []
    for name, output in outputs.items():
        if not is_float(output.dtype) or (reference and name not in reference):
            continue
        bad = ~np.isfinite(output.astype(np.float64))
        if name in reference and reference[name].shape == output.shape:
            bad &= np.isfinite(reference[name].astype(np.float64))
        if bad.any():
            end = " where the CPU has none." if name in reference else "."
            count = f"{int(bad.sum())} of {bad.size} places"
            reason = f"the output {name!r} has NaN or Inf in {count}{end}"
            status = AgreementStatus.NOT_FINITE
            agreements.append(Agreement(name, 0.0, None, status=status, reason=reason))
    return agreements

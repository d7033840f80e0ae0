"""Arrays of every ONNX dtype: their NumPy dtypes, and how they are fed to a session and compared."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.ipc.facts import Agreement
from hatch_epcontext.providers import Tolerance

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]

_NOISE = 0.01
"""The part of ``atol`` by which an output may be wrong on average, whatever its direction: with the
0.05 of an EP that computes in float16, that is the rounding of a value near 1."""

_STRING = np.dtype(object)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of a `TensorFacts` dtype, from ml_dtypes where NumPy has none.

    Raises TypeError when neither has one.
    """
    if name == "string":
        return _STRING
    if hasattr(ml_dtypes, name):
        name = getattr(ml_dtypes, name)
    dtype: np.dtype[np.generic] = np.dtype(name)
    return dtype


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether ``dtype`` is a floating-point type, ml_dtypes' included."""
    # In ml_dtypes, integers of four bits and fewer have the kind "V" too.
    return dtype.kind == "f" or (dtype.kind == "V" and "int" not in dtype.name)


class TooSlowError(Exception):
    """A run was ended, because it took too long."""


def run(
    session: ort.InferenceSession, feeds: Arrays, seconds: float | None = None
) -> dict[str, Array]:
    """Return the outputs of ``session`` by name, of every dtype that ONNX Runtime runs.

    Raises TooSlowError when it takes longer than ``seconds``.
    """
    names = [output.name for output in session.get_outputs()]
    natural = all(array.dtype.kind != "V" for array in feeds.values())
    with _limited(seconds) as options:
        if natural and not any(_is_exotic(output.type) for output in session.get_outputs()):
            return dict(zip(names, session.run(names, dict(feeds), options), strict=True))
        values = {name: _to_value(array) for name, array in feeds.items()}
        outputs = session.run_with_ort_values(names, values, options)
        return {name: _to_array(value) for name, value in zip(names, outputs, strict=True)}


@contextlib.contextmanager
def _limited(seconds: float | None) -> Iterator[ort.RunOptions]:
    """Options of a run that ends at its next node, also inside a loop, after ``seconds``."""
    options = ort.RunOptions()
    if seconds is None:
        yield options
        return
    ended = threading.Event()

    def end() -> None:
        ended.set()
        options.terminate = True

    # No thread can wait for longer.
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield options
    except Exception as error:
        if ended.is_set():
            raise TooSlowError from error
        raise
    finally:
        timer.cancel()


def _is_exotic(type_: str) -> bool:
    """Whether ONNX Runtime cannot return a tensor of ``type_`` as a NumPy array ("tensor(bfloat16)")."""
    return "bfloat16" in type_ or "float8" in type_ or "int4" in type_


def _to_value(array: Array) -> ort.OrtValue:
    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    raw = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    elem_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, elem_type)


def _to_array(value: ort.OrtValue) -> Array:
    if not _is_exotic(value.data_type()):
        array: Array = value.numpy()
        return array
    name = value.data_type().removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype(getattr(ml_dtypes, name.replace("float8", "float8_")))
    count = int(np.prod(value.shape()))
    raw = ctypes.string_at(value.data_ptr(), count * dtype.itemsize)
    result: Array = np.frombuffer(raw, dtype).reshape(value.shape())
    return result


def refuse_not_finite(outputs: Arrays, reference: Arrays) -> None:
    """Raise BuildError for NaN and Inf, unless ``reference`` has them in the same place.

    With a reference, outputs that it does not have are ignored.
    """
    problems = []
    for name, output in outputs.items():
        if not is_float(output.dtype) or (reference and name not in reference):
            continue
        bad = ~np.isfinite(output.astype(np.float64))
        if name in reference and reference[name].shape == output.shape:
            bad &= np.isfinite(reference[name].astype(np.float64))
        if bad.any():
            end = " where the CPU has none." if name in reference else "."
            count = f"{int(bad.sum())} of {bad.size} places"
            message = f"the output {name!r} has NaN or Inf in {count}{end}"
            problems.append(Problem(Kind.NOT_FINITE, "", message))
    if problems:
        raise BuildError(*problems)


def compare(name: str, output: Array, reference: Array, tolerance: Tolerance) -> Agreement:
    """Compare ``output`` with ``reference``; places where either is not finite are ignored.

    Strings and booleans are equal or not. Raises BuildError when the shapes differ.
    """
    if output.shape != reference.shape:
        raise BuildError(
            Problem(
                Kind.OUTPUT_SHAPE,
                "",
                f"the output {name!r} has the shape {list(output.shape)}, but "
                f"{list(reference.shape)} on the CPU.",
            )
        )
    a, b = _numbers(output, reference)
    if not a.size:
        return Agreement(name, 0.0, 1.0)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # All zeros have no direction: they agree with all zeros only.
    cosine = float(a @ b) / norms if norms else float(np.array_equal(a, b))
    error = np.abs(a - b)
    rounding = float(np.sqrt((error**2).mean())) <= _NOISE * _atol(b, tolerance)
    only_rounding = rounding and cosine < tolerance.cosine
    return Agreement(name, float(error.max()), None if only_rounding else min(cosine, 1.0))


def within(output: Array, reference: Array, agreement: Agreement, tolerance: Tolerance) -> bool:
    """Whether ``output`` differs from ``reference`` by no more than ``tolerance`` allows."""
    a, b = _numbers(output, reference)
    if not a.size:
        return True
    if (np.abs(a - b) > _atol(b, tolerance) + tolerance.rtol * np.abs(b)).any():
        return False
    return agreement.cosine is None or agreement.cosine >= tolerance.cosine


def _atol(reference: NDArray[np.float64], tolerance: Tolerance) -> float:
    return tolerance.atol * max(1.0, float(np.abs(reference).max()))


def _numbers(output: Array, reference: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if reference.dtype == _STRING:
        # As numbers, equal strings become 1 and 1, and different ones 0 and 1.
        ones = np.ones(reference.size)
        return (output.ravel() == reference.ravel()).astype(np.float64), ones
    a = np.asarray(output, dtype=np.float64).ravel()
    b = np.asarray(reference, dtype=np.float64).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    return a[finite], b[finite]

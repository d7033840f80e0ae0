"""Arrays of every ONNX dtype: their NumPy dtypes, and feeding them to a session."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.graph.arrays import Array, Arrays, is_float


class TooSlowError(Exception):
    """A run took too long and was ended."""


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


@dataclass
class _TimedRun:
    """A run that is ended at ``end``, in seconds of the monotonic clock, at its next node."""

    options: ort.RunOptions
    end: float
    is_ended: bool = False


class _Watch(threading.Thread):
    """Ends runs that take too long: one thread for all, as starting one takes as long as a small model."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._run: _TimedRun | None = None
        self._wakes = 0.0
        self._changed = threading.Event()
        self.stopped = False

    def begin(self, run: _TimedRun | None) -> None:
        """Watch ``run`` instead of the one before."""
        self._run = run
        # The thread reads the run after it has set its time to wake, so it misses none.
        if run is not None and run.end < self._wakes:
            self._changed.set()

    def stop(self) -> None:
        """End the thread."""
        self.stopped = True
        self._changed.set()
        self.join()

    def run(self) -> None:
        """Sleep until the limit of the current run, or until the next run."""
        while not self.stopped:
            run = self._run
            self._wakes = math.inf if run is None else run.end
            if run is not self._run:
                continue
            left = self._wakes - time.monotonic()
            if run is not None and left <= 0:
                run.is_ended = run.options.terminate = True
                self._run = None
                continue
            self._changed.wait(None if run is None else min(left, threading.TIMEOUT_MAX))
            self._changed.clear()


_watches: list[_Watch] = []


def end_watch() -> None:
    """End the thread that watches runs before this process is forked; the next run starts another one."""
    while _watches:
        _watches.pop().stop()


@contextlib.contextmanager
def _limited(seconds: float | None) -> Iterator[ort.RunOptions]:
    """Options for a run that ends at its next node, also inside a loop, after ``seconds``."""
    options = ort.RunOptions()
    if seconds is None:
        yield options
        return
    if not _watches:
        _watches.append(_Watch())
        _watches[0].start()
    run = _TimedRun(options, time.monotonic() + seconds)
    _watches[0].begin(run)
    try:
        yield options
    except Exception as error:
        if run.is_ended:
            raise TooSlowError from error
        raise
    finally:
        _watches[0].begin(None)


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

    With a reference, outputs that it lacks are ignored.
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

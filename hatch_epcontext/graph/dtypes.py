"""Arrays and their dtypes, also those of ONNX that NumPy lacks."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.graph.facts import TensorFacts

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]
Numbers = NDArray[np.float64]

STRING = np.dtype(object)
"""The dtype of strings."""

MAX_EXACT = 2.0**53
"""The integer up to which floats represent all integers."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype of a `TensorFacts` dtype, from ml_dtypes where NumPy has none.

    Raises TypeError when neither has one.
    """
    if name == "string":
        return STRING
    if hasattr(ml_dtypes, name):
        name = getattr(ml_dtypes, name)
    dtype: np.dtype[np.generic] = np.dtype(name)
    return dtype


def is_extended(dtype: np.dtype[np.generic]) -> bool:
    """Whether ``dtype`` is one of those that NumPy lacks, and ml_dtypes adds."""
    return dtype.isbuiltin == 2


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether ``dtype`` is a floating-point type, ml_dtypes' included."""
    # Those of ml_dtypes have any kind.
    return "float" in dtype.name if is_extended(dtype) else dtype.kind == "f"


def dtype_bounds(facts: TensorFacts) -> tuple[float, float]:
    """The smallest and the largest integer of an input's dtype, as far as floats represent all integers."""
    info = ml_dtypes.iinfo(numpy_dtype(facts.dtype))  # type: ignore[no-untyped-call]
    return max(float(info.min), -MAX_EXACT), min(float(info.max), MAX_EXACT)

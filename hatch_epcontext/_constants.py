# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Sessions of models with inputs that the build froze to a value (``constants``).

This module is beside the loader only where a model has ``constants``. It is a copy of
``hatch_epcontext/_constants.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def session_class(ort: Any, constants: Mapping[str, Any]) -> Any:
    """A session class that takes the inputs that the build froze, and checks their values.

    With it the source model, which still has these inputs, is called like the compiled ones. ``constants``
    are as the manifest has them. Raises ValueError if a value does not fit its dtype.
    """
    # As arrays: `run_async` needs them until it is done.
    arrays = {name: _array(name, each) for name, each in constants.items()}

    class SessionWithConstants(ort.InferenceSession):  # type: ignore[misc]
        def get_inputs(self) -> Any:
            return [each for each in super().get_inputs() if each.name not in arrays]

        def run(self, output_names: Any, input_feed: Any, *more: Any, **named: Any) -> Any:
            return super().run(output_names, self._feed(input_feed), *more, **named)

        def run_async(self, output_names: Any, input_feed: Any, *more: Any, **named: Any) -> Any:
            return super().run_async(output_names, self._feed(input_feed), *more, **named)

        def _feed(self, given: Mapping[str, Any]) -> dict[str, Any]:
            feed = dict(given)
            needed = {each.name for each in super().get_inputs()}
            for name, value in arrays.items():
                if name in feed and not np.array_equal(np.ravel(feed.pop(name)), value.ravel()):
                    raise ValueError(
                        f"the input {name!r} was frozen to {value.tolist()!r} when the model was "
                        "compiled, and has another value here"
                    )
                if name in needed:
                    feed[name] = value
            return feed

    return SessionWithConstants


def _array(name: str, constant: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The value of a frozen input; one number has the rank that the model takes."""
    try:
        dtype = "object" if constant["dtype"] == "string" else constant["dtype"]
        array = np.asarray(constant["value"], dtype)
    except Exception as error:
        raise ValueError(f"the constant {name!r} in the manifest is not valid ({error})") from None
    return array.reshape([1] * len(constant["shape"])) if array.size == 1 else array

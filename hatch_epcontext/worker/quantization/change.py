"""Write models without their quantization, and say in disagreements that their numbers were changed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Dequantize
from hatch_epcontext.errors import BuildError, Key, ModelError
from hatch_epcontext.graph.dequantize import dequantize
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.text import count
from hatch_epcontext.worker.progress import step


def write_dequantized(source: Path, result: Path, how: Dequantize) -> str | None:
    """Write the model at ``source`` without its quantization to ``result``.

    Returns what was done in words; None if there was nothing to undo, and then nothing is written.
    """
    step("undoing the quantization of the model")
    model = onnx.load(source)
    undone = dequantize(model, static=how == "all")
    if not undone:
        return None
    large = model.ByteSize() > PROTOBUF_LIMIT
    onnx.save(model, result, save_as_external_data=large, location=f"{result.name}.data")
    return f"dequantized ({count(undone, 'operator')})"


@contextlib.contextmanager
def explained(done: str | None, key: Key) -> Iterator[None]:
    """Say in a disagreement with the source what was ``done`` to the numbers of the model."""
    try:
        yield
    except ModelError:
        raise
    except BuildError as error:
        if done is None:
            raise
        raise BuildError(
            *(
                dataclasses.replace(
                    problem, message=f"{problem.message}\nThe model was {done} before."
                )
                for problem in error.problems
            )
        ) from error

"""Source models as files: problems are those of their place in the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.files import is_lfs_pointer
from hatch_epcontext.graph import external, graph, reading


def read_source(path: Path, key: Key) -> onnx.ModelProto:
    """Read the source model at ``path``, whose place is ``key``, without its external data.

    Raises ModelError when the file is not a source model, or is damaged.
    """
    with _placed(key, f"{path.name} "):
        if is_lfs_pointer(path):
            raise _invalid("is a Git LFS pointer, not the model itself.", "Run: git lfs pull")
        if not path.stat().st_size:
            raise _invalid("is empty.")
        model = reading.load(path)
        if not model.graph.output:
            what = "output" if model.graph.node else "node"
            raise _invalid(f"is not an ONNX model: its graph has no {what}.")
        if not model.graph.node:
            raise _invalid("has nothing to compile: its outputs are inputs or stored values.")
        parts: list[graph.Part] = [model.graph, *model.functions]
        if any(node.op_type == graph.CONTEXT_OP for part in parts for node in graph.nodes(part)):
            hint = "Name the source model instead."
            raise ModelError(Problem(Kind.COMPILED_MODEL, "", "is a context model already.", hint))
        return model


def data_of(model: onnx.ModelProto, path: Path, key: Key) -> tuple[str, ...]:
    """The files of the external data of ``model``, as `external_data` returns and refuses them."""
    with _placed(key):
        return external.external_data(model, path)


@contextlib.contextmanager
def _placed(key: Key, start: str = "") -> Iterator[None]:
    """Give problems the place ``key``, and their messages this ``start``."""
    try:
        yield
    except ModelError as error:
        raise ModelError(
            *(
                replace(problem, location=str(key), key=key, message=f"{start}{problem.message}")
                for problem in error.problems
            )
        ) from None


def _invalid(message: str, hint: str | None = None) -> ModelError:
    return ModelError(Problem(Kind.INVALID_MODEL, "", message, hint))

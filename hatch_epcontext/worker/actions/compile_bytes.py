"""Compile a model from memory to memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.versions import keep_metadata, lower_versions
from hatch_epcontext.worker.compiler import compile_buffers, explained
from hatch_epcontext.worker.configured import open_dimension_message
from hatch_epcontext.worker.requests import CompileBytesReply, CompileBytesRequest
from hatch_epcontext.worker.sources import read_source


def handle(request: CompileBytesRequest) -> CompileBytesReply:
    """Write the context model of the request's model, with the compiled blob inside, to its ``result``.

    Nothing is written beside the model. Raises ModelError when it is not a source model, or has open
    dimensions and the EP compiles only fixed shapes; BuildError when the EP is unavailable or compiles
    nothing.
    """
    path, provider = Path(request.model), request.target.provider
    source = _read(path)
    if provider.static_shapes and (problems := list(_open_dimensions(source, provider.ep))):
        raise ModelError(*problems)
    data = {location: Path(file).read_bytes() for location, file in request.data.items()}
    with explained(provider, lambda: source.graph):
        compiled = compile_buffers(path.read_bytes(), data, request.target)
    context = onnx.load_model_from_string(compiled)
    keep_metadata(source, context)
    lower_versions(context)
    onnx.save(context, request.result)
    return CompileBytesReply(Path(request.result).stat().st_size)


def _read(path: Path) -> onnx.ModelProto:
    try:
        return read_source(path, Key())
    except ModelError as error:
        # The model has no place in a configuration.
        problems = (replace(problem, location="", key=None) for problem in error.problems)
        raise ModelError(*problems) from None


def _open_dimensions(source: onnx.ModelProto, ep: str) -> Iterator[Problem]:
    for tensor in map(graph.facts, graph.inputs(source.graph)):
        if not tensor.is_fixed:
            message = open_dimension_message([tensor], ep)
            yield Problem(Kind.OPEN_DIMENSION, "", message, "Give the model fixed shapes.")

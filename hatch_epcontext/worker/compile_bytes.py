"""Compile a model from memory to memory."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.ipc.protocol import CompileBytesReply, CompileBytesRequest
from hatch_epcontext.worker.compiler import compile_buffers, explained
from hatch_epcontext.worker.session import provider_of


def handle(request: CompileBytesRequest) -> CompileBytesReply:
    """Write the context model of the request's model, with the compiled blob inside, to its ``result``.

    Nothing is written beside the model. Raises BuildError when the EP is unavailable or compiles
    nothing.
    """
    model = Path(request.model).read_bytes()
    data = {location: Path(path).read_bytes() for location, path in request.data.items()}
    with explained(provider_of(request.target), lambda: onnx.ModelProto.FromString(model).graph):
        compiled = compile_buffers(model, data, request.target)
    Path(request.result).write_bytes(compiled)
    return CompileBytesReply(len(compiled))

"""Measure how long sessions take to open: of the prepared source model, and of its artifact."""

from __future__ import annotations

import time
from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.ipc.protocol import MeasureReply, MeasureRequest
from hatch_epcontext.worker.session import context_options, open_session, options


def handle(request: MeasureRequest) -> MeasureReply:
    """Open the context, then the prepared source, then the context again, each on the target.

    The first time does not count: it includes loading the EP's libraries, which both need.
    """
    context = Path(request.folder) / request.context.model_file

    def load_context() -> float:
        return _seconds(context, context_options(request.target, request.product))

    load_context()
    source = options(request.target, request.target.settings.provider_options)
    return MeasureReply(_seconds(Path(request.prepared), source), load_context())


def _seconds(model: Path, session_options: ort.SessionOptions) -> float:
    start = time.perf_counter()
    open_session(model, session_options)
    return time.perf_counter() - start

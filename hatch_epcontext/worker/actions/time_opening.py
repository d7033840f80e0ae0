"""Open one model once, and run its first inference, in a process that has done nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from hatch_epcontext.worker.requests import TimeOpeningReply, TimeOpeningRequest
from hatch_epcontext.worker.session import (
    context_options,
    cpu_options,
    open_session,
    options,
    set_model_path,
)


def handle(request: TimeOpeningRequest) -> TimeOpeningReply:
    """Open the request's model on its target, and run it once on dummy inputs.

    The time does not include registering the EP's library, nor reading the file of a buffer.
    """
    path = Path(request.path)
    if request.target is None:
        session_options = cpu_options()
    elif request.product is None:
        session_options = options(request.target, request.target.settings.provider_options)
    else:
        session_options = context_options(request.target, request.product)
    contents = None
    if request.buffer:
        set_model_path(path, session_options)
        contents = path.read_bytes()
    start = time.perf_counter()
    session = open_session(path if contents is None else contents, session_options)
    load = time.perf_counter() - start

    # Imported after the measurement, because importing is no part of it.
    from hatch_epcontext.worker.inputs import dummy_inputs
    from hatch_epcontext.worker.tensors import run

    model = request.model
    feeds = dummy_inputs(request.inputs, model, request.ranges)
    start = time.perf_counter()
    run(session, feeds)
    return TimeOpeningReply(load, time.perf_counter() - start)

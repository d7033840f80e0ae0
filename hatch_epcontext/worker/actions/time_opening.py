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
)


def handle(request: TimeOpeningRequest) -> TimeOpeningReply:
    """Open the request's model on its target, and run it once on dummy inputs.

    The time does not include registering the EP's library.
    """
    if request.target is None:
        session_options = cpu_options()
    elif request.compiled:
        session_options = context_options(request.target)
    else:
        session_options = options(request.target, request.target.settings.provider_options)
    start = time.perf_counter()
    session = open_session(Path(request.path), session_options)
    load = time.perf_counter() - start

    # Imported after the measurement, because importing is no part of it.
    from hatch_epcontext.worker.inputs import dummy_inputs
    from hatch_epcontext.worker.ort_values import run

    model = request.model
    feeds = dummy_inputs(request.inputs, model, request.ranges)
    start = time.perf_counter()
    run(session, feeds)
    return TimeOpeningReply(load, time.perf_counter() - start)

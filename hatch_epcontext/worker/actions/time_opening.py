"""Open one model once, and run it, in a process that has done nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from hatch_epcontext.worker.requests import TimeOpeningReply, TimeOpeningRequest
from hatch_epcontext.worker.session import (
    context_options,
    cpu_options,
    open_session,
    options,
    runs_on_simulator,
    set_model_path,
)

_WARM_UP = 5
"""The runs after the first one that are not measured: caches fill, and clocks rise."""


def handle(request: TimeOpeningRequest) -> TimeOpeningReply:
    """Open the request's model on its target, and run it on dummy inputs.

    The time does not include registering the EP's library, or reading what is opened from a buffer.
    """
    if request.target is None:
        session_options = cpu_options()
    elif request.compiled:
        session_options = context_options(request.target)
    else:
        session_options = options(request.target, request.target.settings.provider_options)
    path = Path(request.path)
    model_file: Path | bytes = path
    if request.from_buffer:
        model_file = path.read_bytes()
        set_model_path(path, session_options)
    start = time.perf_counter()
    session = open_session(model_file, session_options)
    load = time.perf_counter() - start

    # Imported after the measurement, because importing is no part of it.
    from hatch_epcontext.worker.inputs import dummy_inputs
    from hatch_epcontext.worker.ort_values import run

    model = request.model
    feeds = dummy_inputs(request.inputs, model, request.ranges)
    simulated = request.target is not None and runs_on_simulator(request.target)
    times = list[float]()
    for _ in range(1 if simulated else 1 + _WARM_UP + request.runs):
        start = time.perf_counter()
        run(session, feeds)
        times.append(time.perf_counter() - start)
    return TimeOpeningReply(load, times[0], tuple(times[1 + _WARM_UP :]), simulated)

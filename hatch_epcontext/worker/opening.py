"""One opening of one model, and its first inference, in a process that has done nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hatch_epcontext.protocol import OpenReply, OpenRequest
from hatch_epcontext.worker.session import context_options, open_session, options, use_bytes_of


def open_once(request: OpenRequest) -> OpenReply:
    """Open the request's model on its target, and run it once on dummy inputs.

    What is read and registered beforehand is not counted: the EP's library, and for a buffer the file.
    """
    path = Path(request.path)
    made = (
        options(request.target, request.target.provider_options)
        if request.product is None
        else context_options(request.target, request.product)
    )
    contents = None
    if request.buffer:
        use_bytes_of(path, made)
        contents = path.read_bytes()
    start = time.perf_counter()
    session = open_session(path if contents is None else contents, made)
    load = time.perf_counter() - start
    memory = _peak_memory()

    # Not before: they have memory of their own.
    from hatch_epcontext.worker.inputs import dummy_inputs
    from hatch_epcontext.worker.tensors import run

    feeds = dummy_inputs(request.inputs, request.model, request.bounds)
    start = time.perf_counter()
    run(session, feeds)
    return OpenReply(load, time.perf_counter() - start, memory)


def _peak_memory() -> int | None:
    """The most bytes that this process has had in memory; None where that is not known."""
    if sys.platform == "linux":
        # Not `ru_maxrss`, in which a child begins with the peak of its parent.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None

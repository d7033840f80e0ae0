"""What to suggest for a model that is not configured yet."""

from __future__ import annotations

from pathlib import Path

from hatch_epcontext.errors import BuildError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.worker.requests import InspectReply, SuggestReply, SuggestRequest


def suggest(path: Path, facts: InspectReply, workers: Workers) -> SuggestReply:
    """Return sizes for the open dimensions of the ONNX file at ``path``, and constants; as few as are found.

    ``facts`` are those of the file. Sizes are tried on the CPU, if ONNX Runtime can run the model.
    """
    if not any(_can_be_fixed(each) for each in facts.inputs):
        return SuggestReply()
    for run in (True, False):
        request = SuggestRequest(str(path.resolve()), run)
        with temp_dir() as folder:
            try:
                return workers.call(request, folder / "suggest", location=str(path))
            except BuildError:
                continue
    return SuggestReply()


def _can_be_fixed(tensor: TensorFacts) -> bool:
    return not tensor.is_fixed or ("int" in tensor.dtype and tensor.shape in ((), (1,)))

"""The nodes of a model that an EP cannot compile, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import (
    BuildError,
    EpcontextError,
    Kind,
    Problem,
    RequirementError,
    Setting,
)
from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION
from hatch_epcontext.jobs.cache.index import Index
from hatch_epcontext.jobs.cut_models import cut_models
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment, requirements
from hatch_epcontext.tools.inspecting import READING
from hatch_epcontext.worker.requests import (
    UNDO,
    FindRefusedReply,
    FindRefusedRequest,
    PreviewReply,
    PreviewRequest,
)


@dataclass(frozen=True)
class Preview:
    """Facts of one model on one target.

    ``ep``: ONNX Runtime's name of the EP. ``known``: from this package. ``asked``: from the EP itself, and
    ``not_asked``: why there are none, as a sentence.
    """

    ep: str
    known: PreviewReply
    asked: FindRefusedReply | None
    not_asked: str | None


def preview(config: Config) -> Preview:
    """Find the nodes that the only target of ``config`` cannot compile of its only model; compile nothing.

    Raises BuildError when the model does not fit its configuration, and RequirementError when onnx is not
    installed.
    """
    check_environment((), READING)
    workers = Workers(config.build.timeout)
    with temp_dir() as folder:
        (model,) = cut_models(config, Index(), workers, folder).models
        (target,) = model.targets
        fixed = model.on(target)
        request = PreviewRequest(fixed, target)
        known = workers.call(request, folder / "preview", location=model.name)
        if target.provider.reasons is None:
            reason = f"{target.provider.ep} does not report which nodes it refuses."
            return Preview(target.provider.ep, known, None, reason)
        if known.problems:
            reason = f"{target.provider.ep} itself was not tried because of that."
            return Preview(target.provider.ep, known, None, reason)
        (folder / "prepared").mkdir()
        ask = FindRefusedRequest(fixed, target, str(folder / "prepared"))
        try:
            check_environment((target,), requirements((target,)))
            asked = workers.call(ask, folder / "ask", location=model.name)
        except (BuildError, RequirementError) as error:
            reason = f"{target.provider.ep} itself could not be tried: {_first_line(error)}"
            return Preview(target.provider.ep, known, None, reason)
    dynamic = any(node.op in DYNAMIC_QUANTIZATION for node in asked.refused)
    if dynamic and not target.settings.dequantize:
        message = f"{target.provider.ep} does not support all of the model's dynamic quantization."
        setting = Setting(fixed.key / "dequantize", True)
        problem = Problem.at(fixed.key, Kind.LOW_COVERAGE, message, UNDO, setting)
        known = replace(known, problems=(*known.problems, problem))
    return Preview(target.provider.ep, known, asked, None)


def _first_line(error: EpcontextError) -> str:
    return error.problems[0].message.splitlines()[0]

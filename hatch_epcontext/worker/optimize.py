"""Write a model as ONNX Runtime optimizes it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Target
from hatch_epcontext.graph.builder import renamed
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.worker.session import LEVELS, cpu_options, near, open_session, options

_FUSIONS = ("ConvAddFusion", "ConvBNFusion", "ConvMulFusion")
"""ONNX Runtime's names of the optimizers that fold other nodes into the weights of convolutions."""

_INSERTED = "InsertedPrecisionFreeCast_"
"""The prefix of the float32 form of a float16 value. ONNX Runtime uses it in each graph and optimization, and
refuses its own result if two names are equal."""


def optimize(
    source: Path,
    result: Path,
    level: str,
    target: Target | None = None,
    *,
    fuse: bool = True,
) -> ort.InferenceSession:
    """Write ``source`` to ``result`` as ONNX Runtime optimizes it for the EP of ``target``.

    Returns the session that wrote it and runs the same graph. Without ``target`` it is optimized for the CPU
    EP. ``level``: ``"none"`` or ``"basic"``, which are the same for all EPs and need only the CPU's;
    ``"extended"`` or ``"all"``, which insert operators that only that EP can run. External data stays
    external. Without ``fuse`` nothing is folded into the weights of convolutions. Raises UnavailableError
    when the EP is needed and unavailable.
    """
    if target is None or level in ("none", "basic"):
        session_options = cpu_options()
    else:
        session_options = options(target, target.settings.provider_options)
    session_options.graph_optimization_level = LEVELS[level]
    session_options.optimized_model_filepath = near(result)
    model = onnx.load(source, load_external_data=False)
    threshold = target.settings.external_initializers if target else None
    if threshold is not None or external_data(model, source.parent, source.name):
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{result.stem}.data"
        )
    if threshold is not None:
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(threshold)
        )
    session = open_session(source, session_options, without=() if fuse else _FUSIONS)
    if _INSERTED.encode() in result.read_bytes():
        onnx.save(renamed(onnx.load(result, load_external_data=False), _INSERTED), result)
    return session

"""ONNX Runtime's graph optimizations, written to a file."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.protocol import TargetSpec
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.session import LEVELS, cpu_options, open_session, options


def optimize(source: Path, result: Path, level: str, target: TargetSpec | None = None) -> None:
    """Write ``source`` to ``result`` as ONNX Runtime optimizes it for the EP of ``target``, or the CPU's.

    ``level``: ``"none"`` or ``"basic"``, which are the same for every EP and so need none but the CPU's;
    ``"extended"`` or ``"all"``, which put in what only that EP can run. Initializers stay outside of the
    file where the source has them so. Raises AbsentError when the EP is needed and not here.
    """
    if target is None or level in ("none", "basic"):
        session_options = cpu_options()
    else:
        session_options = options(target, target.provider_options)
    session_options.graph_optimization_level = LEVELS[level]
    session_options.optimized_model_filepath = str(result)
    model = onnx.load(source, load_external_data=False)
    wanted = target.external_initializers if target else None
    if wanted is not None or graph.external_data(model, source.parent, source.name):
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{result.stem}.data"
        )
    if wanted is not None:
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(wanted)
        )
    open_session(source, session_options)

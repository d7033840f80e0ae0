"""Optimize models with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Target
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.bodies import move_weights
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.graph.repairs import name_nodes, restore_inlined, without_prefix
from hatch_epcontext.worker.session import (
    LEVELS,
    MIN_EXTERNAL,
    cpu_options,
    near,
    open_session,
    options,
)

_FUSIONS = ("ConvAddFusion", "ConvBNFusion", "ConvMulFusion")
"""ONNX Runtime's names of the optimizers that fold other nodes into the weights of convolutions."""

_INSERTED = "InsertedPrecisionFreeCast_"
"""The prefix of a float16 value cast to float32. ONNX Runtime uses it in each graph and optimization, and
refuses its own result if two names are equal."""


def optimize(
    source: Path, result: Path, level: str, target: Target | None = None, *, fuse: bool = True
) -> Callable[[], ort.InferenceSession]:
    """Write ``source`` to ``result`` as ONNX Runtime optimizes it for the EP of ``target``.

    Returns what opens a session that runs the same graph. Without ``target`` it is optimized for no EP.
    ``level``: ``"none"`` or ``"basic"``, which are the same for all EPs and need only the CPU's;
    ``"extended"`` or ``"all"``, which insert operators that only that EP can run. External data stays
    external. Without
    ``fuse`` nothing is folded into the weights of convolutions. For EPs that do not compute float16,
    values of float16 become float32 between casts. Raises UnavailableError when the EP is needed and
    unavailable.
    """
    portable = target is None or level in ("none", "basic")
    if target is None or portable:
        session_options = cpu_options()
    else:
        session_options = options(target, target.settings.provider_options)
    session_options.graph_optimization_level = LEVELS[level]
    if not fuse:
        session_options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(_FUSIONS)
        )
    model = onnx.load(source, load_external_data=False)
    is_apart = target is not None and target.settings.external_initializers
    has_data = is_apart or external_data(model, source, source.name)
    data = f"{result.stem}.data" if has_data else None
    keep_float16 = target is None or target.provider.computes_float16
    if portable and keep_float16 and graph.has_float16(model):
        _optimize_for_no_ep(source, result, level, session_options, data)
        restored = restore_inlined(model.graph, onnx.load(result, load_external_data=False))
        onnx.save(restored, result)
        _move_external(result, data)
        # Only when it is needed, because the CPU makes float32 of the weights. With fewer optimizations each
        # run would do that, and undo the quantization of weights.
        return lambda: open_session(result, cpu_options())
    session_options.optimized_model_filepath = near(result)
    if data is not None:
        session_options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", data
        )
    session = open_session(source, session_options)
    if _INSERTED.encode() in result.read_bytes():
        onnx.save(without_prefix(onnx.load(result, load_external_data=False), _INSERTED), result)
    _move_external(result, data)
    return lambda: session


def load_named(path: Path) -> onnx.ModelProto:
    """Load the model at ``path`` without its external data, and write it again if its nodes need names.

    An EP reports the nodes that it refuses by their names, which those that ONNX Runtime puts instead of
    a function may lack.
    """
    model = onnx.load(path, load_external_data=False)
    if name_nodes(model.graph):
        onnx.save(model, path)
    return model


def _move_external(result: Path, data: str | None) -> None:
    """Move the external tensors of bodies to the main graph of ``result``.

    In bodies ONNX Runtime rejects data with several hard links, which installers and caches make.
    """
    if data is None:
        return
    model = onnx.load(result, load_external_data=False)
    if move_weights(model):
        onnx.save(model, result)


def _optimize_for_no_ep(
    source: Path, result: Path, level: str, session_options: ort.SessionOptions, data: str | None
) -> None:
    """Write ``source`` to ``result`` before ONNX Runtime inserts the casts that the CPU's kernels need.

    A session writes the graph after that; for an EP that compiles nothing its compiler writes it before.
    """
    compiler = ort.ModelCompiler(
        session_options,
        near(source),
        external_initializers_file_path=data,
        external_initializers_size_threshold=MIN_EXTERNAL,
        graph_optimization_level=LEVELS[level],
    )
    compiler.compile_to_file(near(result))

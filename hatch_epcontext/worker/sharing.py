"""Compile models that share weights: in one process, with one sidecar for all of them."""

from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.reading import load
from hatch_epcontext.worker.compiler import compile_context
from hatch_epcontext.worker.readback import read_context
from hatch_epcontext.worker.requests import CompileRequest
from hatch_epcontext.worker.results import Context

_PREFIX = "ep.context_node_name_prefix"


def compile_group(request: CompileRequest) -> tuple[Context, ...]:
    """Compile the request's models in order, each into a context model that names the same sidecar.

    Raises BuildError when one cannot be compiled, or when they do not share a sidecar.
    """
    folder, target = Path(request.folder), request.target
    provider = target.provider
    results = [folder / provider.result_file(model.name) for model in request.models]
    for model, path, result in zip(request.models, request.prepared, results, strict=True):
        sharing = {
            "ep.share_ep_contexts": "1",
            # All partitions are in one sidecar, so their names must differ.
            _PREFIX: f"{target.settings.session_options.get(_PREFIX, '')}{model.name}_",
        }
        if result == results[-1]:
            sharing["ep.stop_share_ep_contexts"] = "1"
        compile_context(Path(path), result, target, sharing, model)
    _equalize_spill_fill(results)
    contexts = tuple(
        read_context(model, Path(path), result, target)
        for model, path, result in zip(request.models, request.prepared, results, strict=True)
    )
    sidecars = {result.name: _sidecars(result) for result in results}
    if len(set().union(*sidecars.values())) != 1:
        named = "; ".join(f"{name}: {', '.join(sorted(files))}" for name, files in sidecars.items())
        message = f"the models do not share one sidecar: {named}."
        hint = "Check that they have the same weights, and that the EP can share them."
        raise ModelError(Problem(Kind.NOT_SHARED, "", message, hint))
    return contexts


def _sidecars(result: Path) -> set[str]:
    model = load(result, result.name)
    return {
        graph.text(node, "ep_cache_context")
        for node in graph.contexts(model.graph)
        if graph.is_main(node)
    }


def _equalize_spill_fill(results: list[Path]) -> None:
    """Give every context the largest ``max_size`` of all: the size of QNN's spill-fill buffer.

    The first context that is opened, which can be any of them, allocates the buffer for all.
    """
    models = {result: load(result, result.name) for result in results}
    nodes = [node for model in models.values() for node in graph.contexts(model.graph)]
    largest = max((graph.number(node, "max_size", 0) for node in nodes), default=0)
    for result, model in models.items():
        changed = False
        for node in graph.contexts(model.graph):
            for attribute in node.attribute:
                if attribute.name == "max_size" and attribute.i != largest:
                    attribute.i, changed = largest, True
        if changed:
            onnx.save(model, result)

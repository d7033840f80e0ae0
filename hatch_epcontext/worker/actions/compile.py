"""Compile a job's prepared models into an artifact, and read it back."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Kind, ModelError, Problem, Setting, UnavailableError
from hatch_epcontext.files import file_sha256, link_or_copy, put_files
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.graph.reading import load
from hatch_epcontext.graph.repairs import order_layout_changes
from hatch_epcontext.graph.versions import keep_metadata, lower_versions
from hatch_epcontext.shipped import PREPARED
from hatch_epcontext.worker.compiling import compile_buffers, compile_context
from hatch_epcontext.worker.explaining import Explainer
from hatch_epcontext.worker.optimizing import optimize
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.readback import read_context, read_optimized
from hatch_epcontext.worker.requests import CompileReply, CompileRequest
from hatch_epcontext.worker.source import data_of, open_dimension_message, read_source

_PREFIX = "ep.context_node_name_prefix"


def handle(request: CompileRequest) -> CompileReply:
    """Compile the request's models into its folder, and read back the result.

    Raises BuildError when the result does not fit the request: no node is compiled, a context is of another
    EP or for another chip, or a sidecar is missing. Raises ModelError for buffers when they are no source
    model, or have open dimensions and the EP compiles only fixed shapes.
    """
    announce(f"compiling for {request.target.provider.ep}")
    start = time.monotonic()
    if request.buffers is not None:
        _compile_buffers(request, request.buffers)
        return CompileReply((), time.monotonic() - start)
    folder, provider = Path(request.folder), request.target.provider
    prepared = [*map(_at_fixed_path, request.models, request.prepared)]
    results = [folder / provider.result_file(model.name) for model in request.models]
    jobs = [*zip(request.models, prepared, results, strict=True)]
    for model, path, result in jobs:
        sharing = _sharing(request.target, model, is_last=result == results[-1])
        _compile(path, result, model, request.target, sharing if len(results) > 1 else {})
    if len(results) > 1:
        _finish_sharing(results)
    contexts = tuple(
        read_context(model, path, result, request.target)
        if provider.product == "context"
        else read_optimized(model.name, result, provider)
        for model, path, result in jobs
    )
    for model, path, result in jobs:
        _finish(onnx.load(result, load_external_data=False), model, result)
        if provider.cache_key:
            _add_cache_key(result, provider.cache_key)
        if request.target.settings.recompile:
            _add_prepared(path, model, folder / PREPARED)
    return CompileReply(contexts, time.monotonic() - start)


def _at_fixed_path(model: Model, path: str) -> Path:
    """A path to the model at ``path`` that is the same in every build, relative to the worker's folder.

    EPs such as QNN derive names in the compiled blob from the path that ONNX Runtime gets.
    """
    folder, prepared = Path(PREPARED) / model.name, Path(path)
    folder.parent.mkdir(exist_ok=True)
    try:
        # Not its files: ONNX Runtime rejects some external data that is a link.
        folder.symlink_to(prepared.parent, target_is_directory=True)
    except OSError:
        # Windows allows links to few users.
        shutil.copytree(prepared.parent, folder, copy_function=link_or_copy)
    return folder / prepared.name


def _add_prepared(path: Path, model: Model, folder: Path) -> None:
    """Put the prepared model at ``path``, with its external data, into ``folder``."""
    onnx_model = onnx.load(path, load_external_data=False)
    folder.mkdir(exist_ok=True)
    put_files(data_of(onnx_model, path, model.key), path.parent, folder)
    _finish(onnx_model, model, folder / f"{model.name}.onnx")


def _finish(onnx_model: onnx.ModelProto, model: Model, result: Path) -> None:
    """Write ``onnx_model``, which was made of ``model``, for apps: with its metadata, for older releases."""
    keep_metadata(onnx.load(model.path, load_external_data=False), onnx_model)
    lower_versions(onnx_model)
    order_layout_changes(onnx_model.graph)
    onnx.save(onnx_model, result)


def _add_cache_key(result: Path, name: str) -> None:
    """Name what the EP caches of ``result`` after the content of its files, in the property ``name``."""
    onnx_model = onnx.load(result, load_external_data=False)
    data = external_data(onnx_model, result, result.name)
    hashes = [file_sha256(file) for file in (result, *(result.parent / name for name in data))]
    properties = {entry.key: entry.value for entry in onnx_model.metadata_props}
    properties[name] = hashlib.sha256("".join(hashes).encode()).hexdigest()[:32]
    onnx.helper.set_model_props(onnx_model, properties)
    onnx.save(onnx_model, result)


def _compile(
    prepared: Path, result: Path, model: Model, target: Target, sharing: Mapping[str, str]
) -> None:
    provider = target.provider
    if provider.product != "context":
        optimize(prepared, result, target.settings.optimization, target)
    elif provider.by_library and provider.compiler_library is not None:
        compiler = importlib.import_module(provider.compiler_library.compiler)
        compiler.compile_with_library(prepared, result, target, model)
    else:
        try:
            compile_context(prepared, result, target, sharing, model)
        except UnavailableError as error:
            raise _with_library(error, target) from error


def _with_library(error: UnavailableError, target: Target) -> UnavailableError:
    """``error``, with the advice to compile without the EP, where that is possible."""
    if target.provider.compiler_library is None:
        return error
    chips = [name for name, chip in target.provider.chips.items() if chip.source]
    setting = Setting(target.key_of("chip"), chips)
    hint = "Or compile without the EP and its device (not tried)."
    return error.changed(
        lambda p: replace(p, hint="\n".join(filter(None, (p.hint, hint))), settings=(setting,))
    )


def _sharing(target: Target, model: Model, *, is_last: bool) -> dict[str, str]:
    """The session options with which ``model`` shares weights with the models of its group."""
    return {
        "ep.share_ep_contexts": "1",
        # All partitions are in one sidecar, so their names must differ.
        _PREFIX: f"{target.settings.session_options.get(_PREFIX, '')}{model.name}_",
        **({"ep.stop_share_ep_contexts": "1"} if is_last else {}),
    }


def _finish_sharing(results: Iterable[Path]) -> None:
    """Give every context the largest ``max_size`` of all: the size of QNN's spill-fill buffer.

    The first context that is opened, which can be any of them, allocates the buffer for all. Raises
    ModelError unless the context models ``results`` name the same sidecar.
    """
    models = {result: load(result, result.name) for result in results}
    contexts = {result: graph.contexts(model.graph) for result, model in models.items()}
    sidecars = {
        result.name: {graph.text(n, "ep_cache_context") for n in nodes if graph.is_main(n)}
        for result, nodes in contexts.items()
    }
    # One without contexts is refused when it is read back.
    if all(contexts.values()) and len(set().union(*sidecars.values())) != 1:
        named = "; ".join(f"{name}: {', '.join(sorted(files))}" for name, files in sidecars.items())
        message = f"the models do not share one sidecar: {named}."
        hint = "Check that they have the same weights, and that the EP can share them."
        raise ModelError(Problem(Kind.NOT_SHARED, "", message, hint))
    all_nodes = itertools.chain.from_iterable(contexts.values())
    largest = max((graph.number(node, "max_size", 0) for node in all_nodes), default=0)
    for result, nodes in contexts.items():
        sizes = [a for node in nodes for a in node.attribute if a.name == "max_size"]
        if any(size.i != largest for size in sizes):
            for size in sizes:
                size.i = largest
            onnx.save(models[result], result)


def _compile_buffers(request: CompileRequest, buffers: Mapping[str, str]) -> None:
    """Write the context model of the request's only model, with the compiled blob inside."""
    (path,), provider = map(Path, request.prepared), request.target.provider
    source = read_source(path, None)
    tensors = [t for t in graph.input_facts(source.graph) if not t.is_fixed]
    if provider.static_shapes and tensors:
        message = open_dimension_message(tensors, provider.ep)
        raise ModelError(Problem(Kind.OPEN_DIMENSION, "", message, "Give the model fixed shapes."))
    data = {location: Path(file).read_bytes() for location, file in buffers.items()}
    with Explainer(provider, lambda: source.graph).explaining():
        compiled = compile_buffers(path.read_bytes(), data, request.target)
    context = onnx.load_model_from_string(compiled)
    keep_metadata(source, context)
    lower_versions(context)
    onnx.save(context, Path(request.folder) / path.name)

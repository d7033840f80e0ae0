"""Compile a job's prepared models into an artifact, and read it back."""

from __future__ import annotations

import importlib
import shutil
import time
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Setting, UnavailableError
from hatch_epcontext.files import link_or_copy
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.external import put_data
from hatch_epcontext.graph.versions import keep_metadata, lower_versions
from hatch_epcontext.shipped import PREPARED
from hatch_epcontext.worker.compiler import compile_context
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.readback import read_context, read_optimized
from hatch_epcontext.worker.reasons import with_reasons
from hatch_epcontext.worker.requests import CompileReply, CompileRequest
from hatch_epcontext.worker.results import Context
from hatch_epcontext.worker.sharing import compile_group
from hatch_epcontext.worker.sources import data_of


def handle(request: CompileRequest) -> CompileReply:
    """Compile the request's models into its folder, and read back the result.

    Raises BuildError when the result does not fit the request: no node is compiled, a context is of another
    EP or for another chip, or a sidecar is missing.
    """
    step(f"compiling for {request.target.provider.ep}")
    start = time.monotonic()
    paths = (
        str(_at_fixed_path(model, Path(path)))
        for model, path in zip(request.models, request.prepared, strict=True)
    )
    request = replace(request, prepared=tuple(paths))
    if len(request.models) > 1:
        contexts = compile_group(request)
    else:
        contexts = tuple(
            _compile(request, model, Path(path))
            for model, path in zip(request.models, request.prepared, strict=True)
        )
    for model, context in zip(request.models, contexts, strict=True):
        result = Path(request.folder) / context.model_file
        _finish(onnx.load(result, load_external_data=False), model, result)
    product = request.target.provider.product
    if request.target.settings.recompile:
        _add_prepared(request)
    return CompileReply(product, contexts, time.monotonic() - start)


def _at_fixed_path(model: Model, prepared: Path) -> Path:
    """A path to ``prepared`` that is the same in every build, relative to the worker's folder.

    EPs such as QNN derive names in the compiled blob from the path that ONNX Runtime gets.
    """
    folder = Path(PREPARED) / model.name
    folder.parent.mkdir(exist_ok=True)
    try:
        # Not its files: ONNX Runtime refuses some external data that is a link.
        folder.symlink_to(prepared.parent, target_is_directory=True)
    except OSError:
        # Windows allows links to few users.
        shutil.copytree(prepared.parent, folder, copy_function=link_or_copy)
    return folder / prepared.name


def _add_prepared(request: CompileRequest) -> None:
    """Put the prepared models, with their external data, into the artifact."""
    for model, path in zip(request.models, map(Path, request.prepared), strict=True):
        onnx_model = onnx.load(path, load_external_data=False)
        folder = Path(request.folder) / PREPARED
        folder.mkdir(exist_ok=True)
        put_data(data_of(onnx_model, path, model.key), path.parent, folder)
        _finish(onnx_model, model, folder / f"{model.name}.onnx")


def _finish(onnx_model: onnx.ModelProto, model: Model, result: Path) -> None:
    """Write ``onnx_model``, which was made of ``model``, for apps: with its metadata, for older releases."""
    keep_metadata(onnx.load(model.path, load_external_data=False), onnx_model)
    lower_versions(onnx_model)
    graph.order_layout_changes(onnx_model.graph)
    onnx.save(onnx_model, result)


def _compile(request: CompileRequest, model: Model, prepared: Path) -> Context:
    target, provider = request.target, request.target.provider
    result = Path(request.folder) / provider.result_file(model.name)
    if provider.product == "context":
        if provider.by_library and provider.compiler_library is not None:
            compiler = importlib.import_module(provider.compiler_library.compiler)
            compiler.compile_with_library(prepared, result, target, model)
        else:
            try:
                compile_context(prepared, result, target, model=model)
            except UnavailableError as error:
                raise _with_library(error, target) from error
        context = read_context(model, prepared, result, target)
        return with_reasons(context, prepared, result, target)
    optimize(prepared, result, target.settings.optimization, target)
    return read_optimized(model.name, result)


def _with_library(error: UnavailableError, target: Target) -> UnavailableError:
    """``error``, with the advice to compile without the EP, where that is possible."""
    if (library := target.provider.compiler_library) is None:
        return error
    place = Setting(target.place("compute-capabilities"), list(library.capabilities[-4:-1]))
    hint = "Or compile without the EP and its device (not tried):"
    return UnavailableError(
        *(
            replace(each, hint="\n".join(filter(None, (each.hint, hint))), settings=(place,))
            for each in error.problems
        )
    )

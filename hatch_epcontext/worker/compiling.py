"""Compile models with ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.files import temp_dir
from hatch_epcontext.graph.bodies import keep_weights, remove_readers
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.worker.explaining import Explainer
from hatch_epcontext.worker.reasons import describe_refused
from hatch_epcontext.worker.session import LEVELS, MIN_EXTERNAL, near, open_session, options


def compile_context(
    prepared: Path,
    result: Path,
    target: Target,
    session_options: Mapping[str, str] | None = None,
    model: Model | None = None,
) -> None:
    """Compile ``prepared`` into the context model ``result``, with its sidecars beside it.

    ``session_options`` are added to the target's; ``model``: the source model, for advice. Raises BuildError
    with an explanation of the EP's error, if there is one.
    """
    key = None if model is None else model.key
    describe = partial(describe_refused, prepared, target)
    read = partial(onnx.load, prepared, load_external_data=False)
    explainer = Explainer(target.provider, lambda: read().graph, key, describe)
    own_options = session_options or {}
    with explainer.explaining():
        try:
            _compile(prepared, result, target, own_options)
        except Exception as error:
            is_of_bodies = _BODY.search(str(error))
            if not is_of_bodies or not _compile_with_bodies(prepared, result, target, own_options):
                raise
    if not result.is_file():
        raise explainer.nothing_compiled()


def _compile(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> None:
    provider = target.provider
    if target.settings.from_memory:
        loaded = onnx.load(prepared, load_external_data=False)
        data = {
            name: (prepared.parent / name).read_bytes()
            for name in external_data(loaded, prepared, prepared.name)
        }
        result.write_bytes(compile_buffers(prepared.read_bytes(), data, target, session_options))
    elif own := provider.own_context_options(near(result), target.settings.embed):
        provider_options = {**target.settings.provider_options, **own}
        _with_session(prepared, options(target, provider_options, session_options), target)
    else:
        _with_model_compiler(prepared, result, target, session_options)


def _compile_with_bodies(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> bool:
    """Compile ``prepared``, whose bodies of control flow lose weights otherwise; False if they read none."""
    model = onnx.load(prepared, load_external_data=False)
    if not (readers := keep_weights(model)):
        return False
    # Beside the external data, under a name that is the same in all builds: an EP may write it.
    kept = prepared.with_name(f"{prepared.stem}.bodies.onnx")
    with temp_dir(prepared.parent) as folder:
        onnx.save(model, folder / kept.name)
        (folder / kept.name).replace(kept)
    _compile(kept, result, target, session_options)
    if result.is_file():
        context = onnx.load(result, load_external_data=False)
        remove_readers(context, readers)
        onnx.save(context, result)
    return True


_BODY = re.compile("topologically sorted|in-memory address marker")
"""ONNX Runtime's errors about weights of inner graphs that it lost, or cannot write: see `bodies`."""


def compile_buffers(
    model: bytes,
    data: Mapping[str, bytes],
    target: Target,
    session_options: Mapping[str, str] | None = None,
) -> bytes:
    """Return the context model of ``model``, an ONNX file's contents, with the compiled blob inside.

    ``data``: the contents of its external data files, by their locations in the model. ``session_options``
    are added to the target's.
    """
    result = options(target, target.settings.provider_options, session_options)
    if data:
        result.add_external_initializers_from_files_in_memory(
            list(data), list(data.values()), [len(contents) for contents in data.values()]
        )
    compiler = ort.ModelCompiler(
        result,
        model,
        # Embedded: ONNX Runtime would otherwise write a sidecar beside the source model.
        embed_compiled_data_into_model=True,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        graph_optimization_level=LEVELS[target.settings.optimization],
    )
    compiled: bytes = compiler.compile_to_bytes()
    return compiled


def _with_model_compiler(
    prepared: Path, result: Path, target: Target, session_options: Mapping[str, str]
) -> None:
    settings = target.settings
    compiler = ort.ModelCompiler(
        options(target, settings.provider_options, session_options),
        near(prepared),
        embed_compiled_data_into_model=settings.embed,
        # Relative to the context model; ONNX Runtime accepts no other path.
        external_initializers_file_path=result.with_suffix(".data").name
        if settings.external_initializers
        else None,
        external_initializers_size_threshold=MIN_EXTERNAL,
        # By default it would write a plain copy of the model, and report success.
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        # By default it optimizes nothing, and EPs leave most real models to the CPU.
        graph_optimization_level=LEVELS[settings.optimization],
    )
    compiler.compile_to_file(near(result))


def _with_session(prepared: Path, session_options: ort.SessionOptions, target: Target) -> None:
    """Open a session whose EP itself writes the context model; no error if it compiles nothing."""
    session_options.graph_optimization_level = LEVELS[target.settings.optimization]
    open_session(prepared, session_options)

"""Compile with NVIDIA's TensorRT RTX library: without the EP, its driver and a GPU.

The context model is like those that the EP 0.5.0 writes: an EPContext node whose compatibility string is the
engine's header in hexadecimal digits. The EP passes that to the library to know whether a GPU can run it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import onnx
from onnx import helper

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import (
    Key,
    Kind,
    LibraryError,
    ModelError,
    Problem,
    RefusedError,
    Setting,
    UnavailableError,
)
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.providers import HEADER, CompilerLibrary, Profile
from hatch_epcontext.providers.tensorrt_rtx import engine_size, sdk_version
from hatch_epcontext.text import listing
from hatch_epcontext.worker.explaining import CHANGE

_MAX_NODES = 20
"""The most nodes that a message names."""

_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
}
"""The library's names of the types that inputs and outputs can have."""

_MAX_REST = 2**20
"""The most bytes that a context model has besides its engine."""

_OF_THE_EP = (
    "In onnxruntime-genai's model builder choose -e NvTensorRtRtx, and -p fp16, int4 or bf16."
)
"""What to do about a language model of another format."""

_CUDA = "libcuda.so.1"

_DRIVER = (
    "Install the libraries of NVIDIA's driver, which need no GPU here: libcuda1 from Debian's non-free, or "
    "libnvidia-compute-<release> from Ubuntu. Or compile with the EP on an RTX GPU: remove chip."
)

_POOLS = {"nv_max_workspace_size": "WORKSPACE", "nv_max_shared_mem_size": "TACTIC_SHARED_MEMORY"}


def compile_with_library(
    prepared: Path, result: Path, target: Target, model: Model | None = None
) -> None:
    """Compile ``prepared`` into the context model ``result``, with the engine inside it or beside it.

    Raises BuildError for what the library does not take, with its reasons.
    """
    library = target.provider.compiler_library
    assert library is not None, "only a target with a library is compiled by it"
    trt = _imported(library)
    log = _log(trt)
    log.errors.clear()
    log.detailed = target.settings.provider_options.get("nv_detailed_build_log") == "1"
    source = onnx.load(prepared, load_external_data=False)
    key = target.key if model is None else model.key
    fused = [node for node in graph.nodes(source.graph) if node.domain == "com.microsoft"]
    if operators := sorted({node.op_type for node in fused} & library.plugins):
        _refuse_without_heads(fused)
        _register_plugins(trt, target, operators)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    # By default a number, which differs in each engine of a process.
    network.name = result.stem
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(prepared)):
        raise LibraryError(_not_parsed(parser, _change(fused, target, model)))
    RefusedError.check(_other_tensors(network, source.graph))
    config = _configured(trt, builder, network, target, key)
    engine = result.with_suffix(".engine")
    with engine.open("wb") as opened:
        stream = _stream(trt, opened)
        is_built = builder.build_serialized_network_to_stream(network, config, stream)
        if stream.error is not None:
            raise stream.error
        if not is_built:
            raise LibraryError(_not_built(log.errors, target, fused))
        bytes_ = opened.tell()
    with engine.open("rb") as opened:
        header = opened.read(HEADER)
    check_engine(header, bytes_, target)
    if target.settings.embed and bytes_ > PROTOBUF_LIMIT - _MAX_REST:
        size = f"the engine has {bytes_ / 2**30:.1f} GiB"
        message = f"{size}, but an ONNX file cannot be larger than 2 GiB."
        hint = "Put it into a file beside the context model (not tried)."
        setting = Setting(key / "embed", False)
        raise ModelError(Problem(Kind.TOO_LARGE, "", message, hint, settings=(setting,)))
    version = importlib.import_module(trt.__package__).__version__
    _write(source, engine, header, result, target, version)


def _stream(trt: Any, file: IO[bytes]) -> Any:
    """What the library writes an engine through, into ``file``: a whole one would be in memory twice.

    It ignores what a stream raises, so ``error`` has that.
    """

    class Stream(trt.IStreamWriter):  # type: ignore[misc]
        error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                self.error = error
                return -1

    return Stream()


def check_engine(header: bytes, size: int, target: Target) -> None:
    """Raise BuildError unless the ``header`` of an engine has its ``size`` and the target's GPUs.

    Without a GPU the library reads no more of it.
    """
    facts = target.provider.compiled_for(header.hex())
    gpus, capabilities = facts.get("compute capability"), target.settings.compute_capabilities
    if not facts:
        raise RefusedError(_wrong("an engine with an unknown header"))
    if (counted := engine_size(header)) != size:
        raise RefusedError(_wrong(f"{size} bytes, and its header counts {counted}"))
    if capabilities and gpus != ", ".join(capabilities):
        raise RefusedError(_wrong(f"an engine for {gpus}, not for {listing(capabilities)}"))


def _imported(library: CompilerLibrary) -> Any:
    try:
        _link()
        return importlib.import_module(library.module)
    except (ImportError, OSError) as error:
        message = f"NVIDIA's library cannot be imported: {error}."
        hint = (
            "Install it: it has packages for Linux and Windows on x86-64. Or compile with the EP, on a "
            "machine with an RTX GPU: remove chip."
        )
        raise UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)) from error


def _link() -> None:
    """Load the library through links beside one without a version: for plugins it opens itself by that name,
    which the packages lack, and ends this process if there is none.
    """
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if sys.platform != "linux" or spec is None or spec.origin is None or spec.name in sys.modules:
        return
    # The libraries search the folder through which they were loaded first.
    links = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, links)
    for file in Path(spec.origin).parent.glob("*.so.1"):
        (links / file.stem).symlink_to(file)
        (links / file.name).symlink_to(file)
    for link in links.glob("*.so.1"):
        ctypes.CDLL(str(link))


def _register_plugins(trt: Any, target: Target, operators: Sequence[str]) -> None:
    """Register the plugins in the EP's package, with which the library takes ``operators``."""
    library, plugin = target.provider.compiler_library, target.provider.plugin
    assert library is not None
    assert plugin is not None
    trt.get_plugin_registry()
    spec = importlib.util.find_spec(plugin.module)
    folder = Path(spec.origin).parent if spec and spec.origin else Path(plugin.module)
    try:
        # What the plugins need is loaded before them.
        ctypes.CDLL(_CUDA)
        ctypes.CDLL(str(next(folder.glob("libcudart.so.*"), "libcudart.so")))
        register = ctypes.CDLL(str(folder / "libtensorrt_plugins.so")).initLibNvTensorRTRtxPlugins
        register.argtypes, register.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_bool
        if not register(None, b""):
            raise OSError("they cannot be registered")  # noqa: TRY301
    except OSError as error:
        message = f"TensorRT RTX has no plugins for {listing(operators)}: {error}."
        package = f"Install {listing(library.plugin_requirements)}."
        hint = _DRIVER if _CUDA in str(error) else package
        raise UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)) from error


def _refuse_without_heads(fused: Sequence[onnx.NodeProto]) -> None:
    """Refuse rotary embeddings without a number of heads, on which the parser ends the process."""
    for node in fused:
        if node.op_type == "RotaryEmbedding" and not graph.attribute(node, "num_heads", 0):
            message = (
                f"TensorRT RTX crashes on {node.name!r} (RotaryEmbedding), which has no num_heads."
            )
            raise LibraryError(Problem(Kind.COMPILE_FAILED, "", message, _OF_THE_EP))


@functools.cache
def _log(trt: Any) -> Any:
    """The logger of this process: the library keeps the first that it gets.

    It keeps the errors; warnings, and with ``detailed`` all messages, are printed.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.detailed = False

        def log(self, severity: Any, message: str) -> None:
            if self.detailed or severity.value <= trt.ILogger.WARNING.value:
                print(message)  # noqa: T201
            if severity.value <= trt.ILogger.ERROR.value:
                self.errors.append(message.strip().rstrip("."))

    return Log()


def _change(fused: Sequence[onnx.NodeProto], target: Target, model: Model | None) -> str:
    """What to do about nodes that the library's parser does not take."""
    genai = model.genai if model else None
    if genai and target.provider.genai_name in genai.config.providers:
        return "Change the model there (not tried)."
    if any(node.op_type.endswith("Attention") for node in fused):
        # Each layer has one: no part is left.
        return f"{_OF_THE_EP} Or change the model there (not tried)."
    return CHANGE


def _not_parsed(parser: Any, hint: str) -> Problem:
    """The problem of a model with nodes that the library's parser does not take."""
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    named = [error for error in errors if error.node_operator()]
    nodes = dict.fromkeys(f"{error.node_name()!r} ({error.node_operator()})" for error in named)
    reasons = dict.fromkeys(e.desc().strip().rstrip(".") for e in errors)
    # Its checks without a message are reported as the word "false".
    why = [reason for reason in reasons if reason not in ("", "false")]
    shown = listing(nodes, _MAX_NODES) if nodes else "the model"
    message = f"TensorRT RTX does not take {shown}{': ' if why else ''}{'; '.join(why)}."
    return Problem(Kind.COMPILE_FAILED, "", message, hint)


def _not_built(reasons: Sequence[str], target: Target, fused: Sequence[onnx.NodeProto]) -> Problem:
    reason = "; ".join(dict.fromkeys(reasons)) or "it gives no reason"
    message = f"TensorRT RTX cannot build an engine: {reason}."
    limits = sorted(_POOLS.keys() & target.settings.provider_options.keys())
    hint = f"Leave out {' or '.join(limits)}, or change it (not tried)." if limits else None
    hint = hint or (_OF_THE_EP if fused else None)
    return Problem(Kind.COMPILE_FAILED, "", message, hint)


def _other_tensors(network: Any, source: onnx.GraphProto) -> Iterator[Problem]:
    """The inputs and outputs that the library's network has otherwise than the model."""
    expected = (*graph.input_facts(source), *graph.output_facts(source))
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    actual = {tensor.name: tensor for tensor in (*inputs, *outputs)}
    for facts in expected:
        tensor = actual.pop(facts.name, None)
        if tensor is None:
            yield _wrong(f"no tensor {facts.name!r}")
        elif tensor.dtype.name != _TYPES.get(facts.dtype):
            actual_type = (
                f"{facts.name!r} {tensor.dtype.name}, and it is {facts.dtype} in the model"
            )
            yield _wrong(f"{actual_type}; inputs and outputs can be {listing(_TYPES)}")
        elif not facts.takes(tuple(tensor.shape)) and -1 not in tensor.shape:
            yield _wrong(
                f"{facts.name!r} {list(tensor.shape)}, and it is {facts.shape_text} in the model"
            )
    yield from (_wrong(f"a tensor {name!r}, which the model does not have") for name in actual)


def _wrong(what: str) -> Problem:
    return Problem(Kind.WRONG_RESULT, "", f"TensorRT RTX made {what}.")


def _configured(trt: Any, builder: Any, network: Any, target: Target, key: Key) -> Any:
    """The library's configuration, with the GPUs, the options and the profiles of ``target``."""
    settings = target.settings
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(settings.compute_capabilities)
    for index, name in enumerate(settings.compute_capabilities):
        capability = getattr(trt.ComputeCapability, f"SM{name.replace('.', '')}")
        if not config.set_compute_capability(capability, index):
            message = f"TensorRT RTX does not compile for the compute capability {name}."
            raise ModelError(Problem(Kind.INVALID_OPTION, "", message))
    for option, pool in _POOLS.items():
        if size := int(settings.provider_options.get(option, "0")):
            config.set_memory_pool_limit(getattr(trt.MemoryPoolType, pool), size)
    for index, profile in enumerate(target.profiles or ({},)):
        trt_profile = builder.create_optimization_profile()
        for number in range(network.num_inputs):
            _set_shape(trt_profile, network.get_input(number), profile, key)
        if config.add_optimization_profile(trt_profile) < 0:
            reason = "; ".join(dict.fromkeys(_log(trt).errors))
            message = f"TensorRT RTX refuses the optimization profile {index}: {reason}."
            profile_key = target.key_of("profiles") / index
            raise ModelError(Problem.at(profile_key, Kind.INVALID_PROFILE, message))
    return config


def _set_shape(trt_profile: Any, tensor: Any, profile: Profile, key: Key) -> None:
    if tensor.is_shape_tensor:
        message = (
            f"the values of the input {tensor.name!r} decide the shapes of other tensors, for which "
            "TensorRT RTX needs their limits."
        )
        hint, setting = "Freeze the input (not tried).", Setting(key / "constants" / tensor.name)
        raise RefusedError(Problem(Kind.COMPILE_FAILED, "", message, hint, settings=(setting,)))
    fixed: Sequence[int] = list(tensor.shape)
    bounds = profile.get(tensor.name)
    shapes = [fixed] * 3 if bounds is None else [bounds[bound] for bound in ("min", "opt", "max")]
    trt_profile.set_shape(tensor.name, *shapes)


def _write(
    source: onnx.ModelProto, engine: Path, header: bytes, result: Path, target: Target, version: str
) -> None:
    """Write the context model, with the ``engine`` inside or beside it."""
    settings = target.settings
    context: bytes | str = engine.name
    if settings.embed:
        context = engine.read_bytes()
        engine.unlink()
    node = helper.make_node(
        graph.CONTEXT_OP,
        [value.name for value in graph.inputs(source.graph)],
        [value.name for value in source.graph.output],
        name=result.stem,
        domain="com.microsoft",
        main_context=0,
        embed_mode=int(settings.embed),
        ep_cache_context=context,
        hardware_architecture=",".join(
            capability.replace(".", "") for capability in settings.compute_capabilities
        ),
        partition_name=result.stem,
        onnx_model_filename=f"{result.stem.removesuffix('_ctx')}.onnx",
        ep_sdk_version=sdk_version(version),
        source=settings.ep,
    )
    model = helper.make_model(
        helper.make_graph(
            [node], source.graph.name, graph.inputs(source.graph), source.graph.output
        ),
        opset_imports=[*source.opset_import, helper.make_opsetid("com.microsoft", 1)],
        ir_version=source.ir_version,
    )
    compatibility = {f"ep_compatibility_info.{settings.ep}": header.hex()}
    helper.set_model_props(model, compatibility)
    onnx.save(model, result)

"""Compile a small model with an unknown library of an EP."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import onnxruntime as ort

from hatch_epcontext.graph import graph
from hatch_epcontext.worker.libraries import load, preload
from hatch_epcontext.worker.requests import Trial, TrialRequest
from hatch_epcontext.worker.session import LEVELS, open_session

_OLDEST = 13
"""The oldest opset of a trial."""

_MODEL = """
<ir_version: 8, opset_import: ["" : {opset}]>
small (float[1, 1, 8, 8] x) => (float[1, 4, 6, 6] y) <float[4, 1, 3, 3] w = {{{weights}}}> {{
    features = Conv(x, w)
    y = Relu(features)
}}
"""
"""A convolution, which EPs of all kinds compile."""


def handle(request: TrialRequest) -> Trial:
    """Compile the model, with the newest opset that works; raises UnavailableError as `load` does."""
    preload()
    device = load(request.plugin, None)[request.device]
    reason = ""
    for opset in range(onnx.defs.onnx_opset_version(), _OLDEST - 1, -1):
        model = _model(opset)
        try:
            compiled = _compile(model, _options(device, request))
        except Exception as error:
            reason = _in_words(str(error))
        else:
            if graph.contexts(compiled.graph):
                return Trial(opset)
            reason = "it writes a model without an EPContext node"
    return Trial(None, reason, _runs(_model(_OLDEST), device, request))


def _model(opset: int) -> bytes:
    weights = ", ".join(["0.1"] * 36)
    text = _MODEL.format(opset=opset, weights=weights)
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def _options(device: Any, request: TrialRequest) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.add_provider_for_devices([device], dict(request.options))
    return options


def _compile(model: bytes, options: ort.SessionOptions) -> onnx.ModelProto:
    compiler = ort.ModelCompiler(
        options,
        model,
        embed_compiled_data_into_model=True,
        # By default it would return a plain copy of the model, and report success.
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        graph_optimization_level=LEVELS["basic"],
    )
    return onnx.load_model_from_string(compiler.compile_to_bytes())


def _in_words(message: str) -> str:
    """An error of ONNX Runtime or the EP in one line, without the lines of their sources."""
    if "Unable to compile any nodes" in message:
        return "it compiles no node of the model"
    if "NULL EPContext node" in message:
        return "it compiles the model, and returns no context"
    return " ".join(message.rsplit(" : ", 1)[-1].split())


def _runs(model: bytes, device: Any, request: TrialRequest) -> bool:
    options = _options(device, request)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        open_session(model, options)
    except Exception:
        return False
    return True

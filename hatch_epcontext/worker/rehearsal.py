"""Do the common work of all jobs once, so that forks of this process need not repeat it."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import Key
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.serialize import from_plain, to_plain
from hatch_epcontext.worker.__main__ import answer
from hatch_epcontext.worker.protocol import Order
from hatch_epcontext.worker.requests import (
    CompileRequest,
    PrepareRequest,
    ReplyT,
    ValidateRequest,
    WorkerRequest,
)
from hatch_epcontext.worker.results import Validated


def rehearse(folder: Path) -> Validated:
    """Prepare, compile and validate a small model on the CPU, in the empty ``folder``."""
    path, prepared, compiled = (folder / name for name in ("model.onnx", "prepared", "compiled"))
    onnx.save(_model(), path)
    prepared.mkdir()
    compiled.mkdir()
    model = Model("model", path, Key() / "models" / 0)
    settings = CompileSettings(provider="cpu", ep="CPUExecutionProvider", device="any")
    target = Target("cpu", settings)
    before = Path.cwd()
    # As each request to a worker has it: actions write into their working directory.
    os.chdir(folder)
    try:
        ready = _answer(PrepareRequest(model, "onnxruntime", str(prepared), compare=True))
        artifact = _answer(CompileRequest((model,), (ready.path,), target, str(compiled)))
        return _answer(
            ValidateRequest(
                model,
                target,
                artifact.contexts[0],
                str(compiled),
                Tolerance(snr=60, cosine=0.99),
                reference=ready.reference,
            )
        )
    finally:
        os.chdir(before)


def _answer(request: WorkerRequest[ReplyT]) -> ReplyT:
    order = Order(request.action, to_plain(request), Path.cwd())
    reply: ReplyT = from_plain(to_plain(answer(order)), request.reply_type)
    return reply


def _model() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Add", ["z", "x"], ["y"])]
    graph = helper.make_graph(nodes, "rehearsal", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

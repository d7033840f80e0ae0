"""Do once what every job does, so that forks of this process do not begin from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import onnx
from onnx import TensorProto, helper

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import Key
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.worker.__main__ import main
from hatch_epcontext.worker.protocol import REPLY, REQUEST
from hatch_epcontext.worker.requests import (
    CompileRequest,
    PrepareRequest,
    ReplyT,
    Request,
    ValidateRequest,
)


def rehearse(folder: Path) -> None:
    """Prepare, compile and validate a small model on the CPU, in the empty ``folder``."""
    path, prepared, compiled = (folder / name for name in ("model.onnx", "prepared", "compiled"))
    onnx.save(_model(), path)
    for each in (prepared, compiled):
        each.mkdir()
    model = Model("model", path, Key() / "models" / 0)
    settings = CompileSettings(provider="cpu", ep="CPUExecutionProvider", device="any")
    target = Target("cpu", settings)
    ready = _answer(PrepareRequest(model, "onnxruntime", str(prepared), compare=True), folder)
    made = _answer(CompileRequest((model,), (ready.path,), target, str(compiled)), folder)
    _answer(
        ValidateRequest(
            model,
            target,
            made.product,
            made.contexts[0],
            str(compiled),
            Tolerance(snr=60, cosine=0.99),
            reference=ready.reference,
        ),
        folder,
    )


def _answer(request: Request[ReplyT], folder: Path) -> ReplyT:
    (folder / REQUEST).write_text(to_json(request), encoding="utf-8")
    main(request.action, folder)
    return cast("ReplyT", from_json((folder / REPLY).read_bytes(), request.reply_type))


def _model() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Add", ["z", "x"], ["y"])]
    graph = helper.make_graph(nodes, "rehearsal", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

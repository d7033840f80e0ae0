from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import Key
from hatch_epcontext.worker.requests import (
    CompileReply,
    CompileRequest,
    PrepareReply,
    PrepareRequest,
)
from hatch_epcontext.worker.results import Context

MODEL = Model("a", Path("a.onnx"), Key())


@pytest.mark.parametrize("name", ["../outside", "missing", "/etc/passwd", "nul\0", "link"])
def test_a_reply_names_files_of_its_own_step_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "a_ctx.onnx").touch()
    (tmp_path / "outside").touch()
    if name == "link" and sys.platform != "win32":
        (folder / name).symlink_to(tmp_path / "outside")
    prepare = PrepareRequest(MODEL, "none", str(folder), compare=True)
    good = str(folder / "a_ctx.onnx")
    assert prepare.misfit(PrepareReply(good, 1, 1, ())) is None
    assert prepare.misfit(PrepareReply(str(folder / name), 1, 1, ())) is not None
    assert prepare.misfit(PrepareReply(good, 1, 1, (), {}, str(folder / name))) is not None
    target = Target("npu", CompileSettings(provider="cpu", ep="CPU", device="cpu"), None)
    compile_ = CompileRequest((MODEL,), (), target, str(folder))

    def reply(model: str, file: str) -> CompileReply:
        return CompileReply("context", (Context(model, file, (), ()),), 0.0)

    assert compile_.misfit(reply("a", "a_ctx.onnx")) is None
    assert compile_.misfit(reply("a", name)) is not None
    assert compile_.misfit(reply("b", "a_ctx.onnx")) == "it is about other models"

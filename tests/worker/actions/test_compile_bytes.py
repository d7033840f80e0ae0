"""Compile from memory to memory, with the same result as from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.graph.arrays import Array
from hatch_epcontext.worker.actions.compile_bytes import handle
from hatch_epcontext.worker.compiler import compile_context
from hatch_epcontext.worker.requests import CompileBytesRequest
from hatch_epcontext.worker.session import context_options, open_session
from hatch_epcontext.worker.tensors import run
from tests.conftest import needs_qnn
from tests.models import choosing_nothing, network, save, save_with_data
from tests.worker.actions.test_compile import X_ELITE, target

X = {"x": np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)}


def compile_bytes(model: Path, result: Path, data: dict[str, Path] | None = None) -> bytes:
    """The context model that a request to compile ``model`` writes to ``result``."""
    locations = {name: str(path) for name, path in (data or {}).items()}
    to = target("qnn", X_ELITE, embed=True)
    reply = handle(CompileBytesRequest(str(model), locations, to, str(result)))
    compiled = result.read_bytes()
    assert reply.size == len(compiled)
    return compiled


def output(model: Path | bytes) -> Array:
    session = open_session(model, context_options(target("qnn", X_ELITE), "context"))
    return run(session, X)["y"]


@needs_qnn
@pytest.mark.parametrize("external", [False, True])
def test_bytes_give_the_same_context_model_as_files(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "models" / "a.onnx"
    data = {}
    (save_with_data if external else save)(network(1), path)
    compile_context(path, tmp_path / "a_ctx.onnx", target("qnn", X_ELITE, embed=True))
    if external:
        # Not beside the model: only the request says where it is.
        data["network.data"] = (path.parent / "network.data").rename(tmp_path / "data")
    compiled = compile_bytes(path, tmp_path / "result.onnx", data)

    def facts(model: onnx.ModelProto) -> list[tuple[str, list[str], list[str]]]:
        return [(node.op_type, [*node.input], [*node.output]) for node in model.graph.node]

    from_file = onnx.load(tmp_path / "a_ctx.onnx")
    in_memory = onnx.ModelProto.FromString(compiled)
    assert facts(in_memory) == facts(from_file)
    assert in_memory.metadata_props == from_file.metadata_props
    assert (output(compiled) == output(tmp_path / "a_ctx.onnx")).all()
    # Nothing is written beside the source.
    assert [file.name for file in path.parent.iterdir()] == ["a.onnx"]


@needs_qnn
def test_nothing_compiled_is_an_error(tmp_path: Path) -> None:
    path = save(choosing_nothing(), tmp_path / "a.onnx")
    with pytest.raises(BuildError, match="compiled no node of the model") as raised:
        compile_bytes(path, tmp_path / "result.onnx")
    assert raised.value.problems[0].kind is Kind.NOTHING_COMPILED

"""From memory to memory, and the same as by files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext.errors import BuildError, ConfigError
from hatch_epcontext.worker.buffers import compile_to_bytes
from hatch_epcontext.worker.compile import compile_context
from hatch_epcontext.worker.session import context_options, open_session
from hatch_epcontext.worker.tensors import Array, run
from tests.conftest import needs_qnn
from tests.models import choosing_nothing, network, save, save_with_data
from tests.worker.test_compile import X_ELITE, target

OPTIONS = {"soc_model": 60, "htp_arch": 73}
X = {"x": np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)}


def answer(model: Path | bytes) -> Array:
    session = open_session(model, context_options(target("qnn", X_ELITE), "context"))
    return run(session, X)["y"]


@needs_qnn
@pytest.mark.parametrize("external", [False, True])
def test_buffers_give_what_files_give(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "models" / "a.onnx"
    data = {}
    if external:
        save_with_data(network(1), path)
        data = {"network.data": (path.parent / "network.data").read_bytes()}
    else:
        save(network(1), path)
    contents = path.read_bytes()
    compile_context(path, tmp_path / "a_ctx.onnx", target("qnn", X_ELITE, embed=True))
    if external:
        (path.parent / "network.data").unlink()
    compiled = compile_to_bytes(contents, "QNNExecutionProvider", OPTIONS, data=data)

    def facts(model: onnx.ModelProto) -> list[tuple[str, list[str], list[str]]]:
        return [(node.op_type, [*node.input], [*node.output]) for node in model.graph.node]

    by_file = onnx.load(tmp_path / "a_ctx.onnx")
    in_memory = onnx.ModelProto.FromString(compiled)
    assert facts(in_memory) == facts(by_file)
    assert in_memory.metadata_props == by_file.metadata_props
    assert (answer(compiled) == answer(tmp_path / "a_ctx.onnx")).all()
    # Nothing was dropped beside the source.
    assert [file.name for file in path.parent.iterdir()] == ["a.onnx"]


@needs_qnn
def test_what_compiles_nothing_is_an_error() -> None:
    with pytest.raises(BuildError, match="compiled no node of the model"):
        compile_to_bytes(choosing_nothing().SerializeToString(), "qnn", OPTIONS)


@pytest.mark.parametrize(
    ("provider", "options", "what"),
    [
        ("cpu", {}, "'cpu' is not a provider that makes contexts"),
        ("qn", {}, 'Did you mean "qnn"'),
        ("qnn", {"soc_mdel": 60}, "is not an option of the qnn provider"),
    ],
)
def test_what_is_wrong_is_told(provider: str, options: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        compile_to_bytes(b"", provider, options)

"""Weight sharing with the real QNN: two sequence lengths of one network."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Key, Kind
from hatch_epcontext.graph import graph
from hatch_epcontext.worker.actions.compile import _finish_sharing
from hatch_epcontext.worker.compiling import compile_context
from hatch_epcontext.worker.requests import CompileRequest
from tests.conftest import needs_qnn
from tests.models import parsed, save, transformer
from tests.worker.actions.test_compile import X_ELITE, run_compile, target


def request_for(tmp_path: Path, **models: onnx.ModelProto) -> CompileRequest:
    """A request to compile the models together; a single one is compiled alone."""
    folder = tmp_path / "-".join(models)
    folder.mkdir()
    paths = [save(made, tmp_path / "models" / f"{name}.onnx") for name, made in models.items()]
    specs = tuple(
        Model(path.stem, path, Key(("models", index))) for index, path in enumerate(paths)
    )
    return CompileRequest(specs, tuple(map(str, paths)), target("qnn", X_ELITE), str(folder))


def blob_of(request: CompileRequest) -> int:
    """The size of the only sidecar in bytes."""
    (blob,) = Path(request.folder).glob("*.bin")
    return blob.stat().st_size


@needs_qnn
def test_two_lengths_of_one_network_share_a_sidecar_of_the_size_of_one(tmp_path: Path) -> None:
    together = request_for(tmp_path, prefill=transformer(64), decode=transformer(1))
    prefill, decode = run_compile(together).contexts
    assert (prefill.model_file, decode.model_file) == ("prefill_ctx.onnx", "decode_ctx.onnx")
    assert prefill.inputs[0].shape == (1, 64, 256)
    assert decode.inputs[0].shape == (1, 1, 256)
    for context in (prefill, decode):
        assert context.coverage is not None
        assert context.coverage.share == 1
        model = onnx.load(Path(together.folder) / context.model_file, load_external_data=False)
        (node,) = model.graph.node
        assert graph.attribute(node, "ep_cache_context", b"") == b"prefill_ctx_qnn.bin"
    alone = request_for(tmp_path, alone=transformer(64))
    run_compile(alone)
    one, both = blob_of(alone), blob_of(together)
    assert one < both < 1.2 * one


@needs_qnn
def test_contexts_with_a_sidecar_each_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hatch_epcontext.worker.actions import compile as action

    # An EP without weight sharing.
    monkeypatch.setattr(
        action, "compile_context", lambda path, result, to, *_: compile_context(path, result, to)
    )
    request = request_for(tmp_path, prefill=transformer(64), decode=transformer(1))
    with pytest.raises(
        BuildError, match=r"do not share one sidecar: prefill_ctx\.onnx: prefill_ctx"
    ) as raised:
        run_compile(request)
    assert raised.value.problems[0].kind is Kind.NOT_SHARED


def context_of(size: int | None, data: str = "shared.bin") -> onnx.ModelProto:
    attributes = f'ep_cache_context = "{data}", embed_mode = 0'
    attributes += "" if size is None else f", max_size = {size}"
    nodes = f"y = com.microsoft.EPContext <{attributes}> (x)"
    return parsed(f"(float[1] x) => (float[1] y) {{ {nodes} }}", check=False)


def test_every_member_gets_the_largest_spill_fill_buffer(tmp_path: Path) -> None:
    # ONNX Runtime's reference tool is meant to do this too, but writes each member's own size back.
    sizes = {"a": 10, "b": 4096, "c": 0, "d": None}
    paths = [save(context_of(size), tmp_path / f"{name}.onnx") for name, size in sizes.items()]
    _finish_sharing(paths)
    nodes = [onnx.load(path).graph.node[0] for path in paths]
    assert [graph.attribute(node, "max_size", -1) for node in nodes] == [4096, 4096, 4096, -1]
    assert {graph.attribute(node, "ep_cache_context", b"") for node in nodes} == {b"shared.bin"}


def test_equal_buffers_leave_the_files_unchanged(tmp_path: Path) -> None:
    paths = [save(context_of(0), tmp_path / f"{name}.onnx") for name in "ab"]
    before = [path.stat().st_mtime_ns for path in paths]
    _finish_sharing(paths)
    assert [path.stat().st_mtime_ns for path in paths] == before

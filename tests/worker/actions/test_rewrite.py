"""Rewrite prepared models, in this process."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.builder import Builder, copy_of
from hatch_epcontext.graph.rewrites import REWRITES
from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.actions import prepare, rewrite
from hatch_epcontext.worker.requests import (
    CompileRequest,
    Prepared,
    PrepareRequest,
    RewriteRequest,
)
from tests.conftest import needs_qnn
from tests.graph.rewrites.equal import operators
from tests.models import parsed, save, save_with_data
from tests.worker.actions.test_compile import X_ELITE, run_compile, target


def rewritten(
    source: Path,
    tmp_path: Path,
    uncovered: tuple[str, ...] | None,
    compare: bool = True,
    path: str = "",
    **more: Any,
) -> Prepared:
    """``source``, or what was made of it at ``path``, prepared and rewritten."""
    spec = Model("a", source, Key(("models", 0)))
    folders = [tmp_path / name for name in ("prepared", "rewritten")]
    for folder in folders:
        folder.mkdir(parents=True)
    reply = prepare.handle(PrepareRequest(spec, "onnxruntime", str(folders[0]), compare))
    before = dataclasses.replace(reply, path=path or reply.path)
    request = RewriteRequest(spec, before, uncovered, str(folders[1]), True, **more)
    return rewrite.handle(request)


@pytest.mark.parametrize(("factor", "kept"), [(1.003, ("square",)), (1.02, ())])
def test_a_rewrite_is_as_near_to_the_source_as_what_is_rewritten(
    tmp_path: Path, factor: float, kept: tuple[str, ...]
) -> None:
    def squares(factor: float, name: str) -> Path:
        text = """(float[1, 64] x) => (float[1, 64] y) <float two = {2.0}>
        { square = Pow(x, two) y = Mul(square, factor) }"""
        model = parsed(text, factor=np.full(64, factor, np.float32))
        path = save_with_data(model, tmp_path / name, f"{name}.data")
        # As in caches, and as workers make them.
        os.link(tmp_path / f"{name}.data", tmp_path / f"{name}.link")
        return path

    # As where the order of additions counts: 50 dB, and 34 dB, which no simplifier may cost.
    reply = rewritten(
        squares(1.0, "a.onnx"),
        tmp_path,
        None,
        path=str(squares(factor, "other.onnx")),
        corrections=("square",),
    )
    assert reply.preparation.rewrites == kept
    assert bool(reply.dropped) is not bool(kept)


def softplus_and_comparison() -> onnx.ModelProto:
    return parsed(
        """(float[2, 300] x) => (float[2, 4] y) {
            p = MatMul (x, w)
            [soft] e = Softplus (p)
            m = ReduceMax <keepdims = 0> (e)
            [compare] c = GreaterOrEqual (p, m)
            y = Where (c, e, m) }""",
        w=np.linspace(-1, 1, 1200, dtype=np.float32).reshape(300, 4),
    )


@pytest.mark.parametrize(
    ("uncovered", "expected"),
    [
        (("soft",), ["Log", "GreaterOrEqual"]),
        (("compare",), ["Softplus", "Or"]),
        (None, ["Log", "Or"]),
    ],
)
def test_what_is_not_covered_is_rewritten(
    tmp_path: Path, uncovered: tuple[str, ...] | None, expected: list[str]
) -> None:
    reply = rewritten(save(softplus_and_comparison(), tmp_path / "a.onnx"), tmp_path, uncovered)
    assert reply.changed
    after = operators(onnx.load(reply.path))
    kinds = ("Softplus", "Log", "GreaterOrEqual", "Or")
    assert [operator for operator in after if operator in kinds] == expected
    assert reply.preparation.nodes == len(after)
    assert reply.dropped == ()


def test_external_data_stays_outside(tmp_path: Path) -> None:
    source = save_with_data(softplus_and_comparison(), tmp_path / "models" / "a.onnx")
    reply = rewritten(source, tmp_path, ("compare",))
    assert reply.changed
    assert [file.suffix for file in Path(reply.path).parent.iterdir() if file.suffix == ".data"]


def test_external_data_hides_no_types(tmp_path: Path) -> None:
    # As language models have them: each takes the sum that the one before it gives.
    nodes, taken = "", "x, x"
    for index in range(4):
        nodes += f"""
        y{index}, , , sum{index} = com.microsoft.SkipSimplifiedLayerNormalization ({taken}, scale)
        m{index} = MatMul (y{index}, w)"""
        taken = f"m{index}, sum{index}"
    model = parsed(
        f"(float[1, 2, 32] x) => (float[1, 2, 32] m3, float[1, 2, 32] sum3) {{ {nodes} }}",
        scale=np.ones(32, np.float32),
        w=np.eye(32, dtype=np.float32),
    )
    inside = rewritten(save(model, tmp_path / "inside" / "a.onnx"), tmp_path / "1", None)
    outside = rewritten(
        save_with_data(model, tmp_path / "outside" / "a.onnx"), tmp_path / "2", None
    )
    assert inside.preparation.nodes == outside.preparation.nodes
    assert outside.changed
    assert "SkipSimplifiedLayerNormalization" not in str(operators(onnx.load(outside.path)))


def test_nothing_to_rewrite(tmp_path: Path) -> None:
    source = save(softplus_and_comparison(), tmp_path / "a.onnx")
    assert not rewritten(source, tmp_path, ("another",)).changed


def test_a_rewrite_that_changes_results_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated(node: onnx.NodeProto, scope: Scope, builder: Builder) -> list[str]:
        new = copy_of(node)
        new.op_type = "ReduceMin"
        builder.append(new)
        return list(node.output)

    wrong = Rewrite("wrong", frozenset({"ReduceMax"}), negated)
    monkeypatch.setattr(rewrite, "REWRITES", (wrong, *REWRITES))
    reply = rewritten(save(softplus_and_comparison(), tmp_path / "a.onnx"), tmp_path, None)
    assert (reply.preparation.rewrites, reply.preparation.replaced) == (("apply_text",), 2)
    (dropped,) = reply.dropped
    assert dropped.startswith("wrong: the output 'y' differs from the source model's")


@needs_qnn
def test_qnn_compiles_what_it_left(tmp_path: Path) -> None:
    model = parsed(
        """(int16[2, 8] x) => (float[2, 96] y) <float one = {1}> {
            f = Cast <to = 1> (x)
            e = MatMul (f, w)
            g = Softplus (e)
            largest = ReduceMax <keepdims = 0> (g)
            above = GreaterOrEqual (largest, one)
            y = Where (above, g, one) }""",
        15,
        w=np.linspace(-0.1, 0.1, 768, dtype=np.float32).reshape(8, 96),
    )
    source = save(model, tmp_path / "a.onnx")
    reply = rewritten(source, tmp_path, None)
    assert reply.changed
    folder = tmp_path / "compiled"
    folder.mkdir()
    spec = Model("a", source, Key(("models", 0)))
    request = CompileRequest((spec,), (reply.path,), target("qnn", X_ELITE), str(folder))
    (context,) = run_compile(request).contexts
    assert context.coverage is not None
    assert context.coverage.uncovered == ()

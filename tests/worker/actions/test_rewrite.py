"""Rewrite prepared models, in this process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.builder import Builder, by_node, copy_of
from hatch_epcontext.graph.number_format import FOR_RANGES
from hatch_epcontext.graph.rewrites import REWRITES
from hatch_epcontext.graph.rewrites import rewrite as rewritten_in_place
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.worker.actions import prepare, rewrite
from hatch_epcontext.worker.requests import (
    CompileRequest,
    PrepareRequest,
    RewriteReply,
    RewriteRequest,
)
from tests.conftest import needs_qnn
from tests.graph.rewrites.equal import made, operators
from tests.graph.rewrites.test_branches import NEGATIVE, TWICE, choosing
from tests.models import save, save_with_data
from tests.worker.actions.test_compile import X_ELITE, run_compile, target

FLOAT = TensorProto.FLOAT


def rewritten(
    source: Path, tmp_path: Path, refused: tuple[str, ...] | None, compare: bool = True
) -> RewriteReply:
    spec = Model("a", source, Key(("models", 0)))
    folders = [tmp_path / name for name in ("prepared", "rewritten")]
    for folder in folders:
        folder.mkdir(parents=True)
    reply = prepare.handle(PrepareRequest(spec, "onnxruntime", str(folders[0]), compare))
    return rewrite.handle(
        RewriteRequest(spec, reply.path, refused, str(folders[1]), True, compare, reply.reference)
    )


def norms(scale: float, offset: float = 1.0) -> onnx.ModelProto:
    """Two norms: of values times ``scale``, as a logarithm above ``offset``, and of values near 2."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    norms (float[1, 64] x) => (float[1, 1] small, float[1, 1] usual)
    <float scale = {{{scale:.9f}}}, float offset = {{{offset:.9f}}}, float two = {{2.0}},
     int64[1] axes = {{1}}> {{
        less = Mul(x, scale)
        lesser = Mul(less, less)
        sum = ReduceSum(lesser, axes)
        norm = Sqrt(sum)
        above = Add(norm, offset)
        small = Log(above)
        part = Tanh(x)
        near = Add(part, two)
        squares = Mul(near, near)
        mean = ReduceMean<axes = [1]>(squares)
        usual = Sqrt(mean)
    }}"""
    return onnx.parser.parse_model(text)


@needs_qnn
@pytest.mark.parametrize(
    ("scale", "offset", "kept"),
    [
        (1e-4, 1e-4, ("hypot",)),
        (1.0, 1.0, ()),
        # Only values near 0 differ, which an app may never have.
        (1.0, 1e-6, ("hypot",)),
    ],
)
def test_rewrites_for_the_range_of_float16_are_kept_where_an_emulation_gains(
    tmp_path: Path, scale: float, offset: float, kept: tuple[str, ...]
) -> None:
    spec = Model("a", save(norms(scale, offset), tmp_path / "a.onnx"), Key(("models", 0)))
    folders = [tmp_path / name for name in ("prepared", "rewritten")]
    for folder in folders:
        folder.mkdir()
    prepared = prepare.handle(PrepareRequest(spec, "onnxruntime", str(folders[0]), True))
    reply = rewrite.handle(
        RewriteRequest(
            spec,
            prepared.path,
            None,
            str(folders[1]),
            simplify=True,
            compare=True,
            reference=prepared.reference,
            remedies=FOR_RANGES,
            target=target("qnn", X_ELITE),
        )
    )
    assert reply.remedies == kept
    assert (reply.path is None) == (not kept)
    assert len(reply.dropped) + len(kept) == 2


@needs_qnn
def test_a_rewrite_around_a_kernel_that_no_emulation_shows_is_kept(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
    norm (float[1, 64] x) => (float[1, 1] y) <int64[1] axes = {1}> {
        near = Tanh(x)
        y = ReduceL2(near, axes)
    }""")
    spec = Model("a", save(model, tmp_path / "a.onnx"), Key(("models", 0)))
    folders = [tmp_path / name for name in ("prepared", "rewritten")]
    for folder in folders:
        folder.mkdir()
    prepared = prepare.handle(PrepareRequest(spec, "onnxruntime", str(folders[0]), True))
    request = RewriteRequest(
        *(spec, prepared.path, None, str(folders[1])),
        simplify=True,
        compare=True,
        reference=prepared.reference,
        remedies=FOR_RANGES,
        target=target("qnn", X_ELITE),
    )
    reply = rewrite.handle(request)
    assert (reply.remedies, reply.dropped) == (("hypot",), ())


@pytest.mark.parametrize(("factor", "kept"), [(1.003, ("square",)), (1.02, ())])
def test_a_rewrite_is_as_near_to_the_source_as_what_is_rewritten(
    tmp_path: Path, factor: float, kept: tuple[str, ...]
) -> None:
    def squares(factor: float, name: str) -> Path:
        text = """<ir_version: 8, opset_import: ["" : 17]>
        squares (float[1, 64] x) => (float[1, 64] y) <float two = {2.0}> {
            square = Pow(x, two)
            y = Mul(square, factor)
        }"""
        model, path = onnx.parser.parse_model(text), tmp_path / name
        weights = numpy_helper.from_array(np.full(64, factor, np.float32), "factor")
        model.graph.initializer.append(weights)
        data = f"{name}.data"
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=16)
        # As in caches, and as workers make them.
        os.link(tmp_path / data, tmp_path / f"{name}.link")
        return path

    # As where the order of additions counts: 50 dB, and 34 dB, which no simplifier may cost.
    spec = Model("a", squares(1.0, "a.onnx"), Key(("models", 0)))
    prepared, rewritten = tmp_path / "prepared", tmp_path / "rewritten"
    prepared.mkdir()
    rewritten.mkdir()
    first = prepare.handle(PrepareRequest(spec, "onnxruntime", str(prepared), True))
    reply = rewrite.handle(
        RewriteRequest(
            spec,
            str(squares(factor, "other.onnx")),
            None,
            str(rewritten),
            simplify=True,
            compare=True,
            reference=first.reference,
            remedies=("square",),
            target=target("qnn", X_ELITE),
        )
    )
    assert reply.remedies == kept
    assert bool(reply.dropped) is not bool(kept)


def einsum_and_clip() -> onnx.ModelProto:
    return made(
        [
            helper.make_node("Einsum", ["x", "w"], ["e"], equation="bi,oi->bo"),
            helper.make_node("ReduceMax", ["e"], ["m"], keepdims=0),
            helper.make_node("Clip", ["e", "", "m"], ["y"]),
        ],
        {"x": (FLOAT, [2, 300])},
        {"y": (FLOAT, [2, 4])},
        {"w": np.linspace(-1, 1, 1200, dtype=np.float32).reshape(4, 300)},
    )


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (("Einsum",), ["Transpose", "MatMul", "ReduceMax", "Clip"]),
        (("Clip",), ["Einsum", "ReduceMax", "Min"]),
        (None, ["Transpose", "MatMul", "ReduceMax", "Min"]),
    ],
)
def test_what_is_refused_is_rewritten(
    tmp_path: Path, refused: tuple[str, ...] | None, expected: list[str]
) -> None:
    reply = rewritten(save(einsum_and_clip(), tmp_path / "a.onnx"), tmp_path, refused)
    assert reply.path is not None
    found = operators(onnx.load(reply.path))
    # A stored tensor is transposed at once.
    assert [each for each in found if each != "Transpose"] == [
        e for e in expected if e != "Transpose"
    ]
    assert reply.nodes == len(found)
    assert reply.dropped == ()


def test_external_data_stays_outside(tmp_path: Path) -> None:
    source = save_with_data(einsum_and_clip(), tmp_path / "models" / "a.onnx")
    reply = rewritten(source, tmp_path, ("Clip",))
    assert reply.path is not None
    assert [file.suffix for file in Path(reply.path).parent.iterdir() if file.suffix == ".data"]


def test_external_data_hides_no_types(tmp_path: Path) -> None:
    # As language models have them: each takes the sum that the one before it gives.
    nodes = []
    values = ["x", "x"]
    for index in range(4):
        outputs = [f"y{index}", "", "", f"sum{index}"]
        nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [*values, "scale"],
                outputs,
                domain="com.microsoft",
            )
        )
        nodes.append(helper.make_node("MatMul", [outputs[0], "w"], [f"m{index}"]))
        values = [f"m{index}", outputs[3]]
    shape = [1, 2, 32]
    model = made(
        nodes,
        {"x": (TensorProto.FLOAT, shape)},
        {values[0]: (TensorProto.FLOAT, shape), values[1]: (TensorProto.FLOAT, shape)},
        {"scale": np.ones(32, np.float32), "w": np.eye(32, dtype=np.float32)},
    )
    inside = rewritten(save(model, tmp_path / "inside" / "a.onnx"), tmp_path / "1", None)
    outside = rewritten(
        save_with_data(model, tmp_path / "outside" / "a.onnx"), tmp_path / "2", None
    )
    assert inside.nodes == outside.nodes
    assert outside.path is not None
    assert "SkipSimplifiedLayerNormalization" not in str(operators(onnx.load(outside.path)))


def test_nothing_to_rewrite(tmp_path: Path) -> None:
    source = save(einsum_and_clip(), tmp_path / "a.onnx")
    assert rewritten(source, tmp_path, ("Resize",)) == RewriteReply(None)


def test_a_rewrite_that_changes_results_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated(node: onnx.NodeProto, scope: Scope, builder: Builder) -> list[str]:
        new = copy_of(node)
        new.op_type = "ReduceMin"
        builder.append(new)
        return list(node.output)

    wrong = by_node("wrong", {"ReduceMax": negated})
    monkeypatch.setattr(rewrite, "REWRITES", (wrong, *REWRITES))
    reply = rewritten(save(einsum_and_clip(), tmp_path / "a.onnx"), tmp_path, None)
    assert len(reply.rewrites) == 2
    (dropped,) = reply.dropped
    assert dropped.startswith("wrong: the output 'y' differs from the source model's")


def test_both_branches_are_compared(tmp_path: Path) -> None:
    source = save(choosing([TWICE], [NEGATIVE]), tmp_path / "a.onnx")
    assert rewritten(source, tmp_path, ("If",)).rewrites


def test_a_branch_that_no_input_takes_is_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = choosing([TWICE], [NEGATIVE])
    # No sum is above that.
    (zero,) = (each for each in model.graph.initializer if each.name == "zero")
    zero.CopyFrom(onnx.numpy_helper.from_array(np.array(1e30, np.float32), "zero"))

    def wrong(model: onnx.ModelProto, *given: object) -> tuple[str, ...]:
        names = rewritten_in_place(model, *given)  # type: ignore[arg-type]
        for node in model.graph.node:
            if node.op_type == "Mul":
                node.op_type = "Sub"
        return names

    monkeypatch.setattr(rewrite, "rewrite", wrong)
    reply = rewritten(save(model, tmp_path / "a.onnx"), tmp_path, ("If",))
    assert reply.path is None
    assert "the branch's" in reply.dropped[0]


def test_without_a_comparison_no_branch_is_removed(tmp_path: Path) -> None:
    source = save(choosing([TWICE], [NEGATIVE]), tmp_path / "a.onnx")
    assert rewritten(source, tmp_path, None, compare=False).path is None


@needs_qnn
def test_qnn_compiles_what_it_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=FLOAT),
        helper.make_node("Einsum", ["f", "w"], ["e"], equation="bi,io->ob"),
        helper.make_node("QuickGelu", ["e"], ["g"], domain="com.microsoft"),
        helper.make_node("ReduceMean", ["g"], ["m"], keepdims=0),
        helper.make_node("Clip", ["g", "m"], ["c"]),
        helper.make_node("Reshape", ["c", "many"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[5, 4, 2, 0, 3, 1]),
        helper.make_node("Reshape", ["t", "few"], ["s"]),
        helper.make_node("ReduceMax", ["s"], ["largest"], keepdims=0),
        helper.make_node("GreaterOrEqual", ["largest", "one"], ["above"]),
        helper.make_node("Where", ["above", "s", "one"], ["y"]),
    ]
    stored = {
        "w": np.linspace(-0.1, 0.1, 768, dtype=np.float32).reshape(8, 96),
        "many": np.array([2, 3, 2, 2, 2, 4]),
        "few": np.array([2, 96]),
        "one": np.array(1, np.float32),
    }
    inputs = {"x": (TensorProto.INT16, [2, 8])}
    source = save(
        made(nodes, inputs, {"y": (FLOAT, [2, 96])}, stored, opset=15), tmp_path / "a.onnx"
    )
    reply = rewritten(source, tmp_path, None)
    assert reply.path is not None
    folder = tmp_path / "compiled"
    folder.mkdir()
    spec = Model("a", source, Key(("models", 0)))
    request = CompileRequest((spec,), (reply.path,), target("qnn", X_ELITE), str(folder))
    (context,) = run_compile(request).contexts
    assert context.coverage is not None
    assert context.coverage.uncovered == ()

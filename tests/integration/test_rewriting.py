"""What QNN refuses, rewritten, compiled and run on its simulator."""

from __future__ import annotations

from pathlib import Path

from onnx import helper

from hatch_epcontext.api import ValidationStatus, compile_models
from tests.conftest import needs_qnn
from tests.models import model, save, value, weights

pytestmark = needs_qnn


def test_what_is_refused_is_rewritten_and_named(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("ReduceMean", ["m"], ["mean"], keepdims=0),
            helper.make_node("Clip", ["m", "mean"], ["c"]),
            helper.make_node("Einsum", ["c", "v"], ["y"], equation="bi,io->ob"),
        ],
        [value("x", [4, 8])],
        [value("y", [6, 4])],
        [weights("w", 8, 8), weights("v", 8, 6)],
    )
    source = save(made, tmp_path / "a.onnx")
    before = source.read_bytes()
    lines: list[str] = []
    result = compile_models(
        source,
        tmp_path / "out",
        "qnn",
        provider_options={"soc_model": 60},
        log=lines.append,
    )
    (compiled,) = result.report.jobs[0].models
    assert compiled.coverage is not None
    assert compiled.coverage.uncovered == ()
    assert compiled.preparation.rewrites == (
        "Clip as Max and Min",
        "Einsum as MatMul, Mul and ReduceSum",
    )
    assert compiled.preparation.tried == ("unmodified: 2 nodes on the CPU",)
    assert compiled.validation.status is ValidationStatus.RAN
    assert any("rewritten (Clip as Max and Min; Einsum" in line for line in lines)
    assert source.read_bytes() == before

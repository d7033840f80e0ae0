from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.versions import lower_versions, usual_versions
from tests.conftest import newer_runtime
from tests.models import parsed

ROI = "roi (float[1, 2, 8, 8] x, float[1, 4] b, int64[1] i) => (float[1, 2, 4, 4] y)"
NORM = "norm (float[1, 4, 2] x, float[4] s) => (float[1, 4, 2] y)"


@pytest.mark.parametrize(
    ("opset", "body", "lowest", "ir_version"),
    [
        (24, "f (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", 13, 8),
        (22, "f (float[1, 1, 4, 4] x) => (float[1, 1, 4, 4] y) { y = HardSigmoid(x) }", 7, 8),
        (25, "f (float[2, 3] x) => (float16[2, 3] y) { y = Cast<to = 10>(x) }", 13, 8),
        (25, "f (float[2, 3] x) => (uint4[2, 3] y) { y = Cast<to = 21>(x) }", 21, 10),
        (25, "f (float[2] x) => (float[4] y) <int64[2] p = {1, 1}> { y = Pad(x, p) }", 18, 8),
        # These need what they name.
        (20, "f (float[2, 3] x) => (float[2, 3] y) { y = Gelu(x) }", 20, 9),
        pytest.param(
            25,
            'f (float[2] x) => (float[4] y) <int64[2] p = {1, 1}> { y = Pad<mode = "wrap">(x, p) }',
            25,
            13,
            marks=newer_runtime,
        ),
        (22, f"{ROI} {{ y = RoiAlign<output_height = 4, output_width = 4>(x, b, i) }}", 16, 8),
        # The meaning of its scale changed, from one number for each group to one for each channel.
        (22, f"{NORM} {{ y = GroupNormalization<num_groups = 2>(x, s, s) }}", 21, 10),
        # The meaning of an axis changed.
        (13, "f (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Softmax<axis = 1>(x) }", 13, 8),
        # An unknown type stays.
        (24, "f (float[2] x) => (y) { h = com.microsoft.Gelu(x) \n y = Relu(h) }", 14, 8),
    ],
)
def test_versions_are_no_higher_than_the_nodes_need(
    tmp_path: Path, opset: int, body: str, lowest: int, ir_version: int
) -> None:
    header = f'<ir_version: 13, opset_import: ["" : {opset}, "com.microsoft": 1, "ai.onnx.ml": 5]>'
    model = onnx.parser.parse_model(f"{header} {body}")
    used = {"com.microsoft": 1} if "com.microsoft" in body else {}
    lower_versions(model)
    assert model.ir_version == ir_version
    found = {each.domain: each.version for each in model.opset_import}
    assert found == {"": lowest, **used}
    onnx.save(model, tmp_path / "a.onnx")
    onnxruntime.InferenceSession(tmp_path / "a.onnx")


def test_a_model_older_than_all_runtimes_gets_the_oldest_usual_opset() -> None:
    model = parsed("(bool[2] x) => (bool[2] y) { y = Not (x) }", 1)
    assert graph.opset(usual_versions(model)) == 7
    # Its broadcasting was another one.
    older = parsed("(float[2] x) => (float[2] y) { y = Add <broadcast = 1> (x, x) }", 6)
    assert graph.opset(usual_versions(older)) == 6


def test_what_onnx_has_defined_since_becomes_what_it_is_made_of() -> None:
    if onnx.defs.onnx_opset_version() < 28:
        pytest.skip("onnx does not have it")
    model = parsed("(float[2, 4] x) => (float[2, 4] y) { y = SwiGLU (x, x) }", 28, check=False)
    model = usual_versions(model)
    assert graph.opset(model) < 28
    assert "SwiGLU" not in {node.op_type for node in model.graph.node}

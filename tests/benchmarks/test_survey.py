"""The list of open models, and what the survey makes of the tool's output."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import ELEVEN, ZOO, OpenModel, fetch
from benchmarks.project import TARGETS
from benchmarks.survey import Printed, Results, Try, outcome, run_limited, tables

_JOB: dict[str, Any] = {
    "times": {"compile": 0.5},
    "models": [
        {
            "preparation": {"rewrites": ["square"]},
            "load": 0.25,
            "coverage": {"nodes": 9, "compiled": 9, "partitions": 1, "uncovered": []},
            "validation": {
                "status": "ran",
                "agreements": [
                    {"output": "a", "status": "agrees", "snr": 40.0, "reason": None},
                    {"output": "b", "status": "agrees", "snr": None, "reason": None},
                    {"output": "c", "status": "random", "snr": None, "reason": "chance"},
                ],
            },
        }
    ],
}


def _printed(**report: Any) -> Printed:
    return Printed(json.dumps({"jobs": [], "failures": [], **report}), "")


def test_the_list_has_different_models_with_known_targets() -> None:
    assert len(ZOO) >= 30
    assert len({model.name for model in ZOO}) == len(ZOO)
    assert len({model.title for model in ZOO}) == len(ZOO)
    for model in ZOO:
        assert len(model.sha256) == 64
        assert "==" in model.package
        assert {*model.targets, *model.keys} <= TARGETS.keys()


def test_the_eleven_need_shapes_and_constants_only() -> None:
    for model in ELEVEN:
        assert model.shapes
        assert not {**model.dims, **model.keys}


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "some==1"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some-1.whl", "w") as wheel:
        wheel.writestr("some/model.onnx.gz", gzip.compress(b"contents", mtime=0))
    return tmp_path


def test_a_compressed_model_is_unpacked_and_its_sha256_checked(downloads: Path) -> None:
    sha256 = hashlib.sha256(gzip.compress(b"contents", mtime=0)).hexdigest()
    model = OpenModel("some", "Some", "some==1", "some/model.onnx.gz", sha256)
    (source,) = fetch(downloads, [model])
    assert source.path.read_bytes() == b"contents"
    other = OpenModel("some", "Some", "some==1", "some/model.onnx.gz", "0" * 64)
    with pytest.raises(ValueError, match="sha256"):
        fetch(downloads, [other])


def test_a_job_is_whole_partial_or_optimized() -> None:
    done = outcome("a", "qnn", 2.0, _printed(jobs=[_JOB]))
    assert (done.outcome, done.compile, done.open, done.snr) == ("whole", 0.5, 0.25, 40.0)
    assert (done.why, done.rules) == ("c is random: chance", ["square"])
    model = _JOB["models"][0]
    coverage = {**model["coverage"], "compiled": 8, "uncovered": [{"op": "LSTM"}]}
    partial = {**_JOB, "models": [{**model, "coverage": coverage}]}
    assert outcome("a", "qnn", 2.0, _printed(jobs=[partial])).outcome == "partial"
    optimized = {**_JOB, "models": [{**model, "coverage": None}]}
    assert outcome("a", "cpu", 2.0, _printed(jobs=[optimized])).outcome == "optimized"


def test_a_failure_is_refused_with_its_message() -> None:
    failure = {"problems": [{"kind": "EPC301", "message": "No."}]}
    done = outcome("a", "qnn", 2.0, _printed(failures=[failure]))
    assert (done.outcome, done.kind, done.why) == ("refused", "EPC301", "No.")


def test_an_error_without_a_report_is_refused_with_its_first_line() -> None:
    printed = Printed("", "epcontext: failed:\na -> qnn: EPC203\n    The first line.\n    More.\n")
    done = outcome("a", "qnn", 2.0, printed)
    assert (done.outcome, done.kind, done.why) == ("refused", "EPC203", "The first line.")


def test_a_command_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_limited(command, 0.1, tmp_path) is None


def test_results_are_in_the_file_after_each_try_and_replace_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path)
    results.add(Try(ZOO[0].name, "qnn", "refused", 1.0, why="a | b"))
    results.add(Try(ZOO[1].name, "qnn", "timeout", 300.0, why="not done in 300 s"))
    assert "a \\| b" in tables(Results(path).tries)
    Results(path).add(Try(ZOO[0].name, "qnn", "whole", 1.0, nodes=3, compiled=3, contexts=1))
    text = tables(Results(path).tries)
    assert "2 models: 1 whole, 1 timeout." in text
    assert f"| {ZOO[0].title} | whole | 3 of 3 in 1 |" in text

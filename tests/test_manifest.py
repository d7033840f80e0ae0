from __future__ import annotations

import pytest

from hatch_epcontext.artifact import FileRecord, Preparation, Proof
from hatch_epcontext.manifest import Manifest, ModelEntry, SourceEntry, TargetEntry
from hatch_epcontext.protocol import Agreement, Coverage, NodeFacts, TensorFacts
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.structure import from_json, to_json


@pytest.fixture
def made() -> Manifest:
    target = TargetEntry(
        target="npu",
        provider="qnn",
        product="context",
        ep="QNNExecutionProvider",
        device="npu",
        device_filter={},
        policy=None,
        plugin=PROVIDERS["qnn"].plugin,
        platforms=("win_arm64",),
        model_file="a/npu/a_ctx.onnx",
        compatibility_string="v2:6:2.51.0:5.51.0:73:60:0:0",
        ep_sdk_version="v2.51",
        session_options={},
        provider_options={"backend_type": "htp"},
        compiled_for={"soc_model": "60"},
        compiled_with={"onnxruntime": "1.31.1"},
        preparation=Preparation("onnxslim", 9, 3, (), ("onnxruntime: crashed",)),
        coverage=Coverage(3, 2, 1, (NodeFacts("where", "NonZero"),)),
        validation=Proof("run", (Agreement("y", 0.001, 0.9999),)),
    )
    x = TensorFacts("x", "float32", ("batch", None, 8))
    model = ModelEntry((x,), (x,), SourceEntry("00", None), (target,))
    return Manifest(
        1, "hatch-epcontext 1.2", {"a": model}, {"a/npu/a_ctx.onnx": FileRecord(1, "0")}
    )


def test_json_comes_back_as_it_was(made: Manifest) -> None:
    assert from_json(to_json(made), Manifest) == made


def test_no_timings(made: Manifest) -> None:
    assert "seconds" not in to_json(made)


def test_ours_is_what_we_generated(made: Manifest) -> None:
    assert made.is_ours
    assert not Manifest(1, "another tool", {}, {}).is_ours


def test_the_coverage_is_the_share_of_compiled_nodes(made: Manifest) -> None:
    coverage = made.models["a"].targets[0].coverage
    assert coverage is not None
    assert coverage.share == pytest.approx(2 / 3)
    assert Coverage(0, 0, 0).share == 0

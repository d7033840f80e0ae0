from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hatch_epcontext.build.artifact import Artifact, Preparation, Validation, ValidationStatus
from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.files import FileRecord
from hatch_epcontext.ipc.protocol import Agreement, Coverage, NodeFacts, TensorFacts
from hatch_epcontext.package.manifest import (
    FileList,
    Manifest,
    ModelEntry,
    SourceEntry,
    TargetEntry,
    make,
)
from hatch_epcontext.providers import PROVIDERS, Plugin
from hatch_epcontext.serialize import from_json, to_json
from tests.results import configured, resulting


@pytest.fixture
def manifest() -> Manifest:
    target = TargetEntry(
        target="npu",
        product="context",
        plugin=PROVIDERS["qnn"].plugin,
        platforms=("win_arm64",),
        model_file="a/npu/a_ctx.onnx",
        compatibility_string="v2:6:2.51.0:5.51.0:73:60:0:0",
        ep_sdk_version="v2.51",
        settings=CompileSettings(
            provider="qnn",
            ep="QNNExecutionProvider",
            provider_options={"backend_type": "htp", "soc_model": "60"},
            device="npu",
            external_initializers=1024,
        ),
        load_options={"backend_type": "htp"},
        compiled_with={"onnxruntime": "1.31.1"},
        preparation=Preparation("onnxslim", 9, 3, (), ("onnxruntime: crashed",)),
        coverage=Coverage(3, 2, 1, (NodeFacts("where", "NonZero"),)),
        validation=Validation(ValidationStatus.RAN, (Agreement("y", 0.001, 0.9999),)),
    )
    x = TensorFacts("x", "float32", ("batch", None, 8))
    model = ModelEntry((x,), (x,), SourceEntry("00", None), (target,))
    return Manifest(
        manifest=2,
        generator="hatch-epcontext 1.2",
        models={"a": model},
        files={"a/npu/a_ctx.onnx": FileRecord(1, "0")},
    )


def test_a_manifest_is_the_same_after_json(manifest: Manifest) -> None:
    assert from_json(to_json(manifest), Manifest) == manifest


def test_it_has_no_times(manifest: Manifest) -> None:
    assert "seconds" not in to_json(manifest)


def test_a_manifest_of_another_tool_is_not_ours(manifest: Manifest) -> None:
    assert manifest.is_ours
    assert not FileList(1, "another tool", {}).is_ours


def test_the_coverage_is_the_share_of_compiled_nodes(manifest: Manifest) -> None:
    coverage = manifest.models["a"].targets[0].coverage
    assert coverage is not None
    assert coverage.share == pytest.approx(2 / 3)
    assert Coverage(0, 0, 0).share == 0


def test_the_json_has_the_keys_that_the_loader_reads(manifest: Manifest) -> None:
    entry = json.loads(to_json(manifest))["models"]["a"]["targets"][0]
    assert entry["settings"].keys() >= {
        "ep",
        "device",
        "device_filter",
        "policy",
        "session_options",
    }
    assert entry["load_options"] == {"backend_type": "htp"}
    assert entry["validation"]["status"] == "ran"


def test_the_build_machines_library_path_is_not_in_it(project: Path, artifact: Artifact) -> None:
    result = resulting(configured(project), artifact)
    (built,) = result.built
    plugin = Plugin("", "its library", "SomeEP", path="/build/machine/libsome_ep.so")
    provider = dataclasses.replace(built.job.target.provider, plugin=plugin)
    target = dataclasses.replace(built.job.target, provider=provider)
    built = dataclasses.replace(built, job=dataclasses.replace(built.job, target=target))
    manifest = make(dataclasses.replace(result, built=(built,)), {"a": None}, {})
    assert manifest.manifest == 2
    assert "/build/machine" not in to_json(manifest)

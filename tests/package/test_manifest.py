from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.recipe import Recipe, Stop
from hatch_epcontext.jobs.search import Attempt
from hatch_epcontext.package.manifest import (
    ModelPackage,
    PlainMetadata,
    Variant,
    VariantMetadata,
    make,
    write,
)
from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.results import Preparation, Validated
from tests.projects import GROUP
from tests.results import Artifact, built_from, compiled, configured, resulting

newer_python = pytest.mark.skipif(sys.version_info < (3, 11), reason="the qnn provider needs 3.11")


def made(root: Path, toml: str, folder: Path) -> ModelPackage:
    """The package of a project that is configured by ``toml``; all sources are in it."""
    result = compiled(configured(root, toml), folder)
    return package_of(result)


def package_of(result: Result) -> ModelPackage:
    sources = {source.model.name: f"{source.model.name}/source/a.onnx" for source in result.sources}
    return make(result, sources, {})


def only_variant(package: ModelPackage, target: str) -> tuple[Variant, VariantMetadata]:
    """The variant for ``target`` of the only component, and what we know of it."""
    (component,) = package.components.values()
    variant = component.variants[target]
    about = variant.about
    assert about is not None
    return variant, about


def test_it_has_what_was_built_and_not_what_was_tried_or_when(
    project: Path, artifact: Artifact
) -> None:
    prepared = Preparation("onnxruntime", 5, 4, rewrites=("a rewrite",))
    (context,) = artifact.record.contexts
    context = dataclasses.replace(context, compatibility="v2:6", ep_sdk_version="2.51")
    record = dataclasses.replace(artifact.record, preparations=(prepared,), contexts=(context,))
    result = resulting(configured(project), Artifact(artifact.folder, record))
    (built,) = result.built
    attempt = Attempt(Recipe("none"), stop=Stop("change"), dropped=("an attempt",))
    built = dataclasses.replace(built, search=built.search.adding(attempt))
    package = package_of(dataclasses.replace(result, built=(built,)))
    text = write(package)
    assert "a rewrite" in text
    for absent in ("an attempt", "seconds", '"load"', "2026-11-23"):
        assert absent not in text
    variant, about = only_variant(package, "cpu")
    assert (variant.compatibility_string, about.ep_sdk_version) == ("v2:6", "2.51")


TWO = """
models = ["models/b.onnx", "models/a.onnx"]
[targets.z]
provider = "openvino"
device = "npu"
[targets.a]
provider = "cuda"
[targets.m]
provider = "cpu"
"""


def test_the_batch_that_a_target_has_seen_is_that_of_the_model(
    project: Path, tmp_path: Path
) -> None:
    toml = '[targets]\na.provider = "cpu"\nb.provider = "cpu"\n[[models]]\npath = "models/a.onnx"\n'
    result = compiled(configured(project, toml), tmp_path)
    batch = {"inputs": {"x": 0}, "outputs": {"y": 0}}
    first, second = result.built
    seen = Validated(second.validations["a"], batch)
    built = first, built_from(second.job, Artifact(second.folder, second.record), {"a": seen})
    package = package_of(dataclasses.replace(result, built=built))
    assert package.components["a"].about.batch == batch
    about = package.components["a"].variants["b"].about
    assert about is not None
    assert about.validation == built[0].validations["a"]


def test_components_and_variants_keep_the_configured_order(project: Path, tmp_path: Path) -> None:
    package = made(project, TWO, tmp_path / "artifacts")
    order = {name: list(model.variants) for name, model in package.components.items()}
    assert order == {"b": ["z", "a", "m", "source"], "a": ["z", "a", "m", "source"]}
    assert list(order) == ["b", "a"]
    written = json.loads(write(package))["components"]
    assert {name: list(model["variants"]) for name, model in written.items()} == order


@pytest.mark.parametrize(
    ("target", "ep", "device"),
    [
        ('"openvino"\ndevice = "npu"', "OpenVINOExecutionProvider", "npu"),
        ('"openvino"\ndevice = "gpu"', "OpenVINOExecutionProvider", "gpu"),
        ('"openvino"\ndevice = "cpu"', "OpenVINOExecutionProvider", None),
        ('"cuda"', "CUDAExecutionProvider", "gpu"),
        ('"coreml"', "CoreMLExecutionProvider", "npu"),
        ('"cpu"', "CPUExecutionProvider", None),
    ],
)
def test_the_device_is_named_for_npus_and_gpus_only(
    target: str, ep: str, device: str | None, project: Path, tmp_path: Path
) -> None:
    toml = f'models = ["models/a.onnx"]\n[targets.it]\nprovider = {target}\n'
    variant, about = only_variant(made(project, toml, tmp_path / "artifacts"), "it")
    assert (variant.ep, variant.device) == (ep, device)
    assert about.settings.device == (device or "cpu")


def test_options_are_where_they_are_understood(project: Path, tmp_path: Path) -> None:
    toml = """
models = ["models/a.onnx"]
[targets.npu]
provider = "plugin"
ep-name = "OtherEP"
library = "other_ep"
provider-options = { target = "X1" }
session-options = { "session.disable_prepacking" = true }
[targets.gpu]
provider = "tensorrt-rtx"
provider-options = { enable_cuda_graph = true }
load-options = { nv_runtime_cache_path = "{user-cache}/rtx", nv_cuda_graph_enable = true }
allow-unknown-options = true
[targets.cpu]
provider = "cpu"
[targets.openvino]
provider = "openvino"
recompile = true
"""
    package = made(project, toml, tmp_path / "artifacts")
    variant, about = only_variant(package, "npu")
    assert variant.ort.provider_options == {"target": "X1"}
    # A context is opened without compiling, and a graph as it is.
    options = {"session.disable_prepacking": "1", "session.disable_model_compile": "1"}
    assert variant.ort.session_options == options
    assert only_variant(package, "cpu")[0].ort.session_options == {}
    variant, about = only_variant(package, "gpu")
    assert about.load_options == {"nv_runtime_cache_path": "{user-cache}/rtx"}
    assert "nv_runtime_cache_path" not in variant.ort.provider_options
    assert variant.ort.provider_options["nv_cuda_graph_enable"] == "1"
    assert about.prepared is None
    assert only_variant(package, "openvino")[1].prepared == "prepared/a.onnx"


@newer_python
def test_the_options_of_the_chip_are_named(project: Path, tmp_path: Path) -> None:
    toml = """
models = ["models/a.onnx"]
[targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
provider-options = { vtcm_mb = 4, htp_graph_finalization_optimization_mode = 3 }
"""
    _, about = only_variant(made(project, toml, tmp_path / "artifacts"), "npu")
    assert set(about.chip_options) == {"soc_model", "htp_arch", "vtcm_mb"}
    assert about.settings.provider_options["soc_model"] == "60"


def test_the_source_is_a_variant_of_the_cpu(project: Path, tmp_path: Path) -> None:
    result = compiled(configured(project), tmp_path / "artifacts")
    (component,) = package_of(result).components.values()
    source = component.variants["source"]
    assert (source.variant_directory, source.model_file) == ("a/source", "a/source/a.onnx")
    assert (source.ep, source.device, source.compatibility_string) == (
        "CPUExecutionProvider",
        None,
        None,
    )
    assert source.facts == PlainMetadata(
        (TensorFacts("x", "float32", ("batch", 4)),), (TensorFacts("y", "float32", ("batch", 4)),)
    )
    (component,) = make(result, {}, {}).components.values()
    assert list(component.variants) == ["cpu"]


def test_the_build_machines_library_path_is_not_in_it(project: Path, artifact: Artifact) -> None:
    result = resulting(configured(project), artifact)
    (built,) = result.built
    plugin = Plugin("", "its library", "SomeEP", path="/build/machine/libsome_ep.so")
    target = dataclasses.replace(built.job.target, plugin=plugin)
    built = dataclasses.replace(built, job=dataclasses.replace(built.job, target=target))
    package = package_of(dataclasses.replace(result, built=(built,)))
    assert "/build/machine" not in write(package)
    _, about = only_variant(package, "cpu")
    assert about.plugin == dataclasses.replace(plugin, path="")


@newer_python
def test_the_variants_of_a_group_are_in_one_folder(project: Path, tmp_path: Path) -> None:
    package = made(project, GROUP, tmp_path / "artifacts")
    for name, component in package.components.items():
        variant = component.variants["npu"]
        assert (variant.variant_directory, variant.model_file) == (
            "both/npu",
            f"both/npu/{name}_ctx.onnx",
        )
        assert variant.ort.session_options == {
            "session.disable_model_compile": "1",
            "ep.share_ep_contexts": "1",
        }
        about = variant.about
        assert about is not None
        assert about.group == "both"
        # QNN's simulator does not open shared contexts.
        assert about.needs_device
        alone = component.variants["cpu"]
        assert alone.variant_directory == f"{name}/cpu"
        assert alone.ort.session_options == {}
        about = alone.about
        assert about is not None
        assert (about.group, about.needs_device) == (None, False)


SEVERAL = """
[[models]]
name = "det"
path = "models/a.onnx"
shapes = [{ x = [1, 8] }, { x = [1, 16] }]
[targets.cpu]
provider = "cpu"
[targets.npu]
provider = "openvino"
device = "npu"
"""


def test_a_model_with_several_shapes_has_a_component_for_each(
    project: Path, tmp_path: Path
) -> None:
    package = made(project, SEVERAL, tmp_path / "artifacts")
    assert list(package.components) == ["det.1x8", "det.1x16"]
    for name, component in package.components.items():
        # In the configured order, and targets with open shapes are a variant of each.
        folders = {
            target: variant.variant_directory for target, variant in component.variants.items()
        }
        assert list(folders) == ["cpu", "npu", "source"]
        assert (folders["cpu"], folders["npu"]) == ("det/cpu", f"{name}/npu")
    first, second = (c.about for c in package.components.values())
    assert first.model == second.model == "det"
    assert first.shapes == {"det.1x8": {"x": (1, 8)}, "det.1x16": {"x": (1, 16)}}
    assert second.shapes == {}

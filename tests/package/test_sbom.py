from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import onnx

from hatch_epcontext.errors import KeyNames
from hatch_epcontext.files import file_sha256
from hatch_epcontext.graph.graph import license_of
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package import sbom
from hatch_epcontext.package.bundle import bundle
from tests.models import network
from tests.results import compiled, configured

TOML = """
fallback = "source"
targets = { npu = { provider = "qnn", provider-options = { soc_model = 60 } }, cpu = { provider = "cpu" } }
models = [{ path = "models/a.onnx", license = "mit or apache-2.0" }, { path = "models/b.onnx" }]
"""

PROJECT = ("My.App", "1.0", "BSD-3-Clause")


def written(project: Path, tmp_path: Path, toml: str = TOML) -> dict[str, Any]:
    """The SBOM of the project's models."""
    result = compiled(configured(project, toml), tmp_path / "artifacts")
    return document(result, tmp_path)


def document(
    result: Result, tmp_path: Path, project: tuple[str, str, str | None] = PROJECT
) -> dict[str, Any]:
    # Importing it takes two seconds, which all processes that collect tests would spend.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    staging = tmp_path / "staging"
    staging.mkdir()
    package = bundle(result, staging, {}).package
    path = sbom.write(result.sources, package, project, staging)
    assert path.name.endswith(".cdx.json")
    text = path.read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    content: dict[str, Any] = json.loads(text)
    return content


def component(content: dict[str, Any], reference: str) -> dict[str, Any]:
    (part,) = [part for part in content["components"] if part["bom-ref"] == reference]
    return dict(part)


def compiled_with(component: dict[str, Any]) -> list[str]:
    return [str(fact["value"]) for fact in component["properties"]]


def needed_by(content: dict[str, Any], reference: str) -> set[str]:
    (needs,) = [part["dependsOn"] for part in content["dependencies"] if part["ref"] == reference]
    return set(needs)


def test_each_source_model_has_its_hashes_and_its_license(project: Path, tmp_path: Path) -> None:
    content = written(project, tmp_path)
    model = component(content, "model:a")
    assert model["type"] == "machine-learning-model"
    assert model["scope"] == "required"
    assert model["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    digest = file_sha256(project / "models" / "a.onnx")
    assert model["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert "licenses" not in component(content, "model:b")


def test_a_source_that_is_not_shipped_is_not_required(project: Path, tmp_path: Path) -> None:
    content = written(project, tmp_path, TOML.replace('"source"', '"none"'))
    assert component(content, "model:a")["scope"] == "excluded"
    assert needed_by(content, "wheel") == {
        f"artifact:{model}/{target}" for model in "ab" for target in ("npu", "cpu")
    }


def test_each_artifact_names_its_model_and_what_compiled_it(project: Path, tmp_path: Path) -> None:
    content = written(project, tmp_path)
    artifact = component(content, "artifact:a/npu")
    assert artifact["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert artifact["name"] == "a/npu"
    assert compiled_with(artifact) == ["onnxruntime 1.0"]
    assert needed_by(content, "artifact:a/npu") == {"model:a"}


def test_the_sdk_in_an_ep_is_what_compiled_the_artifact(project: Path, tmp_path: Path) -> None:
    result = compiled(configured(project), tmp_path / "artifacts")
    (built,) = result.built[:1]
    record = built.artifact.record
    contexts = tuple(
        dataclasses.replace(context, ep_sdk_version="2.5") for context in record.contexts
    )
    artifact = dataclasses.replace(
        built.artifact, record=dataclasses.replace(record, contexts=contexts)
    )
    changed = dataclasses.replace(built, artifact=artifact)
    content = document(dataclasses.replace(result, built=(changed,)), tmp_path)
    tools = compiled_with(component(content, "artifact:a/cpu"))
    assert "SDK of CPUExecutionProvider 2.5" in tools


def test_the_shapes_of_one_model_are_of_one_source(project: Path, tmp_path: Path) -> None:
    table = 'models = [{ path = "models/a.onnx", dims = [{ n = 1 }, { n = 2 }] }]\n'
    content = written(project, tmp_path, f'targets.cpu.provider = "cpu"\n{table}')
    models = [part["bom-ref"] for part in content["components"] if "model:" in part["bom-ref"]]
    assert models == ["model:a"]


def test_equal_content_has_the_same_serial_number_and_no_time(
    project: Path, tmp_path: Path
) -> None:
    result = compiled(configured(project, TOML), tmp_path / "artifacts")
    contents = []
    for name, project_ in (
        ("1", PROJECT),
        ("2", PROJECT),
        ("3", ("other", "1", None)),
    ):
        (tmp_path / name).mkdir()
        contents.append(document(result, tmp_path / name, project_))
    first, second, third = contents
    assert first == second
    assert third["serialNumber"] != first["serialNumber"]
    assert "timestamp" not in first["metadata"]
    wheel = first["metadata"]["component"]
    assert wheel["purl"] == "pkg:pypi/my-app@1.0"
    assert wheel["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert "licenses" not in third["metadata"]["component"]


def test_the_license_in_the_file_counts_where_none_is_configured(
    project: Path, tmp_path: Path
) -> None:
    result = compiled(configured(project, TOML), tmp_path / "artifacts")
    sources = tuple(
        dataclasses.replace(
            source, facts=dataclasses.replace(source.facts, license="AGPL-3.0 License")
        )
        for source in result.sources
    )
    result = dataclasses.replace(result, sources=sources)
    assert not list(sbom.unlicensed(result.sources, KeyNames()))
    content = document(result, tmp_path)
    (named,) = component(content, "model:b")["licenses"]
    assert named == {"license": {"name": "AGPL-3.0 License"}}
    assert component(content, "model:a")["licenses"] == [{"expression": "MIT OR Apache-2.0"}]


def test_the_license_is_read_from_the_files_metadata() -> None:
    model = network()
    assert license_of(model) is None
    onnx.helper.set_model_props(model, {"License": " Apache-2.0 ", "author": "somebody"})
    assert license_of(model) == "Apache-2.0"

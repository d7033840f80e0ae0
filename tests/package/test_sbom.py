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
from tests.results import Artifact, built_from, compiled, configured

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
    # A source that is not shipped.
    (tmp_path / "none").mkdir()
    content = written(project, tmp_path / "none", TOML.replace('"source"', '"none"'))
    assert component(content, "model:a")["scope"] == "excluded"
    assert needed_by(content, "wheel") == {
        f"artifact:{model}/{target}" for model in "ab" for target in ("npu", "cpu")
    }


def test_each_artifact_names_its_model_and_what_compiled_it(project: Path, tmp_path: Path) -> None:
    result = compiled(configured(project, TOML), tmp_path / "artifacts")
    built = result.built[0]
    (context,) = built.record.contexts
    contexts = (dataclasses.replace(context, ep_sdk_version="2.5"),)
    record = dataclasses.replace(built.record, contexts=contexts)
    built = built_from(built.job, Artifact(built.folder, record), built.validated)
    content = document(dataclasses.replace(result, built=(built, *result.built[1:])), tmp_path)
    artifact = component(content, "artifact:a/npu")
    assert artifact["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert artifact["name"] == "a/npu"
    facts = [fact["value"] for fact in artifact["properties"]]
    assert facts == ["onnxruntime 1.0", "SDK of QNNExecutionProvider 2.5"]
    assert needed_by(content, "artifact:a/npu") == {"model:a"}


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
    named = network()
    assert license_of(named) is None
    onnx.helper.set_model_props(named, {"License": " AGPL-3.0 License ", "author": "somebody"})
    facts = (dataclasses.replace(s.facts, license=license_of(named)) for s in result.sources)
    both = zip(result.sources, facts, strict=True)
    sources = tuple(dataclasses.replace(source, facts=fact) for source, fact in both)
    result = dataclasses.replace(result, sources=sources)
    assert not list(sbom.unlicensed(result.sources, KeyNames()))
    content = document(result, tmp_path)
    (license_,) = component(content, "model:b")["licenses"]
    assert license_ == {"license": {"name": "AGPL-3.0 License"}}
    assert component(content, "model:a")["licenses"] == [{"expression": "MIT OR Apache-2.0"}]

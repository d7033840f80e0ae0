from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.errors import InspectionError, Kind
from hatch_epcontext.package.bundle import bundle
from hatch_epcontext.package.folder import read
from hatch_epcontext.package.manifest import FILE, ModelPackage, write
from hatch_epcontext.shipped import METADATA
from hatch_epcontext.tools.inspecting import inspect
from hatch_epcontext.worker.results import Agreement
from tests.package.conftest import opened
from tests.results import MODULES, TOML, compiled, configured

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def package(project: Path, tmp_path: Path) -> ModelPackage:
    """A package with a model, its variant for the CPU and its source."""
    result = compiled(configured(project, TOML + 'fallback = "source"'), tmp_path / "artifacts")
    return bundle(result, tmp_path, MODULES).package


def with_variant(package: ModelPackage, **changes: Any) -> ModelPackage:
    """``package`` with only the variant for the CPU, changed."""
    component = package.components["a"]
    variant = dataclasses.replace(component.variants["cpu"], **changes)
    component = dataclasses.replace(component, variants={"cpu": variant})
    return dataclasses.replace(package, components={"a": component})


def put(place: str, **values: Any) -> Edit:
    """Set the keys ``values`` at ``place``, a dotted key; with None remove them."""

    def edit(content: dict[str, Any]) -> None:
        table = content
        for key in place.split(".") if place else ():
            table = table[key]
        for key, value in values.items():
            table.pop(key, None) if value is None else table.update({key: value})

    return edit


CPU = "components.a.variants.cpu"
ORT = f"{CPU}.executor_info.ort"
ABOUT = f"{CPU}.additional_metadata.{METADATA}"
FILES = f"additional_metadata.{METADATA}.files"


def test_what_is_written_is_read_again(package: ModelPackage) -> None:
    assert read(write(package).encode(), "package") == package
    # In the order of preference.
    assert list(package.components["a"].variants) == ["cpu", "source"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("", schema_version="2.0"), 'schema_version: must be "1.0", not "2.0".'),
        (put("", layout=None), "layout: is missing."),
        (put("components", a="det"), "components.a: must be a table"),
        (put(CPU, ep=None), f"{CPU}.ep: is missing."),
        (put(CPU, device="tpu"), f'{CPU}.device: must be "cpu" or "gpu" or "npu"'),
        (put(CPU, executor_info={"ort": "ort.json"}), "executor_info.ort: must be a table"),
        (put(CPU, additional_metadata={}), f"'{METADATA}'"),
        (put(ABOUT, settings=None), "VariantMetadata.settings: is missing."),
        (put(ORT, model_file="other.onnx"), "'a/cpu/other.onnx' is not among its files"),
        (put(ORT, model_file="../../../x.onnx"), "'a/cpu/../../../x.onnx' is not among its"),
        (put(CPU, variant_directory="../a/cpu"), "is not among its files"),
        (put(FILES, **{"../x": {"size": 1, "sha256": ""}}), "'../x' is outside of it"),
        (put(FILES, **{"C:\\x": {"size": 1, "sha256": ""}}), "is outside of it"),
    ],
)
def test_an_altered_manifest_is_refused(package: ModelPackage, edit: Edit, message: str) -> None:
    content = json.loads(write(package))
    edit(content)
    with pytest.raises(InspectionError) as raised:
        read(json.dumps(content).encode(), "package")
    (problem,) = raised.value.problems
    assert (problem.kind, problem.location) == (Kind.INVALID_PACKAGE, "package")
    assert message in problem.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting property name"),
        (b'{"a": NaN}', "Out of range float"),
        (b"\xff", "codec can't decode byte 0xff"),
        (b'["\\udfff"]', "codec can't encode character"),
        (b"[" * 100_000, ""),
    ],
)
def test_a_manifest_that_is_no_json_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InspectionError, match=f"{FILE} is not JSON: .*{message}"):
        read(content, "package")


OLIVE = {"schema_version": "1.0", "components": {"decoder": "models/decoder"}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"name": "My app", "icons": []},
        OLIVE,
        {**OLIVE, "additional_metadata": {"producer": {"tool": "olive-ai"}}},
        {**OLIVE, "additional_metadata": "text"},
    ],
)
def test_what_others_wrote_is_one_error(content: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(content), encoding="utf-8")
    assert read((tmp_path / FILE).read_bytes(), "package") is None
    with pytest.raises(InspectionError) as raised:
        inspect(tmp_path)
    (problem,) = raised.value.problems
    assert "a model package that hatch-epcontext wrote" in problem.message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_the_place_of_a_manifest_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(InspectionError, match=f"has no {FILE}"):
        inspect(tmp_path)


def test_the_source_of_an_editable_install_may_be_anywhere(package: ModelPackage) -> None:
    component = package.components["a"]
    source = dataclasses.replace(component.variants["source"], variant_directory="../../models")
    moved = dataclasses.replace(component, variants={**component.variants, "source": source})
    installed = dataclasses.replace(package, components={"a": moved}, layout="installed")
    again = read(write(installed).encode(), "package")
    assert again == installed
    assert again.unrecorded == ("../../models/a.onnx",)


def test_any_parser_reads_what_is_written(package: ModelPackage, tmp_path: Path) -> None:
    variant = package.components["a"].variants["cpu"]
    options = {"half \ud800": "\udfff", "模型": "1"}
    ort = dataclasses.replace(variant.ort, provider_options=options)
    text = write(with_variant(package, executor_info={"ort": ort}))
    assert text.isascii()
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    again = opened(tmp_path).components["a"].variants["cpu"]
    assert again.ort.provider_options == {"half \\ud800": "\\udfff", "模型": "1"}


def test_infinite_numbers_are_written_as_the_largest(package: ModelPackage) -> None:
    component = package.components["a"]
    about = component.variants["cpu"].about
    assert about is not None
    agreement = Agreement("y", float("inf"), None)
    validation = dataclasses.replace(about.validation, agreements=(agreement,))
    metadata = dataclasses.replace(about, validation=validation)
    text = write(with_variant(package, additional_metadata={METADATA: metadata}))
    assert str(sys.float_info.max) in text

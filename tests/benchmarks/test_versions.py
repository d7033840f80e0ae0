from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import project, versions
from benchmarks.project import PACKAGE, TARGETS
from benchmarks.versions import Opening, Row

NEWEST = {"onnxruntime": "1.32.0", "onnxruntime-qnn": "2.7.0", "onnxruntime-ep-openvino": "1.8.1"}
ALL = dict.fromkeys(versions.MODELS, Opening(logits=(1.0, 2.0)))


def row(changed: dict[str, str], openings: dict[str, Opening]) -> Row:
    return Row({**NEWEST, **changed}, {**ALL, **openings})


def test_the_last_patch_of_each_minor_release_is_installed_and_one_package_is_older() -> None:
    patches = versions.newest_patches(["1.9.1", "1.31.0", "1.31.1", "1.9.2", "1.32.0"])
    assert patches == ["1.32.0", "1.31.1", "1.9.2"]
    available = {"onnxruntime": patches[:2], "onnxruntime-qnn": ["2.7.0", "2.6.0"]}
    assert [tuple(chosen.values()) for chosen in versions.combinations(available)] == [
        ("1.32.0", "2.7.0"),
        ("1.31.1", "2.7.0"),
        ("1.32.0", "2.6.0"),
    ]


def test_the_page_has_a_table_for_each_package_and_each_reason_once() -> None:
    old = Opening("onnxruntime 1.18.1 is too old for X")
    newer = Opening("onnxruntime 1.19.2 is too old for X")
    refused = Opening("Fail: [ONNXRuntimeError] : 1 : FAIL : not\nmore")
    rows = [
        row({}, {}),
        row({"onnxruntime": "1.19.2"}, {"qnn": newer}),
        row({"onnxruntime": "1.18.1"}, {"qnn": old, "openvino": old}),
        row({"onnxruntime-qnn": "2.6.0"}, {"qnn": refused}),
        row({"onnxruntime-qnn": "2.5.0"}, {"qnn": Opening(logits=(1.0, 2.5))}),
    ]
    sections = versions.page({"3.11": rows}, NEWEST).split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [
        f"{package} on Python 3.11" for package in NEWEST
    ]
    runtime, qnn, openvino = sections
    assert "With onnxruntime-qnn 2.7.0 and onnxruntime-ep-openvino 1.8.1:" in runtime
    assert "| 1.32.0 | opens | opens | opens | opens |" in runtime
    assert "| 1.18.1 | no (1) | no (1) | opens | opens |" in runtime
    assert runtime.count("`onnxruntime is too old for X`") == 1
    assert "| onnxruntime-qnn | `qnn` |" in qnn
    assert "| 2.6.0 | no (1) |\n| 2.5.0 | opens, error 0.5 |\n\n1. `Fail: FAIL : not`" in qnn
    assert openvino.count("| opens |") == 1


@pytest.mark.integration
@pytest.mark.slow
def test_models_are_opened_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [project.Source("digits", versions._MODEL, {"image": (1, 1, 8, 8)})]
    project.write(tmp_path / "app", sources, {"cpu": TARGETS["cpu"]}, fallback="source")
    project.build(tmp_path / "app", tmp_path / "cache")
    with zipfile.ZipFile(project.wheel(tmp_path / "app")) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    cpu, source = (versions.open_model(sys.executable, m, tmp_path) for m in ("cpu", "source"))
    assert len(cpu.logits) == 10
    assert cpu.logits == pytest.approx(source.logits, abs=1e-3)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    missing = versions.open_model(sys.executable, "cpu", tmp_path)
    assert missing.reason.startswith("the process ends with 1: ModuleNotFoundError")
    assert PACKAGE in missing.reason

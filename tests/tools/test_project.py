from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.tools.project import Project, find_models


def write(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize(
    ("system", "backend"),
    [
        (None, "hatchling"),
        ({"requires": []}, "setuptools"),
        ({"build-backend": "hatchling.build"}, "hatchling"),
        ({"build-backend": "setuptools.build_meta:__legacy__"}, "setuptools"),
        ({"build-backend": "poetry.core.masonry.api"}, "poetry"),
        ({"build-backend": "pdm.backend"}, "pdm"),
        ({"build-backend": "scikit_build_core.build"}, "scikit_build_core"),
        ({"build-backend": "mesonpy"}, "mesonpy"),
    ],
)
def test_the_backend_has_its_import_name(tmp_path: Path, system: Any, backend: str) -> None:
    values = {} if system is None else {"build-system": system}
    assert Project(tmp_path, values).backend == backend


def test_a_project_with_only_a_setup_script_is_one_of_setuptools(tmp_path: Path) -> None:
    write(tmp_path, "setup.py")
    assert Project(tmp_path, {}).backend == "setuptools"


def test_models_of_tests_and_examples_are_others(tmp_path: Path) -> None:
    write(tmp_path, "a.onnx", "src/b.ONNX", "dist/c.onnx", ".x/d.onnx", "Tests/data/e.onnx")
    app, others = find_models(tmp_path)
    assert [each.relative_to(tmp_path).as_posix() for each in app] == ["a.onnx", "src/b.ONNX"]
    assert [each.name for each in others] == ["e.onnx"]

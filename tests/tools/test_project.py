from __future__ import annotations

from pathlib import Path, PurePosixPath
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
        ({"build-backend": "poetry.core.masonry.api"}, "poetry-core"),
        ({"build-backend": "pdm.backend"}, "pdm-backend"),
        ({"build-backend": "scikit_build_core.build"}, "scikit-build-core"),
        ({"build-backend": "mesonpy"}, "mesonpy"),
    ],
)
def test_the_backend_has_the_name_of_its_distribution(
    tmp_path: Path, system: Any, backend: str
) -> None:
    values = {} if system is None else {"build-system": system}
    assert Project(tmp_path, values).backend == backend


def test_a_project_with_only_a_setup_script_is_one_of_setuptools(tmp_path: Path) -> None:
    write(tmp_path, "setup.py")
    assert Project(tmp_path, {}).backend == "setuptools"


@pytest.mark.parametrize(
    ("files", "values", "found"),
    [
        (["src/a/__init__.py", "src/a/b/__init__.py", "tests/__init__.py"], {}, {"a": "src/a"}),
        (
            ["livekit/plugins/silero/__init__.py", "livekit/plugins/silero/res/__init__.py"],
            {},
            {"livekit/plugins/silero": "livekit/plugins/silero"},
        ),
        (
            ["code/a/__init__.py", "docs/x/__init__.py"],
            {"tool": {"uv": {"build-backend": {"module-root": "code"}}}},
            {"a": "code/a"},
        ),
        (
            ["rust/py/a/__init__.py"],
            {"tool": {"maturin": {"python-source": "rust/py"}}},
            {"a": "rust/py/a"},
        ),
        (["a/__init__.py", "b/__init__.py"], {}, {"a": "a", "b": "b"}),
        (["a.py"], {}, {}),
    ],
)
def test_import_packages_are_found(
    tmp_path: Path, files: list[str], values: Any, found: dict[str, str]
) -> None:
    write(tmp_path, *files)
    packages = Project(tmp_path, values).packages()
    assert {str(each.name): str(each.folder) for each in packages} == found


@pytest.mark.parametrize(
    ("name", "models", "chosen"),
    [
        ("a-b", [], "a/b"),
        ("x", ["c/m.onnx"], "c"),
        ("x", ["models/m.onnx"], None),
    ],
)
def test_the_package_of_the_app_has_its_name_or_its_models(
    name: str, models: list[str], chosen: str | None
) -> None:
    project = Project(Path(), {"project": {"name": name}})
    packages = [PurePosixPath("a/b"), PurePosixPath("c")]
    found = project.choose(packages, [PurePosixPath(each) for each in models])
    assert found == (None if chosen is None else PurePosixPath(chosen))
    assert project.choose(packages[:1], []) == packages[0]


def test_models_of_tests_and_examples_are_others(tmp_path: Path) -> None:
    write(tmp_path, "a.onnx", "src/b.ONNX", "dist/c.onnx", ".x/d.onnx", "Tests/data/e.onnx")
    app, others = find_models(tmp_path)
    assert [each.relative_to(tmp_path).as_posix() for each in app] == ["a.onnx", "src/b.ONNX"]
    assert [each.name for each in others] == ["e.onnx"]

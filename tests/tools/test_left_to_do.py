from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.tools.adding import Pyproject, left_to_do
from tests.models import network, save_with_data

TABLE = """\
[tool.epcontext.targets.qnn]
provider = "qnn"
[tool.epcontext.targets.cpu]
provider = "cpu"
[[tool.epcontext.models]]
path = "my_app/c.onnx"
"""


def lines_of(project: Path, text: str) -> dict[str, str]:
    """The lines below each heading."""
    (project / "my_app" / "c.onnx").touch()
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    pyproject = Pyproject(project)
    headings = left_to_do(pyproject.project, pyproject.load(pyproject.text))
    return {heading: "\n".join(lines) for heading, lines in headings}


def head(more: str = "", backend: str = "hatchling.build") -> str:
    return (
        f'[build-system]\nrequires = []\nbuild-backend = "{backend}"\n'
        f'[project]\nname = "my-app"\nversion = "1"\n{more}\n'
    )


def test_the_lines_of_the_app_are_those_of_the_project(project: Path) -> None:
    (project / "models" / "c.onnx").touch()
    more = '[[tool.epcontext.models]]\npath = "models/c.onnx"\nname = "d"\n'
    app = lines_of(project, head() + TABLE + more)["In the app:"]
    assert app == 'from my_app.epcontext import load\nsession = load("c")  # or "d"'
    chosen = lines_of(project, head() + '[tool.epcontext]\noutput = "x/y"\n' + TABLE)
    assert "from x.y import load" in chosen["In the app:"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", ['"onnxruntime>=1.2', '"onnxruntime-qnn>=2.7; python_version']),
        ('dependencies = ["onnxruntime-gpu>=1.24", "onnxruntime_qnn"]', []),
        ('optional-dependencies.npu = ["onnxruntime", "onnxruntime-qnn"]', []),
    ],
)
def test_missing_dependencies_of_the_app_are_listed(
    project: Path, listed: str, expected: list[str]
) -> None:
    lines = lines_of(project, head(listed) + TABLE)["In the dependencies of the app:"].splitlines()
    assert len(lines) == len(expected)
    assert all(map(str.startswith, lines, expected))


def test_a_model_stays_out_of_the_wheel_with_its_external_data(project: Path) -> None:
    save_with_data(network(), project / "my_app" / "c.onnx")
    advice = lines_of(project, head() + TABLE)["To keep the plain models out of the wheel:"]
    assert 'exclude = ["my_app/c.onnx", "my_app/network.data"]' in advice


def test_an_import_package_that_is_not_there_is_named_after_the_project(project: Path) -> None:
    (project / "my_app" / "__init__.py").unlink()
    without = lines_of(project, head() + TABLE)
    assert "from my_app.epcontext import load" in without["In the app:"]


def test_poetry_has_tables_of_its_own(project: Path) -> None:
    poetry = (
        '[build-system]\nrequires = ["poetry-core"]\nbuild-backend = "poetry.core.masonry.api"\n'
        '[tool.poetry]\nname = "my-app"\n[tool.poetry.dependencies]\npython = "{}"\n{}'
    )
    advice = lines_of(project, poetry.format("^3.9", "") + TABLE)
    first, second = advice["In [tool.poetry.dependencies]:"].splitlines()
    assert first.startswith('onnxruntime = ">=1.2')
    assert second.startswith('onnxruntime-qnn = { version = ">=2.7", markers = "python_version >= ')
    listed = 'onnxruntime = "^1.23"\nonnxruntime-qnn = { version = "*", optional = true }\n'
    advice = lines_of(project, poetry.format(">=3.10,<4", listed) + TABLE)
    assert advice["In [tool.poetry.dependencies]:"] == ""


SETUP = """
from setuptools import setup
setup(name="my-app", python_requires=">=3.6", install_requires=["onnxruntime>=1.16"], version=version())
"""


@pytest.mark.parametrize(
    ("project_files", "lines"),
    [
        ({"setup.py": SETUP}, ["requires-python (>=3.6)", "dependency onnxruntime>=1.16 allows"]),
        (
            {
                "setup.cfg": "[options]\npython_requires = >=3.8\ninstall_requires =\n    onnxruntime\n"
            },
            ["requires-python (>=3.8)", "dependency onnxruntime allows"],
        ),
        (
            {
                "pyproject.toml": '[tool.poetry.dependencies]\npython = "^3.9"\nonnxruntime = "^1.17"\n'
            },
            ["requires-python (>=3.9)", "dependency onnxruntime>=1.17 allows"],
        ),
        (
            {"pyproject.toml": '[project]\nname = "a"\nrequires-python = ">=3.11"\n'},
            [],
        ),
    ],
)
def test_bounds_that_are_too_loose_are_found_wherever_the_project_has_them(
    project: Path, project_files: dict[str, str], lines: list[str]
) -> None:
    for name, text in project_files.items():
        (project / name).write_text(text, encoding="utf-8")
    listed = lines_of(project, project_files.get("pyproject.toml", "") + TABLE)["In the metadata:"]
    assert len(listed.splitlines()) == len(lines)
    assert all(line in listed for line in lines)

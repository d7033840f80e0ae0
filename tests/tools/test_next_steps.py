from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.tools.next_steps import next_steps

TABLE = """\
[tool.epcontext.targets.qnn]
provider = "qnn"
[tool.epcontext.targets.cpu]
provider = "cpu"
[[tool.epcontext.models]]
path = "my_app/c.onnx"
"""


def head(project: Path, more: str = "", backend: str = "hatchling.build") -> str:
    (project / "my_app" / "c.onnx").touch()
    if "requires-python" not in more:
        more = f'requires-python = ">=3.10"\n{more}'
    return (
        f'[build-system]\nrequires = []\nbuild-backend = "{backend}"\n'
        f'[project]\nname = "my-app"\nversion = "1"\n{more}\n'
    )


def test_the_lines_of_the_app_are_those_of_the_project(project: Path) -> None:
    (project / "models" / "c.onnx").touch()
    more = '[[tool.epcontext.models]]\npath = "models/c.onnx"\nname = "d"\n'
    steps = next_steps(project, head(project) + TABLE + more)
    assert (steps.module, steps.models) == ("my_app.epcontext", ("c", "d"))
    chosen = next_steps(project, head(project) + '[tool.epcontext]\noutput = "x/y"\n' + TABLE)
    assert chosen.module == "x.y"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ['"onnxruntime>=1.23"', '"onnxruntime-qnn>=2.7; python_version']),
        ('dependencies = ["onnxruntime>=1.24", "onnxruntime_qnn"]', []),
        (
            'dependencies = ["onnxruntime-gpu>=1", "onnxruntime-qnn"]',
            ['"onnxruntime-gpu>=1.23"  (instead of'],
        ),
        (
            '[project.optional-dependencies]\nnpu = ["onnxruntime", "onnxruntime-qnn"]',
            ['"onnxruntime>=1.23"  (so far only in the extra npu)'],
        ),
    ],
)
def test_missing_dependencies_of_the_app_are_listed(
    project: Path, given: str, expected: list[str]
) -> None:
    steps = next_steps(project, head(project, given) + TABLE)
    assert len(steps.dependencies) == len(expected)
    assert all(map(str.startswith, steps.dependencies, expected))


def test_an_app_needs_the_ep_of_the_release_of_its_compiler(project: Path) -> None:
    table = TABLE.replace('"qnn"', '"tensorrt-rtx"\ncompute-capabilities = ["8.9"]')
    steps = next_steps(project, head(project, 'dependencies = ["onnxruntime>=1.24"]') + table)
    (needed,) = steps.dependencies
    assert needed.startswith('"onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.*;')


def test_files_that_are_packed_twice_are_noted(project: Path) -> None:
    (plain,) = next_steps(project, head(project) + TABLE).notes
    assert plain.startswith("The wheel also has plain files: my_app/c.onnx.")
    wheel = '[tool.hatch.build.targets.wheel]\nexclude = ["my_app/c.onnx"]\nshared-data = { my_app = "x" }\n'
    left_out, shared = next_steps(project, head(project) + wheel + TABLE).notes
    assert left_out.startswith("The wheel leaves out my_app/c.onnx")
    assert shared.startswith(
        "my_app/c.onnx: packed once more by [tool.hatch.build.targets.wheel.shared"
    )


def test_an_older_python_and_a_missing_package_are_noted(project: Path) -> None:
    (project / "my_app" / "__init__.py").unlink()
    notes = next_steps(project, head(project, 'requires-python = ">=3.8"') + TABLE).notes
    assert any("create src/my_app/__init__.py" in note for note in notes)
    assert any("the loader needs Python 3.10" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("setup.py", 'package_data={"my_app": ["epcontext/**"]}'),
        ("setup.cfg", "[options.package_data]\n    my_app = epcontext/**"),
    ],
)
def test_a_project_without_metadata_in_pyproject_keeps_it_so(
    project: Path, file: str, advice: str
) -> None:
    (project / file).touch()
    (project / "my_app" / "c.onnx").touch()
    steps = next_steps(project, TABLE)
    notes = "\n".join(steps.notes)
    assert steps.exported
    assert f"in {file}" in notes or f"to {file}" in notes
    assert advice in notes
    assert "requires-python" not in notes
    assert "tool.setuptools" not in notes
    assert f"python_requires is not set in {file}" in notes
    (project / file).write_text('python_requires = ">=3.8"')
    assert 'python_requires is ">=3.8"' in "\n".join(next_steps(project, TABLE).notes)
    (project / file).write_text(f'python_requires=">=3.10"\n{advice}')
    done = "\n".join(next_steps(project, TABLE).notes)
    assert "package_data" not in done
    assert "the loader needs" not in done


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            "setuptools.build_meta",
            'Add to [tool.setuptools.package-data] in pyproject.toml:\n    "my_app" = ["epcontext/**"]',
        ),
        (
            "poetry.core.masonry.api",
            'include = [{ path = "my_app/epcontext/**/*", format = ["sdist", "wheel"] }]',
        ),
        ("scikit_build_core.build", 'sdist.include = ["my_app/epcontext/**"]'),
        ("maturin", 'format = ["sdist", "wheel"] }]'),
        ("uv_build", "uv build"),
    ],
)
def test_other_build_backends_pack_what_is_exported(project: Path, backend: str, said: str) -> None:
    steps = next_steps(project, head(project, backend=backend) + TABLE)
    notes = "\n".join(steps.notes)
    assert steps.module == "my_app.epcontext"
    assert "epcontext export -o my_app/epcontext --overwrite" in notes
    assert said in notes
    assert "plain models: my_app/c.onnx." in notes


@pytest.mark.parametrize(
    ("backend", "given", "said"),
    [
        (
            "setuptools.build_meta",
            '[tool.setuptools.package-data]\nmy_app = ["*.yaml"]',
            'to the list "my_app" in [tool.setuptools.package-data] of pyproject.toml:\n    "epcontext/**"',
        ),
        (
            "scikit_build_core.build",
            '[tool.scikit-build]\nsdist.include = ["x"]',
            'to the list sdist.include in [tool.scikit-build] of pyproject.toml:\n    "my_app/epcontext/**"',
        ),
    ],
)
def test_a_list_that_exists_is_not_to_be_written_again(
    project: Path, backend: str, given: str, said: str
) -> None:
    start = head(project, backend=backend)
    assert any(said in note for note in next_steps(project, start + f"{given}\n" + TABLE).notes)
    done = f"{given[:-1]}, {said.rpartition('    ')[2]}]\n"
    assert not any(
        "to the list" in note for note in next_steps(project, start + done + TABLE).notes
    )

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.paths import Finder
from hatch_epcontext.errors import Key, Kind, collect
from tests.config.examples import only_problem, problems, read

CPU = 'provider = "cpu"\n'


@pytest.mark.parametrize(
    ("models", "location", "message"),
    [
        ('"nope.onnx"', "models[0]", 'no model at "nope.onnx"'),
        (f'"{"x" * 300}"', "models[0]", "no model at"),
        ('"*.pt"', "models[0]", "no file matches"),
        ('"../a.onnx"', "models[0]", "not a path inside"),
        ('"/a.onnx"', "models[0]", "not a path inside"),
        ('"../*.onnx"', "models[0]", "not a path inside"),
        ('{ name = "x" }', "models[0].path", "is required"),
        ('{ path = "models/a.onnx", validate = { inputs = "twos" } }',
         "models[0].validate.inputs", "no file or folder of inputs"),
    ],
)  # fmt: skip
def test_an_invalid_path_is_reported_with_its_key(
    project: Path, models: str, location: str, message: str
) -> None:
    found = problems(project, f"{CPU}models = [{models}]")
    assert location in found
    assert message in found[location].message
    assert len(found) == 1


def test_globs_name_models_after_their_files(project: Path) -> None:
    config = read(project, f'{CPU}models = ["models/*.onnx"]')
    assert [model.name for model in config.models] == ["a", "b"]


def test_inputs_from_a_file_are_an_absolute_path(project: Path) -> None:
    (project / "inputs.npz").touch()
    toml = f'{CPU}models = [{{ path = "models/a.onnx", validate = {{ inputs = "inputs.npz" }} }}]'
    assert read(project, toml).models[0].validate.inputs == str(project / "inputs.npz")


def test_inputs_may_be_a_folder_and_a_model_may_not(project: Path) -> None:
    toml = f'{CPU}models = [{{ path = "models/a.onnx", validate = {{ inputs = "models" }} }}]'
    assert read(project, toml).models[0].validate.inputs == str(project / "models")
    assert problems(project, f'{CPU}models = ["models"]').keys() == {"models[0]"}


def test_a_library_that_does_not_exist_is_an_error(project: Path) -> None:
    (project / "ep").mkdir()
    for missing in ("ep/other.so", "ep", f"{'x' * 300}/plugin.so"):
        toml = f'provider = "plugin"\nep-name = "SomeEP"\nlibrary = "./{missing}"'
        location, found = only_problem(project, toml)
        assert location == "library"
        assert found.message.startswith("there is no file")


def test_files_outside_the_project_are_found_unless_confined(project: Path) -> None:
    key = Key() / "models" / 0
    outside = project.parent / "c.onnx"
    outside.touch()
    path, found = collect(Finder(project, confined=False).models(key, "../c.onnx"))
    assert (path, found) == ([project / "../c.onnx"], [])
    path, (problem,) = collect(Finder(project).models(key, str(outside)))
    assert (path, problem.kind, problem.key) == ([], Kind.OUTSIDE_PROJECT, key)


def test_only_a_confined_file_can_be_missing_from_an_sdist(project: Path) -> None:
    for confined, hint in ((True, "In a build from an sdist: check"), (False, "None")):
        _, (problem,) = collect(Finder(project, confined).models(Key(), "nope.onnx"))
        assert problem.kind is Kind.FILE_NOT_FOUND
        assert str(problem.hint).startswith(hint)

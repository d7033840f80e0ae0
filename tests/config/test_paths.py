from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hatch_epcontext.config.build_hooks import BuildHooks
from hatch_epcontext.config.paths import Finder
from hatch_epcontext.errors import Key, Kind, collect
from tests.config.examples import one, only_problem, problems, read

KEY = Key() / "models" / 0

CPU = 'targets.cpu.provider = "cpu"\n'


@pytest.mark.parametrize(
    ("models", "location", "message"),
    [
        ('"nope.onnx"', "models[0]", 'no model at "nope.onnx"'),
        (f'"{"x" * 300}"', "models[0]", "no model at"),
        ('"*.pt"', "models[0]", "no file matches"),
        ('{ path = "models/*.onnx" }', "models[0].path", "no model at"),
        ('"../a.onnx"', "models[0]", "not a path inside"),
        ('"/a.onnx"', "models[0]", "not a path inside"),
        ('"../*.onnx"', "models[0]", "not a path inside"),
        ("'C:a.onnx'", "models[0]", "not a path inside"),
        (r"'C:\a\*.onnx'", "models[0]", "not a path inside"),
        (r"'\models\a.onnx'", "models[0]", "not a path inside"),
        (r"'models\..\..\a.onnx'", "models[0]", "not a path inside"),
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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("models/aa.onnx", 'Did you mean "a.onnx"?'),
        ("nets/a.onnx", 'Did you mean "models/a.onnx"?'),
        (
            "models/*.onnx",
            'A table has one model. Write only the globs: models = ["models/*.onnx"].',
        ),
    ],
)
def test_a_missing_model_has_a_hint(project: Path, path: str, hint: str) -> None:
    (problem,) = problems(project, f'{CPU}models = [{{ path = "{path}" }}]').values()
    assert problem.hint == hint


@pytest.mark.skipif(sys.platform == "win32", reason="there a backslash separates folders")
def test_a_name_may_contain_a_backslash(project: Path) -> None:
    (project / "models/a.onnx").rename(project / "models\\a.onnx")
    table = r"{ path = 'models\a.onnx', name = 'a' }"
    assert read(project, f"{CPU}models = [{table}]").models[0].path.is_file()


def test_globs_name_models_after_their_files(project: Path) -> None:
    config = read(project, f'{CPU}models = ["models/*.onnx"]')
    assert [model.name for model in config.models] == ["a", "b"]


GLOBS = ("models/*.onnx", "models/[a-z].onnx", "**/*.onnx", "*/*", "*/?.onnx", "models/**")


@pytest.mark.parametrize("pattern", GLOBS)
def test_what_a_pattern_matches_is_found_wherever_it_is(project: Path, pattern: str) -> None:
    (project / "models" / "a folder").mkdir()
    if pattern == "*/*":
        (project / "models" / "a folder").rmdir()
    paths, found = collect(Finder(project).models(KEY, pattern))
    names = {path.relative_to(project).as_posix() for path in paths}
    assert {"models/a.onnx", "models/b.onnx"} <= names
    assert paths == sorted(paths)
    assert not [each for each in found if "a folder" not in each.message]


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "dangling link": (
        lambda path: path.symlink_to("nowhere"),
        "is a link to nowhere, which cannot be read: No such file",
    ),
    "git-annex": (
        lambda path: path.symlink_to("../.git/annex/objects/x/y/SHA256E-s1.onnx"),
        "git annex get",
    ),
    "circle": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "pipe": (getattr(os, "mkfifo", Path.touch), "is a folder, a pipe or a device"),
    "folder": (lambda path: path.mkdir(), "is a folder, a pipe or a device, and not a file"),
    "link to a folder": (lambda path: path.symlink_to("."), "is a folder, a pipe or a device"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("pattern", ["models/*.onnx", "**/*.onnx", "mod*/c.onnx", "models/c.onnx"])
def test_what_is_matched_and_cannot_be_read_is_an_error(
    project: Path, name: str, pattern: str
) -> None:
    make, words = UNREADABLE[name]
    make(project / "models" / "c.onnx")
    _, (problem,) = collect(Finder(project).models(KEY, pattern))
    assert problem.kind is Kind.UNREADABLE_FILE
    assert "models/c.onnx" in problem.message
    assert words in f"{problem.message}\n{problem.hint}"
    later = Finder(project, run_hooks=BuildHooks(before=("makes-models",)), pending=True)
    assert collect(later.models(KEY, pattern))[1] == []


@pytest.mark.skipif(sys.platform == "win32", reason="every name there is text")
def test_a_path_that_is_no_text_is_an_error(project: Path) -> None:
    strange = project / os.fsdecode(b"q\xff")
    try:
        (project / "models").rename(strange)
    except OSError:
        pytest.skip("this file system has only names that are text")
    _, (problem,) = collect(Finder(strange.parent).models(KEY, "*/a.onnx"))
    assert problem.kind is Kind.UNREADABLE_FILE
    assert "not UTF-8" in problem.message


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_what_the_user_may_not_read_is_an_error(project: Path) -> None:
    (project / "models" / "a.onnx").chmod(0)
    for pattern in ("models/a.onnx", "models/*.onnx"):
        _, found = collect(Finder(project).models(KEY, pattern))
        assert [problem.kind for problem in found] == [Kind.UNREADABLE_FILE]
        assert "Permission denied" in found[0].message


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
        toml = one("plugin", f'ep-name = "SomeEP"\nlibrary = "./{missing}"')
        location, found = only_problem(project, toml)
        assert location == "targets.plugin.library"
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

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import HOOK, ConfigError
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.tools.adding import NewModel, Pyproject
from hatch_epcontext.tools.adding import add_models as add_unlisted_models
from hatch_epcontext.worker.requests import InspectReply, SuggestedConstant, SuggestReply

QNN, CPU = PROVIDERS["qnn"], PROVIDERS["cpu"]

HATCHLING = '[build-system]\nbuild-backend = "hatchling.build"\n'


def new(path: str = "models/a.onnx", *inputs: TensorFacts) -> NewModel:
    given = inputs or (TensorFacts("x", "float32", ("batch", 3)),)
    facts = InspectReply(given, (TensorFacts("y", "float32", (1,)),), {}, {}, (), (), (), {})
    return NewModel(path, facts, SuggestReply({"x": (0,)}))


def add_models(project: Path, text: str, models: list[NewModel], providers: list[Provider]) -> str:
    """``text`` as the project's file, with those of ``models`` that it does not list."""
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    pyproject = Pyproject(project)
    unlisted = [model for model in models if model.path not in pyproject.listed]
    return add_unlisted_models(pyproject, unlisted, {p.name: {} for p in providers})[0]


def models_of(text: str) -> list[object]:
    models: list[object] = parse(text)["tool"]["epcontext"]["models"]
    return models


def test_a_new_project_gets_all_tables(project: Path) -> None:
    made = add_models(project, '[project]\nname = "a"  # ours\n', [new()], [QNN])
    assert made.startswith('[project]\nname = "a"  # ours\n\n[build-system]\n')
    values = parse(made)
    assert values["build-system"] == {
        "requires": ["hatchling", "hatch-epcontext"],
        "build-backend": "hatchling.build",
    }
    assert values["tool"]["hatch"]["build"]["hooks"]["epcontext"] == {}
    assert values["tool"]["epcontext"]["targets"] == {
        "qnn": {"provider": "qnn", "chip": "snapdragon-x-elite"}
    }
    assert models_of(made) == [{"path": "models/a.onnx", "dims": {"batch": 1}}]
    assert "# in: x: float32, batch x 3\n# out: y: float32, 1\n" in made


def test_open_dimensions_of_one_are_a_comment_if_the_ep_takes_them(project: Path) -> None:
    made = add_models(project, "", [new()], [CPU])
    assert models_of(made) == [{"path": "models/a.onnx"}]
    assert "# dims = { batch = 1 }" in made
    assert models_of(add_models(project, "", [new()], [CPU, QNN])) == [
        {"path": "models/a.onnx", "dims": {"batch": 1}}
    ]


def test_the_shape_of_an_unknown_rank_is_asked_for(project: Path) -> None:
    asked = NewModel("models/a.onnx", new("models/a.onnx", TensorFacts("x", "float32", None)).facts)
    made = add_models(project, "", [asked], [QNN])
    assert models_of(made) == [{"path": "models/a.onnx"}]
    assert asked.questions == (
        "shapes = { x = ? }  # x: which shape, such as [1, 3]? (epcontext record shows it)",
    )
    assert f"\n# {asked.questions[0]}\n" in made


def test_unnamed_dimensions_get_a_shape_and_what_is_unknown_is_a_question(project: Path) -> None:
    tensors = (
        TensorFacts("im:age.0", "float32", (None, 3, "h", None)),
        TensorFacts("line\nbreak", "string", ("new\nline",)),
    )
    suggested = SuggestReply({"im:age.0": (0,), "line\nbreak": (0,)})
    asked = replace(new("models/a.onnx", *tensors), suggested=suggested)
    made = add_models(project, "", [asked], [QNN])
    assert models_of(made) == [{"path": "models/a.onnx", "dims": {"new\nline": 1}}]
    (line,) = asked.questions
    assert line == (
        'shapes = { "im:age.0" = [1, 3, ?, ?] }  # 1 is a guess; h: which size?; '
        "axis 3 of im:age.0: which size? (epcontext record shows it)"
    )
    answered = made.replace(f"# {line}", line.replace("?, ?]", "48, 320]"))
    (model,) = models_of(answered)
    assert model == {
        "path": "models/a.onnx",
        "dims": {"new\nline": 1},
        "shapes": {"im:age.0": [1, 3, 48, 320]},
    }


def test_constants_are_comments_unless_an_ep_of_fixed_shapes_needs_them(project: Path) -> None:
    tensors = (
        TensorFacts("sr", "int64", ()),
        TensorFacts('quo"ted', "int32", (1,)),
        TensorFacts("n", "int64", (1,)),
    )
    constants = (
        SuggestedConstant("sr", 16000, "compared", needed=True),
        SuggestedConstant('quo"ted', 2, "another length"),
        SuggestedConstant("n", 32, "the length"),
    )
    model = replace(new("models/a.onnx", *tensors), suggested=SuggestReply({}, constants))
    made = add_models(project, "", [model], [QNN])
    assert models_of(made) == [{"path": "models/a.onnx", "constants": {"sr": 16000}}]
    made = add_models(project, "", [model], [CPU])
    assert models_of(made) == [{"path": "models/a.onnx"}]
    assert '# constants = { sr = 16000, "quo\\"ted" = 2, n = 32 }  # compared; another' in made


@pytest.mark.parametrize(
    "before",
    [
        '[build-system]\nrequires = [\n  "hatchling", # one\n]\nbuild-backend = "hatchling.build"',
        (
            'build-system.requires = ["Hatch_EPcontext>=0", "hatchling"]\n'
            'build-system.build-backend = "hatchling.build"\n[project]\nname = "a"\n'
        ),
        (
            "[tool.hatch.build.targets.wheel]\npackages = ['my_app']\n[project]\nname = 'a'\n"
            "[tool.other]\nx = 1\n"
        ),
        f"[{HOOK}]\nenable-by-default = false\n[tool.ruff]\nline-length = 100\n",
        "[tool.hatch.build.hooks.epcontext]\n",
        "[build-system]\n",
        "# a comment at the end",
    ],
)
def test_existing_tables_and_comments_stay(project: Path, before: str) -> None:
    made = add_models(project, before, [new()], [QNN])
    kept, values = parse(before), parse(made)
    requires = kept.get("build-system", {}).get("requires", [])
    assert values["build-system"]["requires"][: len(requires)] == requires
    assert len([r for r in values["build-system"]["requires"] if "epcontext" in r.lower()]) == 1
    assert values["build-system"]["build-backend"] == "hatchling.build"
    for name, table in kept.get("project", {}).items():
        assert values["project"][name] == table
    for line in before.splitlines():
        assert line.rstrip("]") in made
    assert str(values).count("'epcontext': {") == 2


def test_models_are_added_to_an_existing_list(project: Path) -> None:
    before = '[tool.epcontext]\ntargets.cpu.provider = "cpu"\nmodels = [\n    "models/a.onnx",  # first\n]\n'
    static = TensorFacts("x", "float32", (1,))
    more = add_models(project, before, [new("models/b.onnx", static)], [])
    assert models_of(more) == ["models/a.onnx", "models/b.onnx"]
    assert "# first" in more
    opened = add_models(project, before, [new("models/b.onnx")], [])
    assert models_of(opened)[1] == {"path": "models/b.onnx", "dims": {"batch": 1}}


def test_globs_and_names_of_configured_models_count(project: Path) -> None:
    before = (
        '[tool.epcontext]\ntargets.cpu.provider = "cpu"\nmodels = ["models/*.onnx"]\n',
        (
            '[tool.epcontext]\ntargets.cpu.provider = "cpu"\n'
            '[[tool.epcontext.models]]\npath = "models/a.onnx"\nname = "b"\n'
        ),
    )
    made = add_models(project, before[0], [new(), new("models/b.onnx")], [])
    assert models_of(made) == ["models/*.onnx"]
    added = models_of(add_models(project, before[1], [new("models/b.onnx")], []))[1]
    assert added == {"path": "models/b.onnx", "dims": {"batch": 1}, "name": "b-2"}


@pytest.mark.parametrize(
    ("before", "requires", "build"),
    [
        (
            '[build-system]\nrequires = ["x"]\nbuild-backend = "poetry.core.masonry.api"\n',
            ["x", "hatch-epcontext"],
            {"backend": "poetry.core.masonry.api"},
        ),
        (
            (
                'build-system.requires = []\nbuild-system.build-backend = "mine:api"\n'
                'build-system.backend-path = ["tools"]\n'
            ),
            ["hatch-epcontext"],
            {"backend": "mine:api", "backend-path": ["tools"]},
        ),
        (
            '[build-system]\nrequires = ["setuptools>=40", "wheel"]\n',
            ["setuptools>=40", "wheel", "hatch-epcontext"],
            {"backend": "setuptools.build_meta:__legacy__"},
        ),
        (
            "",
            ["setuptools", "hatch-epcontext"],
            {"backend": "setuptools.build_meta:__legacy__"},
        ),
    ],
    ids=["poetry", "in the project", "no back end", "only a setup.py"],
)
def test_another_build_back_end_is_wrapped(
    project: Path, before: str, requires: list[str], build: dict[str, object]
) -> None:
    (project / "setup.py").touch()
    made = add_models(project, before, [new()], [CPU])
    values = parse(made)
    assert values["build-system"] == {
        "requires": requires,
        "build-backend": "hatch_epcontext.backend",
    }
    assert values["tool"].keys() == {"epcontext"}
    assert values["tool"]["epcontext"]["output"] == "my_app/epcontext"
    assert values["tool"]["epcontext"]["build"] == build
    again = add_models(project, made, [new("models/b.onnx")], [])
    assert again.startswith(made)


@pytest.mark.parametrize(
    "table",
    [
        '[tool.epcontext.targets.cpu]\nprovider = "cpu"\n[tool.other]\nx = 1\n',
        '[tool.epcontext]\nbuild.jobs = 1\ntargets.cpu.provider = "cpu"\n',
        '[tool.epcontext.build]\njobs = 1\n[tool.epcontext.targets.cpu]\nprovider = "cpu"\n',
    ],
)
def test_a_configuration_without_the_build_back_end_gets_it(project: Path, table: str) -> None:
    system = '[build-system]\nrequires = ["flit_core"]\nbuild-backend = "flit_core.buildapi"\n'
    made = parse(add_models(project, system + table, [new()], []))["tool"]["epcontext"]
    assert made["build"]["backend"] == "flit_core.buildapi"
    assert made["output"] == "my_app/epcontext"
    assert made["targets"] == {"cpu": {"provider": "cpu"}}


@pytest.mark.parametrize(
    ("file", "output"),
    [
        ("src/other/sub/__init__.py", "other/epcontext"),
        ("src/my/app/__init__.py", "my/app/epcontext"),
        ("my_app.py", "my_app_epcontext"),
        ("my_app/my_app.py", "my_app/epcontext"),
        ("tests/__init__.py", "my_app/epcontext"),
    ],
)
def test_the_output_is_in_the_import_package(project: Path, file: str, output: str) -> None:
    (project / "my_app" / "__init__.py").unlink()
    (project / file).parent.mkdir(parents=True, exist_ok=True)
    (project / file).touch()
    (project / "src" / "other").mkdir(parents=True, exist_ok=True)
    if "other" in file:
        (project / "src" / "other" / "__init__.py").touch()
    before = '[project]\nname = "my-app"\n[build-system]\nbuild-backend = "uv_build"\n'
    made = add_models(project, before, [new()], [CPU])
    assert parse(made)["tool"]["epcontext"]["output"] == output


def test_a_file_with_a_general_name_is_named_after_its_folder(project: Path) -> None:
    files = ("models/det/model.onnx", "models/rec/onnx/model.onnx", "models/model.onnx")
    for file in files:
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).touch()
    made = add_models(project, "", [new(file) for file in files], [CPU])
    names = [model.get("name") for model in models_of(made)]  # type: ignore[attr-defined]
    assert names == ["det", "rec", None]


@pytest.mark.skipif(sys.platform == "win32", reason="con.onnx is a device there")
def test_invalid_and_duplicate_names_of_files_are_replaced(project: Path) -> None:
    files = ("a", "A", "my model", "con")
    for name in files:
        (project / "models" / f"{name}.onnx").touch()
    models = [new(f"models/{name}.onnx") for name in files]
    made = add_models(project, "", models, [CPU])
    named = [model.get("name") for model in models_of(made)]  # type: ignore[attr-defined]
    assert named == [None, "A-2", "my-model", "model-con"]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("[tool", "is not TOML"),
        ("tool = { ruff = {} }", "has values to which nothing can be added"),
        (f'{HATCHLING}requires = "hatchling"', r"build-system\.requires: .*\n.*is not a list"),
    ],
)
def test_an_unusable_pyproject_is_an_error(project: Path, before: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_models(project, before, [new()], [QNN])

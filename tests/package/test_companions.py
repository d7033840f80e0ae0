"""How the app pins its companions, and what their wheels have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.package.companions import pinned
from hatch_epcontext.package.wheel import ProjectMetadata, tag
from tests.config.examples import assert_one_problem, read
from tests.language_models import make_folder
from tests.models import network, save
from tests.projects import GROUP

TOML = """
models = ["models/a.onnx", "models/b.onnx"]
fallback = { companion = "my-app-models-source" }
[targets.npu]
provider = "qnn"
companion = "my-app-models-npu"
platforms = ["win_arm64"]
[targets.cpu]
provider = "cpu"
"""

WINDOWS = "sys_platform == 'win32' and platform_machine == 'ARM64'"

SOURCE_PIN = "my-app-models-source==1; extra == 'source'"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("a", "b"):
        save(network(1), tmp_path / "models" / f"{name}.onnx")
    return read(tmp_path, TOML)


def test_each_wheel_has_its_targets_and_sources(config: Config) -> None:
    app, npu, source = map(config.of_wheel, (None, "my-app-models-npu", "my-app-models-source"))
    assert [[t.name for t in model.targets] for model in app.models] == [["cpu"]] * 2
    assert [[t.name for t in model.targets] for model in npu.models] == [["npu"]] * 2
    assert [[t.name for t in model.targets] for model in source.models] == [[]] * 2
    fallbacks = [[model.fallback for model in wheel.models] for wheel in (app, npu, source)]
    assert fallbacks == [["none"] * 2, ["none"] * 2, ["source"] * 2]
    assert (tag(app), tag(npu)) == (None, "py3-none-win_arm64")


def test_the_pins_say_versions_and_what_installs_them(config: Config) -> None:
    pins = (f"My_App.models-npu (==3) ; ({WINDOWS}) and extra == 'x'", SOURCE_PIN, "numpy>=2")
    companions = pinned(config, ProjectMetadata("My-App", "1.0", None, pins))
    facts = [(its.name, its.version, its.requirement, its.module) for its in companions]
    assert facts == [
        ("my-app-models-npu", "3", "My-App[x]", "my_app_models_npu"),
        ("my-app-models-source", "1", "My-App[source]", "my_app_models_source"),
    ]


@pytest.mark.parametrize(
    ("pins", "message", "line"),
    [
        ([], "is not pinned by any extra", f': npu = ["my-app-models-npu==1; {WINDOWS}"]'),
        (["my-app-model-npu==3; extra == 'x'"], "is not pinned", 'Did you mean "my-app-model-npu"? Write in'),
        (["my-app-models-npu>=3; extra == 'x'"], "must be pinned with ==", 'x = ["my-app-models-npu==3;'),
        (["my-app-models-npu==3.*; extra == 'x'"], "must be pinned with ==", "npu==3;"),
        (["my-app-models-npu===3; extra == 'x'"], "must be pinned with ==", "npu==3;"),
        (
            [f"my-app-models-npu=={n}; {WINDOWS} and extra == 'x{n}'" for n in (3, 4)],
            "to one version",
            'x3 = ["my-app-models-npu==3; ',
        ),
        (["my-app-models-npu==3; extra == 'x'"], "without a marker", f"npu==3; {WINDOWS}"),
    ],
)  # fmt: skip
def test_a_pin_that_is_missing_or_wrong_is_an_error_with_the_line_to_write(
    config: Config, pins: list[str], message: str, line: str
) -> None:
    project = ProjectMetadata("my-app", "1.0", None, (*pins, SOURCE_PIN))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        pinned(config, project)
    (problem,) = raised.value.problems
    assert str(problem.key) == "tool.epcontext.targets.npu.companion"
    assert line in str(problem.hint)


def test_the_app_is_no_companion_of_itself(config: Config) -> None:
    message = "my-app-models-source is the app itself, or its package"
    with pytest.raises(ConfigError, match=message):
        pinned(config, ProjectMetadata("my-app-models-source", "1"))
    with pytest.raises(ConfigError, match=message):
        pinned(config, ProjectMetadata("my-app", "1"), "my_app_models_source")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json", "standard library"),
        ("onnxruntime", "opens or compiles models"),
        ("onnxruntime-gpu", "opens or compiles models"),
        ("onnxruntime-genai", "opens or compiles models"),
        ("onnxruntime-qnn", "opens or compiles models"),
        ("onnxruntime-ep-openvino", "opens or compiles models"),
        ("numpy", "opens or compiles models"),
        ("windowsml", "opens or compiles models"),
        # A distribution whose import package has another name, the reverse, a file, a folder of several.
        ("pyyaml", "is installed here"),
        ("yaml", "is installed here"),
        ("typing-extensions", "is installed here"),
        ("google", "is installed here"),
        ("some-dependency", "is a dependency of the app"),
    ],
)
def test_a_companion_has_the_name_of_no_other_package(
    config: Config, name: str, message: str
) -> None:
    own = read(config.root, TOML.replace("my-app-models-source", name))
    pins = (f"my-app-models-npu==1; {WINDOWS} and extra == 'npu'", f"{name}==1; extra == 'c'")
    project = ProjectMetadata("my-app", "1.0", None, (*pins, "Some.Dependency>=2"))
    with pytest.raises(ConfigError, match=message) as raised:
        pinned(own, project)
    (problem,) = raised.value.problems
    assert str(problem.key) == "tool.epcontext.models[1].fallback.companion"


def test_a_companion_that_is_installed_keeps_its_name(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, about = tmp_path / "my_app_models_source", tmp_path / "my_app_models_source-1.dist-info"
    folder.mkdir()
    about.mkdir()
    (folder / "__init__.py").touch()
    (about / "METADATA").write_text("Name: my-app-models-source\nVersion: 1\n", encoding="utf-8")
    (about / "RECORD").write_text("my_app_models_source/__init__.py,,\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    pins = (f"my-app-models-npu==1; {WINDOWS} and extra == 'npu'", SOURCE_PIN)
    project = ProjectMetadata("my-app", "1.0", None, pins)
    with pytest.raises(ConfigError, match="is installed here"):
        pinned(config, project)
    (folder / "manifest.json").touch()
    (about / "RECORD").write_text("my_app_models_source/manifest.json,,\n", encoding="utf-8")
    assert len(pinned(config, project)) == 2


def test_models_that_share_weights_are_in_one_wheel(config: Config) -> None:
    own = 'targets.npu.companion = "my-app-models-npu"'
    toml = GROUP.replace('path = "models/b.onnx"', f'path = "models/b.onnx"\n{own}')
    together = read(config.root, toml)
    with pytest.raises(ConfigError, match="has other settings for the target npu") as raised:
        pinned(together, ProjectMetadata("my-app", "1.0", None, ()))
    assert "Set companion in the target" in str(raised.value.problems[0].hint)


def test_a_language_model_is_in_one_wheel_with_its_targets(tmp_path: Path) -> None:
    make_folder(tmp_path / "models" / "llama")
    toml = """
    targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40", companion = "my-app-models" }
    targets.cpu = { provider = "cpu" }
    models = [{ path = "models/llama" }]
    """
    assert_one_problem(tmp_path, toml, "models[0]", "all its targets have to be in the wheel with")
    table = 'llama", fallback = { companion = "my-app-models" }'
    model = read(tmp_path, toml.replace('llama"', table)).models[-1]
    assert model.companion_modules == {"rtx": "my_app_models", "source": "my_app_models"}


@pytest.mark.parametrize("name", ["My-App", "my_app_models", "3d-models", ""])
def test_a_companion_has_the_normal_form_of_a_distributions_name(config: Config, name: str) -> None:
    toml = TOML.replace("my-app-models-npu", name)
    message = "must be the normalized name of a distribution"
    assert_one_problem(config.root, toml, "targets.npu.companion", message)

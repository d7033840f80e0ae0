from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hatch_epcontext.cli._settings import (
    SettingNames,
    error_text,
    setting_flags,
    switch,
    use_flag_names,
)
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    Key,
    Kind,
    Problem,
    Setting,
)
from hatch_epcontext.tools.project import Project

MODELS = {"a": Path("models/a.onnx"), "b": Path("b.onnx")}
NAMES = SettingNames(MODELS)


def read(*arguments: str) -> dict[str, Any]:
    """The settings in the flags of a command."""
    found: dict[str, Any] = {}

    @click.command()
    @setting_flags
    @switch("--embed", {"embed": True}, "")
    def command(settings: dict[str, Any]) -> None:
        found.update(settings)

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{ atol = 0.1 }", {"atol": 0.1}),
        ('"1"', "1"),
        ("burst", "burst"),
        ("", ""),
    ],
)
def test_a_value_is_toml_or_the_text_itself(text: str, value: object) -> None:
    assert read("--set", f"key={text}") == {"key": value}


@pytest.mark.parametrize(
    ("short", "setting"),
    [
        (("-O", "soc_model=60"), "provider-options.soc_model=60"),
        (("-O", "a=true"), "provider-options.a=true"),
        (("-O", "a={ op = { Relu = 'cpu' } }"), "provider-options.a.op.Relu=cpu"),
        (("-O", 'b={"op": {}}'), "provider-options.b='{\"op\": {}}'"),
        (("--dim", "n=1"), "dims.n=1"),
        (("--dim", "decoder:n=1"), "dims.decoder:n=1"),
        (("--dim", "a.b=1"), 'dims."a.b"=1'),
        (("--dim", "n=many"), "dims.n=many"),
        (("--shape", "x=1, 3"), "shapes.x=[1, 3]"),
        (("--shape", "y="), "shapes.y=[]"),
        (("--constant", "c=[1.5]"), "constants.c=[1.5]"),
        (("--inputs", "ones"), "validate.inputs=ones"),
        (("--device", "npu"), "device=npu"),
        (("--library", "my_ep"), "library=my_ep"),
        (("--embed",), "embed=true"),
    ],
)
def test_a_flag_is_short_for_a_setting(short: tuple[str, ...], setting: str) -> None:
    assert read(*short) == read("--set", setting)


def test_a_name_with_dots_is_quoted() -> None:
    for value in ("text", "'text'"):
        found = read("--set", f'session-options."a.b"={value}')
        assert found == {"session-options": {"a.b": "text"}}


def test_tables_are_merged_and_the_last_value_of_a_key_counts() -> None:
    found = read(
        *("--set", "min-coverage=0.4", "--dim", "n=1", "--dim", "m=2", "--dim", "n=3"),
        *("--set", "min-coverage=0.5", "--set", "validate=require"),
        *("--set", "validate.tolerance={atol=0.1, outputs={a={snr=10}}}"),
        *("--set", "validate.tolerance.outputs.b.snr=20"),
    )
    assert found == {
        "min-coverage": 0.5,
        "dims": {"n": 3, "m": 2},
        "validate": {
            "mode": "require",
            "tolerance": {"atol": 0.1, "outputs": {"a": {"snr": 10}, "b": {"snr": 20}}},
        },
    }


def test_a_later_flag_wins_over_an_earlier_one() -> None:
    assert read("--dim", "n=1", "--dim", "n=2", "--set", "dims.n=3") == {"dims": {"n": 3}}
    assert read("--set", "embed=false", "--embed") == {"embed": True}
    assert read("--embed", "--set", "embed=false") == {"embed": False}
    assert read() == {}


def key(*parts: str | int) -> Key:
    return Key(parts)


def printed(error: EpcontextError) -> str:
    """The message of a command that uses flags and ended with ``error``."""
    with click.Context(click.Command("compile")) as context:
        use_flag_names(MODELS, "it did not work")
        return error_text(error, context)


@pytest.mark.parametrize(
    ("place", "flag"),
    [
        (key(), "--provider"),
        (key("targets", "qnn", "provider"), "--provider"),
        (key("models"), "--set models"),
        (key("targets"), "--set targets"),
        (key("targets", "qnn", "device"), "--set device"),
        (key("targets", "qnn", "session-options", "a.b"), '--set session-options."a.b"'),
        (key("targets", "qnn", "profiles", 0, "x"), "--set profiles[0].x"),
        (key("build", "timeout"), "--set build.timeout"),
        (key("models", 1, "dims", "n"), "b.onnx: --set dims.n"),
        (key("models", 0, "shapes", "x", 2), "models/a.onnx: --set shapes.x[2]"),
        (key("models", 0), "models/a.onnx"),
    ],
)
def test_a_key_is_named_by_its_flag(place: Key, flag: str) -> None:
    flag = flag.replace("models/a.onnx", str(MODELS["a"]))
    assert NAMES.key(place) == flag
    assert printed(ConfigError(Problem.at(place, Kind.INVALID_VALUE, "is wrong."))) == (
        f"invalid configuration:\n{flag}: EPC005\n    is wrong."
    )


@pytest.mark.parametrize(
    ("place", "value", "flags"),
    [
        (key("models", 0, "dims"), {"batch": 1, "n": 1}, "--set dims.batch=1 --set dims.n=1"),
        (key("models", 0, "dims"), None, "--set dims.NAME=..."),
        (key("models", 0, "shapes"), {"x": [1, 3]}, "--set 'shapes.x=[1, 3]'"),
        (key("models", 0, "shapes"), {"a b": (1, 3)}, "--set 'shapes.\"a b\"=[1, 3]'"),
        (key("models", 0, "validate"), "auto", "--set validate=auto"),
        (key("models", 0, "validate", "inputs"), "x.npz", "--set validate.inputs=x.npz"),
        (key("models", 0, "validate", "tolerance"), False, "--set validate.tolerance=false"),
        (
            key("targets", "qnn", "session-options", "a.b"),
            "1",
            '--set \'session-options."a.b"="1"\'',
        ),
        (key("targets", "qnn", "allow-unknown-options"), True, "--set allow-unknown-options=true"),
        (key("build", "timeout"), None, "--set build.timeout=..."),
        (key(), None, "--provider ..."),
    ],
)
def test_a_setting_is_written_with_its_flag(place: Key, value: Any, flags: str) -> None:
    assert SettingNames({"a": Path("a.onnx")}).setting(Setting(place, value)) == f"Add {flags}"


def test_a_setting_of_a_model_among_several_has_the_models_name() -> None:
    setting = Setting(key("models", 1, "dims"), {"batch": 1})
    assert NAMES.setting(setting) == "Add --set 'dims.\"b:batch\"=1'"
    assert read("--set", 'dims."b:batch"=1') == read("--dim", "b:batch=1")


def test_only_a_failed_model_has_the_headline_of_the_command() -> None:
    problem = Problem(Kind.INVALID_VALUE, "x", "y")
    assert printed(BuildError(problem)).startswith("it did not work:")
    assert printed(ConfigError(problem)).startswith("invalid configuration:")


@pytest.mark.parametrize(
    ("system", "backend"),
    [
        (None, "hatchling.build"),
        ({"requires": []}, "setuptools.build_meta:__legacy__"),
        ({"build-backend": "poetry.core.masonry.api"}, "poetry.core.masonry.api"),
    ],
)
def test_a_project_without_a_build_back_end_has_that_of_the_front_ends(
    tmp_path: Path, system: Any, backend: str
) -> None:
    values = {} if system is None else {"build-system": system}
    assert Project(tmp_path, values).backend == backend


def test_a_project_with_only_a_setup_script_is_one_of_setuptools(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    assert Project(tmp_path, {}).backend == "setuptools.build_meta:__legacy__"

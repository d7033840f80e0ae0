from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from hatch_epcontext.cli._flag_errors import FlagNames, error_text, use_flag_names
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    Key,
    Kind,
    Problem,
    Setting,
)

MODELS = {"a": Path("models/a.onnx"), "b": Path("b.onnx")}
NAMES = FlagNames(MODELS)


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
        (key("targets", "qnn"), "--provider"),
        (key("models"), "MODEL"),
        (key("targets", "qnn", "device"), "--device"),
        (key("targets", "qnn", "provider-options", "soc_model"), "--option soc_model"),
        (key("targets", "qnn", "session-options", "a.b"), '--config "a.b"'),
        (key("targets", "qnn", "min-coverage"), "--set min-coverage"),
        (key("targets", "qnn", "device-filter", "type"), "--set device-filter.type"),
        (key("targets", "qnn", "profiles", 0, "x"), "--set profiles[0].x"),
        (key("build", "timeout"), "--set build.timeout"),
        (key("models", 1, "dims", "n"), "b.onnx: --dim n"),
        (key("models", 0, "shapes", "x", 2), "models/a.onnx: --shape x[2]"),
        (key("models", 0, "shapes", 1, "x"), "models/a.onnx: --set shapes[1].x"),
        (key("models", 0, "validate", "inputs"), "models/a.onnx: --inputs"),
        (
            key("models", 0, "validate", "tolerance", "atol"),
            "models/a.onnx: --set validate.tolerance.atol",
        ),
        (key("models", 0), "models/a.onnx"),
    ],
)
def test_a_key_is_named_by_its_flag(place: Key, flag: str) -> None:
    flag = flag.replace("models/a.onnx", str(MODELS["a"]))
    assert NAMES.key(place) == flag
    assert printed(ConfigError(Problem.at(place, Kind.INVALID_VALUE, "is wrong."))) == (
        f"invalid configuration:\n{flag}: EPC005\n    is wrong."
    )


@pytest.mark.parametrize("location", ["models/a.onnx", "HATCH_EPCONTEXT_JOBS"])
def test_other_locations_stay(location: str) -> None:
    error = ConfigError(Problem(Kind.INVALID_VALUE, location, "is wrong."))
    assert printed(error).splitlines()[1] == f"{location}: EPC005"


def test_a_job_is_named_as_in_the_log_with_target_and_step() -> None:
    problem = Problem(Kind.NOT_FINITE, "a", "is wrong.", targets=("one", "two"), step="validation")
    assert printed(ConfigError(problem)).splitlines()[1] == "a -> one, two: validation: EPC402"


@pytest.mark.parametrize(
    ("place", "value", "flags"),
    [
        (key("models", 0, "dims"), {"batch": 1, "n": 1}, "--dim batch=1 --dim n=1"),
        (key("models", 0, "dims"), None, "--dim NAME=..."),
        (key("models", 0, "shapes"), {"x": [1, 3]}, "--shape x=1,3"),
        (key("models", 0, "shapes"), {"a b": (1, 3)}, "--shape 'a b=1,3'"),
        (key("models", 0, "constants", "sr"), [1, 2], "--constant 'sr=[1, 2]'"),
        (key("models", 0, "validate"), "auto", "--set validate=auto"),
        (key("models", 0, "validate", "inputs"), "x.npz", "--inputs x.npz"),
        (key("models", 0, "validate", "tolerance"), None, "--set validate.tolerance=..."),
        (key("models", 0, "validate", "tolerance"), False, "--set validate.tolerance=false"),
        (key("targets", "qnn", "provider-options", "soc_model"), 60, "--option soc_model=60"),
        (key("targets", "qnn", "session-options", "a.b"), "1", "--config a.b=1"),
        (key("targets", "qnn", "allow-unknown-options"), True, "--set allow-unknown-options=true"),
        (key("build", "timeout"), None, "--set build.timeout=..."),
        (key("targets", "qnn", "device"), "npu", "--device npu"),
        (key("targets", "qnn", "embed"), False, "--no-embed"),
        (key(), None, "--provider ..."),
    ],
)
def test_a_setting_is_written_with_its_flag(place: Key, value: Any, flags: str) -> None:
    assert FlagNames({"a": Path("a.onnx")}).setting(Setting(place, value)) == f"Add {flags}"


def test_a_setting_of_a_model_among_several_has_the_models_name() -> None:
    dims = Setting(key("models", 1, "dims"), {"batch": 1, "n": 1})
    assert NAMES.setting(dims) == "Add --dim b:batch=1 --dim b:n=1"
    assert NAMES.setting(Setting(key("models", 1, "dims"))) == "Add --dim b:NAME=..."


def test_settings_follow_the_hint() -> None:
    setting = Setting(key("models", 1, "validate", "tolerance"))
    problem = Problem(Kind.OUTPUT_DIFFERS, "x", "y", "Accept it:", settings=(setting,))
    assert printed(BuildError(problem)).endswith(
        "    Accept it:\n    Add --set validate.tolerance=..."
    )
    problem = Problem(Kind.MISSING_REQUIREMENT, "x", "y", "Install what it needs.")
    assert printed(BuildError(problem)).endswith("    Install what it needs.")


def test_only_a_failed_model_has_the_headline_of_the_command() -> None:
    problem = Problem(Kind.INVALID_VALUE, "x", "y")
    assert printed(BuildError(problem)).startswith("it did not work:")
    assert printed(ConfigError(problem)).startswith("invalid configuration:")


def test_a_command_without_flags_for_keys_names_keys() -> None:
    error = ConfigError(Problem.at(key("output"), Kind.INVALID_VALUE, "is wrong."))
    with click.Context(click.Command("build")) as context:
        assert error_text(error, context) == str(error)
    assert "tool.epcontext.output: EPC005" in str(error)

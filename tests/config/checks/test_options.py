from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.config.checks.options import (
    _RESERVED_SESSION_OPTIONS,
    _SESSION_OPTIONS,
    check_options,
    check_session_options,
    render_options,
)
from hatch_epcontext.errors import Key, Setting
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import quoted_key
from tests.config.examples import MODELS, only_problem, problems, target

QNN = PROVIDERS["qnn"]
T = Key() / "t"
UNCHECKED = Setting(T / "allow-unknown-options", value=True)


def test_options_of_the_provider_pass() -> None:
    options, load_options = {"soc_model": 60}, {"htp_performance_mode": "burst"}
    assert not list(check_options(T, options, load_options, QNN, T))


@pytest.mark.parametrize(
    ("options", "load_options", "location", "message"),
    [
        ({"soc_mdel": 60}, {}, "t.provider-options.soc_mdel", "is not an option of the qnn provider"),
        ({"htp_arch": 999}, {}, "t.provider-options.htp_arch", "must be one of 0, 68"),
        ({}, {"soc_model": 60}, "t.load-options.soc_model", "counts only when the model is compiled"),
        ({}, {"nope": 1}, "t.load-options.nope", "is not an option"),
        ({"backend_type": "htp", "backend_path": "x"}, {}, "t.provider-options", "exclude each other"),
    ],
)  # fmt: skip
def test_invalid_options_are_reported_with_their_key(
    options: dict[str, str], load_options: dict[str, str], location: str, message: str
) -> None:
    (problem,) = check_options(T, options, load_options, QNN, T)
    assert problem.location == f"tool.epcontext.{location}"
    assert message in problem.message


def test_an_option_for_compiling_names_its_place() -> None:
    (problem,) = check_options(T, {}, {"soc_model": 60}, QNN, T)
    assert problem.settings == (Setting(T / "provider-options" / "soc_model", 60),)


def test_an_unknown_option_of_a_model_is_allowed_in_the_table_of_the_target() -> None:
    (problem,) = check_options(Key() / "models" / 0, {"x": 1}, {}, QNN, T)
    assert problem.key == Key() / "models" / 0 / "provider-options" / "x"
    assert problem.settings == (UNCHECKED,)


def test_a_provider_without_options_is_named() -> None:
    (problem,) = check_options(T, {"x": 1}, {}, PROVIDERS["cpu"], T)
    assert problem.hint == "The cpu provider has no options."
    assert problem.settings == ()


def test_session_options_are_known_and_not_reserved() -> None:
    key = Key() / "s"
    assert not list(check_session_options(key, {"session.intra_op_num_threads": 1}))
    unknown, reserved = check_session_options(
        key, {"session.intra_op_num_thread": 1, "ep.context_enable": 1}
    )
    assert unknown.location == 'tool.epcontext.s."session.intra_op_num_thread"'
    assert unknown.hint is not None
    assert 'Did you mean "session.intra_op_num_threads"?' in unknown.hint
    assert "compiling always sets it" in reserved.message
    assert not _SESSION_OPTIONS & _RESERVED_SESSION_OPTIONS.keys()


def test_rendering_leaves_out_refused_options() -> None:
    assert render_options({"soc_model": 60, "htp_arch": 999}, QNN) == {"soc_model": "60"}
    assert render_options({"session.x": True}) == {"session.x": "1"}


def misspelled() -> Iterator[tuple[str, str, str]]:
    """Every option of every provider, with one letter left out."""
    for provider in PROVIDERS.values():
        for option in provider.options:
            middle = len(option) // 2
            yield provider.name, option, option[:middle] + option[middle + 1 :]


@pytest.mark.parametrize(("provider", "option", "wrong"), list(misspelled()))
def test_an_option_that_misses_one_letter_is_refused_with_the_right_one(
    project: Path, provider: str, option: str, wrong: str
) -> None:
    toml = f'provider = "{provider}"\nprovider-options = {{ {wrong} = 1 }}'
    location, found = only_problem(project, toml)
    assert location == f"provider-options.{quoted_key(wrong)}"
    assert found.message == f"is not an option of the {provider} provider."
    assert found.hint is not None
    assert f'Did you mean "{option}"?' in found.hint
    assert "Set tool.epcontext.allow-unknown-options = true" in found.text()


def out_of_range() -> Iterator[tuple[str, str, str]]:
    """Every option of every provider, with a value that it cannot have."""
    for provider in PROVIDERS.values():
        for name, option in provider.options.items():
            impossible = '"no such value"' if option.choices or option.pattern else "[1]"
            if option.kind == "int" and option.minimum is not None:
                impossible = str(option.minimum - 1)
            elif option.kind in ("bool", "text", "json"):
                impossible = "7" if not (option.choices or option.pattern) else impossible
            elif option.kind == "pointer":
                impossible = "140242"
            yield provider.name, name, impossible


@pytest.mark.parametrize(("provider", "option", "value"), list(out_of_range()))
def test_an_impossible_value_is_refused_with_the_allowed_ones(
    project: Path, provider: str, option: str, value: str
) -> None:
    toml = f'provider = "{provider}"\nprovider-options = {{ {option} = {value} }}'
    location, found = only_problem(project, toml)
    assert location == f"provider-options.{option}"
    assert PROVIDERS[provider].options[option].allowed in found.message


@pytest.mark.parametrize(
    ("provider", "option", "replacement"),
    [
        ("openvino", "device_type", 'Use device = "npu", "gpu" or "cpu".'),
        ("openvino", "precision", "INFERENCE_PRECISION_HINT"),
        ("tensorrt-rtx", "profile_min_shapes", "nv_profile_min_shapes"),
    ],
)
def test_a_deprecated_option_is_refused_with_its_replacement(
    project: Path, provider: str, option: str, replacement: str
) -> None:
    toml = f'provider = "{provider}"\nprovider-options = {{ {option} = "x" }}'
    _, found = only_problem(project, toml)
    assert found.message.startswith("is deprecated")
    assert found.hint is not None
    assert replacement in found.hint


def test_a_reserved_option_is_refused(project: Path) -> None:
    toml = 'provider = "tensorrt"\nprovider-options = { trt_engine_cache_path = "x" }'
    _, found = only_problem(project, toml)
    assert found.message == "is reserved: the paths of the files in the wheel are fixed."


def test_only_the_app_can_give_an_address(project: Path) -> None:
    toml = 'provider = "tensorrt-rtx"\nload-options = { user_compute_stream = 12345 }'
    location, found = only_problem(project, toml)
    assert location == "load-options.user_compute_stream"
    assert "an address in the app's memory" in found.message
    assert found.hint is not None
    assert "load(..., provider_options={'user_compute_stream': ...})" in found.hint


def test_engines_without_weights_are_refused(project: Path) -> None:
    for provider, option in (
        ("tensorrt", "trt_weight_stripped_engine_enable"),
        ("tensorrt-rtx", "nv_weight_stripped_engine_enable_experimental"),
    ):
        toml = f'provider = "{provider}"\nprovider-options = {{ {option} = true }}'
        _, found = only_problem(project, toml)
        assert "can only be opened together with the source model" in found.message


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        ('provider-options = { htp_arch = 999 }', "provider-options.htp_arch", "must be one of 0, 68"),
        ('provider-options = { soc_model = 60, htp_arch = 75 }',
         "provider-options.htp_arch", "soc_model 60 has the HTP architecture 73"),
    ],
)  # fmt: skip
def test_options_that_contradict_the_chip_are_refused(
    project: Path, toml: str, location: str, message: str
) -> None:
    found_at, found = only_problem(project, f'provider = "qnn"\n{toml}')
    assert found_at == location
    assert message in found.message


def test_options_newer_than_this_package_can_be_allowed(project: Path) -> None:
    wrong = (
        '{ soc_model = 60, htp_arch = 99, no_such = true, backend_type = "x", backend_path = "y" }'
    )
    toml = f'provider = "qnn"\nprovider-options = {wrong}\n'
    assert len(problems(project, MODELS + toml)) == 4
    found = target(project, f"{toml}allow-unknown-options = true")
    assert found.settings.provider_options == {
        "soc_model": "60",
        "htp_arch": "99",
        "no_such": "1",
        "backend_type": "x",
        "backend_path": "y",
    }


def test_a_table_becomes_json(project: Path) -> None:
    toml = (
        'provider = "openvino"\n'
        'provider-options = { load_config = { CPU = { INFERENCE_PRECISION_HINT = "f32" } } }'
    )
    found = target(project, toml)
    expected = {"load_config": '{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}'}
    assert found.settings.provider_options == expected
    assert found.load_options == expected


def test_dates_in_a_table_of_options_become_strings(project: Path) -> None:
    toml = (
        'provider = "openvino"\nprovider-options = { load_config = { CPU = { A = 2020-01-01 } } }'
    )
    expected = {"load_config": '{"CPU":{"A":"2020-01-01"}}'}
    assert target(project, toml).settings.provider_options == expected


def test_a_session_option_cannot_be_a_table(project: Path) -> None:
    toml = 'provider = "cpu"\nsession-options = { "session.log_id" = { a = 1 } }'
    _, found = only_problem(project, toml)
    assert found.message.startswith("must not be a table")


def test_a_misspelled_session_option_has_the_near_name_and_the_reason(project: Path) -> None:
    toml = 'provider = "cpu"\nsession-options = { "session.intra_op_num_thread" = 1 }'
    _, found = only_problem(project, toml)
    assert found.hint == (
        'Did you mean "session.intra_op_num_threads"? '
        "ONNX Runtime would accept it, and ignore it silently."
    )

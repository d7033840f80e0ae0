from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.config.checks.options import (
    _RESERVED_SESSION_OPTIONS,
    _SESSION_OPTIONS,
    check_options,
    check_session_options,
    render_options,
)
from hatch_epcontext.config.tables import TargetTable
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Key, Kind, Setting
from hatch_epcontext.files import file_sha256
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import quoted_key
from tests.config.examples import MODELS, only_problem, problems, target

QNN = PROVIDERS["qnn"]
T = Key() / "t"
TARGET = NamedTarget("t", T, TargetTable(), QNN)
UNCHECKED = Setting(T / "allow-unknown-options", value=True)


def test_options_of_the_provider_pass() -> None:
    options, load_options = {"soc_model": 60}, {"htp_performance_mode": "burst"}
    assert not list(check_options(T, options, load_options, TARGET))


@pytest.mark.parametrize(
    ("options", "load_options", "location", "message"),
    [
        ({"soc_mdel": 60}, {}, "t.provider-options.soc_mdel", "is not an option of the qnn provider"),
        ({"htp_arch": 999}, {}, "t.provider-options.htp_arch", "must be one of 0, 68"),
        ({}, {"soc_model": 60}, "t.load-options.soc_model", "counts only when the model is compiled"),
        ({}, {"nope": 1}, "t.load-options.nope", "is not an option"),
        ({"backend_type": "htp", "backend_path": "x"}, {}, "t.provider-options", "exclude each other"),
        *(
            ({}, {"profiling_file_path": path}, "t.load-options.profiling_file_path", "a folder in")
            for path in ("{user-cache}/../x", "x/{user-cache}", "{user-cache}x")
        ),
    ],
)  # fmt: skip
def test_invalid_options_are_reported_with_their_key(
    options: dict[str, str], load_options: dict[str, str], location: str, message: str
) -> None:
    (problem,) = check_options(T, options, load_options, TARGET)
    assert problem.location == f"tool.epcontext.{location}"
    assert message in problem.message


def test_an_option_for_compiling_names_its_place() -> None:
    (problem,) = check_options(T, {}, {"soc_model": 60}, TARGET)
    assert problem.settings == (Setting(T / "provider-options" / "soc_model", 60),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("session-options", "only provider-options and load-options"),
        ("provider-options", 'must be "{env:NAME}" alone'),
    ],
)
def test_a_variable_that_nobody_looks_up_is_an_error(
    project: Path, table: str, message: str
) -> None:
    text = f'[targets.vitisai]\nprovider = "vitisai"\n{table} = {{ log_level = "a{{env:KEY}}" }}\n'
    _, found = only_problem(project, f"{text}allow-unknown-options = true\n")
    assert message in found.message


@pytest.mark.parametrize("unchecked", ["", "allow-unknown-options = true"])
@pytest.mark.parametrize("table", ["provider-options", "load-options"])
def test_a_secret_in_the_configuration_is_refused_and_not_shown(
    project: Path, table: str, unchecked: str
) -> None:
    keys = f'{table} = {{ encryption_key = "hunter2" }}\n{unchecked}\n'
    text = f'[targets.vitisai]\nprovider = "vitisai"\n{keys}'
    message, found = only_problem(project, text)
    assert found.location == f"tool.epcontext.targets.vitisai.{table}.encryption_key"
    assert "a secret" in found.message
    assert found.settings[0].value == "{env:ENCRYPTION_KEY}"
    assert "hunter2" not in f"{message} {found}"
    given = target(project, text.replace("hunter2", "{env:MODEL_KEY}"))
    assert given.load_options["encryption_key"] == "{env:MODEL_KEY}"
    assert given.has_secrets


def test_an_unknown_option_of_a_model_is_allowed_in_the_table_of_the_target() -> None:
    (problem,) = check_options(Key() / "models" / 0, {"x": 1}, {}, TARGET)
    assert problem.key == Key() / "models" / 0 / "provider-options" / "x"
    assert problem.settings == (UNCHECKED,)


def test_a_provider_without_options_is_named() -> None:
    (problem,) = check_options(T, {"x": 1}, {}, replace(TARGET, provider=PROVIDERS["cpu"]))
    assert problem.hint == "The cpu provider has no options."
    assert problem.settings == ()


def test_session_options_are_known_and_not_reserved() -> None:
    key = Key() / "s"
    assert not list(check_session_options(key, {"session.intra_op_num_threads": 1}, TARGET))
    unknown, reserved = check_session_options(
        key, {"session.intra_op_num_thread": 1, "ep.context_enable": 1}, TARGET
    )
    assert unknown.location == 'tool.epcontext.s."session.intra_op_num_thread"'
    assert unknown.hint is not None
    assert 'Did you mean "session.intra_op_num_threads"?' in unknown.hint
    assert unknown.settings == (UNCHECKED,)
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


def test_an_option_that_misses_one_letter_is_refused_with_the_right_one(project: Path) -> None:
    accepted = []
    for provider, option, wrong in misspelled():
        toml = (
            f'[targets.{provider}]\nprovider = "{provider}"\nprovider-options = {{ {wrong} = 1 }}'
        )
        location, found = only_problem(project, toml)
        if (
            location != f"targets.{provider}.provider-options.{quoted_key(wrong)}"
            or found.kind is not Kind.UNKNOWN_OPTION
            or provider not in found.message
            or f'"{option}"' not in (found.hint or "")
            or found.settings
            != (Setting(Key() / "targets" / provider / "allow-unknown-options", value=True),)
        ):
            accepted.append((provider, wrong, found))
    assert accepted == []


def out_of_range() -> Iterator[tuple[str, str, str]]:
    """Every option of every provider, with a value that it cannot have."""
    for provider in PROVIDERS.values():
        for name, option in provider.options.items():
            impossible = '"no such value"' if option.choices or option.pattern else "[1]"
            if option.kind == "int" and option.minimum is not None:
                impossible = str(option.minimum - 1)
            elif option.kind in ("bool", "text", "json", "file", "output"):
                impossible = "7" if not (option.choices or option.pattern) else impossible
            elif option.kind == "pointer":
                impossible = "140242"
            yield provider.name, name, impossible


def test_an_impossible_value_is_refused_with_the_allowed_ones(project: Path) -> None:
    accepted = []
    for provider, option, value in out_of_range():
        toml = f'[targets.{provider}]\nprovider = "{provider}"\nprovider-options = {{ {option} = {value} }}'
        location, found = only_problem(project, toml)
        allowed = PROVIDERS[provider].options[option].allowed
        if (
            location != f"targets.{provider}.provider-options.{option}"
            or allowed not in found.message
        ):
            accepted.append((provider, option, value, found))
    assert accepted == []


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
    toml = f'[targets.{provider}]\nprovider = "{provider}"\nprovider-options = {{ {option} = "x" }}'
    _, found = only_problem(project, toml)
    assert found.message.startswith("is deprecated")
    assert found.hint is not None
    assert replacement in found.hint


def test_a_reserved_option_is_refused(project: Path) -> None:
    toml = '[targets.tensorrt]\nprovider = "tensorrt"\nprovider-options = { trt_engine_cache_path = "x" }'
    _, found = only_problem(project, toml)
    assert found.message == "is reserved: the paths of the files in the wheel are fixed."


def test_only_the_app_can_give_an_address(project: Path) -> None:
    toml = '[targets.tensorrt-rtx]\nprovider = "tensorrt-rtx"\nload-options = { user_compute_stream = 12345 }'
    location, found = only_problem(project, toml)
    assert location == "targets.tensorrt-rtx.load-options.user_compute_stream"
    assert "an address in the app's memory" in found.message
    assert found.hint is not None
    assert "load(..., provider_options={'user_compute_stream': ...})" in found.hint


def test_engines_without_weights_are_refused(project: Path) -> None:
    for provider, option in (
        ("tensorrt", "trt_weight_stripped_engine_enable"),
        ("tensorrt-rtx", "nv_weight_stripped_engine_enable_experimental"),
    ):
        toml = f'[targets.{provider}]\nprovider = "{provider}"\nprovider-options = {{ {option} = true }}'
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
    found_at, found = only_problem(project, f'[targets.qnn]\nprovider = "qnn"\n{toml}')
    assert found_at == f"targets.qnn.{location}"
    assert message in found.message


@pytest.mark.parametrize("chips", ["[60, 57]", '["60", 57]', '"60,57"', '"60, 57"'])
def test_a_list_names_several_chips_and_their_architectures_follow(
    project: Path, chips: str
) -> None:
    found = target(
        project,
        f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {{ soc_model = {chips} }}',
    )
    assert found.settings.provider_options == {
        "backend_type": "htp",
        "soc_model": "60,57",
        "htp_arch": "73,75",
    }
    # They count for compiling only.
    assert found.load_options == {"backend_type": "htp"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("soc_model = [60]", {"soc_model": "60", "htp_arch": "73"}),
        ("soc_model = [60, 57], htp_arch = [73, 75]", {"soc_model": "60,57", "htp_arch": "73,75"}),
        ("soc_model = [60, 88], htp_arch = [73, 81]", {"soc_model": "60,88", "htp_arch": "73,81"}),
        # Two chips may have the same architecture.
        ("soc_model = [60, 43]", {"soc_model": "60,43", "htp_arch": "73,73"}),
        ("htp_arch = [73, 75]", {"htp_arch": "73,75"}),
        (
            "soc_model = [60, 57], vtcm_mb = 8",
            {"soc_model": "60,57", "htp_arch": "73,75", "vtcm_mb": "8"},
        ),
        (
            "soc_model = [60, 57], vtcm_mb = [8, 4]",
            {"soc_model": "60,57", "htp_arch": "73,75", "vtcm_mb": "8,4"},
        ),
    ],
)
def test_valid_lists_of_chips_become_what_the_ep_takes(
    project: Path, options: str, expected: dict[str, str]
) -> None:
    found = target(project, f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {{ {options} }}')
    assert found.settings.provider_options == {"backend_type": "htp", **expected}


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        ("soc_model = []", "soc_model", "a list of them, one for each chip, not []"),
        ("soc_model = [60, true]", "soc_model", "must be a whole number"),
        ("soc_model = [60, 57.5]", "soc_model", "must be a whole number"),
        ("soc_model = [60, -1]", "soc_model", "must be a whole number"),
        ('soc_model = "60,x"', "soc_model", "must be a whole number"),
        ('soc_model = "60,"', "soc_model", "must be a whole number"),
        ("htp_arch = [73, 999]", "htp_arch", "must be one of 0, 68"),
        ("soc_model = [60, 60]", "soc_model", "names 60 twice"),
        ("htp_arch = [73, 73]", "htp_arch", "names 73 twice"),
        ("soc_model = [60, 0]", "soc_model", "0 means that it is not set"),
        (
            "soc_model = [60, 88]",
            "soc_model",
            "does not know the HTP architecture of 88: htp_arch must be a list",
        ),
        (
            "soc_model = [60, 88], htp_arch = 73",
            "htp_arch",
            "it has 1, and soc_model names 2 chips",
        ),
        (
            "soc_model = 60, htp_arch = [73, 75]",
            "htp_arch",
            "it has 2, and soc_model names 1 chip.",
        ),
        ("soc_model = 60, vtcm_mb = [8, 4]", "vtcm_mb", "it has 2, and soc_model names 1 chip."),
        (
            "soc_model = [60, 57], htp_arch = [73, 73]",
            "htp_arch",
            "soc_model 57 has the HTP architecture 75",
        ),
        ("device_id = [0, 1]", "device_id", "must be a whole number at least 0, not [0, 1]"),
        ('backend_type = ["htp"]', "backend_type", "must be one of htp"),
        ("enable_htp_prepare_only = [true]", "enable_htp_prepare_only", "must be true or false"),
        ('op_packages = ["a"]', "op_packages", "must be the path of a file, not"),
    ],
)
def test_an_invalid_list_of_chips_is_an_error(
    project: Path, options: str, option: str, message: str
) -> None:
    toml = f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {{ {options} }}'
    location, found = only_problem(project, toml)
    assert location == f"targets.qnn.provider-options.{option}"
    assert message in found.message


@pytest.mark.parametrize("item", ["[1]", "{ a = 1 }", "2020-01-01"])
def test_a_list_has_no_lists_tables_or_dates(project: Path, item: str) -> None:
    toml = f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {{ soc_model = [60, {item}] }}'
    location, found = only_problem(project, toml)
    assert location == "targets.qnn.provider-options.soc_model[1]"
    assert found.message.startswith("must be ")


def test_the_lists_of_a_newer_ep_are_taken_as_they_are(project: Path) -> None:
    toml = (
        '[targets.qnn]\nprovider = "qnn"\nallow-unknown-options = true\n'
        "provider-options = { soc_model = [60, 60], newer = [1, true], device_id = [0, 1] }"
    )
    assert target(project, toml).settings.provider_options == {
        "backend_type": "htp",
        "soc_model": "60,60",
        "htp_arch": "73,73",
        "newer": "1,1",
        "device_id": "0,1",
    }


def test_options_newer_than_this_package_can_be_allowed(project: Path) -> None:
    wrong = (
        '{ soc_model = 60, htp_arch = 99, no_such = true, backend_type = "x", backend_path = "y" }'
    )
    toml = f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {wrong}\n'
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
        '[targets.openvino]\nprovider = "openvino"\n'
        'provider-options = { load_config = { CPU = { INFERENCE_PRECISION_HINT = "f32" } } }'
    )
    found = target(project, toml)
    expected = {"load_config": '{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}'}
    assert found.settings.provider_options == expected
    assert found.load_options == expected


AFFINITY = '{file}{"op_type":{"Relu":"cpu"}}'


@pytest.mark.parametrize(
    ("provider", "option", "value", "expected"),
    [
        ("qnn", "op_affinity", '{ op_type = { Relu = "cpu" } }', AFFINITY),
        ("qnn", "op_affinity", '"files/affinity.json"', AFFINITY),
        ("qnn", "op_affinity", '"{root}/files/affinity.json"', AFFINITY),
        ("vitisai", "config_file", '"files/affinity.json"', AFFINITY),
        ("openvino", "load_config", '"files/affinity.json"', AFFINITY.removeprefix("{file}")),
        ("qnn", "op_packages", '"A:files/a.so:f:HTP,B:files/b.so:f"', "A:{a.so}:f:HTP,B:{b.so}:f"),
        ("qnn", "backend_path", '"libQnnHtp.so"', "libQnnHtp.so"),
        ("qnn", "qnn_saver_path", '"files/a.so"', "{a.so}"),
        ("qnn", "json_qnn_graph_dir", '"graphs"', "{file}/json_qnn_graph_dir"),
        ("tensorrt", "trt_extra_plugin_lib_paths", '"files/a.so;files/b.so"', "{a.so};{b.so}"),
        ("migraphx", "migraphx_int8_calibration_table_name", '"files/a.so"', "{a.so}"),
        ("plugin", "anything", '"files/a.so"', "{a.so}"),
        ("plugin", "anything", '"no/file"', "no/file"),
    ],
)
def test_an_option_has_what_its_files_contain_and_no_path(
    project: Path, provider: str, option: str, value: str, expected: str
) -> None:
    folder = project / "files"
    folder.mkdir()
    (folder / "affinity.json").write_text('{"op_type": {\n"Relu": "cpu"}}')
    for name in ("a.so", "b.so"):
        (folder / name).write_text(f"the library {name}")
        sha256 = file_sha256(folder / name)[:32]
        expected = expected.replace(f"{{{name}}}", f"{{file}}/{sha256}/{name}")
    value = value.replace("{root}", project.as_posix())
    library = 'library = "x_ep"\nep-name = "X"\n' if provider == "plugin" else ""
    keys = f"{library}provider-options = {{ {option} = {value} }}"
    found = target(project, f'[targets.{provider}]\nprovider = "{provider}"\n{keys}')
    assert found.settings.provider_options[option] == expected
    assert found.load_options.get(option, expected) == expected
    named = [Path(file.path).name for file in found.files]
    assert named == re.findall(r"a\.so|b\.so|affinity\.json|graphs", value)[: len(named)]
    assert len(named) == expected.count("{file}/") or named == ["affinity.json"]


@pytest.mark.parametrize(
    ("option", "contents", "kind"),
    [
        ("op_affinity", None, Kind.FILE_NOT_FOUND),
        ("op_affinity", "[1]", Kind.INVALID_OPTION),
        ("op_affinity", "{", Kind.INVALID_OPTION),
        ("op_affinity", '{"op_type": {"A": "C:\\\\x"}}', Kind.INVALID_OPTION),
        ("op_affinity", '{"op_type": {"A": "{user-cache}/x"}}', Kind.INVALID_OPTION),
        ("qnn_saver_path", None, Kind.FILE_NOT_FOUND),
    ],
)
def test_an_option_that_names_no_such_file_is_an_error(
    project: Path, option: str, contents: str | None, kind: Kind
) -> None:
    if contents is not None:
        (project / "named").mkdir()
        (project / "named" / "file").write_text(contents)
    toml = f'[targets.qnn]\nprovider = "qnn"\nprovider-options = {{ {option} = "named/file" }}'
    location, found = only_problem(project, toml)
    assert (location, found.kind) == (f"targets.qnn.provider-options.{option}", kind)


def test_dates_in_a_table_of_options_become_strings(project: Path) -> None:
    options = "provider-options = { load_config = { CPU = { A = 2020-01-01 } } }"
    toml = f'[targets.openvino]\nprovider = "openvino"\n{options}'
    expected = {"load_config": '{"CPU":{"A":"2020-01-01"}}'}
    assert target(project, toml).settings.provider_options == expected


@pytest.mark.parametrize(
    ("value", "message"), [("{ a = 1 }", "must not be a table"), ("[1, 2]", "must not be a list")]
)
@pytest.mark.parametrize("allowed", ["", "allow-unknown-options = true\n"])
def test_a_session_option_cannot_be_a_table_or_a_list(
    project: Path, value: str, message: str, allowed: str
) -> None:
    toml = f'[targets.cpu]\nprovider = "cpu"\n{allowed}session-options = {{ "session.log_id" = {value} }}'
    _, found = only_problem(project, toml)
    assert found.message.startswith(message)


def test_session_options_newer_than_this_package_can_be_allowed(project: Path) -> None:
    toml = '[targets.cpu]\nprovider = "cpu"\nsession-options = { "session.newer" = true }\n'
    _, found = only_problem(project, toml)
    assert "Set tool.epcontext.targets.cpu.allow-unknown-options = true" in found.text()
    allowed = target(project, f"{toml}allow-unknown-options = true")
    assert allowed.settings.session_options == {"session.newer": "1"}


def test_a_reserved_session_option_is_refused_even_if_unknown_ones_are_allowed(
    project: Path,
) -> None:
    toml = (
        '[targets.cpu]\nprovider = "cpu"\nallow-unknown-options = true\n'
        'session-options = { "ep.context_enable" = 0 }'
    )
    _, found = only_problem(project, toml)
    assert "compiling always sets it" in found.message


def test_a_misspelled_session_option_has_the_near_name_and_the_reason(project: Path) -> None:
    toml = (
        '[targets.cpu]\nprovider = "cpu"\nsession-options = { "session.intra_op_num_thread" = 1 }'
    )
    _, found = only_problem(project, toml)
    assert found.hint is not None
    assert found.hint.startswith('Did you mean "session.intra_op_num_threads"? ONNX Runtime ')

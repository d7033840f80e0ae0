from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.errors import Key, Kind, Setting
from hatch_epcontext.files import file_sha256
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import quoted_key
from tests.config.examples import one, only_problem, target

UNKNOWN = "allow-unknown-options = true"
NEWER = 'session-options = { "session.newer" = true }'
# What the message or the hint has, for the provider, its keys, and the place of the problem.
INVALID: list[tuple[str, str, str, str]] = [
    ("qnn", "load-options = { soc_model = 60 }", "load-options.soc_model",
     "tool.epcontext.targets.qnn.provider-options.soc_model = 60"),
    ("cpu", "provider-options = { x = 1 }", "provider-options.x", "is not an option of the cpu provider"),
    ("openvino", 'provider-options = { device_type = "x" }', "provider-options.device_type",
     'use device = "npu", "gpu" or "cpu".'),
    ("openvino", 'provider-options = { precision = "x" }', "provider-options.precision",
     "INFERENCE_PRECISION_HINT"),
    ("tensorrt-rtx", 'provider-options = { profile_min_shapes = "x" }',
     "provider-options.profile_min_shapes", "write the shapes into profiles"),
    ("tensorrt", 'provider-options = { trt_engine_cache_path = "x" }',
     "provider-options.trt_engine_cache_path", "the paths of the files in the wheel are fixed"),
    # Only the app can give an address.
    ("tensorrt-rtx", "load-options = { user_compute_stream = 12345 }",
     "load-options.user_compute_stream", "only the app can give"),
    # Engines without weights cannot be opened alone.
    ("tensorrt", "provider-options = { trt_weight_stripped_engine_enable = true }",
     "provider-options.trt_weight_stripped_engine_enable", "only be opened together with the source model"),
    ("tensorrt-rtx", "provider-options = { nv_weight_stripped_engine_enable_experimental = true }",
     "provider-options.nv_weight_stripped_engine_enable_experimental",
     "only be opened together with the source model"),
    ("qnn", "load-options = { nope = 1 }", "load-options.nope", "is not an option"),
    ("qnn", 'provider-options = { backend_path = "x" }', "provider-options.backend_path",
     "the backend follows from device"),
    ("qnn", "provider-options = { dump_json_qnn_graph = true }", "provider-options.dump_json_qnn_graph",
     "writes files beside the artifact"),
    ("vitisai", 'load-options = { encryption_key = "x" }', "load-options.encryption_key",
     "does not belong in a configuration"),
    *(
        ("qnn", f'load-options = {{ profiling_file_path = "{path}" }}',
         "load-options.profiling_file_path", "a folder in")
        for path in ("{user-cache}/../x", "x/{user-cache}", "{user-cache}x")
    ),
    ("qnn", "provider-options = { soc_model = 60, htp_arch = 75 }", "provider-options.htp_arch",
     "soc_model 60 has the HTP architecture 73"),
    ("cpu", 'session-options = { "session.log_id" = { a = 1 } }',
     'session-options."session.log_id"', "must not be a table"),
    ("cpu", 'session-options = { "session.log_id" = [1, 2] }\n' + UNKNOWN,
     'session-options."session.log_id"', "must not be a list"),
    ("cpu", NEWER, 'session-options."session.newer"',
     "Set tool.epcontext.targets.cpu.allow-unknown-options = true"),
    ("cpu", 'session-options = { "ep.context_enable" = 0 }\n' + UNKNOWN,
     'session-options."ep.context_enable"', "compiling always sets it"),
    ("cpu", 'session-options = { "session.intra_op_num_thread" = 1 }',
     'session-options."session.intra_op_num_thread"',
     'Did you mean "session.intra_op_num_threads"? ONNX Runtime '),
]  # fmt: skip


@pytest.mark.parametrize(("provider", "keys", "place", "words"), INVALID)
def test_an_invalid_option_of_a_target_is_named_with_what_to_do(
    project: Path, provider: str, keys: str, place: str, words: str
) -> None:
    location, problem = only_problem(project, one(provider, keys))
    assert location == f"targets.{provider}.{place}"
    assert words in problem.text()


def misspelled() -> Iterator[tuple[str, str, str]]:
    """Every option of every provider, with one letter left out."""
    for provider in PROVIDERS.values():
        for option in provider.options:
            middle = len(option) // 2
            yield provider.name, option, option[:middle] + option[middle + 1 :]


def test_an_option_that_misses_one_letter_is_refused_with_the_right_one(project: Path) -> None:
    accepted = []
    for provider, option, wrong in misspelled():
        location, found = only_problem(
            project, one(provider, f"provider-options = {{ {wrong} = 1 }}")
        )
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
            impossible = '"no such value"' if option.choices else "7"
            if option.kind == "int":
                impossible = str(option.minimum - 1)
            yield provider.name, name, impossible


def test_an_impossible_value_is_refused_with_the_allowed_ones(project: Path) -> None:
    accepted = []
    for provider, option, value in out_of_range():
        keys = f"provider-options = {{ {option} = {value} }}"
        location, found = only_problem(project, one(provider, keys))
        allowed = PROVIDERS[provider].options[option].allowed
        if (
            location != f"targets.{provider}.provider-options.{option}"
            or allowed not in found.message
        ):
            accepted.append((provider, option, value, found))
    assert accepted == []


UNCHECKED = "targets.qnn.allow-unknown-options = true"


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        ("soc_model = [60, 57]", "soc_model", "Name the chip, or a list of chips:"),
        ("soc_model = [60, 57]", "soc_model", "targets.qnn.chip"),
        ("soc_model = 61", "soc_model", "60 (snapdragon-x-elite), 62 (sa8540) and 57 (snapdragon-8-gen-3)"),
        ("soc_model = 61", "soc_model", UNCHECKED),
        ('soc_model = "x-elite"', "soc_model", 'Did you mean "snapdragon-x-elite"?'),
        ("soc_model = 60, htp_arch = 74", "htp_arch", UNCHECKED),
        ("vtcm_mb = [8, 4]", "vtcm_mb", "must be a whole number"),
        ("device_id = [0, 1]", "device_id", "must be a whole number, at least 0, not [0, 1]"),
        ("enable_htp_prepare_only = [true]", "enable_htp_prepare_only", "must be true or false"),
        ('op_packages = ["a"]', "op_packages", "must be the path of a file, not"),
    ],
)  # fmt: skip
def test_an_impossible_number_or_list_is_an_error(
    project: Path, options: str, option: str, words: str
) -> None:
    location, problem = only_problem(project, one("qnn", f"provider-options = {{ {options} }}"))
    assert location == f"targets.qnn.provider-options.{option}"
    assert words in str(problem)
    assert (UNCHECKED in str(problem)) != ("chip" in str(problem) and "61" not in options)


@pytest.mark.parametrize(
    ("provider", "options", "expected"),
    [
        # The lists of a newer EP are taken as they are.
        ("qnn", "soc_model = [60, 60], newer = [1, true], device_id = [0, 1]",
         {"backend_type": "htp", "soc_model": "60,60", "htp_arch": "73,73", "newer": "1,1",
          "device_id": "0,1"}),
        ("qnn", 'soc_model = 60, htp_arch = 99, no_such = true, backend_type = "x"',
         {"soc_model": "60", "htp_arch": "99", "no_such": "1", "backend_type": "x"}),
        # A table becomes JSON.
        ("openvino", 'load_config = { CPU = { HINT = "f32", A = 2020-01-01 } }',
         {"load_config": '{"CPU":{"A":"2020-01-01","HINT":"f32"}}'}),
    ],
)  # fmt: skip
def test_options_newer_than_this_package_can_be_allowed(
    project: Path, provider: str, options: str, expected: dict[str, str]
) -> None:
    found = target(project, one(provider, f"{UNKNOWN}\nprovider-options = {{ {options} }}"))
    assert found.settings.provider_options == expected


def test_session_options_newer_than_this_package_can_be_allowed(project: Path) -> None:
    allowed = target(project, one("cpu", f"{NEWER}\n{UNKNOWN}"))
    assert allowed.settings.session_options == {"session.newer": "1"}


@pytest.mark.parametrize(
    ("provider", "option", "value", "expected"),
    [
        ("qnn", "op_affinity", '"files/affinity.json"', "{affinity.json}"),
        ("qnn", "op_affinity", '"{root}/files/affinity.json"', "{affinity.json}"),
        ("qnn", "op_packages", '"A:files/a.so:f:HTP,B:files/b.so:f"', "A:{a.so}:f:HTP,B:{b.so}:f"),
        ("tensorrt", "trt_extra_plugin_lib_paths", '"files/a.so;files/b.so"', "{a.so};{b.so}"),
        ("plugin", "anything", '"files/a.so"', "{a.so}"),
        ("plugin", "anything", '"no/file"', "no/file"),
    ],
)
def test_an_option_has_the_contents_of_its_files_and_no_path(
    project: Path, provider: str, option: str, value: str, expected: str
) -> None:
    folder = project / "files"
    folder.mkdir()
    for name in ("a.so", "b.so", "affinity.json"):
        (folder / name).write_text(f"the library {name}")
        sha256 = file_sha256(folder / name)[:32]
        expected = expected.replace(f"{{{name}}}", f"{{file}}/{sha256}/{name}")
    value = value.replace("{root}", project.as_posix())
    library = 'library = "x_ep"\nep-name = "X"\n' if provider == "plugin" else ""
    keys = f"{library}provider-options = {{ {option} = {value} }}"
    found = target(project, one(provider, keys))
    assert found.settings.provider_options[option] == expected
    assert found.load_options.get(option, expected) == expected
    named = [Path(file.path).name for file in found.files]
    assert named == re.findall(r"a\.so|b\.so|affinity\.json", value)


@pytest.mark.parametrize(
    ("provider", "value", "kind"),
    [
        ("qnn", 'op_affinity = "no/file"', Kind.FILE_NOT_FOUND),
        ("vitisai", 'xclbin = "/etc/hostname"', Kind.OUTSIDE_PROJECT),
        ("openvino", "load_config = { CPU = { CACHE_DIR = 'C:\\x' } }", Kind.INVALID_OPTION),
        (
            "openvino",
            "load_config = { CPU = { CACHE_DIR = '{user-cache}/x' } }",
            Kind.INVALID_OPTION,
        ),
    ],
)
def test_an_option_with_a_path_that_no_app_has_is_an_error(
    project: Path, provider: str, value: str, kind: Kind
) -> None:
    location, found = only_problem(project, one(provider, f"provider-options = {{ {value} }}"))
    assert (location, found.kind) == (
        f"targets.{provider}.provider-options.{value.split(maxsplit=1)[0]}",
        kind,
    )

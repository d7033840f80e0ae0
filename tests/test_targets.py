"""Targets of all providers, as a configuration writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.config import Target
from hatch_epcontext.errors import Problem
from hatch_epcontext.providers import PROVIDERS, Plugin, Provider
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import at
from hatch_epcontext.targets import is_path
from tests.test_config import mangle, problems, read

MODELS = 'models = ["models/a.onnx"]\n'

PROFILE = "{ x = { min = [1, 3], opt = [8, 3], max = [32, 3] } }"


def target(project: Path, toml: str) -> Target:
    (found,) = read(project, MODELS + toml).models[0].targets
    return found


def problem(project: Path, toml: str) -> tuple[str, Problem]:
    """The only problem of a configuration, and where it is."""
    ((where, found),) = problems(project, MODELS + toml).items()
    return where, found


@pytest.mark.parametrize(
    "provider",
    [p for p in PROVIDERS.values() if not p.needs_library],
    ids=lambda provider: provider.name,
)
def test_every_provider_needs_no_more_than_its_name(project: Path, provider: Provider) -> None:
    found = target(project, f'provider = "{provider.ep}"')
    assert found.provider is provider
    # The target is called what its provider was called.
    assert found.name == provider.ep
    assert found.device == provider.devices[0]


def misspelled() -> Iterator[tuple[str, str, str]]:
    """Every option of every provider, with one letter left out."""
    for provider in PROVIDERS.values():
        for option in provider.options:
            middle = len(option) // 2
            yield provider.name, option, option[:middle] + option[middle + 1 :]


@pytest.mark.parametrize(("provider", "option", "wrong"), list(misspelled()))
def test_an_option_that_is_off_by_one_letter_is_refused_with_the_right_one(
    project: Path, provider: str, option: str, wrong: str
) -> None:
    where, told = problem(project, f'provider = "{provider}"\nprovider-options = {{ {wrong} = 1 }}')
    assert where == f"provider-options{at(wrong)}"
    assert told.what == f"is not an option of the {provider} provider."
    assert f'Did you mean "{option}"?' in told.fix
    assert "allow-unknown-options = true" in told.fix


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
def test_an_impossible_value_is_refused_with_what_is_allowed(
    project: Path, provider: str, option: str, value: str
) -> None:
    toml = f'provider = "{provider}"\nprovider-options = {{ {option} = {value} }}'
    where, told = problem(project, toml)
    assert where == f"provider-options.{option}"
    assert PROVIDERS[provider].options[option].allowed in told.what


@pytest.mark.parametrize(
    ("provider", "option", "told"),
    [
        ("openvino", "device_type", 'Use device = "npu", "gpu" or "cpu".'),
        ("openvino", "precision", "INFERENCE_PRECISION_HINT"),
        ("tensorrt-rtx", "profile_min_shapes", "nv_profile_min_shapes"),
    ],
)
def test_an_option_that_the_ep_no_longer_reads_is_told_with_what_takes_its_place(
    project: Path, provider: str, option: str, told: str
) -> None:
    toml = f'provider = "{provider}"\nprovider-options = {{ {option} = "x" }}'
    _, found = problem(project, toml)
    assert "is of an older release" in found.what
    assert told in found.fix


def test_options_that_are_not_the_users_to_set(project: Path) -> None:
    toml = 'provider = "tensorrt"\nprovider-options = { trt_engine_cache_path = "x" }'
    _, found = problem(project, toml)
    assert found.what == "is not the user's to set: the files' places in the wheel are fixed."


def test_an_address_is_for_the_app_to_give(project: Path) -> None:
    toml = 'provider = "tensorrt-rtx"\nload-options = { user_compute_stream = 12345 }'
    where, found = problem(project, toml)
    assert where == "load-options.user_compute_stream"
    assert "an address in the app's memory" in found.what
    assert "load(..., provider_options={'user_compute_stream': ...})" in found.fix


def test_what_is_newer_than_this_package_can_be_allowed(project: Path) -> None:
    wrong = (
        '{ soc_model = 60, htp_arch = 99, no_such = true, backend_type = "x", backend_path = "y" }'
    )
    toml = f'provider = "qnn"\nprovider-options = {wrong}\n'
    assert len(problems(project, MODELS + toml)) == 4
    found = target(project, f"{toml}allow-unknown-options = true")
    assert found.provider_options == {
        "soc_model": "60",
        "htp_arch": "99",
        "no_such": "1",
        "backend_type": "x",
        "backend_path": "y",
    }


def test_unknown_options_of_a_model_are_for_targets_that_allow_them(project: Path) -> None:
    toml = """
models = [{ path = "models/a.onnx", provider-options = { soc_model = 43, newer = 1 } }]
[targets.strict]
provider = "qnn"
[targets.lax]
provider = "openvino"
allow-unknown-options = true
"""
    strict, lax = read(project, toml).models[0].targets
    assert strict.provider_options == {"backend_type": "htp", "soc_model": "43"}
    assert lax.provider_options == {"newer": "1"}
    told = problems(project, toml.replace("allow-unknown-options = true", ""))
    assert told.keys() == {"models[0].provider-options.newer"}


def test_a_table_becomes_json(project: Path) -> None:
    toml = (
        'provider = "openvino"\n'
        'provider-options = { load_config = { CPU = { INFERENCE_PRECISION_HINT = "f32" } } }'
    )
    found = target(project, toml)
    expected = {"load_config": '{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}'}
    assert found.provider_options == expected
    assert found.load_options == expected


def test_session_options_are_no_tables(project: Path) -> None:
    toml = 'provider = "cpu"\nsession-options = { "session.log_id" = { a = 1 } }'
    _, found = problem(project, toml)
    assert found.what.startswith("must not be a table")


@pytest.mark.parametrize("provider", ["tensorrt", "tensorrt-rtx"])
def test_profiles_become_options(project: Path, provider: str) -> None:
    found = target(project, f'provider = "{provider}"\nprofiles = [{PROFILE}, {PROFILE}]')
    known = PROVIDERS[provider].profiles
    assert known is not None
    assert found.provider_options[known.min] == "x:1x3,x:1x3"
    assert found.provider_options[known.max] == "x:32x3,x:32x3"
    assert found.provider_options.get("nv_multi_profile_enable", "1") == "1"
    assert found.load_options.keys().isdisjoint(known.names)


def test_a_models_profiles_are_for_those_targets_that_have_them(project: Path) -> None:
    toml = f"""
models = [{{ path = "models/a.onnx", profiles = [{PROFILE}] }}]
[targets.cpu]
provider = "cpu"
[targets.gpu]
provider = "tensorrt"
"""
    cpu, gpu = read(project, toml).models[0].targets
    assert (cpu.profiles, cpu.provider_options) == ((), {})
    assert gpu.provider_options["trt_profile_opt_shapes"] == "x:8x3"
    assert gpu.key == "tool.epcontext.models[0]"
    told = problems(project, toml.replace('"tensorrt"', '"qnn"'))
    assert told.keys() == {"models[0].profiles"}


@pytest.mark.parametrize(
    ("profiles", "where", "what"),
    [
        ("[{ x = { min = [1], opt = [8] } }]", "profiles[0].x.max", "is required: a shape"),
        ("[{ x = { min = [1], opt = [8, 1], max = [9] } }]", "profiles[0].x", "different numbers"),
        ("[{ x = { min = [2], opt = [1], max = [3] } }]", "profiles[0].x", "2, 1, 3"),
        ("[{ x = { min = [-1], opt = [1], max = [3] } }]", "profiles[0].x", "-1, 1, 3"),
        ('[{ "x:0" = { min = [1], opt = [1], max = [3] } }]', 'profiles[0]."x:0"', "',' and ':'"),
        (f"[{PROFILE}, {PROFILE.replace('{ x =', '{ y =')}]", "profiles[1]", "is about y, and the"),
        ("[{ x = { min = [1], opt = [1], mx = [1] } }]", "profiles[0].x.mx", "is not a known key"),
        ("[{ x = 3 }]", "profiles[0].x", "must be a table"),
    ],
)
def test_profiles_that_cannot_be(project: Path, profiles: str, where: str, what: str) -> None:
    told = problems(project, f'{MODELS}provider = "tensorrt-rtx"\nprofiles = {profiles}')
    assert what in told[where].what


def test_profiles_twice(project: Path) -> None:
    toml = (
        f'provider = "tensorrt-rtx"\nprofiles = [{PROFILE}]\n'
        'provider-options = { nv_profile_min_shapes = "x:1x3" }'
    )
    where, found = problem(project, toml)
    assert where == "profiles"
    assert "provider-options.nv_profile_min_shapes" in found.what


def test_profiles_of_an_ep_without_them(project: Path) -> None:
    where, found = problem(project, f'provider = "openvino"\nprofiles = [{PROFILE}]')
    assert where == "profiles"
    assert found.fix == "Those that have: tensorrt, tensorrt-rtx."


def test_what_chooses_a_device(project: Path) -> None:
    toml = (
        'provider = "openvino"\ndevice = "npu"\ndevice-filter = { vendor = "Intel", device-id = 3 }'
    )
    found = target(project, toml)
    assert (found.device, found.device_filter) == ("npu", {"vendor": "Intel", "device-id": "3"})
    assert target(project, 'provider = "qnn"\npolicy = "prefer-npu"').policy == "prefer-npu"
    virtual = target(project, 'provider = "openvino"\nvirtual-devices = true')
    assert (virtual.device, virtual.virtual_devices) == ("npu", True)


@pytest.mark.parametrize(
    ("toml", "where", "what"),
    [
        ('provider = "qnn"\npolicy = "prefer"', "policy", 'must be "default" or "prefer-cpu" or'),
        ('provider = "cuda"\npolicy = "prefer-gpu"', "policy", "a part of ONNX Runtime"),
        ('provider = "cuda"\ndevice-filter = { type = "gpu" }', "device-filter", "a part of ONNX"),
        (
            'provider = "qnn"\npolicy = "prefer-npu"\ndevice-filter = { type = "npu" }',
            "policy",
            "and device-filter exclude one another",
        ),
        (
            'provider = "qnn"\nvirtual-devices = true',
            "virtual-devices",
            "offers no virtual devices",
        ),
        (
            'provider = "qnn"\ndevice-filter = { type = true }',
            "device-filter.type",
            "must be a str",
        ),
        ('provider = "webgpu"\nembed = true', "embed", "makes no contexts to embed"),
    ],
)
def test_what_cannot_choose_a_device(project: Path, toml: str, where: str, what: str) -> None:
    at_, found = problem(project, toml)
    assert at_ == where
    assert what in found.what


def test_any_other_plugin(project: Path) -> None:
    toml = 'provider = "plugin"\nlibrary = "some_ep"\nep-name = "SomeEP"\nprovider-options = { x = true }'
    found = target(project, toml)
    assert found.provider.ep == "SomeEP"
    assert found.provider.plugin == Plugin("some_ep", "some_ep", "SomeEP")
    assert found.provider_options == {"x": "1"}
    assert found.device == "any"
    named = target(project, f'{toml}\nregistration-name = "some"')
    assert named.provider.plugin is not None
    assert named.provider.plugin.registration_name == "some"


def test_a_library_may_be_a_path(project: Path) -> None:
    (project / "ep").mkdir()
    (project / "ep" / "plugin.so").touch()
    toml = 'provider = "plugin"\nep-name = "SomeEP"\nlibrary = '
    found = target(project, f'{toml}"ep/plugin.so"').provider.plugin
    assert found == Plugin("", "its library", "SomeEP", str(project / "ep" / "plugin.so"))
    absolute = target(project, f'{toml}"{(project / "ep" / "plugin.so").as_posix()}"').provider
    assert absolute.plugin is not None
    assert Path(absolute.plugin.path) == project / "ep" / "plugin.so"
    for absent in ("ep/other.so", "ep", f"{'x' * 300}/plugin.so"):
        where, missing = problem(project, f'{toml}"./{absent}"')
        assert where == "library"
        assert missing.what.startswith("there is no file")


def test_a_known_ep_may_come_as_a_library_too(project: Path) -> None:
    found = target(project, 'provider = "vitisai"\nlibrary = "amd_ep"').provider
    assert (found.ep, found.options) == ("VitisAIExecutionProvider", PROVIDERS["vitisai"].options)
    assert found.plugin == Plugin("amd_ep", "amd_ep", "VitisAIExecutionProvider")
    assert "onnxruntime" in found.flavours
    assert found.requirements == ()


@pytest.mark.parametrize(
    ("toml", "keys"),
    [
        ('provider = "plugin"', {"library", "ep-name"}),
        ('provider = "plugin"\nlibrary = "some_ep"', {"ep-name"}),
        ('provider = "qnn"\nep-name = "X"', {"ep-name"}),
        ('provider = "qnn"\nregistration-name = "X"', {"registration-name"}),
        ('provider = "cpu"\nlibrary = "some_ep"', {"library"}),
    ],
)
def test_what_belongs_to_a_library(project: Path, toml: str, keys: set[str]) -> None:
    assert problems(project, MODELS + toml).keys() == keys


@pytest.mark.parametrize(
    "library", ["a/b.so", "b.so", "b.dll", "./b", "C:\\ep\\b.dll", "/opt/ep.so"]
)
def test_what_a_path_looks_like(library: str) -> None:
    assert is_path(library)


@pytest.mark.parametrize("library", ["some_ep", "some.ep", "onnxruntime_qnn"])
def test_what_a_package_looks_like(library: str) -> None:
    assert not is_path(library)


def test_targets_from_the_cache(project: Path) -> None:
    toml = MODELS + '[targets.a]\nprovider = "cpu"\n[targets.b]\nprovider = "qnn"\n'
    a, b = read(project, toml, FROM_CACHE="b").models[0].targets
    assert (a.from_cache, b.from_cache) == (False, True)
    told = problems(project, toml, FROM_CACHE="c", NO_CACHE="1")
    assert told.keys() == {"HATCH_EPCONTEXT_FROM_CACHE"}
    with_both = problems(project, toml, FROM_CACHE="a", NO_CACHE="1")["HATCH_EPCONTEXT_FROM_CACHE"]
    assert "HATCH_EPCONTEXT_NO_CACHE" in with_both.what


EVERYTHING = """
max-size = "1 GB"
[targets.rtx]
provider = "NvTensorRTRTX"
provider-options = { nv_max_workspace_size = 5, nv_weight_streaming_budget = "40%" }
load-options = { nv_runtime_cache_path = "x" }
profiles = [{ x = { min = [1, 2], opt = [1, 2], max = [3, 4] } }]
device-filter = { vendor = "nvidia", vendor-id = 4318 }
[targets.intel]
provider = "openvino"
virtual-devices = true
policy = "prefer-npu"
allow-unknown-options = true
provider-options = { load_config = { CPU = { A = "1", B = 2 } }, newer = 1 }
[targets.other]
provider = "plugin"
library = "other_ep"
ep-name = "X"
registration-name = "Y"
[[models]]
path = "models/a.onnx"
targets = ["rtx", "other"]
profiles = [{ x = { min = [1, 2], opt = [1, 2], max = [3, 4] } }]
device-filter = { type = "gpu" }
[[models]]
path = "models/b.onnx"
policy = "default"
share-weights = "group"
external-initializers = true
external-initializers-threshold = 10
[[models]]
path = "models/b.onnx"
name = "c"
share-weights = "group"
in-memory = false
embed = "auto"
"""


def test_no_target_ends_in_anything_but_its_errors(project: Path) -> None:
    read(project, EVERYTHING)
    mangle(project, parse(EVERYTHING))


def test_dates_in_a_table_of_options_become_strings(project: Path) -> None:
    toml = (
        'provider = "openvino"\nprovider-options = { load_config = { CPU = { A = 2020-01-01 } } }'
    )
    assert target(project, toml).provider_options == {"load_config": '{"CPU":{"A":"2020-01-01"}}'}


def groups(first: str, second: str, provider: str = "qnn") -> str:
    return f"""
provider = "{provider}"
models = [
    {{ path = "models/a.onnx", share-weights = "{first}" }},
    {{ path = "models/b.onnx", share-weights = "{second}" }},
]
"""


@pytest.mark.parametrize(
    ("toml", "where", "what"),
    [
        (groups("x", "y"), "models[0].share-weights", "no other model is in the group"),
        (groups("a", "a"), "models[0].share-weights", '"a" is also the name of'),
        (groups("../x", "../x"), "models[0].share-weights", "cannot be the name of a folder"),
        (groups("x", "x", "cpu"), "models[0].share-weights", "none of the model's targets"),
    ],
)
def test_groups_that_cannot_be(project: Path, toml: str, where: str, what: str) -> None:
    assert what in problems(project, toml)[where].what


def test_external_initializers(project: Path) -> None:
    cpu = 'provider = "cpu"\n'
    assert target(project, cpu).external_initializers is None
    assert target(project, cpu + "external-initializers = true").external_initializers == 1024
    both = cpu + "external-initializers = true\nexternal-initializers-threshold = 0"
    assert target(project, both).external_initializers == 0
    where, _ = problem(project, cpu + "external-initializers-threshold = -1")
    assert where == "external-initializers-threshold"
    wrong = cpu + "external-initializers = false\nexternal-initializers-threshold = 9"
    _, found = problem(project, wrong)
    assert "keeps them inside" in found.what


@pytest.mark.parametrize(
    ("written", "embed"), [("true", True), ("false", False), ('"auto"', False), (None, False)]
)
def test_embedding(project: Path, written: str | None, embed: bool) -> None:
    toml = 'provider = "qnn"\n' + (f"embed = {written}" if written else "")
    assert target(project, toml).embed is embed


@pytest.mark.parametrize(
    ("written", "size"),
    [("1000", 1000), ('"1000"', 1000), ('"250 MB"', 250_000_000), ('"1.5GB"', 1_500_000_000)],
)
def test_the_largest_size_of_the_wheel(project: Path, written: str, size: int) -> None:
    toml = MODELS + f'provider = "cpu"\nmax-size = {written}'
    assert read(project, toml).max_size == size


@pytest.mark.parametrize("written", ["0", "-1", '"many"', '"10 MiB"', "true", "1.5"])
def test_a_size_that_is_none(project: Path, written: str) -> None:
    where, found = problem(project, f'provider = "cpu"\nmax-size = {written}')
    assert where == "max-size"
    assert found.what.startswith("must be ")


def test_engines_without_weights_are_refused(project: Path) -> None:
    for provider, option in (
        ("tensorrt", "trt_weight_stripped_engine_enable"),
        ("tensorrt-rtx", "nv_weight_stripped_engine_enable_experimental"),
    ):
        _, found = problem(
            project, f'provider = "{provider}"\nprovider-options = {{ {option} = true }}'
        )
        assert "needs the source model beside it" in found.what


def test_in_memory_the_blob_is_inside(project: Path) -> None:
    found = target(project, 'provider = "qnn"\nin-memory = true')
    assert (found.in_memory, found.embed) == (True, True)
    for wrong, what in (
        ('provider = "qnn"\nembed = false', "embed is false"),
        ('provider = "qnn"\nexternal-initializers = true', "external-initializers wants one"),
        ('provider = "cpu"', "does not compile in memory"),
        ('provider = "tensorrt"', "does not compile in memory"),
    ):
        where, told = problem(project, f"{wrong}\nin-memory = true")
        assert where == "in-memory"
        assert what in told.what

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hatch_epcontext.errors import Kind
from hatch_epcontext.jobs.requirements import requirements, versions_of
from tests.config.examples import MODELS, PROFILE, assert_one_problem, only_problem, problems
from tests.results import configured

CPU = f'{MODELS}provider = "cpu"\n'


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        (f'{MODELS}provider = "qn"', "provider", '"qn" is not a known provider'),
        (f"{CPU}min-coverage = 2", "min-coverage", "from 0 to 1"),
        (f"{CPU}embed = true", "embed", "has no contexts to embed"),
        (f'{CPU}device = "npu"', "device", "does not run on"),
        (f'{CPU}platforms = ["a b"]', "platforms[0]", "platform tag"),
        (f'{CPU}requirements = ["a b"]', "requirements[0]", "is not a requirement"),
        (f'{MODELS}[targets.source]\nprovider = "qnn"',
         "targets.source", "is reserved for the source model"),
        (f'{MODELS}[targets.Source]\nprovider = "qnn"',
         "targets.Source", "is reserved for the source model"),
        (f'{MODELS}[targets.nul]\nprovider = "qnn"', "targets.nul", "is the name of a device"),
        (f'{MODELS}[targets.Q]\nprovider = "qnn"\n[targets.q]\nprovider = "qnn"',
         "targets.q", "has the same name as"),
        (f"{CPU}resources = {{ NPU = 0 }}", "resources", "names with numbers above 0"),
        (f"{CPU}resources = {{ NPU = nan }}", "resources", "names with numbers above 0"),
        (f'{CPU}resources = {{ NPU = "1" }}', "resources.NPU", "must be a number"),
        (f"{MODELS}[targets.q]\nembed = true", "targets.q.provider", "is required"),
    ],
)  # fmt: skip
def test_an_invalid_target_is_reported_with_its_key(
    project: Path, toml: str, location: str, message: str
) -> None:
    assert_one_problem(project, toml, location, message)


@pytest.mark.parametrize(
    ("profiles", "location", "message"),
    [
        ("[{ x = { min = [1], opt = [8] } }]", "profiles[0].x.max", "is required: a shape"),
        ("[{ x = { min = [1], opt = [8, 1], max = [9] } }]", "profiles[0].x", "different numbers"),
        ("[{ x = { min = [2], opt = [1], max = [3] } }]", "profiles[0].x", "2, 1, 3"),
        ("[{ x = { min = [-1], opt = [1], max = [3] } }]", "profiles[0].x", "-1, 1, 3"),
        ('[{ "x:0" = { min = [1], opt = [1], max = [3] } }]', 'profiles[0]."x:0"', "',' or ':'"),
        (f"[{PROFILE}, {PROFILE.replace('{ x =', '{ y =')}]", "profiles[1]", "is for y, and the"),
        ("[{ x = { min = [1], opt = [1], mx = [1] } }]", "profiles[0].x.mx", "is not a known key"),
        ("[{ x = 3 }]", "profiles[0].x", "must be a table"),
    ],
)
def test_an_invalid_profile_is_an_error(
    project: Path, profiles: str, location: str, message: str
) -> None:
    found = problems(project, f'{MODELS}provider = "tensorrt-rtx"\nprofiles = {profiles}')
    assert message in found[location].message


RTX = f'{MODELS}provider = "tensorrt-rtx"\n'


@pytest.mark.parametrize(
    ("toml", "location", "kind"),
    [
        (f'{RTX}compute-capabilities = ["9.0"]', "compute-capabilities[0]", Kind.INVALID_VALUE),
        (f'{RTX}compute-capabilities = ["8.9", "8.9"]', "compute-capabilities[1]", Kind.INVALID_VALUE),
        (f'{RTX}compute-capabilities = ["8.6"]\ncompile-with = "ep"',
         "compute-capabilities", Kind.CONFLICTING_KEYS),
        (f"{RTX}compute-capabilities = []", "compute-capabilities", Kind.INVALID_VALUE),
        (f'{RTX}compile-with = "library"\noptimization = "all"', "optimization", Kind.NOT_APPLICABLE),
        (f'{RTX}compile-with = "library"\nprovider-options = {{ nv_profile_min_shapes = "x:1" }}',
         "provider-options.nv_profile_min_shapes", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}compile-with = "library"\nprovider-options = {{ nv_weight_streaming_budget = "40%" }}',
         "provider-options.nv_weight_streaming_budget", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}compile-with = "gpu"', "compile-with", Kind.WRONG_TYPE),
        (f'{CPU}compile-with = "library"', "compile-with", Kind.NOT_APPLICABLE),
        (f'{CPU}compute-capabilities = ["8.6"]', "compute-capabilities", Kind.NOT_APPLICABLE),
        (f'{RTX}compile-with = "library"\nprovider-options = {{ nv_target_sm = "sm89" }}',
         "provider-options.nv_target_sm", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}compile-with = "library"\nprovider-options = {{ nv_dump_subgraphs = true }}',
         "provider-options.nv_dump_subgraphs", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}compile-with = "library"\nin-memory = true', "in-memory", Kind.NOT_APPLICABLE),
        (f'{RTX}profiles = [{{ x = {{ min = [1], opt = [1], max = [2147483648] }} }}]',
         "profiles[0].x.max", Kind.INVALID_PROFILE),
    ],
)  # fmt: skip
def test_what_the_library_of_a_vendor_does_not_do_is_an_error(
    project: Path, toml: str, location: str, kind: Kind
) -> None:
    found = problems(project, toml)
    assert {place: each.kind for place, each in found.items()} == {location: kind}


def test_the_capabilities_choose_the_library_unless_the_ep_is_named(project: Path) -> None:
    for toml, by_library in (
        ("", False),
        ('compile-with = "ep"', False),
        ('compile-with = "library"', True),
        ('compute-capabilities = ["8.9"]\nload-options = { enable_cuda_graph = true }', True),
    ):
        (target,) = configured(project, f'provider = "tensorrt-rtx"\n{MODELS}{toml}').targets
        assert target.provider.by_library == by_library
        names = {Requirement(each).name for each in requirements([target])}
        assert ("onnxruntime-ep-nv-tensorrt-rtx-cu13" in names) != by_library
        assert ("tensorrt-rtx-cu13-libs" in names) == by_library
        both = {"tensorrt-rtx-cu13-libs": "1", "onnxruntime-ep-nv-tensorrt-rtx-cu13": "1"}
        found = versions_of(replace(target, requirements=("something",)), both)
        assert ("tensorrt-rtx-cu13-libs" in found) == by_library
        assert not (by_library and "onnxruntime-ep-nv-tensorrt-rtx-cu13" in found)
        assert (target.provider.unavailable((3, 12), "linux", "aarch64") is None) != by_library


def test_the_order_of_the_capabilities_changes_nothing(project: Path) -> None:
    settings = [
        configured(project, f'provider = "tensorrt-rtx"\n{MODELS}compute-capabilities = {order}')
        .targets[0]
        .settings
        for order in ('["12.0", "8.9"]', '["8.9", "12.0"]')
    ]
    assert settings[0] == settings[1]
    assert settings[0].compute_capabilities == ("8.9", "12.0")


def test_profiles_exclude_options_with_the_same_shapes(project: Path) -> None:
    toml = (
        f'provider = "tensorrt-rtx"\nprofiles = [{PROFILE}]\n'
        'provider-options = { nv_profile_min_shapes = "x:1x3" }'
    )
    location, found = only_problem(project, toml)
    assert location == "profiles"
    assert "provider option nv_profile_min_shapes" in found.message


def test_profiles_of_an_ep_without_them_are_an_error(project: Path) -> None:
    location, found = only_problem(project, f'provider = "openvino"\nprofiles = [{PROFILE}]')
    assert location == "profiles"
    assert found.hint == "Providers with profiles: tensorrt, tensorrt-rtx."


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        ('provider = "qnn"\npolicy = "prefer"', "policy", 'must be "default" or "prefer-cpu" or'),
        ('provider = "cuda"\npolicy = "prefer-gpu"', "policy", "a part of ONNX Runtime"),
        ('provider = "cuda"\ndevice-filter = { type = "gpu" }', "device-filter", "a part of ONNX"),
        (
            'provider = "qnn"\npolicy = "prefer-npu"\ndevice-filter = { type = "npu" }',
            "policy",
            "excludes device-filter",
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
        ('provider = "webgpu"\nembed = true', "embed", "has no contexts to embed"),
    ],
)
def test_a_setting_that_cannot_choose_a_device_is_an_error(
    project: Path, toml: str, location: str, message: str
) -> None:
    found_at, found = only_problem(project, toml)
    assert found_at == location
    assert message in found.message


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
def test_the_keys_of_a_library_are_for_libraries_only(
    project: Path, toml: str, keys: set[str]
) -> None:
    assert problems(project, MODELS + toml).keys() == keys


def test_external_initializers_exclude_each_other(project: Path) -> None:
    cpu = 'provider = "cpu"\n'
    location, _ = only_problem(project, cpu + "external-initializers-threshold = -1")
    assert location == "external-initializers-threshold"
    wrong = cpu + "external-initializers = false\nexternal-initializers-threshold = 9"
    location, found = only_problem(project, wrong)
    assert location == "external-initializers-threshold"
    assert "external-initializers is false" in found.message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('provider = "qnn"\nembed = false', "embed is false"),
        ('provider = "qnn"\nexternal-initializers = true', "external-initializers needs one"),
        ('provider = "cpu"', "does not compile in memory"),
        ('provider = "tensorrt"', "does not compile in memory"),
    ],
)
def test_settings_that_exclude_compiling_in_memory(project: Path, toml: str, message: str) -> None:
    location, found = only_problem(project, f"{toml}\nin-memory = true")
    assert location == "in-memory"
    assert message in found.message

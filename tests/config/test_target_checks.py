from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hatch_epcontext.errors import Kind
from hatch_epcontext.jobs.requirements import requirements, versions_of
from hatch_epcontext.serialize import value_sha256
from tests.config.examples import MODELS, PROFILE, assert_one_problem, one, problems
from tests.results import configured

CPU = f'{MODELS}[targets.cpu]\nprovider = "cpu"\n'
RTX = f'{MODELS}[targets.rtx]\nprovider = "tensorrt-rtx"\n'


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        (f'{MODELS}[targets.q]\nprovider = "qn"', "targets.q.provider", '"qn" is not a known provider'),
        (f"{CPU}min-coverage = 2", "targets.cpu.min-coverage", "from 0 to 1"),
        (f"{CPU}embed = true", "targets.cpu.embed", "has no contexts to embed"),
        (f'{CPU}device = "npu"', "targets.cpu.device", "does not run on"),
        (f'{CPU}platforms = ["a b"]', "targets.cpu.platforms[0]", "platform tag"),
        (f'{CPU}requirements = ["a b"]', "targets.cpu.requirements[0]", "must be a requirement"),
        (f'{MODELS}[targets.Source]\nprovider = "qnn"',
         "targets.Source", "is reserved for the source model"),
        (f'{MODELS}[targets.nul]\nprovider = "qnn"', "targets.nul", "cannot be the name of a folder"),
        (f'{MODELS}[targets.Q]\nprovider = "qnn"\n[targets.q]\nprovider = "qnn"',
         "targets.q", "has the same name as"),
        (f"{CPU}resources = {{ NPU = nan }}", "targets.cpu.resources.NPU", "must be a number above 0"),
        (f'{CPU}resources = {{ NPU = "1" }}', "targets.cpu.resources.NPU", "must be a number"),
        (f"{MODELS}[targets.q]\nembed = true", "targets.q.provider", "is required"),
        (MODELS + one("openvino", f"profiles = [{PROFILE}]"),
         "targets.openvino.profiles", "profiles"),
        (MODELS + one("tensorrt-rtx", f"profiles = [{PROFILE}]\n"
                      'provider-options = { nv_profile_min_shapes = "x:1x3" }'),
         "targets.tensorrt-rtx.provider-options.nv_profile_min_shapes", "into profiles"),
        (MODELS + one("qnn", "resources = { GPU = true }"),
         "targets.qnn.resources.GPU", "must be a number"),
    ],
)  # fmt: skip
def test_an_invalid_target_is_reported_with_its_key(
    project: Path, toml: str, location: str, message: str
) -> None:
    assert_one_problem(project, toml, location, message)


@pytest.mark.parametrize(
    ("profiles", "location", "message"),
    [
        (
            "[{ x = { min = [1], opt = [8] } }]",
            "profiles[0].x.max",
            "is required: the largest shape",
        ),
        (
            "[{ x = { min = [1], opt = [8, 1], max = [9] } }]",
            "profiles[0].x",
            "shapes of one length",
        ),
        (
            "[{ x = { min = [2], opt = [1], max = [3] } }]",
            "profiles[0].x",
            "min [2], opt [1], max [3]",
        ),
        ('[{ "x:0" = { min = [1], opt = [1], max = [3] } }]', 'profiles[0]."x:0"', "',' or ':'"),
        ("[{ x = 3 }]", "profiles[0].x", "must be a table"),
    ],
)
def test_an_invalid_profile_is_an_error(
    project: Path, profiles: str, location: str, message: str
) -> None:
    found = problems(project, f"{RTX}profiles = {profiles}")
    assert message in found[f"targets.rtx.{location}"].message


@pytest.mark.parametrize(
    ("toml", "location", "kind"),
    [
        (f'{RTX}chip = ["9.0"]', "targets.rtx.chip", Kind.INVALID_VALUE),
        (f'{RTX}chip = ["8.9", "rtx-40"]', "targets.rtx.chip", Kind.INVALID_VALUE),
        (f'{RTX}chip = ["auto", "rtx-40"]', "targets.rtx.chip", Kind.INVALID_VALUE),
        (f"{RTX}chip = []", "targets.rtx.chip", Kind.INVALID_VALUE),
        (f'{RTX}chip = "auto"\noptimization = "all"',
         "targets.rtx.optimization", Kind.NOT_APPLICABLE),
        (f'{RTX}chip = "auto"\nprovider-options = {{ nv_profile_min_shapes = "x:1" }}',
         "targets.rtx.provider-options.nv_profile_min_shapes", Kind.RESERVED_OPTION),
        (f'{RTX}chip = "auto"\nprovider-options = {{ nv_weight_streaming_budget = "40%" }}',
         "targets.rtx.provider-options.nv_weight_streaming_budget", Kind.CONFLICTING_OPTIONS),
        (f"{RTX}chip = 8.9", "targets.rtx.chip", Kind.WRONG_TYPE),
        (f'{CPU}chip = "snapdragon-x-elite"', "targets.cpu.chip", Kind.NOT_APPLICABLE),
        (MODELS + one("plugin", 'ep-name = "X"\nlibrary = "x_ep"\nchip = []'),
         "targets.plugin.chip", Kind.NOT_APPLICABLE),
        (MODELS + one("qnn", 'chip = "auto"'), "targets.qnn.chip", Kind.INVALID_VALUE),
        (MODELS + one("qnn", 'chip = ["qcs9100", "qcs9100"]'), "targets.qnn.chip", Kind.INVALID_VALUE),
        (MODELS + one("qnn", 'chip = "qcs9100"\nprovider-options = { soc_model = 77 }'),
         "targets.qnn.provider-options.soc_model", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}chip = "auto"\nprovider-options = {{ nv_target_sm = "sm89" }}',
         "targets.rtx.provider-options.nv_target_sm", Kind.CONFLICTING_OPTIONS),
        (f'{RTX}profiles = [{{ x = {{ min = [1], opt = [1], max = [2147483648] }} }}]',
         "targets.rtx.profiles[0].x", Kind.INVALID_PROFILE),
    ],
)  # fmt: skip
def test_what_the_library_of_a_vendor_does_not_do_is_an_error(
    project: Path, toml: str, location: str, kind: Kind
) -> None:
    found = problems(project, toml)
    assert {place: each.kind for place, each in found.items()} == {location: kind}


def test_the_chips_choose_the_library(project: Path) -> None:
    for toml, by_library in (
        ("", False),
        ('chip = "auto"', True),
        ('chip = ["8.9"]\nload-options = { enable_cuda_graph = true }', True),
    ):
        (target,) = configured(project, f"{RTX}{toml}").targets
        assert target.provider.by_library == by_library
        names = {Requirement(each).name for each in requirements([target])}
        assert ("onnxruntime-ep-nv-tensorrt-rtx-cu13" in names) != by_library
        assert ("tensorrt-rtx-cu13-libs" in names) == by_library
        both = {"tensorrt-rtx-cu13-libs": "1", "onnxruntime-ep-nv-tensorrt-rtx-cu13": "1"}
        found = versions_of(replace(target, requirements=("something",)), both)
        assert ("tensorrt-rtx-cu13-libs" in found) == by_library
        assert not (by_library and "onnxruntime-ep-nv-tensorrt-rtx-cu13" in found)
        assert (target.provider.unavailable((3, 12), "linux", "aarch64") is None) != by_library


def test_names_numbers_and_their_order_change_nothing(project: Path) -> None:
    settings = [
        configured(project, f"{RTX}chip = {chips}").targets[0].settings
        for chips in ('["rtx-50", "8.9"]', '["8.9", "12.0"]')
    ]
    assert settings[0] == settings[1]
    assert settings[0].compute_capabilities == ("8.9", "12.0")


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        ('"snapdragon-x-elite"', "soc_model = 60"),
        ('["snapdragon-x-elite"]', 'soc_model = "60", htp_arch = 73'),
        (
            '["snapdragon-x-elite", "snapdragon-8-gen-3"]',
            'soc_model = "60,57", htp_arch = "73,75" }\nallow-unknown-options = true #',
        ),
    ],
)
def test_a_chip_is_compiled_for_by_name_as_by_its_numbers(
    project: Path, chip: str, options: str
) -> None:
    named, numbered = (
        configured(project, MODELS + one("qnn", keys)).targets[0]
        for keys in (f"chip = {chip}", f"provider-options = {{ {options} }}")
    )
    assert value_sha256(named.settings) == value_sha256(numbered.settings)
    # A chip counts for compiling only.
    assert named.load_options == {"backend_type": "htp"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("x-elite", '"snapdragon-x-elite"'), ("snapdragon-8-gen3", '"snapdragon-8-gen-3"')],
)
def test_an_unknown_chip_is_named_with_the_nearest(project: Path, name: str, hint: str) -> None:
    (problem,) = problems(project, MODELS + one("qnn", f'chip = "{name}"')).values()
    assert problem.hint is not None
    assert f"Did you mean {hint}?" in problem.hint


@pytest.mark.parametrize(
    ("toml", "keys"),
    [
        (one("plugin"), {"library", "ep-name"}),
        (one("plugin", 'library = "some_ep"'), {"ep-name"}),
        (one("qnn", 'ep-name = "X"'), {"ep-name"}),
        (one("cpu", 'library = "some_ep"'), {"library"}),
    ],
)
def test_the_keys_of_a_library_are_for_libraries_only(
    project: Path, toml: str, keys: set[str]
) -> None:
    assert {place.split(".", 2)[2] for place in problems(project, MODELS + toml)} == keys

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.jobs.plan import plan
from tests.projects import GROUP

BOTH = """
models = ["models/a.onnx", { path = "models/b.onnx", targets = ["npu"] }]
[targets.npu]
provider = "qnn"
[targets.cpu]
provider = "cpu"
"""


newer_python = pytest.mark.skipif(sys.version_info < (3, 11), reason="the qnn provider needs 3.11")


def config(project: Path, toml: str = BOTH, **environ: str) -> Config:
    variables = {f"HATCH_EPCONTEXT_{name}": value for name, value in environ.items()}
    return load(project, parse(toml), {}, variables)


SHAPES = """
models = [{ name = "det", path = "models/a.onnx", shapes = [{ x = [1] }, { x = [2] }] }]
[targets.npu]
provider = "qnn"
[targets.cpu]
provider = "cpu"
"""

SHARED_SHAPES = SHAPES.replace("shapes", 'share-weights = "both", shapes')


@pytest.mark.parametrize(
    ("toml", "jobs"),
    [
        pytest.param(
            BOTH,
            {"a -> npu": "a/npu", "a -> cpu": "a/cpu", "b -> npu": "b/npu"},
            marks=newer_python,
        ),
        pytest.param(
            SHAPES,
            {"det.1 -> npu": "det.1/npu", "det.2 -> npu": "det.2/npu", "det -> cpu": "det/cpu"},
            marks=newer_python,
        ),
        pytest.param(
            SHARED_SHAPES,
            {"both (det.1 + det.2) -> npu": "both/npu", "det -> cpu": "det/cpu"},
            marks=newer_python,
        ),
        pytest.param(
            GROUP,
            {"both (a + b) -> npu": "both/npu", "a -> cpu": "a/cpu", "b -> cpu": "b/cpu"},
            marks=newer_python,
        ),
    ],
    ids=["models", "shapes", "shapes that share", "models that share"],
)
def test_the_jobs_are_in_the_listed_order_each_with_a_folder(
    project: Path, toml: str, jobs: dict[str, str]
) -> None:
    assert [(job.location, job.folder) for job in plan(config(project, toml)).jobs] == list(
        jobs.items()
    )


@pytest.mark.parametrize(("keys", "dims"), [("", {"n": 4}), ("static-shapes = false", {})])
def test_profiles_have_the_shape_to_optimize_for_and_win_over_sizes_that_are_not_fixed(
    project: Path, keys: str, dims: dict[str, int]
) -> None:
    toml = f"""
models = [{{ path = "models/a.onnx", shapes = {{ y = [4] }}, dims = {{ n = 4 }} }}]
[targets.tensorrt]
provider = "tensorrt"
profiles = [{{ x = {{ min = [1, 3], opt = [8, 3], max = [32, 3] }} }}]
{keys}
"""
    (job,) = plan(config(project, toml)).jobs
    spec = job.models[0].to_run_on(job.target)
    assert (dict(spec.shapes), dict(spec.dims)) == ({"x": (8, 3), "y": (4,)}, dims)
    assert job.models[0].dims == {"n": 4}


@newer_python
def test_models_that_share_weights_are_one_job_for_eps_that_can_share(project: Path) -> None:
    together, alone, _ = plan(config(project, GROUP)).jobs
    assert together.group == "both"
    assert [job.location for job in together.jobs_alone] == ["a -> npu", "b -> npu"]
    only_a = GROUP.replace('b.onnx"', 'b.onnx"\nvalidate = false')
    (run_alone,) = plan(config(project, only_a)).jobs[0].jobs_alone
    assert run_alone.location == "a -> npu"
    assert together.reason_not_to_open
    assert (alone.group, alone.jobs_alone, alone.reason_not_to_open) == (None, (), "")


def test_without_an_ep_that_can_share_there_is_no_group(project: Path) -> None:
    planned = plan(config(project, GROUP, TARGETS="cpu"))
    assert [job.location for job in planned.jobs] == ["a -> cpu", "b -> cpu"]


@newer_python
def test_a_shared_sidecar_cannot_be_embedded(project: Path) -> None:
    toml = GROUP.replace('"qnn"', '"qnn"\nembed = true')
    with pytest.raises(ConfigError, match="embed = true puts it inside each") as raised:
        plan(config(project, toml))
    assert [problem.location for problem in raised.value.problems] == [
        "tool.epcontext.models[0].share-weights",
        "tool.epcontext.models[1].share-weights",
    ]
    plan(config(project, toml.replace("true", "false")))
    with pytest.raises(ConfigError, match="embed = true") as raised:
        plan(config(project, SHARED_SHAPES.replace("shapes", "targets.npu.embed = true, shapes")))
    assert len(raised.value.problems) == 1


@newer_python
def test_members_of_a_group_have_the_same_settings(project: Path) -> None:
    toml = GROUP.replace(
        "[targets.npu]", "targets.npu.provider-options = { vtcm_mb = 8 }\n[targets.npu]"
    )
    with pytest.raises(
        ConfigError, match="this model has other settings for the target npu than a"
    ):
        plan(config(project, toml))


@newer_python
def test_the_facts_of_a_model_are_those_of_its_fixed_form_if_it_has_one(project: Path) -> None:
    both, only_npu = config(project).models
    assert both.static_shapes
    assert both.on(both.targets[0]).static_shapes
    assert not both.on(both.targets[1]).static_shapes
    assert only_npu.static_shapes
    (only_cpu, nothing) = config(project, TARGETS="cpu").models
    assert not only_cpu.static_shapes
    assert (nothing.targets, nothing.static_shapes) == ((), False)


CHIPS = """
chip = ["snapdragon-x-elite", "snapdragon-8-gen-3"]
provider-options = { vtcm_mb = 8 }
"""


@newer_python
def test_a_job_for_several_chips_is_also_one_for_each(project: Path) -> None:
    toml = BOTH.replace('"qnn"', f'"qnn"\n{CHIPS}')
    both, cpu, _ = plan(config(project, toml)).jobs
    assert (bool(both.reason_not_to_open), both.folder) == (True, "a/npu")
    first, second = both.jobs_alone
    assert first.location == "a -> npu (snapdragon-x-elite)"
    assert (first.target.settings.provider_options, second.target.settings.provider_options) == (
        {"backend_type": "htp", "soc_model": "60", "htp_arch": "73", "vtcm_mb": "8"},
        {"backend_type": "htp", "soc_model": "57", "htp_arch": "75", "vtcm_mb": "8"},
    )
    assert len({both.folder, first.folder, second.folder}) == 3
    for job in (first, second, cpu):
        assert (job.jobs_alone, job.reason_not_to_open) == ((), "")


@newer_python
def test_a_group_for_several_chips_is_also_a_job_for_each_model_and_chip(project: Path) -> None:
    toml = GROUP.replace('"qnn"', f'"qnn"\n{CHIPS}')
    job, *_ = plan(config(project, toml)).jobs
    chips = ("snapdragon-x-elite", "snapdragon-8-gen-3")
    assert job.reason_not_to_open
    assert [alone.location for alone in job.jobs_alone] == [
        f"{model} -> npu ({chip})" for model in "ab" for chip in chips
    ]


@newer_python
def test_the_same_chip_twice_is_one_job_alone(project: Path) -> None:
    keys = 'allow-unknown-options = true\nprovider-options = { soc_model = "60,60" }'
    toml = BOTH.replace('"qnn"', f'"qnn"\n{keys}')
    job = plan(config(project, toml)).jobs[0]
    assert (bool(job.reason_not_to_open), len(job.jobs_alone)) == (True, 1)

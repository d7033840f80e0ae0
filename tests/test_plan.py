from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hatch_epcontext.config import Config, load
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.plan import model_spec_of, plan, target_spec
from hatch_epcontext.pyproject import parse

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


@newer_python
def test_each_model_and_target_is_a_job_in_order(project: Path) -> None:
    planned = plan(config(project))
    assert [job.where for job in planned.jobs] == ["a -> npu", "a -> cpu", "b -> npu"]
    assert [job.folder for job in planned.jobs] == ["a/npu", "a/cpu", "b/npu"]


def test_what_profiles_leave_open_is_fed_with_the_best_shape(project: Path) -> None:
    toml = """
provider = "tensorrt"
profiles = [{ x = { min = [1, 3], opt = [8, 3], max = [32, 3] } }]
models = [{ path = "models/a.onnx", shapes = { y = [4] } }]
"""
    (model,) = config(project, toml).models
    assert model_spec_of(model, model.targets[0]).shapes == {"x": (8, 3), "y": (4,)}


def test_a_worker_is_told_of_all_that_changes_the_result(project: Path) -> None:
    target = config(project).models[0].targets[0]
    spec = target_spec(target)
    assert spec.provider == "qnn"
    assert spec.provider_options == target.provider_options


GROUP = """
[[models]]
path = "models/a.onnx"
share-weights = "both"
[[models]]
path = "models/b.onnx"
share-weights = "both"
[targets.npu]
provider = "qnn"
[targets.cpu]
provider = "cpu"
"""


@newer_python
def test_models_that_share_weights_are_one_job_where_that_can_be(project: Path) -> None:
    planned = plan(config(project, GROUP))
    assert [job.where for job in planned.jobs] == [
        "both (a + b) -> npu",
        "a -> cpu",
        "b -> cpu",
    ]
    together = planned.jobs[0]
    assert (together.folder, together.group) == ("both/npu", "both")
    assert [job.where for job in together.alone] == ["a -> npu", "b -> npu"]
    assert planned.jobs[1].group is None


def test_where_weights_cannot_be_shared_there_is_no_group(project: Path) -> None:
    planned = plan(config(project, GROUP, TARGETS="cpu"))
    assert [job.where for job in planned.jobs] == ["a -> cpu", "b -> cpu"]


@newer_python
def test_a_shared_sidecar_cannot_be_inside_of_each_model(project: Path) -> None:
    toml = GROUP.replace('provider = "qnn"', 'provider = "qnn"\nembed = true')
    with pytest.raises(ConfigError, match="embed = true would put it inside of each") as raised:
        plan(config(project, toml))
    assert [problem.where for problem in raised.value.problems] == [
        "tool.epcontext.models[0].share-weights",
        "tool.epcontext.models[1].share-weights",
    ]
    plan(config(project, toml.replace("true", '"auto"')))


@newer_python
def test_members_have_the_same_settings(project: Path) -> None:
    toml = GROUP.replace("[targets.npu]", "provider-options = { vtcm_mb = 8 }\n[targets.npu]")
    with pytest.raises(ConfigError, match="this one has other settings for the target npu than a"):
        plan(config(project, toml))

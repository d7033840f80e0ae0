from __future__ import annotations

import dataclasses
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hatch_epcontext.config import Config, load
from hatch_epcontext.errors import ConfigError, RequirementError
from hatch_epcontext.plan import (
    INSPECTION,
    TOOLS,
    check_environment,
    distributions,
    plan,
    target_spec,
)
from hatch_epcontext.providers import PROVIDERS, Provider
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


@newer_python
def test_the_requirements_are_one_flavour_and_what_the_targets_need(project: Path) -> None:
    assert plan(config(project)).requirements == (
        "onnxruntime>=1.23",
        "onnxruntime-qnn>=2.7",
        *TOOLS,
    )


def test_targets_that_are_not_wanted_need_nothing(project: Path) -> None:
    planned = plan(config(project, TARGETS="cpu"))
    assert planned.requirements == ("onnxruntime>=1.23", *TOOLS)


def test_a_target_may_name_its_requirements(project: Path) -> None:
    toml = 'models = ["models/a.onnx"]\nprovider = "cpu"\nrequirements = ["onnxruntime==1.23.2"]'
    assert plan(config(project, toml)).requirements == ("onnxruntime==1.23.2", *TOOLS)


def test_two_flavours_are_refused(project: Path) -> None:
    toml = 'models = ["models/a.onnx"]\nprovider = "cpu"\nrequirements = ["onnxruntime-gpu"]'
    with pytest.raises(ConfigError, match="onnxruntime-gpu and onnxruntime cannot be installed"):
        plan(config(project, toml))


def test_targets_that_no_one_flavour_serves_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = dataclasses.replace(PROVIDERS["cpu"], flavours=("onnxruntime-gpu",))
    settings = config(project, BOTH)
    (model, _) = settings.models
    npu, cpu = model.targets
    targets = (npu, dataclasses.replace(cpu, provider=gpu))
    settings = dataclasses.replace(settings, models=(dataclasses.replace(model, targets=targets),))
    with pytest.raises(ConfigError, match="HATCH_EPCONTEXT_TARGETS: the cache keeps"):
        plan(settings)


def test_a_machine_that_the_provider_has_no_packages_for(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provider, "unavailable", lambda *_: "has no packages for this system")
    planned = plan(config(project, TARGETS="npu"))
    # An editable install of the source models is still possible.
    assert planned.requirements == ("onnxruntime>=1.23", *TOOLS)
    with pytest.raises(RequirementError, match=r"target npu\n.*the qnn provider has no packages"):
        check_environment(planned.config.targets, planned.requirements)


def test_the_versions_that_count_are_those_of_the_target(project: Path) -> None:
    npu, cpu = config(project).models[0].targets
    assert "onnxruntime-qnn" in distributions(npu)
    assert "onnxruntime-qnn" not in distributions(cpu)
    assert "onnxruntime" in distributions(cpu)


def test_a_worker_is_told_of_all_that_changes_the_result(project: Path) -> None:
    target = config(project).models[0].targets[0]
    spec = target_spec(target)
    assert spec.provider == "qnn"
    assert spec.provider_options == target.provider_options


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as far as the plan can see."""
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("hatch_epcontext.plan.metadata.version", version)
    return there


def test_an_environment_that_has_all(project: Path, installed: dict[str, str]) -> None:
    installed |= {"onnxruntime": "1.31.1", "onnx": "1.23.2", "onnxslim": "0.1.98", "numpy": "2.0"}
    planned = plan(config(project, TARGETS="cpu"))
    versions = check_environment(planned.config.targets, planned.requirements)
    assert versions == installed


def test_any_flavour_that_serves_the_targets_will_do(
    project: Path, installed: dict[str, str]
) -> None:
    installed |= {
        "onnxruntime-gpu": "1.31.1",
        "onnx": "1.23.2",
        "onnxslim": "0.1.98",
        "numpy": "2.0",
    }
    planned = plan(config(project, TARGETS="cpu"))
    versions = check_environment(planned.config.targets, planned.requirements)
    assert versions["onnxruntime-gpu"] == "1.31.1"


def test_any_flavour_will_do_to_read_models(installed: dict[str, str]) -> None:
    installed |= {"onnx": "1.23.2", "onnxslim": "0.1.98", "numpy": "2.0"}
    with pytest.raises(RequirementError, match=r"onnxruntime>=1\.23 \(is not installed\)"):
        check_environment((), INSPECTION)
    installed["onnxruntime-gpu"] = "1.31.1"
    check_environment((), INSPECTION)


def test_what_is_missing_or_too_old_is_told_with_the_pip_command(
    project: Path, installed: dict[str, str]
) -> None:
    installed |= {"onnxruntime": "1.20.0", "onnxslim": "0.1.98", "numpy": "2.0"}
    planned = plan(config(project, TARGETS="cpu"))
    with pytest.raises(RequirementError) as raised:
        check_environment(planned.config.targets, planned.requirements)
    told = str(raised.value)
    assert "onnxruntime>=1.23 (1.20.0 is)" in told
    assert "onnx>=1.19 (is not installed)" in told
    assert f'{sys.executable} -m pip install "onnxruntime>=1.23" "onnx>=1.19"' in told


def test_two_flavours_in_one_environment_are_told(installed: dict[str, str]) -> None:
    installed |= {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    with pytest.raises(RequirementError, match="both installed, and overwrite one another"):
        check_environment((), ())

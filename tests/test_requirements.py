from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hatch_epcontext.errors import ConfigError, RequirementError
from hatch_epcontext.plan import plan
from hatch_epcontext.providers import FLAVOURS, Provider
from hatch_epcontext.requirements import (
    INSPECTION,
    TOOLS,
    check_environment,
    distributions,
    versions_of,
)
from tests.test_plan import config, newer_python

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the packages are other ones")


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


@pytest.mark.parametrize(
    ("provider", "requirement"),
    [("cpu", "onnxruntime-gpu"), ("qnn", "onnxruntime-gpu>=1.30"), ("webgpu", "onnxruntime-rocm")],
)
@newer_python
def test_a_target_may_name_its_flavour(
    project: Path, installed: dict[str, str], provider: str, requirement: str
) -> None:
    toml = f'models = ["models/a.onnx"]\nprovider = "{provider}"\nrequirements = ["{requirement}"]'
    assert plan(config(project, toml)).requirements == (requirement, *TOOLS)


@pytest.mark.parametrize(
    ("requirements", "clash"),
    [
        ('"onnxruntime-directml"', "onnxruntime and onnxruntime-directml"),
        ('"onnxruntime", "onnxruntime-gpu"', "onnxruntime and onnxruntime-gpu"),
    ],
)
@newer_python
def test_two_flavours_are_refused(
    project: Path, installed: dict[str, str], requirements: str, clash: str
) -> None:
    toml = f'models = ["models/a.onnx"]\nprovider = "qnn"\nrequirements = [{requirements}]'
    with pytest.raises(ConfigError, match=f"{clash} cannot be installed together"):
        plan(config(project, toml))


RTX = """
models = ["models/a.onnx"]
[targets.new]
provider = "tensorrt-rtx"
[targets.old]
provider = "tensorrt-rtx"
requirements = ["onnxruntime-ep-nv-tensorrt-rtx-cu12>=0.5"]
"""


@needs_linux
def test_packages_that_overwrite_one_another_are_refused(
    project: Path, installed: dict[str, str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"rtx-cu12 and onnxruntime-ep-nv-tensorrt-rtx-cu13 cannot"
    ):
        plan(config(project, RTX))
    for one, cuda in (("new", "13"), ("old", "12")):
        assert (
            f"onnxruntime-ep-nv-tensorrt-rtx-cu{cuda}>=0.5"
            in plan(config(project, RTX, TARGETS=one)).requirements
        )
    both = {f"onnxruntime-ep-nv-tensorrt-rtx-cu{cuda}": "0.5.0" for cuda in (12, 13)}
    installed |= {"onnxruntime-gpu": "1.31.1", **both}
    planned = plan(config(project, RTX, TARGETS="old"))
    with pytest.raises(RequirementError, match="both installed, and overwrite one another"):
        check_environment(planned.config.targets, planned.requirements)


@pytest.mark.parametrize(
    ("providers", "flavour"),
    [
        (["cpu"], "onnxruntime"),
        (["openvino"], "onnxruntime"),
        (["tensorrt-rtx"], "onnxruntime-gpu"),
        (["tensorrt"], "onnxruntime-gpu"),
        (["tensorrt", "cpu", "openvino"], "onnxruntime-gpu"),
        (["migraphx"], "onnxruntime-migraphx"),
        (["cuda", "cpu", "openvino"], "onnxruntime-gpu"),
        (["directml", "cpu"], "onnxruntime"),
        # What it makes of a model is the same with any.
        (["migraphx", "openvino"], "onnxruntime"),
        (["directml", "tensorrt"], "onnxruntime-gpu"),
    ],
)
@needs_linux
def test_dependencies_are_of_exactly_one_flavour(
    project: Path, installed: dict[str, str], providers: list[str], flavour: str
) -> None:
    targets = "".join(f'[targets.{name}]\nprovider = "{name}"\n' for name in providers)
    requirements = plan(config(project, f'models = ["models/a.onnx"]\n{targets}')).requirements
    names = [Requirement(requirement).name for requirement in requirements]
    assert [name for name in names if name in FLAVOURS] == [flavour]


TWO_RUNTIMES = """
models = ["models/a.onnx"]
[targets.nvidia]
provider = "tensorrt"
[targets.amd]
provider = "migraphx"
optimization = "all"
"""


@needs_linux
def test_targets_that_no_one_flavour_serves_are_refused_with_the_way_out(
    project: Path, installed: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(config(project, TWO_RUNTIMES))
    told = str(raised.value)
    assert "no one ONNX Runtime serves all targets" in told
    assert "nvidia: onnxruntime-gpu, amd: onnxruntime-migraphx" in told
    assert "HATCH_EPCONTEXT_TARGETS=<these>" in told
    assert "HATCH_EPCONTEXT_FROM_CACHE=<these>" in told
    # And that is a way out.
    assert (
        "onnxruntime-gpu>=1.23"
        in plan(config(project, TWO_RUNTIMES, TARGETS="nvidia")).requirements
    )
    last = plan(config(project, TWO_RUNTIMES, FROM_CACHE="nvidia"))
    assert "onnxruntime-migraphx>=1.23" in last.requirements
    assert len(last.jobs) == 2


def test_what_comes_from_the_cache_needs_nothing(project: Path, installed: dict[str, str]) -> None:
    planned = plan(config(project, FROM_CACHE="npu,cpu"))
    assert planned.requirements == INSPECTION
    installed |= {"onnxruntime-gpu": "1.31.1", "onnx": "1.23", "onnxslim": "0.1.98", "numpy": "2.0"}
    planned = plan(config(project, FROM_CACHE="npu,cpu"))
    check_environment(planned.config.targets, planned.requirements)


@newer_python
def test_the_flavour_that_is_there_is_taken_if_it_serves(
    project: Path, installed: dict[str, str]
) -> None:
    installed["onnxruntime-gpu"] = "1.31.1"
    assert plan(config(project)).requirements[0] == "onnxruntime-gpu>=1.23"
    installed.clear()
    installed["onnxruntime-directml"] = "1.24.4"
    assert plan(config(project)).requirements[0] == "onnxruntime>=1.23"


def test_a_library_without_a_distribution_counts_by_its_contents(project: Path) -> None:
    library = project / "plugin.so"
    library.write_bytes(b"one")
    toml = 'models = ["models/a.onnx"]\nprovider = "plugin"\nlibrary = "plugin.so"\nep-name = "X"\n'
    target = config(project, toml).models[0].targets[0]
    one = versions_of(target, {"onnxruntime": "1.31.1", "numpy": "2.0"})
    assert one.keys() == {"onnxruntime", "plugin.so"}
    assert one["plugin.so"].startswith("sha256:")
    library.write_bytes(b"two")
    assert versions_of(target, {"onnxruntime": "1.31.1"}) != one


def test_a_librarys_package_counts_by_its_version(project: Path) -> None:
    toml = 'models = ["models/a.onnx"]\nprovider = "plugin"\nlibrary = "cattrs"\nep-name = "X"\n'
    target = config(project, toml).models[0].targets[0]
    assert versions_of(target, {}) == {"cattrs": metadata.version("cattrs")}


def test_a_machine_that_the_provider_has_no_packages_for(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provider, "unavailable", lambda *_: "has no packages for this system")
    planned = plan(config(project, TARGETS="npu"))
    # An editable install of the source models is still possible.
    assert planned.requirements == INSPECTION
    with pytest.raises(RequirementError, match=r"target npu\n.*the qnn provider has no packages"):
        check_environment(planned.config.targets, planned.requirements)


def test_the_versions_that_count_are_those_of_the_target(project: Path) -> None:
    npu, cpu = config(project).models[0].targets
    assert "onnxruntime-qnn" in distributions(npu)
    assert "onnxruntime-qnn" not in distributions(cpu)
    assert "onnxruntime" in distributions(cpu)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as far as the plan can see."""
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("hatch_epcontext.requirements.metadata.version", version)
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

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hatch_epcontext.errors import ConfigError, RequirementError
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.requirements import (
    INSPECTION,
    TOOLS,
    check_environment,
    versions_of,
)
from hatch_epcontext.providers import DISTRIBUTIONS, Provider
from tests.jobs.test_plan import BOTH, config, newer_python
from tests.language_models import make_folder

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have other packages"
)


def using(provider: str, *keys: str) -> str:
    """The configuration of one target with this provider and these ``keys``."""
    return "\n".join(
        ['models = ["models/a.onnx"]', f"[targets.{provider}]", f'provider = "{provider}"', *keys]
    )


def naming(provider: str, *requirements: str) -> str:
    return using(provider, f"requirements = {list(requirements)}")


@pytest.mark.parametrize(
    ("toml", "targets", "requirements"),
    [
        pytest.param(BOTH, "", ("onnxruntime>=1.23", "onnxruntime-qnn>=2.7"), marks=newer_python),
        (BOTH, "cpu", ("onnxruntime>=1.23",)),
        # A target may name its distribution.
        (naming("cpu", "onnxruntime==1.23.2"), "", ("onnxruntime==1.23.2",)),
        (naming("cpu", "onnxruntime-gpu"), "", ("onnxruntime-gpu",)),
        (naming("cuda", "onnxruntime-rocm"), "", ("onnxruntime-rocm",)),
        pytest.param(
            *(naming("qnn", "onnxruntime-gpu>=1.30"), "", ("onnxruntime-gpu>=1.30",)),
            marks=newer_python,
        ),
    ],
)
def test_the_requirements_are_one_distribution_and_what_the_targets_need(
    project: Path,
    installed: dict[str, str],
    toml: str,
    targets: str,
    requirements: tuple[str, ...],
) -> None:
    assert plan(config(project, toml, TARGETS=targets)).requirements == (*requirements, *TOOLS)


@pytest.mark.parametrize(
    ("requirements", "clash"),
    [
        (["onnxruntime-directml"], "onnxruntime and onnxruntime-directml"),
        (["onnxruntime", "onnxruntime-gpu"], "onnxruntime and onnxruntime-gpu"),
    ],
)
@newer_python
def test_two_distributions_are_refused(
    project: Path, installed: dict[str, str], requirements: list[str], clash: str
) -> None:
    with pytest.raises(ConfigError, match=f"{clash} cannot be installed together"):
        plan(config(project, naming("qnn", *requirements)))


RTX = """
models = ["models/a.onnx"]
[targets.new]
provider = "tensorrt-rtx"
[targets.old]
provider = "tensorrt-rtx"
requirements = ["onnxruntime-ep-nv-tensorrt-rtx-cu12>=0.5"]
"""


@needs_linux
def test_packages_that_overwrite_each_other_are_refused(
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
    with pytest.raises(RequirementError, match="both installed, and overwrite each other"):
        check_environment(planned.config.targets, planned.requirements)


@pytest.mark.parametrize("needed", [False, True])
@needs_linux
def test_only_a_language_model_needs_the_plugins_of_a_library(
    project: Path, installed: dict[str, str], needed: bool
) -> None:
    make_folder(project / "models" / "llama")
    models = ["models/a.onnx", "models/llama"][: 1 + needed]
    toml = f"models = {models}\ntargets.rtx = {{ provider = 'tensorrt-rtx', chip = 'auto' }}"
    planned = plan(config(project, toml))
    package = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
    assert (f"{package}>=0.5,<0.6" in planned.requirements) == needed
    versions = [versions_of(target, {package: "0.5.0"}) for target in planned.config.targets]
    assert [package in own for own in versions] == [False, True][: 1 + needed]


@pytest.mark.parametrize(
    ("providers", "distribution"),
    [
        (["cpu"], "onnxruntime"),
        (["openvino"], "onnxruntime"),
        (["tensorrt-rtx"], "onnxruntime-gpu"),
        (["tensorrt"], "onnxruntime-gpu"),
        (["tensorrt", "cpu", "openvino"], "onnxruntime-gpu"),
        (["vitisai"], "onnxruntime-vitisai"),
        (["cuda", "cpu", "openvino"], "onnxruntime-gpu"),
        (["directml", "cpu"], "onnxruntime"),
        # The optimized graph is the same with any distribution.
        (["directml", "openvino"], "onnxruntime"),
        (["directml", "tensorrt"], "onnxruntime-gpu"),
    ],
)
@needs_linux
def test_the_requirements_have_exactly_one_distribution(
    project: Path, installed: dict[str, str], providers: list[str], distribution: str
) -> None:
    targets = "".join(f'[targets.{name}]\nprovider = "{name}"\n' for name in providers)
    requirements = plan(config(project, f'models = ["models/a.onnx"]\n{targets}')).requirements
    names = [Requirement(requirement).name for requirement in requirements]
    assert [name for name in names if name in DISTRIBUTIONS] == [distribution]


TWO_RUNTIMES = """
models = ["models/a.onnx"]
[targets.nvidia]
provider = "tensorrt"
[targets.amd]
provider = "vitisai"
"""


@needs_linux
def test_targets_without_a_common_distribution_are_refused_with_a_hint(
    project: Path, installed: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(config(project, TWO_RUNTIMES))
    text = str(raised.value)
    assert "no single ONNX Runtime distribution fits all targets" in text
    assert "nvidia: onnxruntime-gpu, amd: onnxruntime-vitisai or" in text
    assert "HATCH_EPCONTEXT_TARGETS=<names>" in text
    assert "HATCH_EPCONTEXT_FROM_CACHE=<names>" in text
    # The hint works.
    assert (
        "onnxruntime-gpu>=1.23"
        in plan(config(project, TWO_RUNTIMES, TARGETS="nvidia")).requirements
    )
    last = plan(config(project, TWO_RUNTIMES, FROM_CACHE="nvidia"))
    assert "onnxruntime-vitisai>=1.23" in last.requirements
    assert len(last.jobs) == 2


def test_targets_from_the_cache_need_nothing(project: Path, installed: dict[str, str]) -> None:
    planned = plan(config(project, FROM_CACHE="npu,cpu"))
    assert planned.requirements == INSPECTION
    installed |= {"onnxruntime-gpu": "1.31.1", "onnx": "1.23", "onnxslim": "0.1.98", "numpy": "2.0"}
    planned = plan(config(project, FROM_CACHE="npu,cpu"))
    check_environment(planned.config.targets, planned.requirements)


@newer_python
def test_an_installed_distribution_is_taken_if_it_fits(
    project: Path, installed: dict[str, str]
) -> None:
    installed["onnxruntime-gpu"] = "1.31.1"
    assert plan(config(project)).requirements[0] == "onnxruntime-gpu>=1.23"
    installed.clear()
    installed["onnxruntime-directml"] = "1.24.4"
    assert plan(config(project)).requirements[0] == "onnxruntime>=1.23"


@newer_python
def test_only_the_versions_of_the_target_count(project: Path) -> None:
    versions = {"onnxruntime": "1.31.1", "onnxruntime-qnn": "2.7", "numpy": "2.0"}
    npu, cpu = config(project).models[0].targets
    assert versions_of(npu, versions).keys() == {"onnxruntime", "onnxruntime-qnn"}
    assert versions_of(cpu, versions) == {"onnxruntime": "1.31.1"}


@pytest.mark.parametrize(
    ("library", "versions"),
    [("plugin.so", {}), ("packaging", {"packaging": metadata.version("packaging")})],
)
def test_a_library_counts_by_the_version_of_its_package(
    project: Path, library: str, versions: dict[str, str]
) -> None:
    (project / "plugin.so").write_bytes(b"one")
    toml = using("plugin", f'library = "{library}"', 'ep-name = "X"')
    target = config(project, toml).models[0].targets[0]
    assert versions_of(target, {"onnxruntime": "1.31.1", "numpy": "2.0"}) == {
        "onnxruntime": "1.31.1",
        **versions,
    }


def test_a_machine_without_packages_of_the_provider(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provider, "unavailable", lambda *_: "has no packages for this system")
    planned = plan(config(project, TARGETS="npu"))
    # An editable install of the source models is still possible.
    assert planned.requirements == INSPECTION
    with pytest.raises(
        RequirementError, match=r"target npu: EPC103\n.*the qnn provider has no packages"
    ):
        check_environment(planned.config.targets, planned.requirements)


OF_TOOLS = {"onnx": "1.23.2", "onnxslim": "0.1.98", "numpy": "2.0"}


@pytest.mark.parametrize("distribution", ["onnxruntime", "onnxruntime-gpu"])
def test_any_distribution_that_fits_the_targets_is_enough(
    project: Path, installed: dict[str, str], distribution: str
) -> None:
    installed |= {distribution: "1.31.1", **OF_TOOLS}
    planned = plan(config(project, TARGETS="cpu"))
    assert check_environment(planned.config.targets, planned.requirements) == installed


def test_any_distribution_is_enough_to_read_models(installed: dict[str, str]) -> None:
    installed |= OF_TOOLS
    with pytest.raises(RequirementError, match=r"onnxruntime>=1\.23 \(not installed\)"):
        check_environment((), INSPECTION)
    installed["onnxruntime-gpu"] = "1.31.1"
    check_environment((), INSPECTION)


def test_missing_and_old_packages_are_reported_with_the_pip_command(
    project: Path, installed: dict[str, str]
) -> None:
    installed |= {"onnxruntime": "1.20.0", "onnxslim": "0.1.98", "numpy": "2.0"}
    planned = plan(config(project, TARGETS="cpu"))
    with pytest.raises(RequirementError) as raised:
        check_environment(planned.config.targets, planned.requirements)
    text = str(raised.value)
    assert "2 build requirements are missing" in text
    assert "onnxruntime>=1.23 (1.20.0 is installed)" in text
    assert "onnx>=1.19 (not installed)" in text
    assert f'{sys.executable} -m pip install "onnxruntime>=1.23" "onnx>=1.19"' in text
    assert "Offline, HATCH_EPCONTEXT_FROM_CACHE=all takes" in text


def test_a_missing_package_is_named_for_a_shell_and_without_the_credentials_of_its_address() -> (
    None
):
    address = "absent-package @ https://bob:secret@host/a.whl?tok=secret"
    with pytest.raises(RequirementError) as raised:
        check_environment([], [address, 'absent>=1; python_version >= "3.10"'])
    (problem,) = raised.value.problems
    assert """"absent>=1; python_version >= '3.10'\"""" in problem.text()
    assert "absent-package @ https://***" in problem.text()
    assert "secret" not in problem.text()


def test_two_installed_distributions_are_an_error(installed: dict[str, str]) -> None:
    installed |= {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}
    with pytest.raises(RequirementError, match="both installed, and overwrite each other"):
        check_environment((), ())

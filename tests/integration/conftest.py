"""Real wheels, real front ends, real EPs, fresh environments."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.api import compile_models
from hatch_epcontext.jobs.report import JobReport, ModelReport
from tests.conftest import REPOSITORY
from tests.models import save

INTEGRATION = Path(__file__).parent

OFFERED = """
import onnxruntime, onnxruntime_ep_openvino
library = onnxruntime_ep_openvino.get_library_path()
onnxruntime.register_execution_provider_library("OpenVINOExecutionProvider", library)
devices = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "OpenVINOExecutionProvider"]
print(any(device.device.type.name == "CPU" for device in devices))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.slow)


def run(*command: str | Path, cwd: Path, env: Mapping[str, str], fails: bool = False) -> str:
    """The output of ``command``, stdout and stderr together; it must succeed, or with ``fails`` fail."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def build_here(project: Path, cache: Path, *, fails: bool = False, **settings: str) -> str:
    """Build the wheel of ``project`` in this process, as Hatch does it; what is printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        for name, value in {"CACHE_DIR": str(cache), **settings}.items():
            patch.setenv(f"HATCH_EPCONTEXT_{name}", value)
        with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
            builder = WheelBuilder(str(project), plugin_manager=PluginManager())
            list(builder.build(directory=str(project / "dist"), versions=["standard"]))
    return printed.getvalue()


def build_project(project: Path, **variables: str) -> tuple[Path, str]:
    """The wheel of ``project``, built without isolation with a cache beside it; and what was printed.

    With ``variables`` it is built in a process of its own, which takes four times as long.
    """
    cache = project.parent / "cache"
    if variables:
        env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(cache), **variables}
        command = ("-m", "hatchling", "build", "-t", "wheel")
        text = run(sys.executable, *command, cwd=project, env=env)
    else:
        text = build_here(project, cache)
    (wheel,) = (project / "dist").glob("*.whl")
    return wheel, text


def compile_for_qnn(model: onnx.ModelProto, folder: Path, **arguments: Any) -> ModelReport:
    """The report of ``model``, saved in ``folder`` and compiled for QNN."""
    (report,) = compile_job_for_qnn(model, folder, **arguments).models
    return report


def compile_job_for_qnn(model: onnx.ModelProto, folder: Path, **arguments: Any) -> JobReport:
    """The report of the job of ``model``, saved in ``folder`` and compiled for QNN."""
    source = save(model, folder / "a.onnx")
    options = {"soc_model": 60}
    result = compile_models(source, folder / "out", "qnn", provider_options=options, **arguments)
    (report,) = result.report.jobs
    return report


def tool(name: str) -> Path:
    """A command that is installed with this Python."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found is not None, f"{name} is missing: install the dependency group test"
    return Path(found)


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the variables of its processes."""

    folder: Path
    env: Mapping[str, str]

    def executable(self, name: str) -> Path:
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        found = shutil.which(name, path=str(self.folder / scripts))
        assert found is not None
        return Path(found)

    def install(self, *what: str | Path) -> None:
        python = self.executable("python")
        run(
            tool("uv"),
            "pip",
            "install",
            "-q",
            "--python",
            python,
            *what,
            cwd=self.folder,
            env=self.env,
        )

    def python(self, *arguments: str | Path, fails: bool = False) -> str:
        # Run in a folder without other modules.
        return run(
            self.executable("python"), *arguments, cwd=self.folder, env=self.env, fails=fails
        )


UV = "--installer=uv"
"""Of ``build``: its environments are made by uv, in a tenth of pip's time."""


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of this checkout, instead of a package index."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    build_wheel(folder)
    return folder


def build_wheel(folder: Path) -> None:
    """Build the wheel of this checkout into ``folder``."""
    command = ("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    run(sys.executable, *command, cwd=REPOSITORY, env=os.environ)


def environment_without(*prefixes: str) -> dict[str, str]:
    """This process's variables, without those whose names begin so."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of temporary files that all processes of this test run share."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def env(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of front ends: they find this checkout's wheel, and share one cache."""
    own = environment_without("HATCH_", "PYTHON", "VIRTUAL_ENV")
    links = [*own.get("PIP_FIND_LINKS", "").split(), wheelhouse.as_uri()]
    return own | {
        "PIP_FIND_LINKS": " ".join(links),
        "UV_FIND_LINKS": str(wheelhouse),
        # Hatch keeps environments between builds, also of another checkout.
        "HATCH_DATA_DIR": str(tmp_path_factory.mktemp("hatch")),
        "HATCH_EPCONTEXT_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        # Each test run builds the same version, and uv would install its own older copy.
        "UV_CACHE_DIR": str(shared_folder(tmp_path_factory) / "uv"),
    }


@pytest.fixture(scope="session")
def openvino_cpu() -> None:
    """Skip tests on machines without OpenVINO's CPU device."""
    done = subprocess.run(
        [sys.executable, "-c", OFFERED], capture_output=True, text=True, check=False
    )
    if "onnxruntime_ep_openvino" in done.stderr and "ModuleNotFoundError" in done.stderr:
        pytest.skip("onnxruntime-ep-openvino has no wheels for this Python or platform")
    assert done.returncode == 0, done.stderr
    if done.stdout.split() != ["True"]:
        processor = platform.processor() or platform.machine()
        pytest.skip(f"OpenVINO offers no CPU device on this processor ({processor})")


@pytest.fixture
def fresh(tmp_path: Path, env: dict[str, str]) -> Environment:
    """An empty virtual environment of this Python."""
    return make_environment(tmp_path / "venv", env)


def make_environment(folder: Path, env: Mapping[str, str]) -> Environment:
    run(tool("uv"), "venv", "-q", "--python", sys.executable, folder, cwd=folder.parent, env=env)
    return Environment(folder, env)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example project."""
    return copy_example(tmp_path / "digits-app")


def copy_example(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("dist", "epcontext", "__pycache__")
    return Path(shutil.copytree(REPOSITORY / "example_project", folder, ignore=ignored))

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager
from onnx import helper

from hatch_epcontext.cli.app import app
from tests.models import network, save
from tests.projects import PROJECT

Cli = Callable[..., Result]

TOML = """
[tool.epcontext]
models = ["models/a.onnx", "models/b.onnx"]
[tool.epcontext.targets.one]
provider = "cpu"
[tool.epcontext.targets.two]
provider = "cpu"
optimization = "extended"
"""


@pytest.fixture
def cli() -> Cli:
    """Run ``epcontext`` with these arguments; its exit code must be ``code``, without a traceback."""

    def run(*arguments: str | Path, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return run


def problems(result: Result) -> list[str]:
    """The place and the id of each problem that a command printed, such as ``--dim batch: EPC005``."""
    return re.findall(r"^\S.*\bEPC\d{3}$", result.stderr, re.MULTILINE)


def zeroed() -> onnx.ModelProto:
    """The network, with zeros as its first weights."""
    made = network()
    made.graph.initializer[0].raw_data = bytes(len(made.graph.initializer[0].raw_data))
    return made


def scaled() -> onnx.ModelProto:
    """The network with an input ``scale``, by which its output is multiplied."""
    made = network()
    made.graph.input.append(helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, []))
    made.graph.node[-1].output[0] = "before"
    made.graph.node.append(helper.make_node("Mul", ["before", "scale"], ["y"], "scaled"))
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(network(), tmp_path / "models" / "net.onnx")


@pytest.fixture
def app_project(project: Path) -> Path:
    """A project with two models and two targets."""
    (project / "pyproject.toml").write_text(TOML, encoding="utf-8")
    for name in ("a", "b"):
        save(network(), project / "models" / f"{name}.onnx")
    return project


def build_wheel(project: Path) -> Path:
    """Build the wheel of `app_project`, whose ``pyproject.toml`` has only the models."""
    text = (project / "pyproject.toml").read_text("utf-8")
    head = PROJECT.removesuffix("[tool.epcontext]\n")
    (project / "pyproject.toml").write_text(head + text, encoding="utf-8")
    builder = WheelBuilder(str(project), plugin_manager=PluginManager())
    (wheel,) = builder.build(directory=str(project / "dist"), versions=["standard"])
    return Path(wheel)

"""Configurations, and short ways to load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config, Target
from hatch_epcontext.errors import ConfigError, Problem

MODELS = 'models = ["models/a.onnx"]\n'

SHORT = """
targets.qnn.provider = "qnn"
targets.qnn.chip = "snapdragon-x-elite"
models = ["models/a.onnx"]
"""

LONG = """
output = "my_app/models"
fallback = "none"
editable = "compile"

[build]
jobs = 2
timeout = 60

[wheel]
tag = "py3-none-win_arm64"

[targets.x-elite]
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73, enable_htp_fp16_precision = true }
session-options = { "session.intra_op_num_threads" = 1 }
load-options = { htp_performance_mode = "burst" }
device = "npu"
platforms = ["win_arm64"]
requirements = ["onnxruntime-qnn==2.7.0"]
optimization = "extended"
embed = true
min-coverage = 0.9

[targets.cpu]
provider = "cpu"

[[models]]
name = "first"
path = "models/a.onnx"
targets.cpu = {}
targets.x-elite.provider-options.vtcm_mb = 8
targets.x-elite.optimization = "none"
targets.x-elite.embed = false
targets.x-elite.min-coverage = 0.5
dims = { batch = 1 }
shapes = { image = [1, 1, 28, 28] }
constants = { sr = 16000, flags = [true, false] }
validate = { mode = "require", inputs = "ones", tolerance = { rtol = 0.1 } }

[[models]]
path = "models/b.onnx"
targets = ["x-elite"]
validate = { tolerance = false }
"""

PROFILE = "{ x = { min = [1, 3], opt = [8, 3], max = [32, 3] } }"

EVERYTHING = """
wheel = { sbom = true }
[targets.rtx]
provider = "NvTensorRTRTX"
provider-options = { nv_max_workspace_size = 5, nv_weight_streaming_budget = "40%" }
load-options = { nv_runtime_cache_path = "x" }
profiles = [{ x = { min = [1, 2], opt = [1, 2], max = [3, 4] } }]
[targets.intel]
provider = "openvino"
session-options = { "ep.enable_weightless" = true }
allow-unknown-options = true
provider-options = { load_config = { CPU = { A = "1", B = 2 } }, newer = 1 }
[targets.other]
provider = "plugin"
library = "other_ep"
ep-name = "X"
[[models]]
path = "models/a.onnx"
targets.rtx.profiles = [{ x = { min = [1, 2], opt = [1, 2], max = [3, 4] } }]
targets.rtx.min-coverage = 0.5
targets.other = { device = "npu", requirements = [] }
[[models]]
path = "models/b.onnx"
share-weights = "group"
targets.intel = { external-initializers = true, unroll-limit = 0, provider-options = { newer = 2 } }
[[models]]
path = "models/b.onnx"
name = "c"
share-weights = "group"
targets = ["other"]
"""


def read(root: Path, toml: str, hook: dict[str, Any] | None = None, **environ: str) -> Config:
    """The configuration ``toml``; ``environ`` are variables without their prefix."""
    variables = {f"HATCH_EPCONTEXT_{name}": value for name, value in environ.items()}
    return load(root, parse(toml), hook or {}, variables)


def problems(root: Path, toml: str, **environ: str) -> dict[str, Problem]:
    """The problems of the configuration ``toml``, by location without the root table."""
    with pytest.raises(ConfigError) as raised:
        read(root, toml, None, **environ)
    return {
        problem.location.removeprefix("tool.epcontext."): problem
        for problem in raised.value.problems
    }


def assert_one_problem(root: Path, toml: str, location: str, message: str) -> None:
    """The configuration ``toml`` has one problem, at ``location``, with ``message`` in its text."""
    found = problems(root, toml)
    assert location in found
    assert message in found[location].message
    assert len(found) == 1


def only_problem(root: Path, toml: str) -> tuple[str, Problem]:
    """The location and the only problem of a configuration of one model, to which ``toml`` adds."""
    ((location, found),) = problems(root, MODELS + toml).items()
    return location, found


def target(root: Path, toml: str) -> Target:
    """The only target of a configuration of one model, to which ``toml`` adds."""
    (found,) = read(root, MODELS + toml).models[0].targets
    return found


def one(provider: str, keys: str = "") -> str:
    """A target with ``keys``, which has the name of its provider."""
    return f'\n[targets.{provider}]\nprovider = "{provider}"\n{keys}'

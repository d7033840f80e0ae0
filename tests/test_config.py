from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hatch_epcontext.config import Config, load
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.pyproject import parse

SHORT = """
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
models = ["models/a.onnx"]
"""

LONG = """
output = "my_app/models"
default-targets = ["x-elite"]
jobs = 2
timeout = 60
fallback = "none"
editable = "compile"
wheel-tag = "py3-none-win_arm64"
min-coverage = 0.9

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

[targets.cpu]
provider = "cpu"

[[models]]
name = "first"
path = "models/a.onnx"
targets = ["cpu", "x-elite"]
dims = { batch = 1 }
shapes = { image = [1, 1, 28, 28] }
constants = { sr = 16000, flags = [true, false] }
inputs = "ones"
tolerance = { rtol = 0.1 }
validate = "require"
provider-options = { vtcm_mb = 8 }
optimization = "none"
embed = false
min-coverage = 0.5

[[models]]
path = "models/b.onnx"
tolerance = false
"""


def read(root: Path, toml: str, hook: dict[str, Any] | None = None, **environ: str) -> Config:
    variables = {f"HATCH_EPCONTEXT_{name}": value for name, value in environ.items()}
    return load(root, parse(toml), hook or {}, variables)


def problems(root: Path, toml: str, **environ: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as raised:
        read(root, toml, None, **environ)
    return {
        problem.where.removeprefix("tool.epcontext."): problem for problem in raised.value.problems
    }


def test_the_short_form_is_one_target_named_after_its_provider(project: Path) -> None:
    config = read(project, SHORT)
    (model,) = config.models
    (target,) = model.targets
    assert (model.name, model.path) == ("a", project / "models" / "a.onnx")
    assert target.name == target.provider.name == "qnn"
    assert target.provider_options == {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"}
    assert target.load_options == {"backend_type": "htp"}
    assert (target.device, target.optimization, target.embed) == ("npu", "basic", False)
    assert target.min_coverage == 1.0
    assert (config.output, config.fallback, config.editable) == (None, "source", "source")
    assert (config.timeout, config.use_cache) == (1800, True)
    assert model.tolerance_for(target.provider) == Tolerance(1e-2, 5e-2, 0.99)


def test_the_long_form(project: Path) -> None:
    config = read(project, LONG)
    assert config.output == PurePosixPath("my_app/models")
    assert (config.jobs, config.timeout, config.fallback) == (2, 60, "none")
    assert (config.editable, config.wheel_tag) == ("compile", "py3-none-win_arm64")
    first, second = config.models
    assert [target.name for target in first.targets] == ["cpu", "x-elite"]
    assert [target.name for target in second.targets] == ["x-elite"]
    assert first.dims == {"batch": 1}
    assert first.shapes == {"image": (1, 1, 28, 28)}
    assert first.constants == {"sr": 16000, "flags": [True, False]}
    assert (first.inputs, first.validate) == ("ones", "require")
    (target,) = second.targets
    assert target.provider_options["enable_htp_fp16_precision"] == "1"
    assert target.session_options == {"session.intra_op_num_threads": "1"}
    assert target.load_options == {"backend_type": "htp", "htp_performance_mode": "burst"}
    assert target.platforms == ("win_arm64",)
    assert target.requirements == ("onnxruntime-qnn==2.7.0",)
    assert (target.optimization, target.embed, target.min_coverage) == ("extended", True, 0.9)
    assert second.tolerance_for(target.provider) is None


def test_a_model_narrows_its_targets(project: Path) -> None:
    _, x_elite = read(project, LONG).models[0].targets
    assert x_elite.provider_options["vtcm_mb"] == "8"
    assert x_elite.provider_options["soc_model"] == "60"
    assert (x_elite.optimization, x_elite.embed, x_elite.min_coverage) == ("none", False, 0.5)


def test_narrowed_options_are_for_those_targets_that_know_them(project: Path) -> None:
    cpu, _ = read(project, LONG).models[0].targets
    assert cpu.provider_options == {}
    assert cpu.embed is False


def test_narrowed_keys_that_no_target_of_the_model_knows_are_wrong(project: Path) -> None:
    text = LONG.replace('targets = ["cpu", "x-elite"]', 'targets = ["cpu"]\ndevice = "gpu"')
    assert problems(project, text).keys() == {
        "models[0].provider-options.vtcm_mb",
        "models[0].device",
    }


def test_part_of_a_tolerance_leaves_the_rest_to_the_provider(project: Path) -> None:
    model = read(project, LONG).models[0]
    cpu, x_elite = model.targets
    assert model.tolerance_for(x_elite.provider) == Tolerance(0.1, 5e-2, 0.99)
    assert model.tolerance_for(cpu.provider) == Tolerance(0.1, 1e-4, 0.9999)


def test_globs_name_models_after_their_files(project: Path) -> None:
    config = read(project, 'provider = "cpu"\nmodels = ["models/*.onnx"]')
    assert [model.name for model in config.models] == ["a", "b"]


def test_inputs_from_a_file_are_found_from_anywhere(project: Path) -> None:
    (project / "inputs.npz").touch()
    toml = 'provider = "cpu"\nmodels = [{ path = "models/a.onnx", inputs = "inputs.npz" }]'
    assert read(project, toml).models[0].inputs == str(project / "inputs.npz")


def test_the_environment_wins(project: Path, tmp_path: Path) -> None:
    config = read(
        project,
        LONG,
        TARGETS="cpu",
        JOBS="1",
        TIMEOUT="5",
        EDITABLE="skip",
        VALIDATE="structure",
        CACHE_DIR=str(tmp_path),
        NO_CACHE="1",
    )
    assert [target.name for target in config.targets] == ["cpu"]
    # The second model is not for the CPU, and its source is not to be shipped.
    assert [model.name for model in config.models] == ["first"]
    assert (config.jobs, config.timeout, config.editable) == (1, 5, "skip")
    assert config.models[0].validate == "structure"
    assert (config.cache_dir, config.use_cache) == (tmp_path, False)
    assert "HATCH_EPCONTEXT_TARGETS=cpu" in config.overrides


@pytest.mark.parametrize(
    ("toml", "where", "what"),
    [
        ('provider = "cpu"', "models", "is required"),
        ('models = ["models/a.onnx"]', "tool.epcontext", "names no target"),
        ('provider = "qn"\nmodels = ["models/a.onnx"]', "provider", '"qn" is not a provider'),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\njbs = 1', "jbs", "is not a known key"),
        ('provider = "cpu"\nmodels = ["nope.onnx"]', "models[0]", 'no model at "nope.onnx"'),
        (f'provider = "cpu"\nmodels = ["{"x" * 300}"]', "models[0]", "no model at"),
        ('provider = "cpu"\nmodels = ["*.pt"]', "models[0]", "no file matches"),
        ('provider = "cpu"\nmodels = ["../a.onnx"]', "models[0]", "not a path inside"),
        ('provider = "cpu"\nmodels = ["/a.onnx"]', "models[0]", "not a path inside"),
        ('provider = "cpu"\nmodels = ["../*.onnx"]', "models[0]", "not a path inside"),
        ('provider = "cpu"\nmodels = [{ name = "x" }]', "models[0].path", "is required"),
        ('provider = "cpu"\nmodels = ["models/a.onnx", { path = "models/b.onnx", name = "A" }]',
         "models[1]", "has the same name as tool.epcontext.models[0]"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", name = "a/b" }]',
         "models[0].name", "cannot be the name of a folder"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", targets = ["x"] }]',
         "models[0].targets", '"x" is not a target'),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", targets = [] }]',
         "models[0].targets", "names no target"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", dims = { n = 0 } }]',
         "models[0].dims.n", "must be at least 1"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", shapes = { x = [-1] } }]',
         "models[0].shapes.x", "must not be negative"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", constants = { x = 1979-05-27 } }]',
         "models[0].constants.x", "must be a number"),
        ('provider = "cpu"\n[[models]]\npath = "models/a.onnx"\nconstants = { x = 1 }\nshapes = { x = [1] }',
         "models[0].shapes.x", "is frozen in constants"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", inputs = "twos" }]',
         "models[0].inputs", "no file or folder of inputs"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", tolerance = { cosine = 2 } }]',
         "models[0].tolerance.cosine", "is out of range"),
        ('provider = "cpu"\nmodels = [{ path = "models/a.onnx", tolerance = true }]',
         "models[0].tolerance", "must be a table or false"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\njobs = 0', "jobs", "must be at least 1"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\ntimeout = 0', "timeout", "must be more than 0"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\nmin-coverage = 2', "min-coverage", "from 0 to 1"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\noutput = "my-app"', "output", "a package's path"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\noutput = "../x"', "output", "a package's path"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\nwheel-tag = "x"', "wheel-tag", "must be a wheel tag"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\nembed = true', "embed", "makes no contexts"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\ndevice = "npu"', "device", "does not run on"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\nplatforms = ["a b"]', "platforms[0]", "platform tag"),
        ('provider = "cpu"\nmodels = ["models/a.onnx"]\nrequirements = ["a b"]',
         "requirements[0]", "is not a requirement"),
        ('provider = "qnn"\nmodels = ["models/a.onnx"]\nprovider-options = { htp_arch = 999 }',
         "provider-options.htp_arch", "must be one of 0, 68"),
        ('provider = "qnn"\nmodels = ["models/a.onnx"]\nprovider-options = { soc_model = 60, htp_arch = 75 }',
         "provider-options.htp_arch", "soc_model 60 has HTP architecture 73"),
        ('models = ["models/a.onnx"]\nembed = true\n[targets.q]\nprovider = "qnn"',
         "embed", "belongs to a target"),
        ('models = ["models/a.onnx"]\ndefault-targets = ["z"]\n[targets.q]\nprovider = "qnn"',
         "default-targets", '"z" is not a target'),
        ('models = ["models/a.onnx"]\n[targets.source]\nprovider = "qnn"',
         "targets.source", "stands for the source model"),
        ('models = ["models/a.onnx"]\n[targets.Q]\nprovider = "qnn"\n[targets.q]\nprovider = "qnn"',
         "targets.q", "has the same name as"),
        ('models = ["models/a.onnx"]\n[targets.q]\nembed = true', "targets.q.provider", "is required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_key(
    project: Path, toml: str, where: str, what: str
) -> None:
    found = problems(project, toml)
    assert where in found
    assert what in found[where].what
    assert len(found) == 1


def test_every_error_is_told_at_once_whatever_its_kind(project: Path) -> None:
    toml = """
    jobs = 0
    fallback = "x"
    provider = "qn"
    unknown = 1
    models = ["nope.onnx", 3, { path = "models/a.onnx", dims = { n = "1" } }]
    """
    assert problems(project, toml, JOB="1").keys() == {
        "HATCH_EPCONTEXT_JOB",
        "jobs",
        "fallback",
        "provider",
        "unknown",
        "models[0]",
        "models[1]",
        "models[2].dims.n",
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested tables and lists."""
    yield path
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inside, dict | list):
            yield from places(inside, (*path, key))
        else:
            yield (*path, key)


def mangle(project: Path, good: dict[str, Any]) -> None:
    """Load ``good`` two thousand times with one thing in it replaced: only a ConfigError may be raised."""
    rng = random.Random(20240229)
    odd = [-1, 0, 1.5, 10**30, "", "x", "../x", "*", "[", "\0", "x" * 300, True, [], [1], [{}], {}]
    odd += [[[1]], {"a": 1}, {"": 1}, date(2020, 1, 1), float("nan"), float("inf")]
    everywhere = [path for path in places(good) if path]
    for _ in range(2000):
        table = copy.deepcopy(good)
        path = rng.choice(everywhere)
        inside = table
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = rng.choice(odd)
        with contextlib.suppress(ConfigError):
            load(project, table, {}, {})


def test_no_configuration_ends_in_anything_but_its_errors(project: Path) -> None:
    mangle(project, parse(LONG))


def test_a_problem_of_a_shared_target_is_told_once(project: Path) -> None:
    toml = """
    models = ["models/a.onnx", "models/b.onnx"]
    [targets.q]
    provider = "qnn"
    provider-options = { soc_model = 60, htp_arch = 75 }
    """
    assert list(problems(project, toml)) == ["targets.q.provider-options.htp_arch"]


def test_a_model_without_a_wanted_target_is_still_a_fallback(project: Path) -> None:
    config = read(project, LONG.replace('fallback = "none"', ""), None, TARGETS="cpu")
    first, second = config.models
    assert [target.name for target in first.targets] == ["cpu"]
    assert second.targets == ()


def test_an_unknown_target_in_the_environment(project: Path) -> None:
    assert "HATCH_EPCONTEXT_TARGETS" in problems(project, SHORT, TARGETS="npu")


def test_the_hooks_table_is_hatchs(project: Path) -> None:
    reserved = {
        "dependencies": [],
        "enable-by-default": True,
        "require-runtime-dependencies": False,
    }
    assert read(project, SHORT, reserved).models
    with pytest.raises(ConfigError, match=r"hooks\.epcontext\.models\n.*not one of Hatch's keys"):
        read(project, SHORT, {"models": []})


def test_a_hook_that_is_switched_on_wants_its_table(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[tool\.epcontext\]\n.*is not in pyproject\.toml"):
        load(project, None, {}, {})

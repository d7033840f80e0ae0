"""Whole configurations."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.tables import ToleranceTable, ValidateTable
from hatch_epcontext.errors import ConfigError, Kind
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.providers import Tolerance
from tests.config.examples import (
    LONG,
    MODELS,
    SHORT,
    one,
    only_problem,
    problems,
    read,
)

CPU = 'targets.cpu.provider = "cpu"\n'

RTOL = ToleranceTable(rtol=0.1)


def test_the_short_form_is_one_target_named_after_its_provider(project: Path) -> None:
    config = read(project, SHORT)
    (model,) = config.models
    (target,) = model.targets
    settings = target.settings
    assert (model.name, model.path) == ("a", project / "models" / "a.onnx")
    assert target.name == target.provider.name == settings.provider == "qnn"
    assert settings.provider_options == {
        "backend_type": "htp",
        "soc_model": "60",
        "htp_arch": "73",
    }
    assert target.load_options == {"backend_type": "htp"}
    assert (settings.device, settings.optimization, settings.embed) == ("npu", "basic", False)
    assert target.min_coverage == 1.0
    assert (config.output, config.editable) == (None, "source")
    assert [model.fallback for model in config.models] == ["auto"] * len(config.models)
    assert (config.build.timeout, config.environment.no_cache) == (1800, False)
    assert config.wheel.tag == "auto"
    assert model.validate == ValidateTable(mode="auto", inputs="random")
    assert model.tolerance_for(target) == Tolerance(20, 0.99, unit=0.1)


def test_the_long_form(project: Path) -> None:
    config = read(project, LONG)
    assert config.output == PurePosixPath("my_app/models")
    assert (config.build.jobs, config.build.timeout) == (2, 60)
    assert {model.fallback for model in config.models} == {"none"}
    assert (config.editable, config.wheel.tag) == ("compile", "py3-none-win_arm64")
    first, second = config.models
    assert [target.name for target in first.targets] == ["x-elite", "cpu"]
    assert [target.name for target in second.targets] == ["x-elite"]
    assert first.dims == {"batch": 1}
    assert first.shapes == {"image": (1, 1, 28, 28)}
    assert first.constants == {"sr": 16000, "flags": [True, False]}
    assert first.validate == ValidateTable(mode="require", inputs="ones", tolerance=RTOL)
    (target,) = second.targets
    settings = target.settings
    assert settings.provider_options["enable_htp_fp16_precision"] == "1"
    assert settings.session_options == {"session.intra_op_num_threads": "1"}
    assert target.load_options == {"backend_type": "htp", "htp_performance_mode": "burst"}
    assert target.platforms == ("win_arm64",)
    assert target.requirements == ("onnxruntime-qnn==2.7.0",)
    assert (settings.optimization, settings.embed, target.min_coverage) == ("extended", True, 0.9)
    assert second.validate == ValidateTable(mode="auto", inputs="random", tolerance=False)
    assert second.tolerance_for(target) is None


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
    # The second model is not for the CPU, and with this fallback its source is not shipped.
    assert [model.name for model in config.models] == ["first"]
    assert (config.build.jobs, config.build.timeout, config.editable) == (1, 5, "skip")
    # The variable replaces only the mode.
    assert config.models[0].validate == ValidateTable(
        mode="structure", inputs="ones", tolerance=RTOL
    )
    assert (config.environment.cache_dir, config.environment.no_cache) == (tmp_path, True)
    assert "HATCH_EPCONTEXT_TARGETS=cpu" in config.environment.overrides


@pytest.mark.parametrize("text", ["apache 2", "MIT AND", ""])
def test_a_license_that_is_no_expression_is_an_error(project: Path, text: str) -> None:
    toml = f'{CPU}models = [{{ path = "models/a.onnx", license = "{text}" }}]'
    ((location, found),) = problems(project, toml).items()
    assert (location, found.kind) == ("models[0].license", Kind.INVALID_VALUE)
    assert "an SPDX license expression" in found.text()


def test_every_problem_of_any_kind_is_reported_at_once(project: Path) -> None:
    toml = """
    fallback = "x"
    targets.qn.provider = "qn"
    unknown = 1
    models = ["nope.onnx", 3, { path = "models/a.onnx", dims = { n = "1" } }]
    build = { jobs = 0 }
    """
    assert problems(project, toml, JOB="1").keys() == {
        "HATCH_EPCONTEXT_JOB",
        "build.jobs",
        "fallback",
        "targets.qn.provider",
        "unknown",
        "models[0]",
        "models[1]",
        "models[2].dims.n",
    }


def test_a_problem_of_a_target_that_models_share_is_reported_once(project: Path) -> None:
    toml = """
    models = ["models/a.onnx", "models/b.onnx"]
    [targets.q]
    provider = "qnn"
    provider-options = { soc_model = 60, htp_arch = 75 }
    """
    with pytest.raises(ConfigError) as raised:
        read(project, toml)
    locations = [problem.location for problem in raised.value.problems]
    assert locations == ["tool.epcontext.targets.q.provider-options.htp_arch"]


def test_a_model_without_a_selected_target_is_still_a_fallback(project: Path) -> None:
    config = read(project, LONG.replace('fallback = "none"', ""), None, TARGETS="cpu")
    first, second = config.models
    assert [target.name for target in first.targets] == ["cpu"]
    assert second.targets == ()


def test_targets_can_come_from_the_cache(project: Path) -> None:
    toml = MODELS + '[targets.a]\nprovider = "cpu"\n[targets.b]\nprovider = "qnn"\n'
    a, b = read(project, toml, FROM_CACHE="b").models[0].targets
    assert (a.from_cache, b.from_cache) == (False, True)
    unknown = problems(project, toml, FROM_CACHE="c", NO_CACHE="1")
    assert unknown.keys() == {"HATCH_EPCONTEXT_FROM_CACHE"}
    with_both = problems(project, toml, FROM_CACHE="a", NO_CACHE="1")["HATCH_EPCONTEXT_FROM_CACHE"]
    assert "HATCH_EPCONTEXT_NO_CACHE" in with_both.message


def test_the_table_of_the_hook_has_only_the_keys_of_hatch(project: Path) -> None:
    reserved = {
        "dependencies": [],
        "enable-by-default": True,
        "require-runtime-dependencies": False,
    }
    assert read(project, SHORT, reserved).models
    with pytest.raises(
        ConfigError, match=r"hooks\.epcontext\.models: EPC001\n.*not one of Hatch's"
    ):
        read(project, SHORT, {"models": []})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, r"\[tool\.epcontext\]: EPC025\n.*is missing in pyproject\.toml"),
        (3, r"tool\.epcontext: EPC003\n.*must be a table"),
        ([], r"tool\.epcontext: EPC003\n.*must be a table"),
    ],
)
def test_a_hook_that_is_switched_on_needs_its_table(
    project: Path, table: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(project, table, {}, {})
    assert len(raised.value.problems) == 1


def test_a_model_has_the_fallback_of_the_root_or_its_own(project: Path) -> None:
    toml = """
        targets.cpu.provider = "cpu"
        fallback = "none"
        models = [
            { path = "models/a.onnx" },
            { path = "models/a.onnx", name = "b", fallback = "source" },
        ]
    """
    config = read(project, toml)
    assert {model.name: model.fallback for model in config.models} == {"a": "none", "b": "source"}


def test_only_contexts_of_plugins_can_be_recompiled(project: Path) -> None:
    location, problem = only_problem(project, f"{CPU}targets.cpu.recompile = true\n")
    assert (location, problem.kind) == ("targets.cpu.recompile", Kind.NOT_APPLICABLE)
    models = 'models = [{ path = "models/a.onnx", targets = { qnn.recompile = true, cpu = {} } }]\n'
    (model,) = read(project, models + one("qnn") + one("cpu")).models
    assert [target.settings.recompile for target in model.targets] == [True, False]


def test_weight_sharing_groups_cannot_be_recompiled(project: Path) -> None:
    toml = """
        targets.qnn.provider = "qnn"
        targets.qnn.recompile = true
        models = [
            { path = "models/a.onnx", share-weights = "g" },
            { path = "models/a.onnx", name = "b", share-weights = "g" },
        ]
    """
    with pytest.raises(
        ConfigError, match="recompile = true lets the loader compile each by itself"
    ):
        plan(read(project, toml))


@pytest.mark.parametrize(
    ("place", "of_model", "elsewhere", "owner"),
    [
        ("models[0].embed", "embed = true", "", "[tool.epcontext.targets.<name>]"),
        ("models[0].targets.cpu.dims", "targets.cpu.dims.n = 1", "", "[[tool.epcontext.models]]"),
        ("targets.cpu.dims", "", "targets.cpu.dims.n = 1", "[[tool.epcontext.models]]"),
        ("jobs", "", "jobs = 1", "[tool.epcontext.build]"),
        ("targets.cpu.output", "", 'targets.cpu.output = "a"', "[tool.epcontext]"),
    ],
)
def test_a_key_of_another_table_says_where_it_belongs(
    project: Path, place: str, of_model: str, elsewhere: str, owner: str
) -> None:
    model = ", ".join(filter(None, ('path = "models/a.onnx"', of_model)))
    found = problems(project, f"{CPU}{elsewhere}\nmodels = [{{ {model} }}]")
    ((location, problem),) = found.items()
    assert (location, problem.kind) == (place, Kind.UNKNOWN_KEY)
    assert problem.hint == f"It is a key of {owner}."


@pytest.mark.parametrize(
    ("name", "shown"), [('name = "digits", ', "digits, models/a.onnx"), ("", "models/a.onnx")]
)
def test_a_mistyped_key_of_a_model_names_the_model(project: Path, name: str, shown: str) -> None:
    toml = f'{CPU}models = [{{ path = "models/a.onnx", {name}fallback = 1, foo = 2 }}]\n'
    with pytest.raises(ConfigError) as raised:
        load(project, parse(toml), {}, {})
    for key in ("fallback", "foo"):
        assert f"tool.epcontext.models[0].{key} ({shown}): EPC" in str(raised.value)


def test_a_target_that_is_left_out_may_be_wrong(project: Path) -> None:
    toml = """
    targets.rtx = { provider = "tensorrt-rtx", chip = "rtx-40" }
    targets.npu = { provider = "qnn", device = "fpga", quantize = { inputs = "none.npz" }, mistyped = 1 }
    targets.other = { provider = "plugin", min-coverage = 2 }
    models = [{ path = "models/a.onnx", targets.npu.provider-options = { soc_model = "one" } }]
    """
    (model,) = read(project, toml, TARGETS="rtx").models
    assert [target.name for target in model.targets] == ["rtx"]
    wrong = problems(project, toml, TARGETS="npu")
    assert wrong.keys() >= {"targets.npu.device", "targets.npu.mistyped"}
    assert not any("other" in key for key in wrong)

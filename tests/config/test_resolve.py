"""Models and their targets, with what the models narrow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config import targets
from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.config.tables import TargetTable, ToleranceTable, ValidateTable
from hatch_epcontext.errors import ConfigError, Key, Kind
from hatch_epcontext.jobs import requirements
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.text import to_toml, toml_key
from tests.config.examples import LONG, PROFILE, one, problems, read, target


def test_a_model_narrows_its_targets(project: Path) -> None:
    x_elite, cpu = read(project, LONG).models[0].targets
    assert (cpu.settings.provider_options, cpu.settings.embed) == ({}, False)
    settings = x_elite.settings
    assert settings.provider_options["vtcm_mb"] == "8"
    assert settings.provider_options["soc_model"] == "60"
    assert (settings.optimization, settings.embed, x_elite.min_coverage) == ("none", False, 0.5)


def test_keys_of_a_target_are_settings_of_the_same_name(project: Path) -> None:
    own = {
        "optimization": "extended",
        "embed": True,
        "external_initializers": True,
        "unroll_limit": 7,
        "recompile": True,
        "dequantize": "all",
    }
    toml = "\n".join(f"{toml_key(name)} = {to_toml(value)}" for name, value in own.items())
    settings = read(project, 'models = ["models/a.onnx"]\n' + one("qnn", toml)).targets[0].settings
    assert {name: getattr(settings, name) for name in own} == own
    # Those with other names, or that other keys and the provider decide too.
    derived = {"provider", "ep", "library_module", "library_sha256", "provider_options", "device"}
    derived |= {"session_options", "static_shapes", "from_memory", "compile_with", "quantize"}
    fields = {field.name for field in dataclasses.fields(CompileSettings)}
    assert fields == own.keys() | derived | {"compute_capabilities"}


def test_a_model_is_compiled_for_the_targets_that_it_names(project: Path) -> None:
    targets = one("cpu") + one("cuda") + one("qnn")
    for written, names in (
        ('["qnn", "cpu"]', ["qnn", "cpu"]),
        ("{ qnn = { min-coverage = 0.9 }, cpu = false }", ["cuda", "qnn"]),
    ):
        toml = f'models = [{{ path = "models/a.onnx", targets = {written} }}]\n{targets}'
        assert [found.name for found in read(project, toml).models[0].targets] == names


def test_unknown_options_of_a_model_are_allowed_by_the_model_or_its_target(project: Path) -> None:
    toml = """
    models = [{ path = "models/a.onnx", targets.qnn = { provider-options.newer = 1, KEY } }]
    """
    allowed = "allow-unknown-options = true"
    for own, of_target in ((f", {allowed}", ""), ("", allowed)):
        config = read(project, toml.replace(", KEY", own) + one("qnn", of_target))
        assert config.targets[0].settings.provider_options["newer"] == "1"
    refused = toml.replace("KEY", "allow-unknown-options = false")
    found = problems(project, refused + one("qnn", "allow-unknown-options = true"))
    assert found.keys() == {"models[0].targets.qnn.provider-options.newer"}


@pytest.mark.parametrize("provider", ["tensorrt", "tensorrt-rtx"])
def test_profiles_become_options(project: Path, provider: str) -> None:
    found = target(
        project,
        one(provider, f"profiles = [{PROFILE}, {PROFILE}]"),
    )
    known = PROVIDERS[provider].profiles
    assert known is not None
    options = found.settings.provider_options
    assert [options[name] for name in known.names[::2]] == ["x:1x3,x:1x3", "x:32x3,x:32x3"]
    assert options.get("nv_multi_profile_enable", "1") == "1"
    assert found.load_options.keys().isdisjoint(known.names)


def test_the_profiles_of_a_model_are_those_of_its_target(project: Path) -> None:
    toml = f"""
models = [{{ path = "models/a.onnx", targets = {{ cpu = {{}}, gpu.profiles = [{PROFILE}] }} }}]
[targets.cpu]
provider = "cpu"
[targets.gpu]
provider = "tensorrt"
"""
    cpu, gpu = read(project, toml).models[0].targets
    assert (cpu.profiles, cpu.settings.provider_options) == ((), {})
    assert gpu.settings.provider_options["trt_profile_opt_shapes"] == "x:8x3"
    assert cpu.key_of("profiles") == Key() / "targets" / "cpu" / "profiles"
    assert gpu.key_of("profiles") == Key() / "models" / 0 / "targets" / "gpu" / "profiles"


def test_the_settings_that_choose_a_device(project: Path) -> None:
    openvino = one("openvino", 'device = "npu"\n')
    assert target(project, openvino).settings.device == "npu"


@pytest.mark.parametrize("keys", ["", "embed = false"])
def test_contexts_are_beside_the_model_by_default(project: Path, keys: str) -> None:
    assert target(project, one("qnn", keys)).settings.embed is False


@pytest.mark.parametrize(
    ("validate", "settings"),
    [
        ('"require"', ValidateTable(mode="require", inputs="random")),
        ("false", ValidateTable(mode=False, inputs="random")),
        ("{ tolerance = false }", ValidateTable(mode="auto", inputs="random", tolerance=False)),
        (
            '{ mode = "require", inputs = "ones", tolerance = { rtol = 0.1 } }',
            ValidateTable(mode="require", inputs="ones", tolerance=ToleranceTable(rtol=0.1)),
        ),
    ],
)
def test_validation_is_a_mode_or_a_table(
    project: Path, validate: str, settings: ValidateTable
) -> None:
    models = f'models = [{{ path = "models/a.onnx", validate = {validate} }}]'
    assert read(project, f'targets.cpu.provider = "cpu"\n{models}').models[0].validate == settings


LIBRARY = 'ep-name = "X"\nlibrary = "ep.so"\n'

SAMPLES: dict[str, tuple[str, str, Any]] = {
    "provider": ("QNNExecutionProvider", "", "qnn"),
    "provider_options": (
        "openvino", "provider-options = { load_config = { A = 1 } }", {"load_config": '{"A":1}'},
    ),
    "session_options": (
        "cpu", 'session-options = { "session.intra_op_num_threads" = 3 }',
        {"session.intra_op_num_threads": "3"},
    ),
    "device": ("openvino", 'device = "gpu"', "gpu"),
    "optimization": ("cpu", 'optimization = "all"', "all"),
    "static_shapes": ("cpu", "static-shapes = true", True),
    "embed": ("qnn", "embed = true", True),
    "external_initializers": ("cpu", "external-initializers = true", True),
    "unroll_limit": ("qnn", "unroll-limit = 0", 0),
    "recompile": ("qnn", "recompile = true", True),
    "dequantize": ("qnn", 'dequantize = "all"', "all"),
    "quantize": (
        "qnn", 'quantize = { inputs = "models", activation = "int8" }',
        "int8",
    ),
}  # fmt: skip
"""For each key of a target that is a field of `CompileSettings`: its TOML, and the value of the field."""


def test_each_key_that_decides_how_a_target_is_compiled_has_a_sample() -> None:
    keys = {field.name for field in dataclasses.fields(TargetTable)}
    fields = {field.name for field in dataclasses.fields(CompileSettings)}
    assert SAMPLES.keys() == keys & fields


@pytest.mark.parametrize("name", SAMPLES)
def test_each_key_that_decides_how_a_target_is_compiled_reaches_its_settings(
    project: Path, name: str
) -> None:
    (project / "ep.so").touch()
    provider, keys, value = SAMPLES[name]
    default = target(project, one(provider, LIBRARY if provider == "plugin" else ""))
    if name != "provider":
        assert getattr(default.settings, name) != value
    assert getattr(target(project, one(provider, keys)).settings, name) == value


def test_a_library_counts_by_its_content_and_not_by_its_path(project: Path) -> None:
    for folder, content in (("one", b"same"), ("two", b"same"), ("three", b"other")):
        (project / folder).mkdir()
        (project / folder / "ep.so").write_bytes(content)
    toml = one("plugin", 'ep-name = "X"\nlibrary = "{}/ep.so"')
    first, same, other = (
        target(project, toml.format(folder)).settings for folder in ("one", "two", "three")
    )
    assert first.library_sha256 == (
        "0967115f2813a3541eaef77de9d9d5773f1c0c04314b0bbfe4ff3b3b1c55b5d5"
    )
    assert first == same
    assert first != other
    assert first == dataclasses.replace(other, library_sha256=first.library_sha256)
    assert "ep.so" not in repr(first)


def test_a_library_is_read_once_for_all_models(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "ep.so").touch()
    read_files: list[Path] = []

    def sha256(path: Path) -> str:
        read_files.append(path)
        return "00"

    monkeypatch.setattr(targets, "file_sha256", sha256)
    toml = f'models = ["models/*.onnx"]\n[targets.plugin]\nprovider = "plugin"\n{LIBRARY}'
    hashes = [found.settings.library_sha256 for found in read(project, toml).targets]
    assert (hashes, read_files) == (["00", "00"], [project / "ep.so"])


def test_a_library_in_a_package_counts_by_its_name(project: Path) -> None:
    one_ep, other_ep = (
        target(project, one("plugin", f'library = "{name}"\nep-name = "X"')).settings
        for name in ("one_ep", "other_ep")
    )
    assert one_ep != other_ep
    assert (one_ep.library_module, one_ep.library_sha256) == ("one_ep", None)


ALL, SOME = (
    '{ path = "models/a.onnx", targets = { amd.optimization = "all", intel = {} } }',
    '{ path = "models/b.onnx", targets = { amd.optimization = "basic", intel = {} } }',
)


@pytest.mark.parametrize("models", [(ALL, SOME), (SOME, ALL)], ids=["first", "last"])
def test_the_order_of_models_does_not_change_the_requirements(
    project: Path, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provider, "unavailable", lambda *_: None)
    monkeypatch.setattr(requirements, "installed", lambda _: None)
    toml = f"""
models = [{", ".join(models)}]
[targets.amd]
provider = "directml"
[targets.intel]
provider = "openvino"
"""
    # Only the model with all optimizations needs DirectML itself.
    assert plan(read(project, toml.replace('"all"', '"basic"'))).jobs
    with pytest.raises(ConfigError) as raised:
        plan(read(project, toml))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.CONFLICTING_REQUIREMENTS
    assert "no single ONNX Runtime distribution fits all targets" in problem.message
    assert (
        "amd: onnxruntime-directml or onnxruntime-windowsml, intel: onnxruntime or"
        in problem.message
    )


def test_a_model_changes_some_targets_and_leaves_others_out(project: Path) -> None:
    toml = """
models = [{ path = "models/a.onnx", targets = { a.optimization = "all", c = false } }]
targets = { a.provider = "cpu", b.provider = "cpu", c.provider = "cpu" }
"""
    (model,) = read(project, toml).models
    assert [(target.name, target.settings.optimization) for target in model.targets] == [
        ("a", "all"),
        ("b", "basic"),
    ]


def test_a_model_of_a_glob_is_named_in_its_problems(project: Path) -> None:
    config = read(project, 'targets.cpu.provider = "cpu"\nmodels = ["models/*.onnx"]\n')
    assert [model.key.model for model in config.models] == ["models/a.onnx", "models/b.onnx"]


def test_a_model_can_switch_off_what_its_target_quantizes(project: Path) -> None:
    toml = """
    targets.qnn.provider = "qnn"
    targets.qnn.quantize = { inputs = "models" }
    models = ["models/a.onnx", { path = "models/b.onnx", targets.qnn.quantize = false }]
    """
    first, other = (model.targets[0] for model in read(project, toml).models)
    assert (first.settings.quantize, first.calibration) == ("uint16", str(project / "models"))
    assert (other.settings.quantize, other.calibration) == (None, "")


def test_an_empty_value_of_a_model_replaces_that_of_its_target(project: Path) -> None:
    toml = """
    targets.qnn = { provider = "qnn", platforms = ["win_arm64"], resources = { NPU = 1 } }
    models = [
        "models/a.onnx",
        { path = "models/b.onnx", targets.qnn = { platforms = [], resources = {} } },
    ]
    """
    first, other = (model.targets[0] for model in read(project, toml).models)
    assert (first.platforms, first.resources) == (("win_arm64",), {"NPU": 1})
    assert (other.platforms, other.resources) == ((), {})


def test_other_numbers_than_those_of_the_source_have_limits_of_their_own(project: Path) -> None:
    toml = """
    targets.qnn.provider = "qnn"
    models = [
        "models/a.onnx",
        { path = "models/a.onnx", name = "b", targets.qnn.dequantize = "all" },
        { path = "models/a.onnx", name = "c", targets.qnn.dequantize = "all", validate.tolerance.snr = 30 },
        # It is compared with its float form.
        { path = "models/a.onnx", name = "d", targets.qnn.dequantize = true },
    ]
    """
    models = read(project, toml).models
    limits = [model.tolerance_for(model.targets[0]) for model in models]
    assert [limit and (limit.snr, limit.cosine) for limit in limits] == [
        (20, 0.99),
        (15, 0.98),
        (30, 0.98),
        (20, 0.99),
    ]

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.examples import PROFILE, assert_one_problem, one, problems

CPU = 'targets.cpu.provider = "cpu"\n'


def model(keys: str) -> str:
    return f'{CPU}models = [{{ path = "models/a.onnx", {keys} }}]'


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        (f'{CPU}models = ["models/a.onnx", {{ path = "models/b.onnx", name = "A" }}]',
         "models[1]", 'has the same name as tool.epcontext.models[0] (models/a.onnx): "A"'),
        (model('name = "a/b"'), "models[0].name", "cannot be the name of a folder"),
        (model('name = "CON"'), "models[0].name", "cannot be the name of a folder"),
        (model('targets = ["x"]'), "models[0].targets", '"x" is not a target'),
        (model("targets = []"), "models[0].targets", "names no target"),
        (model("constants = { x = 1979-05-27 }"), "models[0].constants", "must be numbers"),
        (model("validate = { tolerance = { cosine = 2 } }"),
         "models[0].validate.tolerance.cosine", "must be from 0 to 1"),
        (model("validate = { tolerance = { rtol = -1 } }"),
         "models[0].validate.tolerance.rtol", "must be at least 0"),
        (model("validate = { tolerance = true }"),
         "models[0].validate.tolerance", "must be a table or false"),
        (model("cut = {}"), "models[0].cut", "names no tensor"),
        (model('cut = { outputs = ["y", "y"] }'), "models[0].cut.outputs", "must be different names"),
        (model('cut = { inputs = ["y"], outputs = ["y"] }'),
         "models[0].cut.outputs", "which is one of the inputs too"),
        (model('targets.cpu.quantize = { inputs = "no" }'),
         "models[0].targets.cpu.quantize.inputs", "there is no file or folder of inputs"),
        (model('targets.cpu.quantize = { inputs = "models", activation = "int4" }'),
         "models[0].targets.cpu.quantize.activation", 'must be "uint8"'),
        (model('targets.cpu = { quantize = { inputs = "models" }, dequantize = true }'),
         "models[0].targets.cpu.quantize", "set together with dequantize"),
        (model('targets.cpu.quantize = { activation = "int8" }'),
         "models[0].targets.cpu.quantize.inputs", "is required"),
        (model("targets.cpu.recompile = true"),
         "models[0].targets.cpu.recompile", "no contexts that the loader can compile"),
        (model('targets.cpu.device = "gpu"'), "models[0].targets.cpu.device", "does not run on"),
        (model('targets.cpu.provider = "x"'), "models[0].targets.cpu.provider", "not a known provider"),
        (model("targets.cpu.min-coverage = 2"), "models[0].targets.cpu.min-coverage", "must be from 0"),
        (model("targets.cpu.provider-options.x = 1"),
         "models[0].targets.cpu.provider-options.x", "is not an option of the cpu provider"),
        (model(f"targets.cpu.profiles = [{PROFILE}]"),
         "models[0].targets.cpu.profiles", "has no optimization profiles"),
        (model('targets.cpu.chip = "rtx-30"'), "models[0].targets.cpu.chip", "has no chips with names"),
        (model("targets.cpu.embd = true"), "models[0].targets.cpu.embd", "is not a known key"),
        (model("targets.npu = false"), "models[0].targets", '"npu" is not a target'),
        (model("targets.cpu = false"), "models[0].targets", "names no target"),
        (model('cut = { output = ["y"] }'), "models[0].cut.output", "is not a known key"),
        (model('validate = "always"'), "models[0].validate", 'must be a table or "auto" or "require"'),
        (model('validate = { mode = "always" }'),
         "models[0].validate.mode", 'must be "auto" or "require"'),
        (model("validate = { tolerances = false }"),
         "models[0].validate.tolerances", "is not a known key"),
    ],
)  # fmt: skip
def test_an_invalid_model_is_reported_with_its_key(
    project: Path, toml: str, location: str, message: str
) -> None:
    assert_one_problem(project, toml, location, message)


def test_what_contradicts_a_target_is_reported_where_it_is_written(project: Path) -> None:
    model = 'models = [{ path = "models/a.onnx", targets.npu.provider-options = %s }]\n'
    target = one("qnn", "provider-options = { soc_model = 60 }").replace(
        "[targets.qnn]", "[targets.npu]"
    )
    toml = model % "{ htp_arch = 75 }" + target
    location = "models[0].targets.npu.provider-options.htp_arch"
    assert_one_problem(project, toml, location, "soc_model 60 has the HTP architecture 73")
    # The target itself has one problem, however many models use it.
    toml = model % "{ vtcm_mb = 8 }" + target.replace("60", "-1")
    assert_one_problem(project, toml, "targets.npu.provider-options.soc_model", "must be")


def groups(first: str, second: str, provider: str = "qnn") -> str:
    return f"""
targets.{provider}.provider = "{provider}"
models = [
    {{ path = "models/a.onnx", share-weights = "{first}" }},
    {{ path = "models/b.onnx", share-weights = "{second}" }},
]
"""


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        (groups("x", "y"), "models[0].share-weights", "no other model is in the group"),
        (groups("a", "a"), "models[0].share-weights", '"a" is also the name of'),
        (groups("../x", "../x"), "models[0].share-weights", "cannot be the name of a folder"),
        (
            groups("x", "x", "cpu"),
            "models[0].share-weights",
            "none of the model's targets",
        ),
    ],
)
def test_an_invalid_weight_sharing_group_is_an_error(
    project: Path, toml: str, location: str, message: str
) -> None:
    assert message in problems(project, toml)[location].message

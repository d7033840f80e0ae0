from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext import api
from hatch_epcontext.api import (
    BuildError,
    ConfigError,
    InspectionError,
    Kind,
    ModelError,
    OutputError,
    ValidationStatus,
    compile_models,
    compile_to_bytes,
    validate_context,
)
from hatch_epcontext.graph.dtypes import Array
from hatch_epcontext.worker.compiling import compile_context
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.session import context_options, open_session
from tests.conftest import needs_qnn
from tests.models import network, save, save_with_data
from tests.worker.actions.test_compile import X_ELITE, target

OPTIONS = {"soc_model": 60, "htp_arch": 73}
X = {"x": np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(network(), tmp_path / "models" / "net.onnx")


def test_importing_the_api_loads_no_heavy_package() -> None:
    code = "import hatch_epcontext.api, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"onnx", "onnxruntime", "numpy", "click", "tomlkit"}
    assert not heavy & set(json.loads(done.stdout))


def test_all_names_exist_and_are_documented() -> None:
    for name in api.__all__:
        assert getattr(api, name).__doc__


def test_a_model_is_compiled_validated_and_written(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    result = compile_models(source, tmp_path / "out", "cpu", dims={"batch": 2}, log=lines.append)
    assert result.files == (tmp_path / "out" / "net_optimized.onnx",)
    (job,) = result.report.jobs
    assert job.models[0].validation.status is ValidationStatus.RAN
    assert lines[0].startswith("net -> cpu (cpu): ")
    with pytest.raises(OutputError, match="exists already"):
        compile_models(source, tmp_path / "out", "cpu")
    again = compile_models(source, tmp_path / "out", "cpu", dims={"batch": 2}, overwrite=True)
    assert again.report.jobs[0].cached


def test_models_can_have_names(source: Path, tmp_path: Path) -> None:
    models = {"first": source, "second": source}
    dims = {"first:batch": 1, "second:batch": 2}
    settings = {"static-shapes": True, "validate": False}
    result = compile_models(models, tmp_path, "cpu", dims=dims, settings=settings)
    assert [file.name for file in result.files] == [
        "first_optimized.onnx",
        "second_optimized.onnx",
    ]
    sizes = [
        onnx.load(file).graph.input[0].type.tensor_type.shape.dim[0].dim_value
        for file in result.files
    ]
    assert sizes == [1, 2]


def test_all_invalid_arguments_are_one_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        compile_models(
            [source],
            tmp_path / "out",
            "qnn",
            provider_options={"soc_modle": 60},
            dims={"batch": -1},
            settings={"min-coverage": 2},
        )
    kinds = {problem.kind for problem in raised.value.problems}
    assert kinds == {Kind.UNKNOWN_OPTION, Kind.INVALID_VALUE}
    assert len(raised.value.problems) == 3
    with pytest.raises(ConfigError, match="several models need a folder"):
        compile_models({"a": source, "b": source}, tmp_path / "a.onnx", "cpu")
    with pytest.raises(ConfigError):
        compile_models([], tmp_path / "a.onnx", "cpu")


@needs_qnn
def test_a_context_is_validated(source: Path, tmp_path: Path) -> None:
    context = tmp_path / "net_ctx.onnx"
    compile_models(source, context, "qnn", provider_options=OPTIONS, dims={"batch": 1})
    validated = validate_context(context, source=source)
    assert (validated.provider, validated.ep) == ("qnn", "QNNExecutionProvider")
    assert validated.validation.status is ValidationStatus.RAN
    assert [agreement.output for agreement in validated.validation.agreements] == ["y"]
    structure = validate_context(context, settings={"validate": "structure"})
    assert structure.validation.status is ValidationStatus.STRUCTURE
    with pytest.raises(InspectionError, match="soc_model"):
        validate_context(context, provider_options={"soc_model": 43})
    strict = {"validate.tolerance": {"atol": 0.0, "rtol": 0.0}}
    with pytest.raises(BuildError, match="differs from the CPU's"):
        validate_context(context, source=source, settings=strict)


def outputs(model: Path | bytes) -> Array:
    session = open_session(model, context_options(target("qnn", X_ELITE)))
    return run(session, X)["y"]


@needs_qnn
@pytest.mark.parametrize("external", [False, True])
def test_bytes_are_compiled_as_files_are(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "models" / "a.onnx"
    (save_with_data if external else save)(network(1), path)
    data = {"network.data": (path.parent / "network.data").read_bytes()} if external else {}
    contents = path.read_bytes()
    compile_context(path, tmp_path / "a_ctx.onnx", target("qnn", X_ELITE, embed=True))
    if external:
        (path.parent / "network.data").unlink()
    compiled = compile_to_bytes(contents, "QNNExecutionProvider", OPTIONS, data=data)

    def facts(model: onnx.ModelProto) -> list[tuple[str, list[str], list[str]]]:
        return [(node.op_type, [*node.input], [*node.output]) for node in model.graph.node]

    by_file = onnx.load(tmp_path / "a_ctx.onnx")
    in_memory = onnx.ModelProto.FromString(compiled)
    assert facts(in_memory) == facts(by_file)
    assert in_memory.metadata_props == by_file.metadata_props
    assert (outputs(compiled) == outputs(tmp_path / "a_ctx.onnx")).all()
    # Nothing was written beside the source.
    assert [file.name for file in path.parent.iterdir()] == ["a.onnx"]


@pytest.mark.parametrize(
    ("provider", "options", "more", "message"),
    [
        ("cpu", {}, {}, '"cpu" is not a provider that compiles contexts'),
        ("qn", {}, {}, 'Did you mean "qnn"'),
        ("qnn", {"soc_mdel": 60}, {}, "is not an option of the qnn provider"),
        ("qnn", {"soc_model": 60, "htp_arch": 75}, {}, "EPC018"),
        ("qnn", OPTIONS, {"device": "tpu"}, r"targets\.qnn\.device: EPC"),
        ("qnn", OPTIONS, {"optimization": "foo"}, r"targets\.qnn\.optimization: EPC"),
        ("qnn", OPTIONS, {"build.timeout": -1}, r"build\.timeout: EPC"),
    ],
)
def test_invalid_arguments_for_bytes_are_errors(
    provider: str, options: dict[str, int], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compile_to_bytes(b"", provider, options, settings=more)
    with pytest.raises(ModelError, match="is not an ONNX model") as raised:
        compile_to_bytes(b"text", "qnn", OPTIONS)
    assert raised.value.problems[0].location == "model -> qnn"


def test_paths_can_be_strings(source: Path, tmp_path: Path) -> None:
    inputs = source.parent / "x.npz"
    np.savez(inputs, x=np.ones((1, 1, 8, 8), np.float32))
    dims, settings = {"batch": 1}, {"validate.inputs": inputs}
    out = tmp_path / "out"
    for models in (str(source), [str(source)], {"net": str(source)}):
        result = compile_models(
            models, str(out), "cpu", dims=dims, settings=settings, overwrite=True
        )
        assert result.files == (out / "net_optimized.onnx",)
    validated = validate_context(
        str(result.files[0]), source=str(source), provider="cpu", dims=dims, settings=settings
    )
    assert validated.validation.status is ValidationStatus.RAN

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.cli.conftest import Cli
from tests.conftest import needs, needs_qnn
from tests.models import network, save, transformer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(network(), tmp_path / "models" / "net.onnx")


@pytest.fixture
def context(source: Path, tmp_path: Path) -> Path:
    """A context model that ONNX Runtime alone has made."""
    import onnxruntime_qnn

    # Registered for good in this process: another test may have done so.
    if not any(d.ep_name == "QNNExecutionProvider" for d in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(
            "QNNExecutionProvider", onnxruntime_qnn.get_library_path()
        )
    device = next(d for d in onnxruntime.get_ep_devices() if d.ep_name == "QNNExecutionProvider")
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(
        [device], {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"}
    )
    options.add_free_dimension_override_by_name("batch", 1)
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    path = tmp_path / "theirs" / "net_ctx.onnx"
    path.parent.mkdir()
    onnxruntime.ModelCompiler(options, str(source), graph_optimization_level=level).compile_to_file(
        str(path)
    )
    return path


@needs_qnn
def test_it_runs_and_agrees_with_its_source(cli: Cli, context: Path, source: Path) -> None:
    before = {path: path.read_bytes() for path in context.parent.iterdir()}
    told = cli("validate", context, "--source", source).stdout
    assert told.startswith(
        f"{context}: 1 context of QNNExecutionProvider, for soc_model 60, htp_arch 73, nothing left to "
        "the CPU, ran and agrees with the CPU (cosine 1.00000"
    )
    assert {path: path.read_bytes() for path in context.parent.iterdir()} == before


@needs_qnn
def test_without_a_source_nothing_is_compared_and_that_is_said(cli: Cli, context: Path) -> None:
    assert cli("validate", context).stdout.endswith("ran, outputs finite, not compared\n")


@needs_qnn
def test_what_is_not_run_is_not_called_proven(cli: Cli, context: Path) -> None:
    assert cli("validate", context, "--structure").stdout.endswith("structure checked, NOT run\n")
    answer = json.loads(cli("validate", context, "--json", "--structure").stdout)
    assert (answer["provider"], answer["validation"]["how"]) == ("qnn", "structure")


@needs_qnn
def test_what_disagrees_fails(cli: Cli, context: Path, source: Path) -> None:
    strict = ("--set", "tolerance={atol=0.0, rtol=0.0}")
    told = cli("validate", context, "-s", source, *strict, code=1).stderr
    assert "it is not proven" in told
    assert "disagrees with the CPU's" in told
    other = network()
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    save(other, source)
    assert "disagrees" in cli("validate", context, "-s", source, code=1).stderr


@needs_qnn
def test_another_model_is_no_source(cli: Cli, context: Path, tmp_path: Path) -> None:
    other = save(transformer(1), tmp_path / "other.onnx")
    told = cli("validate", context, "-s", other, code=1).stderr
    assert f"{other}: --shape x\n    is [1, 1, 8, 8], and the input has 1 x 1 x 256." in told


@needs_qnn
def test_another_chip(cli: Cli, context: Path) -> None:
    told = cli("validate", context, "-O", "soc_model=43", code=1).stderr
    assert "soc_model = 43 was asked for and the EP compiled for 60" in told
    cli("validate", context, "-O", "soc_model=60", "--structure")


@needs_qnn
def test_another_provider(cli: Cli, context: Path) -> None:
    told = cli("validate", context, "-p", "openvino", code=1).stderr
    assert "were made by 'QNNExecutionProvider', and not by OpenVINOExecutionProvider" in told
    told = cli("validate", context, "-p", "qnm", code=2).stderr
    assert "'qnm' is not a provider that exists here" in told
    assert 'Did you mean "qnn"?' in told


@needs_qnn
def test_a_sidecar_that_is_not_there_or_is_damaged(cli: Cli, context: Path) -> None:
    (sidecar,) = context.parent.glob("*.bin")
    sidecar.write_bytes(b"no blob")
    told = cli("validate", context, code=1).stderr
    assert "it is not proven" in told
    sidecar.unlink()
    assert f"needs the sidecar '{sidecar.name}'" in cli("validate", context, code=1).stderr


@needs_qnn
def test_a_sidecar_elsewhere(cli: Cli, context: Path) -> None:
    (sidecar,) = context.parent.glob("*.bin")
    shutil.move(sidecar, context.parent.parent / sidecar.name)
    made = onnx.load(context)
    for attribute in made.graph.node[0].attribute:
        if attribute.name == "ep_cache_context":
            attribute.s = f"../{sidecar.name}".encode()
    onnx.save(made, context)
    assert "and has it not" in cli("validate", context, code=1).stderr


@needs_qnn
def test_contexts_that_share_weights_do_not_crash_the_simulator(cli: Cli, tmp_path: Path) -> None:
    models = [save(transformer(n), tmp_path / f"m{n}.onnx") for n in (64, 1)]
    out = tmp_path / "out"
    cli("compile", *models, "-o", out, "-p", "qnn", "-O", "soc_model=60", "--share-weights", "-q")
    told = cli("validate", out / "m1_ctx.onnx", code=1).stderr
    assert "it shares m64_ctx_qnn.bin with m64_ctx.onnx" in told
    cli("validate", out / "m1_ctx.onnx", "--structure")


@needs_qnn
def test_what_was_frozen_has_to_be_said(cli: Cli, context: Path, source: Path) -> None:
    made = network()
    made.graph.input.append(helper.make_tensor_value_info("scale", onnx.TensorProto.FLOAT, []))
    made.graph.node[-1].output[0] = "before"
    made.graph.node.append(helper.make_node("Mul", ["before", "scale"], ["y"], "scaled"))
    save(made, source)
    told = cli("validate", context, "-s", source, code=1).stderr
    assert "the source takes 'scale'" in told
    assert "Say with --constant to which values they were frozen" in told
    cli("validate", context, "-s", source, "--constant", "scale=1.0")


@needs("onnxruntime_ep_openvino")
def test_where_its_ep_has_no_device_it_is_not_proven(cli: Cli, tmp_path: Path) -> None:
    path = save(
        onnx.helper.make_model(
            helper.make_graph(
                [
                    helper.make_node(
                        "EPContext",
                        ["x"],
                        ["y"],
                        "node",
                        domain="com.microsoft",
                        embed_mode=1,
                        ep_cache_context=b"blob",
                        source="OpenVINOExecutionProvider",
                    )
                ],
                "graph",
                [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])],
                [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4])],
            ),
            ir_version=8,
            opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ),
        tmp_path / "ov_ctx.onnx",
    )
    told = cli("validate", path, "-d", "gpu", code=1).stderr
    assert "OpenVINOExecutionProvider finds no device" in told


def test_an_optimized_graph_is_one_if_the_user_says_so(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    assert "has no EPContext node" in cli("validate", source, code=1).stderr
    made = tmp_path / "o.onnx"
    cli("compile", source, "-o", made, "-p", "cpu", "-q")
    told = cli("validate", made, "-p", "cpu", "-s", source, "--dim", "batch=1").stdout
    assert "optimized graph, ran and agrees with the CPU" in told


def test_what_is_no_model(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("text", encoding="utf-8")
    assert "is not an ONNX model" in cli("validate", tmp_path / "a.onnx", code=1).stderr
    assert "does not exist" in cli("validate", tmp_path / "b.onnx", code=2).stderr

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnxruntime
import pytest

from tests.cli.conftest import Cli, problems, scaled, zeroed
from tests.conftest import needs, needs_qnn
from tests.models import parsed, save, transformer


@pytest.fixture
def context(source: Path, tmp_path: Path) -> Path:
    """A context model that ONNX Runtime wrote without this package."""
    import onnxruntime_qnn

    # A library stays registered in the process: another test may have done it.
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
def test_a_context_runs_and_agrees_with_its_source(cli: Cli, context: Path, source: Path) -> None:
    before = {path: path.read_bytes() for path in context.parent.iterdir()}
    printed = cli("validate", context, "--source", source).stdout
    assert printed.startswith(
        f"{context}: 1 context of QNNExecutionProvider, for snapdragon-x-elite, nothing left to "
        "the CPU, agrees on synthetic inputs, simulator ("
    )
    assert {path: path.read_bytes() for path in context.parent.iterdir()} == before


@needs_qnn
@pytest.mark.parametrize(("name", "code"), [("Qnn", 0), ("QNN", 0), ("Hexagon", 1)])
def test_a_context_names_its_ep_as_the_ep_reads_it(
    cli: Cli, context: Path, source: Path, name: str, code: int
) -> None:
    """As other tools write it: qualcomm/ai-hub-models#315 and microsoft/onnxruntime#20926."""
    written = onnx.load(context)
    (node,) = written.graph.node
    next(each for each in node.attribute if each.name == "source").s = name.encode()
    # Other tools write no compatibility string.
    del written.metadata_props[:]
    onnx.save(written, context)
    result = cli("validate", context, "--source", source, code=code)
    if code:
        assert problems(result) == [f"{context}: EPC507"]
    else:
        assert "agrees on " in result.stdout


@needs_qnn
def test_limits_of_an_output_that_is_not_there_are_an_error(
    cli: Cli, context: Path, source: Path
) -> None:
    limits = "validate.tolerance={ outputs = { nope = { snr = 1 } } }"
    result = cli("validate", context, "--source", source, "--set", limits, code=1)
    assert [each.rpartition(" ")[2] for each in problems(result)] == ["EPC205"]
    assert "'nope'" in result.stderr


@needs_qnn
def test_an_artifact_has_one_shape(cli: Cli, context: Path, source: Path) -> None:
    several = "shapes=[{ x = [1, 1, 8, 8] }, { x = [2, 1, 8, 8] }]"
    result = cli("validate", context, "--source", source, "--set", several, code=2)
    assert problems(result) == ["--set shapes: EPC007"]


@needs_qnn
def test_what_is_not_compared_or_not_run_is_said(cli: Cli, context: Path) -> None:
    assert cli("validate", context).stdout.endswith(
        "ran, NOT compared (there is no source to compare with), simulator\n"
    )
    structure = ("validate", context, "--set", "validate=structure")
    assert cli(*structure).stdout.endswith("structure checked, NOT run\n")
    answer = json.loads(cli(*structure, "--json").stdout)
    assert (answer["provider"], answer["validation"]["status"]) == ("qnn", "structure")


@needs_qnn
def test_a_difference_from_the_source_is_an_error(cli: Cli, context: Path, source: Path) -> None:
    strict = ("--set", "validate.tolerance={atol=0.0, rtol=0.0}")
    differs = [f"{context}: EPC401"]
    assert problems(cli("validate", context, "-s", source, *strict, code=1)) == differs
    save(zeroed(), source)
    assert problems(cli("validate", context, "-s", source, code=1)) == differs


@needs_qnn
def test_a_source_with_other_inputs_is_an_error(cli: Cli, context: Path, tmp_path: Path) -> None:
    other = save(transformer(1), tmp_path / "other.onnx")
    result = cli("validate", context, "-s", other, code=1)
    assert problems(result) == [f"{other}: --set shapes.x: EPC206"]
    assert "[1, 1, 8, 8]" in result.stderr


@needs_qnn
def test_a_context_for_another_chip_is_an_error(cli: Cli, context: Path) -> None:
    printed = cli("validate", context, "-O", "soc_model=43", code=1).stderr
    assert "soc_model = 43 was requested, but the EP compiled for 60" in printed
    assert "\n    Its compatibility string is v2:" in printed
    cli("validate", context, "-O", "soc_model=60", "--set", "validate=structure")


@needs_qnn
def test_a_context_of_another_provider_is_an_error(cli: Cli, context: Path) -> None:
    result = cli("validate", context, "-p", "openvino", code=1)
    assert problems(result) == [f"{context}: EPC507"]
    assert "'QNNExecutionProvider'" in result.stderr
    result = cli("validate", context, "-p", "qnm", code=2)
    assert problems(result) == ["--provider: EPC008"]
    assert '"qnn"?' in result.stderr


@needs_qnn
def test_a_sidecar_that_is_damaged_missing_or_elsewhere_is_an_error(
    cli: Cli, context: Path
) -> None:
    (sidecar,) = context.parent.glob("*.bin")
    whole = sidecar.read_bytes()
    sidecar.write_bytes(b"no blob")
    (problem,) = problems(cli("validate", context, code=1))
    assert problem.endswith("EPC307")
    sidecar.unlink()
    assert f"the sidecar '{sidecar.name}'" in cli("validate", context, code=1).stderr
    (context.parent.parent / sidecar.name).write_bytes(whole)
    made = onnx.load(context)
    for attribute in made.graph.node[0].attribute:
        if attribute.name == "ep_cache_context":
            attribute.s = f"../{sidecar.name}".encode()
    onnx.save(made, context)
    assert problems(cli("validate", context, code=1)) == [f"{context}: EPC506"]


@needs_qnn
def test_contexts_that_share_weights_do_not_crash_the_simulator(cli: Cli, tmp_path: Path) -> None:
    models = [save(transformer(n), tmp_path / f"m{n}.onnx") for n in (64, 1)]
    out = tmp_path / "out"
    cli("compile", *models, "-o", out, "-p", "qnn", "-O", "soc_model=60", "--share-weights")
    printed = cli("validate", out / "m1_ctx.onnx", code=1).stderr
    assert "it shares m64_ctx_qnn.bin with m64_ctx.onnx" in printed
    cli("validate", out / "m1_ctx.onnx", "--set", "validate=structure")


@needs_qnn
def test_constants_must_be_given_again(cli: Cli, context: Path, source: Path) -> None:
    save(scaled(), source)
    result = cli("validate", context, "-s", source, code=1)
    (problem,) = problems(result)
    assert problem.endswith("EPC206")
    assert "'scale'" in result.stderr
    assert "Add --set constants.NAME=...\n" in result.stderr
    cli("validate", context, "-s", source, "--constant", "scale=1.0")


@needs("onnxruntime_ep_openvino")
def test_a_missing_device_is_an_error(cli: Cli, tmp_path: Path) -> None:
    attributes = 'embed_mode = 1, ep_cache_context = "blob", source = "OpenVINOExecutionProvider"'
    nodes = f"[node] y = com.microsoft.EPContext <{attributes}> (x)"
    made = parsed(f"(float[1, 4] x) => (float[1, 4] y) {{ {nodes} }}", check=False)
    path = save(made, tmp_path / "ov_ctx.onnx")
    (problem,) = problems(cli("validate", path, "--device", "gpu", code=1))
    assert problem.endswith("EPC106")


def test_an_optimized_graph_needs_its_provider(cli: Cli, source: Path, tmp_path: Path) -> None:
    assert problems(cli("validate", source, code=1)) == [f"{source}: EPC507"]
    made = tmp_path / "o.onnx"
    cli("compile", source, "-o", made, "-p", "cpu")
    printed = cli("validate", made, "-p", "cpu", "-s", source, "--dim", "batch=1").stdout
    assert "optimized graph, agrees on synthetic inputs" in printed


def test_what_a_comparison_leaves_open_is_a_warning(cli: Cli, tmp_path: Path) -> None:
    made = parsed("(float[1, 8] x) => (float[1, 8] y) { a = Abs (x) n = Neg (a) y = Sqrt (n) }")
    path = save(made, tmp_path / "a.onnx")
    run = cli("validate", path, "--source", path, "--provider", "cpu")
    assert "NOT compared, 1 output inconclusive" in run.stdout
    assert "the comparison of the output 'y' is inconclusive" in run.stderr

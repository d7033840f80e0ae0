"""Models whose numbers are changed, in whole builds."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from hatch_epcontext.errors import EpcontextError
from hatch_epcontext.jobs.notes import notes
from hatch_epcontext.jobs.report import describe_validation, summarize, validation_warnings
from hatch_epcontext.worker.results import Agreement, ValidationStatus
from tests.conftest import needs_qnn, newer_runtime
from tests.graph.test_dequantize import int4_blocks, recurrent
from tests.jobs.conftest import Run
from tests.models import network, save

CPU = """
targets.cpu.provider = "cpu"
[[models]]
path = "models/a.onnx"
dims = { batch = 1 }
"""

QUANTIZE = f'{CPU}targets.cpu.quantize = {{ inputs = "samples" }}\n'

QNN_ALONE = CPU.replace(
    'targets.cpu.provider = "cpu"',
    'targets.qnn.provider = "qnn"\ntargets.qnn.provider-options = { soc_model = 60 }',
)

QNN = f'{QNN_ALONE}targets.qnn.quantize = {{ inputs = "samples" }}\n'


def write_samples(folder: Path, seed: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(3):
        np.savez(folder / f"{index}.npz", x=rng.standard_normal((1, 1, 8, 8)).astype(np.float32))


def save_dynamic(project: Path, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """Save the network, or ``model``, with dynamic quantization as the project's model."""
    source = save(model or network(), project / "float.onnx")
    logging.disable(logging.WARNING)
    try:
        quantize_dynamic(source, project / "models" / "a.onnx")
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(project / "models" / "a.onnx")


@pytest.fixture
def run(run: Run, project: Path) -> Run:
    write_samples(project / "samples")
    return run


def test_a_model_is_quantized_for_its_samples(run: Run) -> None:
    (built,) = run(QUANTIZE).built
    (preparation,) = built.record.preparations
    assert preparation.precision == "quantized to uint16 with weights of uint8 (3 samples)"
    assert built.validations["a"].agreements


def test_the_samples_count_by_their_contents(run: Run, project: Path) -> None:
    run(QUANTIZE)
    (project / "samples").rename(project / "moved")
    assert run(QUANTIZE.replace("samples", "moved")).built[0].cached
    write_samples(project / "samples", seed=1)
    assert not run(QUANTIZE).built[0].cached


@newer_runtime
@pytest.mark.parametrize("which", ["true", '"all"'])
def test_dynamic_quantization_is_undone_and_compared_with_its_float_form(
    run: Run, project: Path, which: str
) -> None:
    source = save_dynamic(project)
    (built,) = run(f"{CPU}targets.cpu.dequantize = {which}").built
    (preparation,) = built.record.preparations
    assert preparation.precision == "dequantized (4 operators)"
    optimized = onnx.load(built.folder / "a_optimized.onnx")
    assert not {node.op_type for node in optimized.graph.node} & {"ConvInteger", "MatMulInteger"}
    (agreement,) = built.validations["a"].agreements
    assert agreement.max_abs < 1e-3
    integers = built.validations["a"].integers
    assert integers is not None
    assert 30 < (integers.snr or 0) < 100
    # What the source computes itself is not changed.
    assert onnx.load(project / "models" / "a.onnx") == source


@newer_runtime
def test_an_optimized_graph_with_dynamic_quantization_agrees_with_itself(
    run: Run, project: Path
) -> None:
    save_dynamic(project)
    (built,) = run(CPU).built
    assert built.validations["a"].integers is None
    assert "agrees on synthetic inputs" in describe_validation(built.validations["a"])


@needs_qnn
@newer_runtime
def test_dynamic_quantization_that_qnn_leaves_is_undone_at_last(run: Run, project: Path) -> None:
    save_dynamic(project, recurrent())
    toml = QNN_ALONE.replace("dims = { batch = 1 }", "")
    (built,) = run(toml).built
    (preparation,), (context,) = built.record.preparations, built.record.contexts
    assert preparation.precision == "dequantized (1 operator)"
    assert notes(built.search, built.attempt)[0].startswith(
        "unmodified: QNNExecutionProvider compiled no node"
    )
    assert context.coverage is not None
    assert not context.coverage.uncovered
    validation = built.validations["a"]
    assert validation.status is ValidationStatus.RAN
    assert "agrees with its float form" in describe_validation(validation)
    assert not list(validation_warnings("a", validation))
    (warning,) = validation_warnings(
        "a", replace(validation, integers=Agreement("y", 0.1, 0.9, 3.4))
    )
    assert "3 dB" in warning
    # Whoever validates the wheel again compares with the float form too.
    assert built.job.target.settings.dequantize is True
    assert "nodes, dequantized (1 operator), agrees with" in summarize(built, 1)
    (again,) = run(toml).built
    assert again.cached
    assert again.validations == built.validations
    # It is compared anew, and from the cache, with other limits.
    (other,) = run(f"{toml}validate = {{ tolerance = {{ snr = 5 }} }}").built
    assert other.cached
    assert other.validations["a"].integers == built.validations["a"].integers
    with pytest.raises(EpcontextError, match="compiled no node of the model"):
        run(f"{toml}targets.qnn.dequantize = false")


@needs_qnn
@newer_runtime
def test_weights_that_qnn_leaves_are_undone_by_the_key_that_it_names(
    run: Run, project: Path
) -> None:
    save(int4_blocks(), project / "models" / "a.onnx")
    toml = QNN_ALONE.replace("dims = { batch = 1 }", "")
    with pytest.raises(EpcontextError, match="DequantizeLinear") as raised:
        run(toml)
    assert 'targets.qnn.dequantize = "all"' in str(raised.value)
    (built,) = run(f'{toml}targets.qnn.dequantize = "all"').built
    (preparation,), (context,) = built.record.preparations, built.record.contexts
    assert preparation.precision == "dequantized (1 operator)"
    assert context.coverage is not None
    assert not context.coverage.uncovered
    assert built.validations["a"].status is ValidationStatus.RAN


@needs_qnn
def test_qnn_takes_the_whole_of_a_quantized_model(run: Run) -> None:
    (built,) = run(QNN).built
    (context,) = built.record.contexts
    assert context.coverage is not None
    assert not context.coverage.uncovered
    (preparation,) = built.record.preparations
    assert preparation.options == ("offload_graph_io_quantization = 0",)
    assert built.validations["a"].status is ValidationStatus.RAN

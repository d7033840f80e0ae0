from __future__ import annotations

import dataclasses
import re
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import BuildError, Kind, ModelError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.actions import prepare, validate
from hatch_epcontext.worker.comparison.runs import read_reference, write_reference
from hatch_epcontext.worker.requests import PrepareRequest, ValidateRequest
from hatch_epcontext.worker.results import Nearness, Validated, Validation, ValidationStatus
from hatch_epcontext.worker.session import context_options
from tests.conftest import needs_qnn
from tests.models import interrupted, network, parsed, save, with_weights_left_over
from tests.worker.actions.test_compile import MODEL, X_ELITE, compile_request, run_compile, target
from tests.worker.comparison.test_emulation import detector
from tests.worker.test_covered import variance

HALF = Tolerance(20, 0.99)


def built(
    made: onnx.ModelProto,
    provider: str,
    tmp_path: Path,
    *,
    constants: dict[str, Any] | None = None,
    inputs: str = "random",
    embed: bool = False,
) -> ValidateRequest:
    """Compile ``made``; returns a request to validate its artifact."""
    path = save(made, tmp_path / "models" / "a.onnx")
    dims = {"batch": 2} if "batch" in str(made.graph.input) else {}
    spec = Model("a", path, MODEL, dims, {}, constants or {}, ValidateTable(inputs=inputs))
    to = target(provider, X_ELITE if provider == "qnn" else {}, embed=embed)
    request = compile_request(spec, to, tmp_path)
    reply = run_compile(request)
    return ValidateRequest(spec, to, reply.contexts[0], request.folder, HALF)


def handled(request: ValidateRequest) -> Validated:
    """Compare with the source as it is now."""
    compares = request.tolerance is not None
    with temp_dir() as folder:
        source = prepare.handle(
            PrepareRequest(request.model, "none", str(folder), compares, emulated=False)
        )
        found = dataclasses.replace(request, reference=source.reference, ranges=source.ranges)
        return validate.handle(found)


def handle(request: ValidateRequest) -> Validation:
    return handled(request).validation


def square_root(output: str = "y") -> onnx.ModelProto:
    """A square root, which is NaN above 0."""
    return parsed(
        f"""(float[batch, 50] x) => (float[batch, 50] {output}) {{
            n = Neg (x)
            {output} = Sqrt (n) }}"""
    )


@needs_qnn
def test_a_context_is_run_and_compared(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    validated = handled(request)
    validation = validated.validation
    (agreement,) = validation.agreements
    assert agreement.output == "y"
    assert agreement.cosine is not None
    assert agreement.cosine > 0.999
    # The NPU computes in float16: with exactly the CPU's numbers, the CPU must have computed them.
    assert 0 < agreement.max_abs < 0.1
    assert validated.load is not None
    assert validated.load > 0
    assert validated.day == datetime.now(timezone.utc).date().isoformat()
    # The source's outputs in the file of its preparation are the same, and are what is compared.
    path = tmp_path / "prepared" / "reference.bin"
    recorded = validate.handle(dataclasses.replace(request, reference=str(path)))
    assert recorded.validation.agreements == validation.agreements
    found = read_reference(str(path))
    for run in found.runs:
        for outputs in run.outputs:
            np.negative(outputs["y"], out=outputs["y"])
    wrong = write_reference(found, tmp_path / "wrong.bin")
    (problem,) = validate.handle(dataclasses.replace(request, reference=wrong)).validation.problems
    assert "differs from the CPU's" in problem.message


@needs_qnn
@pytest.mark.parametrize(
    ("to_beat", "samples"),
    [(Nearness(70), 0), (Nearness(70, gap=10), 1), (Nearness(0), 3)],
    ids=["emulated", "run", "nearer"],
)
def test_an_artifact_is_run_only_as_long_as_it_may_be_nearer_than_another(
    to_beat: Nearness, samples: int, tmp_path: Path
) -> None:
    inputs, rng = tmp_path / "inputs", np.random.default_rng(0)
    inputs.mkdir()
    for number in range(3):
        np.savez(inputs / f"{number}.npz", x=rng.random((2, 1, 8, 8), np.float32))
    request = built(network(), "qnn", tmp_path, inputs=str(inputs))
    request = dataclasses.replace(request, to_beat=to_beat)
    source = prepare.handle(PrepareRequest(request.model, "none", str(tmp_path), compare=True))
    request = dataclasses.replace(request, reference=source.reference, prepared=source.path)
    validated = validate.handle(request)
    assert len(validated.validation.samples) == samples
    assert validated.beaten == (samples < 3)
    assert validated.runs == samples
    assert validated.validation.margin < 70


@needs_qnn
def test_the_smallest_floats_that_differ_are_named_whatever_is_to_be_beaten(tmp_path: Path) -> None:
    request = built(variance(), "qnn", tmp_path)
    source = prepare.handle(PrepareRequest(request.model, "none", str(tmp_path), compare=True))
    request = dataclasses.replace(request, reference=source.reference, prepared=source.path)
    (warning,) = validate.handle(request).validation.warnings
    assert warning.startswith("'x' above 260, such as 512, may")
    request = dataclasses.replace(request, to_beat=Nearness(-100))
    assert validate.handle(request).validation.warnings == (warning,)


@needs_qnn
def test_what_is_no_nearer_may_still_be_right_for_more_unusual_samples(tmp_path: Path) -> None:
    request = built(variance(), "qnn", tmp_path)
    source = prepare.handle(PrepareRequest(request.model, "none", str(tmp_path), compare=True))
    request = dataclasses.replace(request, reference=source.reference, prepared=source.path)
    whole = validate.handle(request)
    assert whole.unusual > 0
    for unusual in (whole.unusual, whole.unusual + 1):
        to_beat = Nearness(whole.validation.margin, unusual=unusual)
        validated = validate.handle(dataclasses.replace(request, to_beat=to_beat))
        assert validated.beaten == (unusual == whole.unusual)
        assert validated.beaten or validated.validation == whole.validation


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_several_partitions_are_counted_and_run(tmp_path: Path, embed: bool) -> None:
    request = built(interrupted(), "qnn", tmp_path, embed=embed)
    coverage = request.context.coverage
    assert coverage is not None
    assert (coverage.nodes, coverage.compiled, coverage.partitions) == (5, 4, 2)
    assert [node.op for node in coverage.uncovered] == ["Hardmax"]
    assert handle(request).agreements[0].max_abs < 0.05


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_what_a_suppression_reads_is_compared(tmp_path: Path, embed: bool) -> None:
    request = built(detector(), "qnn", tmp_path, embed=embed)
    assert {each.output for each in handle(request).agreements} == {"rows", "boxes", "scores"}
    other = detector()
    changed = numpy_helper.to_array(other.graph.initializer[0])[:, ::-1]
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), "w"))
    save(other, Path(request.model.path))
    (problem,) = handle(request).problems
    assert "'boxes' differs from the CPU's" in problem.message


def joined_head(*, wrong: bool = False) -> onnx.ModelProto:
    """Boxes and the scores of twelve classes, of which most have hardly any signal."""
    return parsed(
        """(float[1, 60, 16] x) => (float[1, 16, 60] y) {
            boxes = MatMul (x, w)
            logits = MatMul (x, v)
            moved = Add (logits, bias)
            scores = Sigmoid (moved)
            joined = Concat <axis = -1> (boxes, scores)
            y = Transpose <perm = [0, 2, 1]> (joined) }""",
        w=(16, 4),
        v=(16, 12),
        bias=np.linspace(0, -11, 12, dtype=np.float32) * (-1 if wrong else 1),
    )


@needs_qnn
def test_a_class_without_signal_beside_boxes_is_not_sensitive(tmp_path: Path) -> None:
    request = built(joined_head(), "qnn", tmp_path)
    request = dataclasses.replace(request, tolerance=dataclasses.replace(HALF, unit=0.1))
    validation = handle(request)
    assert validation.margin > 25
    save(joined_head(wrong=True), Path(request.model.path))
    (problem,) = handle(request).problems
    assert "of its scores" in problem.message


@needs_qnn
def test_a_source_model_instead_of_a_context_is_an_error(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    save(network(2), Path(request.folder) / request.context.model_file)
    with pytest.raises(Exception, match=r"(?i)compil"):
        handle(request)


@needs_qnn
def test_a_model_that_runs_on_the_cpu_instead_of_a_context_is_an_error(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    # With an open dimension the NPU takes no node, and all nodes would run on the CPU in silence.
    save(network("batch"), Path(request.folder) / request.context.model_file)
    with pytest.raises(
        BuildError, match="assigned no node of it to QNNExecutionProvider"
    ) as raised:
        handle(request)
    assert raised.value.problems[0].kind is Kind.WRONG_RESULT


@needs_qnn
def test_a_missing_sidecar_is_an_error(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    (Path(request.folder) / "a_ctx_qnn.bin").unlink()
    with pytest.raises(Exception, match="does not exist"):
        handle(request)


@needs_qnn
def test_outputs_that_differ_from_the_sources_are_a_result(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    other = network()
    weights = other.graph.initializer[2]
    changed = numpy_helper.to_array(weights) * np.float32(1.5)
    weights.CopyFrom(numpy_helper.from_array(changed, weights.name))
    save(other, Path(request.model.path))
    validation = handle(request)
    assert (validation.status, validation.differs) == (ValidationStatus.RAN, True)
    assert validation.margin == pytest.approx(9.5 - HALF.snr, abs=0.1)
    (problem,) = validation.problems
    assert problem.kind is Kind.OUTPUT_DIFFERS
    heading, row, *_ = problem.message.splitlines()
    assert heading == "the output 'y' differs from the CPU's:"
    assert row.split("  ") == ["", "y", "signal to noise", *[""] * 5, "9.5 dB", "at least 20 dB"]
    (setting,) = problem.settings
    assert str(setting).startswith(
        "tool.epcontext.models[0].validate.tolerance = { outputs = { y = {"
    )
    needed = setting.value["outputs"]["y"]
    # Those of other samples differ a little.
    needed = {"snr": needed["snr"] - 1}
    tolerance = dataclasses.replace(HALF, outputs={"y": needed})
    assert not handle(dataclasses.replace(request, tolerance=tolerance)).differs


def test_nan_is_an_error_unless_the_cpu_has_it_there_too(tmp_path: Path) -> None:
    request = built(square_root(), "cpu", tmp_path)
    assert handle(request).agreements[0].cosine == pytest.approx(1)
    uncompared = handle(dataclasses.replace(request, tolerance=None))
    assert re.search(r"has NaN or Inf in \d+ of 100 values\.", uncompared.problems[0].message)
    absolute = parsed("(float[batch, 50] x) => (float[batch, 50] y) { y = Abs (x) }")
    save(absolute, Path(request.model.path))
    (problem,) = handle(request).problems
    assert "where the CPU has none" in problem.message


def test_what_is_not_compared_has_the_values_that_the_app_keeps(tmp_path: Path) -> None:
    request = dataclasses.replace(built(square_root(), "cpu", tmp_path), tolerance=None)
    assert handle(request).differs
    keeps = dataclasses.replace(request.model.validate, ranges={"x": (-2.0, -1.0)})
    model = dataclasses.replace(request.model, validate=keeps)
    assert not handle(dataclasses.replace(request, model=model)).differs
    keeps = dataclasses.replace(keeps, ranges={"z": (-2.0, -1.0)})
    model = dataclasses.replace(request.model, validate=keeps)
    with pytest.raises(ModelError) as raised:
        handle(dataclasses.replace(request, model=model))
    assert raised.value.problems[0].kind is Kind.UNKNOWN_INPUT


def test_constants_are_fed_to_the_source(tmp_path: Path) -> None:
    text = "(float[batch, 3] x, float[1] scale) => (float[batch, 3] y) { y = Mul (x, scale) }"
    request = built(parsed(text), "cpu", tmp_path, constants={"scale": 3}, inputs="ones")
    assert [each.name for each in request.context.inputs] == ["x"]
    assert handle(request).agreements[0].max_abs == 0
    assert handle(dataclasses.replace(request, tolerance=None)).agreements == ()


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "double", "int8", "uint16", "int64", "bool", "string"]
)
@pytest.mark.parametrize("inputs", ["random", "ones", "zeros"])
def test_models_of_every_dtype_are_compiled_and_validated(
    tmp_path: Path, dtype: str, inputs: str
) -> None:
    made = parsed(f"({dtype}[3, 4] x) => ({dtype}[3, 4] y) {{ y = Identity (x) }}")
    (agreement,) = handle(built(made, "cpu", tmp_path, inputs=inputs)).agreements
    assert agreement.max_abs == 0


def test_a_source_that_cannot_be_run_is_a_model_error(tmp_path: Path) -> None:
    request = built(network(), "cpu", tmp_path)
    other = network()
    other.graph.initializer[2].dims[0] = 128
    other.graph.initializer[2].dims[1] = 20
    save(other, Path(request.model.path))
    with pytest.raises(
        ModelError, match="the source model itself cannot be run on the CPU"
    ) as raised:
        handle(request)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.SOURCE_FAILED
    # Nothing but another model helps one that ONNX Runtime cannot load.
    assert not problem.settings


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_initializers_outside_the_contexts_are_in_a_file_of_their_own(
    tmp_path: Path, embed: bool
) -> None:
    path = save(with_weights_left_over(), tmp_path / "models" / "a.onnx")
    spec = Model("a", path, MODEL)
    to = target("qnn", X_ELITE, embed=embed, external_initializers=True)
    request = compile_request(spec, to, tmp_path)
    reply = run_compile(request)
    names = {file.name for file in Path(request.folder).iterdir()}
    assert names == {"a_ctx.onnx", "a_ctx.data"} | (set() if embed else {"a_ctx_qnn.bin"})
    moved = shutil.move(request.folder, tmp_path / "elsewhere")
    validation = ValidateRequest(spec, to, reply.contexts[0], str(moved), HALF)
    assert [agreement.output for agreement in handle(validation).agreements] == ["y", "z"]
    (Path(moved) / "a_ctx.data").unlink()
    with pytest.raises(Exception, match=r"a_ctx\.data"):
        handle(validation)


def test_an_optimized_graph_can_have_external_initializers(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "models" / "a.onnx")
    to = target("cpu", external_initializers=True)
    request = compile_request(Model("a", path, MODEL), to, tmp_path)
    run_compile(request)
    data = Path(request.folder) / "a_optimized.data"
    # The matrix, but not the small tensors.
    assert data.stat().st_size == 256 * 10 * 4


@needs_qnn
def test_a_worker_has_a_user_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    to = target("qnn", X_ELITE)
    load_options = {**to.load_options, "profiling_file_path": "{user-cache}/profiles"}
    context_options(dataclasses.replace(to, load_options=load_options))
    assert (tmp_path / "user-cache" / "profiles").is_dir()


def test_other_outputs_than_the_source_has_are_an_error(tmp_path: Path) -> None:
    request = built(square_root(), "cpu", tmp_path)
    path = save(square_root("z"), tmp_path / "other" / "a.onnx")
    other = dataclasses.replace(request.model, path=path)
    with pytest.raises(ModelError, match="has the output 'y', and the source model does not"):
        handle(dataclasses.replace(request, model=other))

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.protocol import MeasureRequest, ModelSpec, ValidateRequest
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.compile import compile_job
from hatch_epcontext.worker.measure import measure
from hatch_epcontext.worker.session import context_options
from hatch_epcontext.worker.validate import validate
from tests.conftest import needs_qnn
from tests.models import interrupted, model, network, save, value, with_weights_left_over
from tests.worker.test_compile import X_ELITE, compile_request, target

STRICT = Tolerance(1e-3, 1e-4, 0.9999)
HALF = Tolerance(1e-2, 5e-2, 0.99)


def built(
    made: onnx.ModelProto,
    provider: str,
    tmp_path: Path,
    *,
    constants: dict[str, Any] | None = None,
    inputs: str = "random",
    embed: bool = False,
) -> ValidateRequest:
    """A request to validate what was compiled from ``made``."""
    path = save(made, tmp_path / "models" / "a.onnx")
    dims = {"batch": 2} if "batch" in str(made.graph.input) else {}
    spec = ModelSpec("a", str(path), "models[0]", dims, {}, constants or {}, inputs)
    to = target(provider, X_ELITE if provider == "qnn" else {}, embed=embed)
    request = compile_request(spec, to, tmp_path)
    reply = compile_job(request)
    return ValidateRequest(spec, to, reply.product, reply.contexts[0], request.folder, HALF)


def square_root() -> onnx.ModelProto:
    """NaN for whatever is below 0."""
    return model(
        [helper.make_node("Sqrt", ["x"], ["y"])],
        [value("x", ["batch", 50])],
        [value("y", ["batch", 50])],
    )


@needs_qnn
def test_a_context_is_run_and_compared(tmp_path: Path) -> None:
    (agreement,) = validate(built(network(), "qnn", tmp_path)).agreements
    assert agreement.output == "y"
    assert agreement.cosine is not None
    assert agreement.cosine > 0.999
    # The NPU computes in float16: exactly the CPU's numbers would mean that the CPU made them.
    assert 0 < agreement.max_abs < 0.1


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_several_partitions_are_counted_and_run(tmp_path: Path, embed: bool) -> None:
    request = built(interrupted(), "qnn", tmp_path, embed=embed)
    coverage = request.context.coverage
    assert coverage is not None
    assert (coverage.nodes, coverage.compiled, coverage.partitions) == (5, 4, 2)
    assert [node.op for node in coverage.left] == ["Hardmax"]
    assert validate(request).agreements[0].max_abs < 0.05


@needs_qnn
def test_a_source_model_in_a_contexts_place_is_found_out(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    save(network(2), Path(request.folder) / request.context.model_file)
    with pytest.raises(Exception, match=r"(?i)compil"):
        validate(request)


@needs_qnn
def test_a_model_for_the_cpu_in_a_contexts_place_is_found_out(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    # With an open dimension the NPU takes nothing, and all of it would quietly run on the CPU.
    save(network("batch"), Path(request.folder) / request.context.model_file)
    with pytest.raises(BuildError, match="no node of it went to QNNExecutionProvider"):
        validate(request)


@needs_qnn
def test_a_missing_sidecar_is_found_out(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    (Path(request.folder) / "a_ctx_qnn.bin").unlink()
    with pytest.raises(Exception, match="does not exist"):
        validate(request)


@needs_qnn
def test_a_contexts_numbers_are_compared_with_the_sources(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    other = network()
    other.graph.initializer[2].raw_data = other.graph.initializer[2].raw_data[::-1]
    save(other, Path(request.model.path))
    with pytest.raises(BuildError, match=r"disagrees with the CPU's: the largest difference is"):
        validate(request)


def test_an_optimized_graph_agrees_to_the_last_bits(tmp_path: Path) -> None:
    request = dataclasses.replace(built(network(), "cpu", tmp_path), tolerance=STRICT)
    (agreement,) = validate(request).agreements
    assert agreement.max_abs < 1e-5


def test_without_a_tolerance_it_is_run_and_not_compared(tmp_path: Path) -> None:
    request = dataclasses.replace(built(network(), "cpu", tmp_path), tolerance=None)
    assert validate(request).agreements == ()


def test_nan_is_refused_unless_the_cpu_has_it_in_the_same_place(tmp_path: Path) -> None:
    request = built(square_root(), "cpu", tmp_path)
    assert validate(request).agreements[0].cosine == pytest.approx(1)
    with pytest.raises(BuildError, match=r"has NaN or Inf in \d+ of 100 places\."):
        validate(dataclasses.replace(request, tolerance=None))


def test_nan_where_the_cpu_has_none_is_refused(tmp_path: Path) -> None:
    request = built(square_root(), "cpu", tmp_path)
    absolute = model(
        [helper.make_node("Abs", ["x"], ["y"])],
        [value("x", ["batch", 50])],
        [value("y", ["batch", 50])],
    )
    save(absolute, Path(request.model.path))
    with pytest.raises(BuildError, match="where the CPU has none"):
        validate(request)


def test_frozen_inputs_are_fed_to_the_source(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        [value("x", ["batch", 3]), value("scale", [1])],
        [value("y", ["batch", 3])],
    )
    request = built(made, "cpu", tmp_path, constants={"scale": 3}, inputs="ones")
    assert [each.name for each in request.context.inputs] == ["x"]
    assert validate(request).agreements[0].max_abs == 0


def test_what_onnxs_test_data_recorded_counts_too(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    x = np.full((2, 50), 4, np.float32)
    onnx.save_tensor(numpy_helper.from_array(x, "x"), data / "input_0.pb")
    onnx.save_tensor(numpy_helper.from_array(np.sqrt(x), "y"), data / "output_0.pb")
    request = built(square_root(), "cpu", tmp_path, inputs=str(data))
    assert validate(request).agreements[0].max_abs == 0
    onnx.save_tensor(numpy_helper.from_array(x, "y"), data / "output_0.pb")
    with pytest.raises(BuildError, match="disagrees with what was recorded"):
        validate(request)


def test_a_source_that_cannot_be_run_is_the_users_to_mend(tmp_path: Path) -> None:
    request = built(network(), "cpu", tmp_path)
    other = network()
    other.graph.initializer[2].dims[0] = 128
    other.graph.initializer[2].dims[1] = 20
    save(other, Path(request.model.path))
    with pytest.raises(ModelError, match="the source model itself cannot be run on the CPU"):
        validate(request)


@needs_qnn
def test_loading_is_measured_side_by_side(tmp_path: Path) -> None:
    request = built(network(), "qnn", tmp_path)
    (prepared,) = (tmp_path / "prepared").glob("folded-*/a.onnx")
    times = measure(
        MeasureRequest(
            str(prepared), request.target, request.product, request.context, request.folder
        )
    )
    assert times.load_source > 0
    assert times.load_context > 0


@pytest.mark.parametrize(
    "dtype", ["FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT16", "INT64", "BOOL", "STRING"]
)
@pytest.mark.parametrize("inputs", ["random", "ones", "zeros"])
def test_models_of_every_dtype_go_all_the_way(tmp_path: Path, dtype: str, inputs: str) -> None:
    elem_type = onnx.TensorProto.DataType.Value(dtype)
    made = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", [3, 4], elem_type)],
        [value("y", [3, 4], elem_type)],
    )
    (agreement,) = validate(built(made, "cpu", tmp_path, inputs=inputs)).agreements
    assert agreement.max_abs == 0


@needs_qnn
@pytest.mark.parametrize("embed", [False, True])
def test_what_is_left_outside_lies_in_a_file_of_its_own(tmp_path: Path, embed: bool) -> None:
    path = save(with_weights_left_over(), tmp_path / "models" / "a.onnx")
    spec = ModelSpec("a", str(path), "m")
    to = dataclasses.replace(target("qnn", X_ELITE, embed=embed), external_initializers=100)
    request = compile_request(spec, to, tmp_path)
    reply = compile_job(request)
    names = {file.name for file in Path(request.folder).iterdir()}
    assert names == {"a_ctx.onnx", "a_ctx.data"} | (set() if embed else {"a_ctx_qnn.bin"})
    moved = shutil.move(request.folder, tmp_path / "elsewhere")
    asked = ValidateRequest(spec, to, reply.product, reply.contexts[0], str(moved), HALF)
    assert [agreement.output for agreement in validate(asked).agreements] == ["y", "z"]
    (Path(moved) / "a_ctx.data").unlink()
    with pytest.raises(Exception, match=r"a_ctx\.data"):
        validate(asked)


def test_an_optimized_graph_may_have_its_weights_outside(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "models" / "a.onnx")
    to = dataclasses.replace(target("cpu"), external_initializers=1000)
    request = compile_request(ModelSpec("a", str(path), "m"), to, tmp_path)
    compile_job(request)
    data = Path(request.folder) / "a_optimized.data"
    # The matrix, and not the small ones.
    assert data.stat().st_size == 256 * 10 * 4


@needs_qnn
def test_a_folder_in_the_users_cache_is_one_of_the_workers_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    to = target("qnn", X_ELITE)
    load_options = {**to.load_options, "profiling_file_path": "{user-cache}/profiles"}
    context_options(dataclasses.replace(to, load_options=load_options), "context")
    assert (tmp_path / "user-cache" / "profiles").is_dir()

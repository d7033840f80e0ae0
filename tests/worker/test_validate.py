from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.protocol import CompileRequest, ModelSpec, ValidateRequest
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.compile import compile_job
from hatch_epcontext.worker.validate import compare, validate, within
from tests.conftest import needs_qnn
from tests.models import model, network, save, value
from tests.worker.test_compile import X_ELITE, target

STRICT = Tolerance(1e-3, 1e-4, 0.9999)
LOOSE = Tolerance()


def built(made: onnx.ModelProto, provider: str, tmp_path: Path) -> ValidateRequest:
    """A request to validate what was compiled from ``made``."""
    path = save(made, tmp_path / "models" / "a.onnx")
    folder, scratch = tmp_path / "made", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    spec = ModelSpec("a", str(path), "models[0]", {"batch": 2})
    to = target(provider, X_ELITE if provider == "qnn" else {})
    reply = compile_job(CompileRequest((spec,), to, str(folder), str(scratch)))
    return ValidateRequest(spec, to, reply.product, reply.contexts[0], str(folder), "random", LOOSE)


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
    assert agreement.cosine > 0.999
    # The NPU computes in float16: exactly the CPU's numbers would mean that the CPU made them.
    assert 0 < agreement.max_abs < 0.1


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
    path = save(made, tmp_path / "a.onnx")
    folder, scratch = tmp_path / "made", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    spec = ModelSpec("a", str(path), "models[0]", constants={"scale": 3})
    reply = compile_job(CompileRequest((spec,), target("cpu"), str(folder), str(scratch)))
    context = reply.contexts[0]
    assert [each.name for each in context.inputs] == ["x"]
    request = ValidateRequest(
        spec, target("cpu"), "optimized", context, str(folder), "ones", STRICT
    )
    assert validate(request).agreements[0].max_abs == 0


def test_inputs_that_do_not_fit_are_the_users_to_mend(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", z=np.zeros(1))
    request = built(network(), "cpu", tmp_path)
    with pytest.raises(ModelError, match="has no array for the input 'x'"):
        validate(dataclasses.replace(request, inputs=str(tmp_path / "inputs.npz")))


def agrees(output: list[float], reference: list[float], tolerance: Tolerance = LOOSE) -> bool:
    a, b = np.array(output), np.array(reference)
    return within(a, b, compare("y", a, b), tolerance)


def test_near_is_near_in_value_and_in_direction() -> None:
    assert agrees([1.0, 2.0], [1.005, 2.0])
    assert not agrees([1.0, 2.5], [1.0, 2.0])
    assert not agrees([0.005, 0.0], [0.0, 0.005]), "small, and at a right angle"


def test_the_absolute_part_grows_with_the_output() -> None:
    assert agrees([100.0, 0.5], [100.0, 0.0])
    assert not agrees([1.0, 0.5], [1.0, 0.0])


def test_all_zeros_agree_with_all_zeros_alone() -> None:
    assert agrees([0.0, 0.0], [0.0, 0.0])
    assert not agrees([0.0, 0.0], [0.001, 0.0])


def test_places_where_neither_is_finite_do_not_count() -> None:
    assert agrees([np.nan, 1.0], [np.nan, 1.0])
    assert agrees([np.inf], [np.inf])


def test_another_shape_is_refused() -> None:
    with pytest.raises(BuildError, match=r"has the shape \[2\], and \[1, 2\] on the CPU"):
        compare("y", np.zeros(2), np.zeros((1, 2)))

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.errors import BuildError, ModelError, Problem
from hatch_epcontext.protocol import (
    FOLDINGS,
    Folding,
    InspectRequest,
    ModelProfiles,
    ModelSpec,
    PrepareReply,
    PrepareRequest,
)
from hatch_epcontext.worker import graph
from hatch_epcontext.worker import prepare as prepare_module
from hatch_epcontext.worker.prepare import fix, inspect, prepare
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import (
    initializer_among_the_inputs,
    model,
    network,
    save,
    save_with_data,
    value,
    weights,
)


def two_inputs() -> onnx.ModelProto:
    """``y = x * scale``, with a shared dimension and a scalar-like input."""
    return model(
        [
            helper.make_node("Mul", ["x", "scale"], ["m"]),
            helper.make_node("Add", ["m", "z"], ["y"]),
        ],
        [value("x", ["n", 4]), value("z", ["n", None]), value("scale", [1])],
        [value("y", ["n", 4])],
    )


def spec(**settings: Any) -> ModelSpec:
    return ModelSpec("a", "a.onnx", "models[0]", **settings)


def shapes(made: onnx.ModelProto) -> dict[str, list[int | str]]:
    return {
        each.name: [dim.dim_value or dim.dim_param for dim in each.type.tensor_type.shape.dim]
        for each in (*made.graph.input, *made.graph.output)
    }


def refused(made: onnx.ModelProto, **settings: Any) -> Problem:
    with pytest.raises(ModelError) as raised:
        fix(made, spec(**settings))
    (problem,) = raised.value.problems
    return problem


def test_dims_are_fixed_wherever_they_appear() -> None:
    made = two_inputs()
    fix(made, spec(dims={"n": 3}))
    assert shapes(made) == {"x": [3, 4], "z": [3, ""], "scale": [1], "y": [3, 4]}


def test_a_whole_shape_fixes_its_dims_everywhere_else_too() -> None:
    made = two_inputs()
    fix(made, spec(shapes={"z": (2, 4)}))
    assert shapes(made) == {"x": [2, 4], "z": [2, 4], "scale": [1], "y": [2, 4]}


def test_constants_become_initializers_of_the_inputs_dtype() -> None:
    made = two_inputs()
    fix(made, spec(constants={"scale": 2}))
    assert [each.name for each in made.graph.input] == ["x", "z"]
    (stored,) = made.graph.initializer
    array = numpy_helper.to_array(stored)
    assert array.dtype == np.float32
    assert array.tolist() == [2.0]


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        ({"dims": {"m": 1}}, "models[0].dims.m", "has no open dimension 'm'"),
        ({"shapes": {"w": (1,)}}, "models[0].shapes.w", "has no input 'w'"),
        ({"shapes": {"x": (1,)}}, "models[0].shapes.x", "is [1], and the input has n x 4"),
        ({"shapes": {"x": (1, 5)}}, "models[0].shapes.x", "is [1, 5], and the input has n x 4"),
        ({"shapes": {"x": (1, 4), "z": (2, 4)}}, "models[0].shapes.z", "makes 'n' 2, and elsewhere it is 1"),
        ({"dims": {"n": 2}, "shapes": {"x": (1, 4)}}, "models[0].shapes.x", "makes 'n' 1"),
        ({"constants": {"w": 1}}, "models[0].constants.w", "has no input 'w'"),
        ({"constants": {"scale": "x"}}, "models[0].constants.scale", "does not fit the input"),
        ({"constants": {"scale": [1, 2]}}, "models[0].constants.scale", "has the shape [2]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_told(
    settings: dict[str, Any], where: str, what: str
) -> None:
    problem = refused(two_inputs(), **settings)
    assert problem.where == where
    assert what in problem.what


def test_a_number_that_is_too_large_for_the_dtype_is_told() -> None:
    made = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", [1], TensorProto.INT8)],
        [value("y", [1], TensorProto.INT8)],
    )
    assert "does not fit the input, which is int8" in refused(made, constants={"x": 1000}).what


def request_for(path: Path, static: str = "", **settings: Any) -> InspectRequest:
    one = ModelSpec("a", str(path), "models[0]", **settings)
    return InspectRequest((one,), {"a": static} if static else {})


def test_inspection_tells_the_fixed_inputs_and_the_data(tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "a.onnx")
    (facts,) = inspect(request_for(path, "QNN", dims={"batch": 2})).models
    assert facts.inputs[0].shape == (2, 1, 8, 8)
    assert facts.outputs[0].shape == (2, 10)
    assert facts.external_data == ("network.data",)


def test_open_dimensions_are_fine_where_nobody_minds(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    (facts,) = inspect(request_for(path)).models
    assert facts.inputs[0].shape == ("batch", 1, 8, 8)


@pytest.mark.parametrize(
    ("batch", "fix_"),
    [("batch", "dims = { batch = 1 }"), (None, "shapes = { x = [1, 1, 8, 8] }")],
)
def test_an_open_dimension_is_told_with_what_to_write(
    tmp_path: Path, batch: str | None, fix_: str
) -> None:
    path = save(network(batch), tmp_path / "a.onnx")
    with pytest.raises(ModelError) as raised:
        inspect(request_for(path, "QNNExecutionProvider"))
    (problem,) = raised.value.problems
    assert "the input 'x' has an open dimension" in problem.what
    assert "QNNExecutionProvider compiles only what has fixed shapes" in problem.what
    assert fix_ in problem.fix


def test_every_models_problems_are_told_at_once(tmp_path: Path) -> None:
    good = save(network(1), tmp_path / "good.onnx")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"")
    specs = [ModelSpec(path.stem, str(path), path.stem) for path in (bad, good, bad)]
    with pytest.raises(ModelError) as raised:
        inspect(InspectRequest(tuple(specs), {}))
    assert [problem.where for problem in raised.value.problems] == ["bad", "bad"]


def run(
    path: Path, tmp_path: Path, folding: Folding, compare: bool = True, **settings: Any
) -> PrepareReply:
    folder = tmp_path / f"prepared-{folding}"
    folder.mkdir()
    one = ModelSpec("a", str(path), "models[0]", **settings)
    return prepare(PrepareRequest(one, folding, str(folder), compare))


@pytest.mark.parametrize("folding", FOLDINGS)
def test_a_prepared_model_has_its_data_and_the_source_is_as_it_was(
    tmp_path: Path, folding: Folding
) -> None:
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    reply = run(source, tmp_path, folding, dims={"batch": 1})
    assert Path(reply.path).is_relative_to(tmp_path / f"prepared-{folding}")
    assert shapes(onnx.load(reply.path, load_external_data=False))["x"] == [1, 1, 8, 8]
    x = np.ones((1, 1, 8, 8), np.float32)
    assert open_session(Path(reply.path), cpu_options()).run(None, {"x": x})[0].shape == (1, 10)
    assert (reply.nodes_before, reply.nodes, reply.control_flow) == (4, 4, ())
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before


@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize(
    "location", ["a.fixed.onnx", "folded/a.onnx", "folded/a.data", "a.onnx.data"]
)
def test_data_of_any_name_is_only_read(tmp_path: Path, folding: Folding, location: str) -> None:
    folder = tmp_path / "models"
    (folder / "folded").mkdir(parents=True)
    source = save_with_data(network(), folder / "a.onnx", location)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run(source, tmp_path, folding, dims={"batch": 1})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("compare", [True, False])
def test_a_model_beyond_the_limit_of_a_file_is_prepared_with_its_data_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folding: Folding, compare: bool
) -> None:
    monkeypatch.setattr(prepare_module, "PROTOBUF_LIMIT", 1000)
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    reply = run(source, tmp_path, folding, compare=compare, dims={"batch": 1})
    prepared = Path(reply.path)
    assert prepared.stat().st_size < 2000
    loaded = onnx.load(prepared, load_external_data=False)
    assert graph.external_data(loaded, prepared.parent, "a")
    x = {"x": np.ones((1, 1, 8, 8), np.float32)}
    expected = open_session(source, cpu_options()).run(None, x)[0]
    np.testing.assert_allclose(
        open_session(prepared, cpu_options()).run(None, x)[0], expected, 1e-4
    )


def choosing() -> onnx.ModelProto:
    """``y = x + w if rate == 16000 else relu(x)``, with ``w`` of the outer graph, and a ``Loop``."""
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["t"])], "then", [], [value("t", [2])]
    )
    other = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["e"])], "else", [], [value("e", [2])]
    )
    body = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "w"], ["sum"]),
            helper.make_node("Identity", ["on"], ["on_"]),
        ],
        "body",
        [
            value("i", [], TensorProto.INT64),
            value("on", [], TensorProto.BOOL),
            value("carried", [2]),
        ],
        [value("on_", [], TensorProto.BOOL), value("sum", [2])],
    )
    return model(
        [
            helper.make_node("Equal", ["rate", "wanted"], ["c"]),
            helper.make_node("If", ["c"], ["chosen"], then_branch=then, else_branch=other),
            helper.make_node("Loop", ["times", "", "chosen"], ["y"], body=body),
        ],
        [value("x", [2]), value("rate", [], TensorProto.INT64)],
        [value("y", [2])],
        [
            weights("w", 2),
            numpy_helper.from_array(np.array(16000), "wanted"),
            numpy_helper.from_array(np.array(3), "times"),
        ],
    )


def test_a_frozen_condition_is_folded_away(tmp_path: Path) -> None:
    path = save(choosing(), tmp_path / "a.onnx")
    reply = run(path, tmp_path, "onnxruntime", constants={"rate": 16000})
    assert reply.control_flow == ("Loop",)
    assert run(path, tmp_path, "none", constants={"rate": 16000}).control_flow == ("If", "Loop")


@pytest.mark.parametrize("folding", FOLDINGS)
def test_initializers_among_the_inputs(tmp_path: Path, folding: Folding) -> None:
    made = initializer_among_the_inputs()
    assert run(save(made, tmp_path / "a.onnx"), tmp_path, folding).nodes == 1


@pytest.mark.parametrize("opset", [7, 11, 13, 18, 21])
def test_opsets_old_and_new(tmp_path: Path, opset: int) -> None:
    made = network(1)
    made.opset_import[0].version = opset
    path = save(made, tmp_path / "a.onnx")
    for folding in FOLDINGS:
        assert run(path, tmp_path, folding).nodes == 4


def test_folding_must_not_change_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(made: onnx.ModelProto) -> onnx.ModelProto:
        changed = numpy_helper.to_array(made.graph.initializer[2]) * 1.5
        made.graph.initializer[2].CopyFrom(numpy_helper.from_array(changed, "dense"))
        return made

    monkeypatch.setattr(onnxslim, "slim", wrong)
    path = save(network(1), tmp_path / "a.onnx")
    with pytest.raises(BuildError, match="disagrees with the source model's"):
        run(path, tmp_path, "onnxslim")


def test_inputs_that_do_not_fit_are_told_on_inspection(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    np.savez(tmp_path / "inputs.npz", z=np.zeros(1))
    with pytest.raises(ModelError, match="has no array for the input 'x'"):
        inspect(request_for(path, inputs=str(tmp_path / "inputs.npz")))


@pytest.mark.parametrize("folding", FOLDINGS)
def test_a_source_that_cannot_be_run_is_told_before_anything_is_folded(
    tmp_path: Path, folding: Folding
) -> None:
    made = network(1)
    del made.graph.initializer[2].dims[:]
    made.graph.initializer[2].dims.extend([128, 20])
    path = save(made, tmp_path / "a.onnx")
    with pytest.raises(ModelError, match="the source model itself cannot be run on the CPU"):
        run(path, tmp_path, folding)


def fitting(path: Path, *profiles: dict[str, dict[str, list[int]]]) -> list[Problem]:
    """What is wrong with profiles for the model at ``path``, whose input ``x`` is batch x 1 x 8 x 8."""
    request = InspectRequest(
        (ModelSpec("a", str(path), "m"),), {}, (ModelProfiles("a", "t.profiles", profiles),)
    )
    try:
        inspect(request)
    except ModelError as error:
        return list(error.problems)
    return []


def test_profiles_have_to_fit_the_inputs(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")

    def shapes(*sizes: int) -> dict[str, list[int]]:
        return {bound: [*sizes] for bound in ("min", "opt", "max")}

    assert not fitting(path, {"x": shapes(1, 1, 8, 8)}, {"x": shapes(9, 1, 8, 8)})
    wrong_size = fitting(path, {"x": shapes(1, 1, 8, 9)})
    assert [problem.where for problem in wrong_size] == ["t.profiles[0].x"] * 3
    assert wrong_size[0].what == "min is [1, 1, 8, 9], and the input has batch x 1 x 8 x 8."
    assert len(fitting(path, {"x": shapes(1, 1, 8)})) == 3
    unknown, absent = fitting(path, {"x": shapes(1, 1, 8, 8)}, {"y": shapes(1)})
    assert (unknown.where, absent.where) == ("t.profiles[1].y", "t.profiles[1]")
    assert "the model has no input 'y'" in unknown.what
    assert "does not name the input 'x', which has open dimensions" in absent.what


def test_inputs_of_fixed_shapes_need_no_profile(tmp_path: Path) -> None:
    assert not fitting(save(network(1), tmp_path / "a.onnx"), {})

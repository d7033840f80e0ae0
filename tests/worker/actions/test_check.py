from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph.facts import Size, TensorFacts
from hatch_epcontext.providers import Profile
from hatch_epcontext.worker.actions.check import check_fixed, handle
from hatch_epcontext.worker.requests import CheckRequest
from tests.models import network, of_any_rank, parsed, save, save_with_data, value
from tests.worker.actions.test_compile import MODEL, target

QNN = target("qnn")
PROFILES = Key(("targets", "t", "profiles"))


def request_for(path: Path, *targets: Target, **settings: Any) -> CheckRequest:
    return CheckRequest((Model("a", path, MODEL, targets=targets, **settings),))


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"dims": {"batch": 2}}, 2),
        # Open dimensions are for EPs that take them.
        ({}, "batch"),
        ({"dims": {"batch": 2}, "static_shapes": False}, "batch"),
    ],
)
def test_the_reply_has_the_inputs_and_the_external_data(
    tmp_path: Path, settings: dict[str, Any], first: int | str
) -> None:
    path = save_with_data(network(), tmp_path / "a.onnx")
    (facts,) = handle(request_for(path, **settings))
    assert facts.inputs[0].shape == (first, 1, 8, 8)
    assert facts.outputs[0].shape == (first, 10)
    assert facts.external_data == ("network.data",)


def test_a_type_that_onnx_runtime_lacks_is_named(tmp_path: Path) -> None:
    number = TensorProto.COMPLEX64
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [value("x", [2], number)],
        [value("y", [2], number)],
    )
    path = save(helper.make_model(graph), tmp_path / "a.onnx")
    with pytest.raises(ModelError) as raised:
        handle(request_for(path))
    kinds = [problem.kind for problem in raised.value.problems]
    assert kinds == [Kind.UNSUPPORTED_INPUT, Kind.UNSUPPORTED_OUTPUT]
    assert "the input 'x' is complex64, and ONNX Runtime" in raised.value.problems[0].message


@pytest.mark.parametrize(
    ("batch", "size_key", "setting"),
    [
        ("batch", None, "dims = { batch = 1 }"),
        (None, None, "shapes.x"),
        ("batch", Key() / "models" / 0 / "dims" / 1, "dims[1] = { batch = 1 }"),
    ],
)
def test_an_open_dimension_is_an_error_with_a_setting_that_fixes_it(
    tmp_path: Path, batch: str | None, size_key: Key | None, setting: str
) -> None:
    path = save(network(batch), tmp_path / "a.onnx")
    with pytest.raises(ModelError) as raised:
        handle(request_for(path, QNN, size_key=size_key))
    (problem,) = raised.value.problems
    assert problem.message.startswith("QNNExecutionProvider compiles only fixed shapes, and")
    assert problem.kind is Kind.OPEN_DIMENSION
    assert [str(each) for each in problem.settings] == [f"tool.epcontext.models[0].{setting}"]


def test_an_output_that_is_listed_twice_is_for_models_that_stay_graphs(tmp_path: Path) -> None:
    text = "(float[1] x) => (float[1] y, float[1] x, float[1] y) { y = Relu (x) }"
    path = save(parsed(text), tmp_path / "a.onnx")
    (facts,) = handle(request_for(path, target("cpu")))
    assert [each.name for each in facts.outputs] == ["y", "x", "y"]
    with pytest.raises(ModelError, match="lists the output 'y' more than once") as raised:
        handle(request_for(path, QNN))
    (setting,) = raised.value.problems[0].settings
    assert str(setting) == 'tool.epcontext.models[0].cut = { outputs = ["y", "x"] }'


def test_an_input_without_values_is_refused_for_eps_that_crash(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")
    shapes = {"x": (0, 1, 8, 8)}
    assert handle(request_for(path, target("cpu"), shapes=shapes))
    with pytest.raises(ModelError, match=r"'x' has no values \(0 x 1 x 8 x 8\)") as raised:
        handle(request_for(path, QNN, shapes=shapes))
    assert raised.value.problems[0].location == "tool.epcontext.models[0].shapes"


def test_an_unknown_rank_is_open(tmp_path: Path) -> None:
    path = save(of_any_rank(), tmp_path / "a.onnx")
    with pytest.raises(ModelError) as raised:
        handle(request_for(path, QNN))
    (problem,) = raised.value.problems
    assert "'x' (any rank)" in problem.message
    assert [str(each) for each in problem.settings] == ["tool.epcontext.models[0].shapes.x"]
    (facts,) = handle(request_for(path, QNN, shapes={"x": (2, 3)}))
    assert [each.shape for each in (*facts.inputs, *facts.own_inputs)] == [(2, 3), None]


def test_all_open_inputs_are_one_problem_with_each_size_once() -> None:
    model = request_for(Path("a.onnx"), QNN).models[0]
    shapes: tuple[tuple[Size, ...], ...] = (("batch", 3), ("batch", "length"), (None, 3))
    inputs = [TensorFacts(f"x{n}", "float32", shape) for n, shape in enumerate(shapes)]
    (problem,) = check_fixed(tuple(inputs), model, "AnEP")
    assert all(repr(tensor.name) in problem.message for tensor in inputs)
    names = [str(setting).removeprefix(f"{MODEL}.") for setting in problem.settings]
    assert names == ["dims.batch = 1", "dims.length", "shapes.x2"]


@pytest.mark.parametrize("static_shapes", [True, False])
@pytest.mark.parametrize(
    ("dims", "settings"),
    [
        ({"batch": 2}, []),
        ({}, ["models[0].dims = { batch = 1 }"]),
    ],
)
def test_a_dimension_that_is_left_open_for_an_ep_of_fixed_shapes_is_an_error(
    tmp_path: Path, static_shapes: bool, dims: dict[str, int], settings: list[str]
) -> None:
    path = save(network(), tmp_path / "a.onnx")
    # Another target of the same model may fix them.
    left_open = target("qnn", static_shapes=False)
    with pytest.raises(ModelError) as raised:
        handle(request_for(path, left_open, dims=dims, static_shapes=static_shapes))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.OPEN_DIMENSION
    assert problem.message == (
        "QNNExecutionProvider compiles only fixed shapes, and dimensions of inputs are open: "
        "'x' (batch x 1 x 8 x 8). They are left open because static-shapes is false."
    )
    assert [str(each).removeprefix("tool.epcontext.") for each in problem.settings] == settings
    save(network(1), path)
    handle(request_for(path, left_open, static_shapes=static_shapes))


def test_the_problems_of_all_models_are_reported_at_once(tmp_path: Path) -> None:
    good = save(network(1), tmp_path / "good.onnx")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"")
    specs = [
        Model(path.stem, path, Key(("models", index)))
        for index, path in enumerate((bad, good, bad))
    ]
    with pytest.raises(ModelError) as raised:
        handle(CheckRequest(tuple(specs)))
    assert [str(problem.key) for problem in raised.value.problems] == [
        "tool.epcontext.models[0]",
        "tool.epcontext.models[2]",
    ]


def test_inputs_are_not_generated_to_check_their_sizes(tmp_path: Path) -> None:
    made = parsed("(float[n] x) => (float[n] y) { y = Relu (x) }")
    path = save(made, tmp_path / "a.onnx")
    tracemalloc.start()
    handle(request_for(path, dims={"n": 2**29}))
    assert tracemalloc.get_traced_memory()[1] < 2**29
    tracemalloc.stop()
    with pytest.raises(ModelError, match="too large to be generated"):
        handle(request_for(path, dims={"n": 2**29 + 1}))


def test_dummy_inputs_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "a.onnx")
    np.savez(tmp_path / "inputs.npz", z=np.zeros(1))
    with pytest.raises(ModelError, match="has no array for the input 'x'"):
        handle(request_for(path, validate=ValidateTable(inputs=str(tmp_path / "inputs.npz"))))


def with_profiles(*profiles: Profile, static_shapes: bool = True) -> Target:
    key = Key(("targets", "t"))
    return replace(target("tensorrt", static_shapes=static_shapes), profiles=profiles, key=key)


def profile_problems(path: Path, *profiles: dict[str, dict[str, list[int]]]) -> list[Problem]:
    """The problems of profiles for the model at ``path``."""
    try:
        handle(request_for(path, with_profiles(*profiles)))
    except ModelError as error:
        return list(error.problems)
    return []


def test_profiles_have_to_fit_the_inputs(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "a.onnx")

    def shapes(*sizes: int) -> dict[str, list[int]]:
        return {bound: [*sizes] for bound in ("min", "opt", "max")}

    assert not profile_problems(path, {"x": shapes(1, 1, 8, 8)}, {"x": shapes(9, 1, 8, 8)})
    wrong_size = profile_problems(path, {"x": shapes(1, 1, 8, 9)})
    assert [problem.location for problem in wrong_size] == [
        "tool.epcontext.targets.t.profiles[0].x"
    ] * 3
    assert wrong_size[0].kind is Kind.INVALID_PROFILE
    assert wrong_size[0].message == (
        "min is [1, 1, 8, 9], but the input has the shape batch x 1 x 8 x 8."
    )
    assert len(profile_problems(path, {"x": shapes(1, 1, 8)})) == 3
    unknown, missing = profile_problems(path, {"x": shapes(1, 1, 8, 8)}, {"y": shapes(1)})
    assert (unknown.key, missing.key) == (PROFILES / 1 / "y", PROFILES / 1)
    assert "the model has no input 'y'" in unknown.message
    assert unknown.kind is Kind.UNKNOWN_INPUT
    assert "has no shapes for the input 'x', which has open dimensions" in missing.message
    # A target that leaves shapes open has profiles of the open inputs.
    profile = {"x": {"min": [1, 1, 8, 8], "opt": [4, 1, 8, 8], "max": [8, 1, 8, 8]}}
    sizes = {"batch": 1}
    handle(request_for(path, with_profiles(profile, static_shapes=False), dims=sizes))
    with pytest.raises(ModelError, match="but the input has the shape 1 x 1 x 8 x 8"):
        handle(request_for(path, with_profiles(profile), dims=sizes))
    assert not profile_problems(save(network(1), path), {})


@pytest.mark.parametrize("tail", ["s = ai.onnx.ml.ZipMap (p)", "s = SequenceConstruct (p, x, p)"])
def test_an_output_that_is_no_tensor_is_an_error(tmp_path: Path, tail: str) -> None:
    text = f"""(float[2, 2] x) => (seq(float[]) s, float[2, 2] l)
    {{ l = MatMul (x, x) p = Softmax (l) {tail} }}"""
    with pytest.raises(ModelError) as raised:
        handle(request_for(save(parsed(text, check=False), tmp_path / "a.onnx")))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.UNSUPPORTED_OUTPUT
    (setting,) = problem.settings
    assert (setting.key, setting.value) in [
        (MODEL / "cut", {"outputs": names}) for names in (["l", "p"], ["p", "l"])
    ]


def test_the_size_of_an_image_is_for_the_user_to_choose(tmp_path: Path) -> None:
    made = parsed("""(float[batch, 3, 48, width] x) => (float[batch, 3, 48, width] y)
        { y = Relu (x) }""")
    with pytest.raises(ModelError, match="the sizes that the app feeds") as raised:
        handle(request_for(save(made, tmp_path / "a.onnx"), QNN))
    (problem,) = raised.value.problems
    assert [str(each) for each in problem.settings] == [
        "tool.epcontext.models[0].dims.batch = 1",
        "tool.epcontext.models[0].dims.width",
    ]

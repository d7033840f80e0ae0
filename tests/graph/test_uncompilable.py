"""What an EP cannot compile of a source graph, and what the message suggests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.worker.actions import check
from hatch_epcontext.worker.actions.check import not_compilable
from hatch_epcontext.worker.requests import CheckRequest
from hatch_epcontext.worker.source import fix_constants, on_conditions
from tests.models import parsed
from tests.worker.actions.test_compile import target

ML = "ai.onnx.ml"
SPEC = Model("m", Path("m.onnx"), Key() / "models" / 0)


def graph_of(nodes: str, outputs: str, more: str = "") -> onnx.ModelProto:
    """``x`` (1 x 4) and ``more`` inputs -> ``nodes``, which may read the matrix ``w`` -> ``outputs``."""
    return parsed(f"(float[1, 4] x{more}) => ({outputs}) {{ {nodes} }}", check=False, w=(4, 4))


def problems(
    given: onnx.ModelProto, provider: str = "qnn", min_coverage: float = 1.0
) -> list[Problem]:
    npu = replace(
        target(provider),
        name="npu",
        key=Key() / "targets" / "npu",
        min_coverage=min_coverage,
    )
    return list(not_compilable(given, SPEC, [npu]))


PRODUCT = "y = MatMul (x, w)"
LABELS = f'{ML}.LabelEncoder <keys_int64s = [0, 1], values_strings = ["a", "b"]>'
TREE = f"t = {ML}.TreeEnsembleRegressor (x)"
SCALED = graph_of(f"{PRODUCT} z = {ML}.Scaler (y)", "float[1, 4] z")


@pytest.mark.parametrize("provider", ["qnn", "openvino", "tensorrt", "vitisai"])
@pytest.mark.parametrize(
    ("node", "output", "word"),
    [
        (f"{LABELS} (y)", "string[1, 4]", "strings: 'z'"),
        (f"{ML}.ZipMap (y)", "seq(float[])", "a sequence: 'z'"),
        ("SplitToSequence (y)", "seq(float[])", "a sequence: 'z'"),
        ("Optional (y)", "optional(float[])", "an optional value: 'z'"),
        (f"{ML}.Scaler (y)", "float[1, 4]", "an operator of ai.onnx.ml"),
    ],
)
def test_a_tail_that_no_npu_takes_is_refused(
    node: str, output: str, word: str, provider: str
) -> None:
    (problem,) = problems(graph_of(f"{PRODUCT} z = {node}", f"{output} z"), provider)
    assert problem.kind is Kind.NOT_COMPILABLE
    assert word in problem.message
    assert str(problem.settings[0]) == 'tool.epcontext.models[0].cut = { outputs = ["y"] }'


def test_a_model_that_is_all_trees_gets_the_cpu_provider_and_no_cut() -> None:
    (problem,) = problems(graph_of(f"{TREE} z = Identity (t)", "float[1, 4] z"))
    assert "(an ensemble of trees" in problem.message
    assert 'provider = "cpu"' in (problem.hint or "")
    assert problem.settings == ()


def test_the_cpu_and_an_unknown_ep_refuse_nothing() -> None:
    given = graph_of(TREE, "float[1, 4] t")
    assert problems(given, "cpu") == problems(given, "plugin") == []


def test_min_coverage_counts() -> None:
    nodes = f"{PRODUCT} r = Relu (y) z = {ML}.Scaler (y)"
    given = graph_of(nodes, "float[1, 4] z, float[1, 4] r")
    assert problems(given, min_coverage=0.7)
    assert problems(given, min_coverage=0.6) == []


def test_what_is_between_parts_that_can_be_compiled_is_to_be_cut_away() -> None:
    nodes = f"{PRODUCT} s = {ML}.Scaler (y) z = MatMul (s, w)"
    (problem,) = problems(graph_of(nodes, "float[1, 4] z"))
    assert "Keep only the part before them" in (problem.hint or "")
    assert [str(each) for each in problem.settings] == [
        'tool.epcontext.models[0].cut = { outputs = ["y"] }',
        f"{problem.settings[1].key} = 0.6",
    ]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        # Only constants need it.
        ("shape = Shape (y) n = NonZero (shape) m = Reshape (n, two)", "int64[?] m"),
        # No output needs it.
        ("n = NonZero (y)", "float[1, 4] y"),
        # Its shape is known.
        ("z = NonZero (y)", "int64[2, 4] z"),
    ],
)
def test_what_does_not_matter_is_not_refused(nodes: str, outputs: str) -> None:
    assert problems(graph_of(f"{PRODUCT} {nodes}", outputs)) == []


def test_shapes_that_depend_on_data_are_refused_for_fixed_shapes_only() -> None:
    given = graph_of(f"{PRODUCT} z = NonZero (y)", "int64[2, ?] z")
    (problem,) = problems(given)
    assert "depends on the values of 'y'" in problem.message
    assert problems(given, "openvino") == []


def test_an_input_that_decides_a_shape_is_to_be_frozen_and_then_nothing_is_refused() -> None:
    given = graph_of(f"{PRODUCT} z = Reshape (y, size)", "float[?, ?] z", ", int64[2] size")
    (problem,) = problems(given)
    assert "'size'" in (problem.hint or "")
    assert [str(each) for each in problem.settings] == ["tool.epcontext.models[0].constants.size"]
    fix_constants(given, Model("m", Path("m"), SPEC.key, constants={"size": [2, 2]}))
    assert problems(given) == []


def test_data_that_decides_a_shape_is_not_to_be_frozen() -> None:
    nodes = f"{PRODUCT} size = Cast <to = 7> (y) z = Reshape (y, size)"
    (problem,) = problems(graph_of(nodes, "float[?, ?, ?, ?] z"))
    assert "Freeze" not in (problem.hint or "")


def _choosing(condition: str, more: str) -> onnx.ModelProto:
    return graph_of(
        f"""{condition} z = If (c) <then_branch = one () => (float[1, 4] a) {{ a = Relu (x) }},
        else_branch = other () => (float[1, 4] b) {{ b = Neg (x) }}>""",
        "float[1, 4] z",
        more,
    )


def test_the_input_that_decides_a_condition_is_named_with_what_it_is_compared_with() -> None:
    nodes = "rate = Constant <value_int = 16000> () c = Equal (sr, rate)"
    given = _choosing(nodes, ", int64 sr")
    found = on_conditions(given.graph, SPEC.key)
    assert found is not None
    assert "'sr' (compared with 16000)" in found[0]
    assert str(found[1][0]) == "tool.epcontext.models[0].constants = { sr = 16000 }"


def test_a_condition_on_data_gives_no_on_conditions() -> None:
    nodes = "top = ReduceMax <keepdims = 0> (x) c = Greater (top, limit)"
    assert on_conditions(_choosing(nodes, ", float limit").graph, SPEC.key) is None


@pytest.mark.parametrize(
    ("count", "refused"), [("Cast <to = 7> (top)", True), ("Constant <value_int = 4> ()", False)]
)
def test_a_loop_with_a_computed_count_is_refused_and_one_with_a_fixed_count_is_not(
    count: str, refused: bool
) -> None:
    given = graph_of(
        f"""top = ReduceMax <keepdims = 0> (x) n = {count}
        z = Loop (n, , x) <body = body (int64 i, bool go, float[1, 4] s)
            => (bool more, float[1, 4] t) {{ more = Identity (go) t = Relu (s) }}>""",
        "float[1, 4] z",
    )
    messages = [problem.message for problem in problems(given)]
    assert len(messages) == refused
    assert all("depends on 'n'" in message for message in messages)


def test_a_refused_model_fails_before_anything_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(SCALED, path)
    spec = Model("m", path, SPEC.key)
    npu = target("qnn")
    check.handle(CheckRequest((spec,)))
    trees = tmp_path / "trees.onnx"
    onnx.save(graph_of(f"{TREE} z = {ML}.ZipMap (t)", "seq(float[]) z"), trees)
    with pytest.raises(ModelError, match="an ensemble of trees"):
        check.handle(CheckRequest((Model("m", trees, SPEC.key, targets=(npu,)),)))
    with pytest.raises(ModelError) as caught:
        check.handle(CheckRequest((replace(spec, targets=(npu,)),)))
    assert [each.kind for each in caught.value.problems] == [Kind.NOT_COMPILABLE]

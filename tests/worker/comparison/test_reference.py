from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.graph.number_format import BFLOAT16, FLOAT16
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.check import ComparisonResult, check_runs
from hatch_epcontext.worker.comparison.reference import reference
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    for_format,
    read_reference,
    write_reference,
)
from hatch_epcontext.worker.facts import AgreementStatus
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import model, save, value, weights
from tests.worker.actions.test_compile import MODEL
from tests.worker.comparison.test_states import lstm

HALF = Tolerance(20, 0.99, unit=0.1)


def referred(made: onnx.ModelProto, folder: Path, **settings: Any) -> tuple[Model, Reference]:
    path = save(made, folder / "a.onnx")
    spec = Model("a", path, MODEL, **settings)
    return spec, reference(spec, made)


def check(
    changed: onnx.ModelProto, spec: Model, expected: Reference, folder: Path
) -> ComparisonResult:
    """Compare ``changed``, run on the CPU, with the reference."""
    session = open_session(save(changed, folder / "changed.onnx"), cpu_options())
    return check_runs(session, expected, HALF, spec, "the changed model", "the CPU's")


def table(size: int = 100, *, named: str = "ids") -> onnx.ModelProto:
    """Sums of squares of the rows of a table: what 20 indices choose."""
    return model(
        [
            helper.make_node("Gather", ["table", named], ["rows"]),
            helper.make_node("ReduceSumSquare", ["rows"], ["y"], axes=[1], keepdims=0),
        ],
        [value(named, [1, 20], TensorProto.INT64)],
        [value("y", [1, 8])],
        [weights("table", size, 8)],
    )


def clipped(made: onnx.ModelProto, limit: float, node: int = -1) -> onnx.ModelProto:
    """``made`` with the result of one node saturated, as in a float type that ends there."""
    changed = onnx.ModelProto()
    changed.CopyFrom(made)
    last = changed.graph.node[node]
    name = last.output[0]
    last.output[0] = "raw"
    bounds = [
        numpy_helper.from_array(np.float32(each), n) for n, each in (("lo", -limit), ("hi", limit))
    ]
    changed.graph.initializer.extend(bounds)
    changed.graph.node.append(helper.make_node("Clip", ["raw", "lo", "hi"], [name]))
    return changed


def test_a_sample_with_larger_values_is_run_on_the_target(tmp_path: Path) -> None:
    # Rows of alike indices add up; the signs of others cancel each other out.
    signs = numpy_helper.from_array(
        np.where(np.arange(256) < 128, -1, 1).astype(np.float32), "signs"
    )
    made = model(
        [
            helper.make_node("Gather", ["signs", "ids"], ["chosen"]),
            helper.make_node("MatMul", ["chosen", "halves"], ["sums"]),
            helper.make_node("Mul", ["sums", "sums"], ["y"]),
        ],
        [value("ids", [1, 512], TensorProto.INT32)],
        [value("y", [1, 1])],
        [
            signs,
            numpy_helper.from_array(
                np.repeat([[-1.0], [1.0]], 256, axis=0).astype(np.float32), "halves"
            ),
        ],
    )
    spec, expected = referred(made, tmp_path)
    assert [run.name for run in expected.runs if run.on_target][:2] == ["random", "sorted"]
    (large,) = expected.facts.large
    assert (large.output, large.value) == ("y", "y")
    assert large.largest > 65504
    assert expected.facts.guessed == ()
    with pytest.raises(
        BuildError, match=r"for the sample 'sorted': .*\n *The value 'y' inside the model reaches"
    ) as raised:
        check(clipped(made, 65504), spec, expected, tmp_path)
    assert raised.value.problems[0].kind is Kind.OUTPUT_DIFFERS


def test_a_disagreement_on_large_floats_that_nothing_bounds_is_a_warning(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Mul", ["x", "k"], ["y"])],
        [value("x", [1, 300])],
        [value("y", [1, 300])],
        [numpy_helper.from_array(np.float32(10000), "k")],
    )
    spec, expected = referred(made, tmp_path)
    found = check(clipped(made, 65504), spec, expected, tmp_path)
    assert found.agreements[0].status is AgreementStatus.AGREES
    assert len(found.warnings) == len(found.samples) - 1 > 0
    assert found.warnings[0].startswith("the output 'y' differs from the CPU's for the sample ")
    assert found.warnings[0].endswith("This counts only if the app can have such inputs.")


def test_integers_that_nothing_bounds_are_bytes(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Cast", ["ids"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "k"], ["y"]),
        ],
        [value("ids", [1, 600], TensorProto.INT64)],
        [value("y", [1, 600])],
        [numpy_helper.from_array(np.float32(2), "k")],
    )
    spec, expected = referred(made, tmp_path)
    assert expected.facts.guessed == ("ids",)
    fed = expected.feeds["ids"]
    assert (fed.min(), fed.max()) == (0, 255)
    with pytest.raises(BuildError) as raised:
        check(clipped(made, 100), spec, expected, tmp_path)
    (problem,) = raised.value.problems
    assert problem.hint == (
        "Nothing in the graph bounds 'ids', which got values up to 255. Feed real inputs:"
    )
    assert str(problem.settings[0]) == "tool.epcontext.models[0].validate.inputs"


def test_states_are_fed_back(tmp_path: Path) -> None:
    made = lstm()
    spec, expected = referred(made, tmp_path)
    steps = expected.runs[-1]
    assert (steps.name, len(steps.feeds), steps.on_target) == ("8 steps", 8, True)
    assert not steps.feeds[0]["h0"].any()
    assert set(steps.feeds[1]) == {"x"}
    session = open_session(Path(spec.path), cpu_options())
    states = {"h0": steps.outputs[0]["h1"], "c0": steps.outputs[0]["c1"]}
    second = session.run(["h1"], {**steps.feeds[1], **states})[0]
    assert np.array_equal(second, steps.outputs[1]["h1"])


def test_errors_that_grow_from_step_to_step_are_found(tmp_path: Path) -> None:
    def counter(rate: float) -> onnx.ModelProto:
        return model(
            [
                helper.make_node("Mul", ["state", "rate"], ["kept"]),
                helper.make_node("Add", ["kept", "x"], ["next"]),
            ],
            [value("x", [1, 40]), value("state", [1, 40])],
            [value("next", [1, 40])],
            [numpy_helper.from_array(np.float32(rate), "rate")],
        )

    spec, expected = referred(
        counter(2.0), tmp_path, validate=ValidateTable(states={"state": "next"})
    )
    with pytest.raises(BuildError, match=r"in step [2-8] of 8, with its own states"):
        check(counter(2.1), spec, expected, tmp_path)
    spec, alone = referred(counter(2.0), tmp_path)
    assert not any(run.name == "8 steps" for run in alone.runs)
    check(counter(2.1), spec, alone, tmp_path)


def test_what_depends_on_chance_is_not_compared(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("RandomNormalLike", ["x"], ["noise"]),
            helper.make_node("Add", ["x", "noise"], ["y"]),
            helper.make_node("Relu", ["x"], ["z"]),
        ],
        [value("x", [1, 10])],
        [value("y", [1, 10]), value("z", [1, 10])],
    )
    spec, expected = referred(made, tmp_path)
    assert expected.facts.random == ("y",)
    statuses = {a.output: a.status for a in check(made, spec, expected, tmp_path).agreements}
    assert statuses == {"y": AgreementStatus.RANDOM, "z": AgreementStatus.AGREES}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([helper.make_node("Div", ["x", "zero"], ["y"])], None),
        (
            [
                helper.make_node("Mul", ["x", "zero"], ["n"]),
                helper.make_node("Div", ["n", "zero"], ["y"]),
            ],
            "the CPU's values are NaN or Inf everywhere",
        ),
        (
            [helper.make_node("Mul", ["x", "zero"], ["n"]), helper.make_node("Cos", ["n"], ["y"])],
            "the CPU's value is 1.0 everywhere, for all inputs",
        ),
        (
            # Finite in one sample only, which is 0 everywhere.
            [
                helper.make_node("Abs", ["x"], ["a"]),
                helper.make_node("Neg", ["a"], ["n"]),
                helper.make_node("Sqrt", ["n"], ["y"]),
            ],
            "the CPU's values are NaN or Inf everywhere",
        ),
    ],
)
def test_a_reference_that_proves_nothing_is_inconclusive(
    tmp_path: Path, nodes: list[onnx.NodeProto], reason: str | None
) -> None:
    zero = numpy_helper.from_array(np.float32(0), "zero")
    if reason is None:
        nodes = [helper.make_node("Add", ["x", "zero"], ["y"])]
    made = model(nodes, [value("x", [1, 10])], [value("y", [1, 10])], [zero])
    spec, expected = referred(made, tmp_path)
    assert expected.facts.inconclusive == ({} if reason is None else {"y": reason})
    (agreement,) = check(made, spec, expected, tmp_path).agreements
    assert agreement.reason == reason
    wanted = AgreementStatus.AGREES if reason is None else AgreementStatus.INCONCLUSIVE
    assert agreement.status is wanted


def test_a_sample_in_which_an_output_has_several_values_is_run_on_the_target(
    tmp_path: Path,
) -> None:
    nodes = [helper.make_node("Greater", ["x", "limit"], ["y"])]
    limit = numpy_helper.from_array(np.linspace(5, 20, 10, dtype=np.float32), "limit")
    outputs = [value("y", [1, 10], TensorProto.BOOL)]
    spec, expected = referred(model(nodes, [value("x", [1, 10])], outputs, [limit]), tmp_path)
    assert not expected.facts.inconclusive
    chosen = [each.name for each in expected.runs if each.on_target]
    assert chosen[0] == "random"
    assert len(chosen) == 2
    nothing = numpy_helper.from_array(np.full(10, 100, np.float32), "limit")
    wrong = model(nodes, [value("x", [1, 10])], outputs, [nothing])
    assert check(wrong, spec, expected, tmp_path).warnings


def test_a_sample_with_nan_hides_no_larger_values(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Mul", ["x", "x"], ["squares"]),
            helper.make_node("Mul", ["squares", "scale"], ["large"]),
            helper.make_node("Div", ["large", "x"], ["y"]),
        ],
        [value("x", [1, 10])],
        [value("y", [1, 10])],
        [numpy_helper.from_array(np.float32(1000), "scale")],
    )
    _, expected = referred(made, tmp_path)
    assert "scaled" in [each.name for each in expected.runs if each.on_target]
    (large,) = expected.facts.large
    assert large.value == "large"
    assert large.largest < 1e6


def test_a_constant_that_no_input_decides_is_compared(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["length"]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    outputs = [value("y", [1, 10]), value("length", [2], TensorProto.INT64)]
    _, expected = referred(model(nodes, [value("x", [1, 10])], outputs), tmp_path)
    assert not expected.facts.inconclusive


@pytest.mark.parametrize("name", ["long", "with/slashes", "../up"])
def test_a_reference_is_kept_in_a_file(tmp_path: Path, name: str) -> None:
    made = lstm()
    # Names in an archive have at most 65535 bytes.
    made.graph.node[-1].output[0] = made.graph.output[0].name = name * 20_000
    _, expected = referred(made, tmp_path)
    path = write_reference(expected, tmp_path / "reference.bin")
    assert path is not None
    found = read_reference(path)
    assert found.facts == expected.facts
    for one, other in zip(found.runs, expected.runs, strict=True):
        assert (one.name, one.bounded, one.on_target) == (
            other.name,
            other.bounded,
            other.on_target,
        )
        for a, b in zip((*one.feeds, *one.outputs), (*other.feeds, *other.outputs), strict=True):
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[name], b[name]) for name in a)


BROKEN = [
    "weights swapped",
    "bias dropped",
    "output transposed",
    "constant wrong",
    "float16 saturated",
]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_model_that_is_broken_on_purpose_fails(tmp_path: Path, fault: str) -> None:
    made = model(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["hidden"]),
            helper.make_node("Mul", ["hidden", "scale"], ["large"]),
            helper.make_node("MatMul", ["large", "v"], ["y"]),
        ],
        [value("x", [6, 8])],
        [value("y", [6, 6])],
        [
            weights("w", 8, 16),
            weights("b", 16),
            weights("v", 16, 6),
            numpy_helper.from_array(np.float32(400000), "scale"),
        ],
    )
    spec, expected = referred(made, tmp_path)
    check(made, spec, expected, tmp_path)
    changed = onnx.ModelProto()
    changed.CopyFrom(made)
    stored = {tensor.name: tensor for tensor in changed.graph.initializer}
    if fault == "output transposed":
        changed.graph.node[-1].output[0] = "turned"
        changed.graph.node.append(helper.make_node("Transpose", ["turned"], ["y"]))
    elif fault == "float16 saturated":
        changed.graph.node[2].input[0] = "short"
        half = helper.make_node("Clip", ["large", "lo", "hi"], ["short"])
        changed.graph.node.insert(2, half)
        for name, limit in (("lo", -65504), ("hi", 65504)):
            changed.graph.initializer.append(numpy_helper.from_array(np.float32(limit), name))
    else:
        name = {"weights swapped": "w", "bias dropped": "b", "constant wrong": "scale"}[fault]
        array = numpy_helper.to_array(stored[name])
        new = array[::-1] if name == "w" else np.zeros_like(array) if name == "b" else array * 1.5
        stored[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(new, np.float32), name))
    with pytest.raises(BuildError, match=r"dB of signal to noise|dB in"):
        check(changed, spec, expected, tmp_path)


def test_values_near_the_limit_of_float16_matter_in_float16_only(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("Mul", ["x", "many"], ["large"]),
            helper.make_node("Sin", ["large"], ["y"]),
        ],
        [value("x", [4])],
        [value("y", [4])],
        [numpy_helper.from_array(np.float32(1e6), "many")],
    )
    _, expected = referred(made, tmp_path)
    assert [each.value for each in expected.facts.large] == ["large"]
    assert for_format(expected, FLOAT16) == expected
    for other in (None, BFLOAT16):
        assert for_format(expected, other).facts.large == ()

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hatch_epcontext.graph.facts import Declined, NodeFacts
from hatch_epcontext.jobs.failure import low_coverage
from hatch_epcontext.worker.results import Coverage
from tests.results import configured


def failure(
    coverage: Coverage, project: Path, toml: str = "", declined: Sequence[Declined] = ()
) -> str:
    text = f'models = ["models/a.onnx"]\n[targets.cpu]\nprovider = "cpu"\n{toml}'
    (model,) = configured(project, text).models
    return str(low_coverage(coverage, model.targets[0], model, declined))


def test_enough_coverage_is_no_error(project: Path) -> None:
    (model,) = configured(
        project,
        'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\ntargets.cpu.min-coverage = 0.5',
    ).models
    (target,) = model.targets
    assert low_coverage(Coverage(4, 2, 1, (NodeFacts("a", "Op"),) * 2), target, model) is None
    assert low_coverage(None, target, model) is None


def test_uncovered_operators_are_named(project: Path) -> None:
    text = failure(Coverage(3, 2, 1, (NodeFacts("rnn", "GRU"),)), project)
    assert (
        "takes 2 of 3 nodes (66.7%), and min-coverage is 100.0%. Left to the CPU: GRU rnn." in text
    )
    assert "Change the model at these nodes (not tried)." in text


def test_only_the_first_operators_have_lines_of_their_own(project: Path) -> None:
    nodes = tuple(NodeFacts(f"n{index}", f"Op{index}") for index in range(12))
    text = failure(Coverage(20, 8, 1, nodes), project)
    assert "Op7 n7\n      and 4 more operators" in text


def test_shapes_that_depend_on_the_data_are_named_as_the_reason(project: Path) -> None:
    uncovered = (NodeFacts("", "NonZero", "the shape of its output 'y' depends on the data", True),)
    text = failure(Coverage(2, 1, 1, uncovered), project)
    assert "NonZero (the shape of its output 'y' depends on the data)" in text


def test_why_no_rewrite_applied_is_named_of_the_nodes_that_are_left(project: Path) -> None:
    uncovered = (NodeFacts("a", "If", "no branches"), NodeFacts("b", "Slice"))
    declined = [
        Declined("its condition is not one value", "if_as_where", "If", "a"),
        Declined("its start has 2 axes", "slice_as_gather", "Slice", "b"),
        # Another node has that name, or is compiled.
        Declined("its lengths differ", "reverse_sequence_as_gather", "ReverseSequence", "b"),
        Declined("its start has 3 axes", "slice_as_gather", "Slice", "c"),
    ]
    text = failure(Coverage(3, 1, 1, uncovered), project, declined=declined)
    assert (
        "\n      If a (no branches; if_as_where does not apply: its condition is not one value)\n"
        in text
    )
    assert "\n      Slice b (slice_as_gather does not apply: its start has 2 axes)\n" in text
    assert "lengths" not in text


def test_a_reason_is_given_once_for_all_nodes_that_it_is_about(project: Path) -> None:
    uncovered = tuple(NodeFacts(name, "LSTM", "no clip") for name in ("a", "b"))
    text = failure(Coverage(3, 1, 1, uncovered), project)
    assert "2 LSTM a, b (no clip)." in text


def test_inputs_that_decide_are_to_be_frozen(project: Path) -> None:
    known = NodeFacts("a", "If", "a reason", deciders={"sr": (16000,)})
    text = failure(Coverage(3, 2, 1, (known,)), project)
    assert "Freeze 'sr' (compared with 16000), which decides them (not tried)." in text
    assert "constants = { sr = 16000 }" in text
    unknown = NodeFacts("b", "GRU", "a reason", deciders={"lengths": ()})
    text = failure(Coverage(3, 1, 1, (known, unknown)), project)
    assert "'sr' (compared with 16000) and 'lengths', which decide them (not tried)." in text
    assert "sr = 16000" not in text
    assert "Change constants.lengths in the model's table" in text
    # What nothing decides is left all the same.
    text = failure(Coverage(3, 1, 1, (known, NodeFacts("c", "Op", "a reason"))), project)
    assert "Freeze 'sr' (compared with 16000), which decides some of them (not tried)." in text


def test_dynamic_quantization_is_named_as_the_reason(project: Path) -> None:
    uncovered = (NodeFacts("conv", "ConvInteger"),)
    text = failure(Coverage(2, 1, 1, uncovered), project, "dequantize = false\n")
    assert "The model is dynamically quantized" in text
    assert "dequantize = true" in text
    # Without the key it was tried.
    for toml in ("", "dequantize = true\n"):
        text = failure(Coverage(2, 1, 1, uncovered), project, toml)
        assert "dynamically quantized" not in text


def test_the_key_that_undoes_quantized_weights_is_named(project: Path) -> None:
    coverage = Coverage(2, 1, 1, (NodeFacts("w", "DequantizeLinear", "no blocks"),))
    assert 'dequantize = "all"' in failure(coverage, project)
    assert "dequantize" not in failure(coverage, project, 'dequantize = "all"\n')
    (project / "samples").mkdir()
    quantized = failure(coverage, project, 'quantize = { inputs = "samples" }\n')
    assert "dequantize" not in quantized


def test_operators_of_integers_are_named_as_the_reason_and_are_not_undone(project: Path) -> None:
    for operator in ("QLinearConv", "com.microsoft.QLinearAdd", "com.microsoft.QGemm"):
        uncovered = (NodeFacts("a", operator), NodeFacts("y", "DequantizeLinear"))
        text = failure(Coverage(4, 2, 1, uncovered), project)
        assert "Quantize the float model anew in the QDQ format" in text
        assert "dequantize" not in text


def test_all_nodes_are_named_in_groups(project: Path) -> None:
    uncovered = tuple(NodeFacts(f"n{index}", "Op") for index in range(25))
    others = (NodeFacts("", "NonZero", "no shape"), NodeFacts("", "NonZero", "no shape"))
    text = failure(
        Coverage(28, 0, 1, (*uncovered, NodeFacts("last", "Op", "no"), *others)), project
    )
    assert "25 Op n0, n1," in text
    assert "n19 and 5 more\n      Op last (no)\n      2 NonZero (no shape)\n" in text


def test_what_is_refused_for_no_given_reason_is_one_group_of_many(project: Path) -> None:
    names = ("Add", "Mul", "Sub")
    uncovered = [NodeFacts(f"n{i}", names[i % 3], f"float32 [{i}]", own=True) for i in range(30)]
    uncovered.append(NodeFacts("last", "Mul", "dynamic scale"))
    uncovered += [NodeFacts(f"s{i}", "Shape", f"the shape of 't{i}'", True) for i in range(9)]
    text = failure(Coverage(40, 0, 1, tuple(uncovered)), project)
    assert "10 Mul n1, n4, n7, n10, n13, n16, n19, n22, n25, n28 (for example float32 [1])" in text
    assert "Mul last (dynamic scale)" in text
    assert "9 Shape s0, s1, s2, s3, s4, s5, s6, s7, s8 (for example the shape of 't0')" in text

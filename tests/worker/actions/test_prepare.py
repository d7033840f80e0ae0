from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import LimitsTable, ToleranceTable, ValidateTable
from hatch_epcontext.errors import BuildError, Key, ModelError
from hatch_epcontext.graph import external, graph
from hatch_epcontext.graph.external import external_data
from hatch_epcontext.graph.facts import Range
from hatch_epcontext.jobs.stages import SIMPLIFIERS
from hatch_epcontext.worker.actions.prepare import handle
from hatch_epcontext.worker.comparison.runs import read_reference
from hatch_epcontext.worker.requests import Prepared, PrepareRequest
from hatch_epcontext.worker.results import FEW_SAMPLES, Simplifier
from hatch_epcontext.worker.session import cpu_options, open_session
from tests.models import (
    network,
    parsed,
    save,
    save_with_data,
    shapes,
)


def run(
    path: Path, tmp_path: Path, simplifier: Simplifier, compare: bool = True, **settings: Any
) -> Prepared:
    folder = tmp_path / f"prepared-{simplifier}"
    folder.mkdir()
    spec = Model("a", path, Key(("models", 0)), **settings)
    return handle(PrepareRequest(spec, simplifier, str(folder), compare))


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
def test_a_prepared_model_has_its_data_and_the_source_is_unchanged(
    tmp_path: Path, simplifier: Simplifier
) -> None:
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    before = {path.name: path.read_bytes() for path in source.parent.iterdir()}
    reply = run(source, tmp_path, simplifier, dims={"batch": 1})
    assert Path(reply.path).is_relative_to(tmp_path / f"prepared-{simplifier}")
    assert shapes(onnx.load(reply.path, load_external_data=False))["x"] == [1, 1, 8, 8]
    x = np.ones((1, 1, 8, 8), np.float32)
    assert open_session(Path(reply.path), cpu_options()).run(None, {"x": x})[0].shape == (1, 10)
    assert (
        reply.preparation.nodes_before,
        reply.preparation.nodes,
        reply.preparation.control_flow,
    ) == (4, 4, ())
    assert {path.name: path.read_bytes() for path in source.parent.iterdir()} == before


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
def test_open_shapes_stay_open_and_take_other_sizes(tmp_path: Path, simplifier: Simplifier) -> None:
    source = save(network(), tmp_path / "a.onnx")
    reply = run(source, tmp_path, simplifier, dims={"batch": 2}, static_shapes=False)
    assert shapes(onnx.load(reply.path))["x"] == ["batch", 1, 8, 8]
    x = np.ones((5, 1, 8, 8), np.float32)
    assert open_session(Path(reply.path), cpu_options()).run(None, {"x": x})[0].shape == (5, 10)


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
@pytest.mark.parametrize(
    "location", ["a.fixed.onnx", "simplified/a.onnx", "simplified/a.data", "a.onnx.data"]
)
def test_external_data_of_any_name_is_only_read(
    tmp_path: Path, simplifier: Simplifier, location: str
) -> None:
    folder = tmp_path / "models"
    (folder / "simplified").mkdir(parents=True)
    source = save_with_data(network(), folder / "a.onnx", location)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run(source, tmp_path, simplifier, dims={"batch": 1})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
@pytest.mark.parametrize("compare", [True, False])
def test_a_model_beyond_the_protobuf_limit_keeps_external_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simplifier: Simplifier, compare: bool
) -> None:
    monkeypatch.setattr(external, "PROTOBUF_LIMIT", 1000)
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    reply = run(source, tmp_path, simplifier, compare=compare, dims={"batch": 1})
    prepared = Path(reply.path)
    assert prepared.stat().st_size < 2000
    loaded = onnx.load(prepared, load_external_data=False)
    assert external_data(loaded, prepared, "a")
    x = {"x": np.ones((1, 1, 8, 8), np.float32)}
    expected = open_session(source, cpu_options()).run(None, x)[0]
    np.testing.assert_allclose(
        open_session(prepared, cpu_options()).run(None, x)[0], expected, 1e-4
    )


def choosing() -> onnx.ModelProto:
    """``y = x + w if rate == 16000 else relu(x)``, with ``w`` from the outer graph, and a ``Loop``."""
    return parsed(
        """(float[2] x, int64 rate) => (float[2] y) <int64 wanted = {16000}, int64 times = {3}> {
            c = Equal (rate, wanted)
            chosen = If (c) <then_branch = one () => (float[2] t) { t = Add (x, w) },
                             else_branch = other () => (float[2] e) { e = Relu (x) }>
            y = Loop (times, , chosen) <body = body (int64 i, bool on, float[2] carried)
                => (bool on_, float[2] sum) { sum = Add (carried, w) on_ = Identity (on) }> }""",
        w=(2,),
    )


def test_all_nodes_get_names_by_which_an_ep_can_refuse_them(tmp_path: Path) -> None:
    made = parsed("(float[2] x) => (float[2] y) { y = Relu (x) }")
    reply = run(save(made, tmp_path / "a.onnx"), tmp_path, "onnxruntime")
    assert [node.name for node in onnx.load(reply.path).graph.node] == ["y"]


REPEATED = """<ir_version: 8, opset_import: ["" : 17, "our.own" : 1]>
graph (float[2, 4] x, bool c) => (float[2, 4] y) {
    a = our.own.twice (x)
    b = our.own.twice (a)
    d = If (c) <then_branch = then () => (float[2, 4] t) { [end] t = Softplus (b) },
                else_branch = other () => (float[2, 4] e) { [end] e = Erf (b) }>
    [end] y = Sigmoid (d) }
<domain: "our.own", opset_import: ["" : 17]> twice (p) => (q) { r = Softplus (p) [inner] q = Erf (r) }
"""


@pytest.mark.parametrize(("simplifier", "count"), [("onnxruntime", 8), ("none", 6)])
def test_no_two_nodes_have_the_same_name(
    tmp_path: Path, simplifier: Simplifier, count: int
) -> None:
    source = save(onnx.parser.parse_model(REPEATED), tmp_path / "a.onnx")
    reply = run(source, tmp_path, simplifier)
    model = onnx.load(reply.path)
    names = {node.name: node.op_type for node in graph.nodes(model.graph)}
    assert len(names) == reply.preparation.nodes == count
    assert names["end"] == "Sigmoid"
    assert "" not in names


def test_the_simplifier_removes_a_constant_condition(tmp_path: Path) -> None:
    path = save(choosing(), tmp_path / "a.onnx")
    reply = run(path, tmp_path, "onnxruntime", constants={"rate": 16000})
    assert reply.preparation.control_flow == ("Loop",)
    assert run(path, tmp_path, "none", constants={"rate": 16000}).preparation.control_flow == (
        "If",
        "Loop",
    )


@pytest.mark.parametrize("simplifier", ["onnxruntime", "onnxslim"])
def test_dummy_inputs_are_within_ranges_that_the_simplified_graph_shows(
    tmp_path: Path, simplifier: Simplifier
) -> None:
    made = parsed("""(float[1, time, 3] x, int64[1] n) => (bool[1, 24] y, float[1, time, 3] z)
        <int64 zero = {0}, int64 one = {1}, int64[1] first = {0}> {
            sizes = Shape (x)
            size = Gather (sizes, one)
            positions = Range (zero, size, one)
            row = Unsqueeze (positions, first)
            y = Less (row, n)
            z = Relu (x) }""")
    reply = run(save(made, tmp_path / "a.onnx"), tmp_path, simplifier, dims={"time": 24})
    assert reply.ranges["n"] == Range(1, 24, known=True, usual=24, whole=True)


def test_the_number_of_samples_follows_from_sizes_that_only_the_simplified_graph_shows(
    tmp_path: Path,
) -> None:
    slow = parsed("""(float[1, 900] x) => (float y)
        <int64[2] least = {900, 1}, int64[2] most = {1, 1}> {
            size = Max (least, most)
            rows = Expand (x, size)
            product = MatMul (rows, rows)
            y = ReduceMean <keepdims = 0> (product) }""")
    reply = run(save(slow, tmp_path / "a.onnx"), tmp_path, "onnxruntime")
    assert reply.reference is not None
    ordinary = [run for run in read_reference(reply.reference).runs if not run.far]
    assert len(ordinary) <= FEW_SAMPLES


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_among_the_inputs_are_constants(
    tmp_path: Path, simplifier: Simplifier, ir_version: int
) -> None:
    stored: dict[str, Any] = {"w": (4, 3, 3, 3), **dict.fromkeys(("scale", "bias", "mean"), (4,))}
    made = parsed(
        """(float[1, 3, 8, 8] x, float[4, 3, 3, 3] w, float[4] scale, float[4] bias, float[4] mean,
        float[4] var) => (float[1, 4, 6, 6] y) <float[4] var = {1, 1, 1, 1}> {
            c = Conv (x, w)
            n = BatchNormalization (c, scale, bias, mean, var)
            y = Relu (n) }""",
        ir_version=ir_version,
        **stored,
    )
    source = save(made, tmp_path / "a.onnx")
    before = source.read_bytes()
    reply = run(source, tmp_path, simplifier)
    session = open_session(Path(reply.path), cpu_options())
    assert session.get_overridable_initializers() == []
    # The normalization is folded into the weights.
    assert reply.preparation.nodes == (3 if simplifier == "none" else 2)
    assert source.read_bytes() == before


def test_a_simplifier_that_changes_the_outputs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(made: onnx.ModelProto) -> onnx.ModelProto:
        changed = numpy_helper.to_array(made.graph.initializer[2]) * 1.5
        made.graph.initializer[2].CopyFrom(numpy_helper.from_array(changed, "dense"))
        return made

    # Importing it takes as long as all other imports of a file.
    monkeypatch.setattr("onnxslim.slim", wrong)
    path = save(network(1), tmp_path / "a.onnx")
    with pytest.raises(BuildError, match="differs from the source model's"):
        run(path, tmp_path, "onnxslim")


def test_a_difference_is_allowed_by_the_setting_that_its_message_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inexact(made: onnx.ModelProto) -> onnx.ModelProto:
        changed = numpy_helper.to_array(made.graph.initializer[2]).copy()
        changed[:64] *= 1.1
        made.graph.initializer[2].CopyFrom(numpy_helper.from_array(changed, "dense"))
        return made

    monkeypatch.setattr("onnxslim.slim", inexact)
    path = save(network(1), tmp_path / "a.onnx")
    with pytest.raises(BuildError) as caught:
        run(path, tmp_path, "onnxslim")
    (problem,) = caught.value.problems
    (setting,) = problem.settings
    assert setting.key == Key(("models", 0, "validate", "tolerance"))
    limits = {name: LimitsTable(**table) for name, table in setting.value["outputs"].items()}
    (tmp_path / "prepared-onnxslim").rename(tmp_path / "before")
    table = ValidateTable(tolerance=ToleranceTable(outputs=limits))
    assert run(path, tmp_path, "onnxslim", validate=table).preparation.nodes == 4


@pytest.mark.parametrize("size", [[1, 5], [4, 4], [4]])
def test_shapes_that_contradict_the_inferred_ones_are_inferred_anew(
    tmp_path: Path, size: list[int]
) -> None:
    made = parsed(
        "(float[1, 8] x) => (float[1, 4] y) { c = MatMul(x, w) r = Relu(c) y = Add(r, c) }",
        w=(8, 4),
    )
    made.graph.value_info.add(name="c", type=onnx.helper.make_tensor_type_proto(1, size))
    made.graph.output[0].type.CopyFrom(onnx.helper.make_tensor_type_proto(1, size))
    reply = run(save(made, tmp_path / "a.onnx"), tmp_path, "none")
    prepared = onnx.load(reply.path).graph
    values = (*prepared.value_info, *prepared.output)
    assert {value.name: graph.sizes(value.type) for value in values} == {"c": (1, 4), "y": (1, 4)}


def test_a_shape_stays_that_onnx_runtime_infers_too(tmp_path: Path) -> None:
    """Both sides of the spectrum are what onnx infers."""
    made = parsed(
        """(float[1, 128, 1] x) => (float[1, 15, 9, 2] y)
        <int64 step = {8}, int64 length = {16}> { y = STFT (x, step, , length) }""",
        17,
    )
    reply = run(save(made, tmp_path / "a.onnx"), tmp_path, "none")
    assert graph.sizes(onnx.load(reply.path).graph.output[0].type) == (1, 15, 9, 2)


def test_shapes_of_a_branch_that_contradict_the_inferred_ones_are_inferred_anew(
    tmp_path: Path,
) -> None:
    made = parsed(
        """(float[1, 8] x, bool c) => (float[1, 8] y) { y = If(c) <
        then_branch = a () => (float[1, 8] t) { s = Neg(x) t = Relu(s) },
        else_branch = b () => (float[1, 8] e) { e = Abs(x) }> }"""
    )
    branch = made.graph.node[0].attribute[0].g
    branch.value_info.add(name="s", type=onnx.helper.make_tensor_type_proto(1, [8]))
    reply = run(save(made, tmp_path / "a.onnx"), tmp_path, "none")
    prepared = onnx.load(reply.path).graph.node[0].attribute[0].g
    assert [graph.sizes(value.type) for value in prepared.value_info] == [(1, 8)]


def deep_quantized(layers: int = 12, size: int = 64) -> onnx.ModelProto:
    """Products of integers, each rounded again: one that is rounded otherwise changes many behind it."""
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {
        f"w{number}": rng.integers(-127, 128, (size, size)).astype(np.int8)
        for number in range(layers)
    }
    body = "".join(
        f"""q{n} = QuantizeLinear (x{n}, scale, zero) d{n} = DequantizeLinear (q{n}, scale, zero)
        f{n} = DequantizeLinear (w{n}, small) x{n + 1} = MatMul (d{n}, f{n})"""
        for n in range(layers)
    )
    return parsed(
        f"""(float[8, {size}] x0) => (float[8, {size}] y)
        <float scale = {{0.05}}, uint8 zero = {{128}}, float small = {{{1 / (73 * size**0.5)}}}> {{
            {body} q = QuantizeLinear (x{layers}, scale, zero) y = DequantizeLinear (q, scale, zero) }}""",
        **stored,
    )


def test_a_quantized_model_may_differ_as_much_as_the_fusions_of_the_cpu(tmp_path: Path) -> None:
    path, table = save(deep_quantized(), tmp_path / "a.onnx"), ValidateTable()
    assert run(path, tmp_path, "onnxruntime", validate=table).preparation.nodes > 12


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
def test_a_source_that_cannot_be_run_is_an_error(tmp_path: Path, simplifier: Simplifier) -> None:
    made = network(1)
    del made.graph.initializer[2].dims[:]
    made.graph.initializer[2].dims.extend([128, 20])
    path = save(made, tmp_path / "a.onnx")
    shapes = r"MatMul 'y' reads 'f' \(1 x 256\) and 'dense' \(128 x 20\)\."
    with pytest.raises(ModelError, match=rf"(?s)source model itself cannot be run .*: {shapes}"):
        run(path, tmp_path, simplifier)


def test_a_suppression_of_nearly_the_same_boxes_may_select_others(tmp_path: Path) -> None:
    made = parsed(
        """(float[1, 1, 16, 16] x) => (int64[?, 3] y)
        <int64[1] most = {5}, float[1] overlap = {0.5}, int64[3] by_box = {1, 1, 256}, float factor = {3.3}> {
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            f = Mul (c, factor)
            logits = Reshape (f, by_box)
            scores = Sigmoid (logits)
            y = NonMaxSuppression (boxes, scores, most, overlap) }""",
        w=np.random.default_rng(0).uniform(0, 0.1, (1, 1, 3, 3)).astype(np.float32),
        boxes=np.add.outer(np.arange(256), [0, 0, 1, 1]).astype(np.float32)[None],
    )
    # The sums differ only in their rounding, which folding the factor changes.
    x = np.float32(1) + np.float32(2**-22) * np.random.default_rng(1).integers(0, 2, (1, 1, 16, 16))
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32))
    table = ValidateTable(inputs=str(tmp_path / "x.npz"))
    assert (
        run(
            save(made, tmp_path / "a.onnx"), tmp_path, "onnxruntime", validate=table
        ).preparation.nodes
        == 4
    )


def test_a_range_for_no_input_of_the_model_is_refused(tmp_path: Path) -> None:
    source = save_with_data(network(), tmp_path / "models" / "a.onnx")
    settings = ValidateTable(ranges={"user": (0, 9)})
    with pytest.raises(ModelError, match="the model has no input 'user'"):
        run(source, tmp_path, "none", dims={"batch": 1}, validate=settings)

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.graph.rewrites.fused import DEFINITIONS, FUNCTIONS, FUSED
from tests.conftest import newer_runtime
from tests.graph.rewrites.equal import check_equal, made, operators, rewritten, untouched

FLOAT = TensorProto.FLOAT
RNG = np.random.default_rng(3)


def ours(operator: str, inputs: list[str], *outputs: str, **attributes: Any) -> onnx.NodeProto:
    names = list(outputs or ("y",))
    return helper.make_node(operator, inputs, names, domain="com.microsoft", **attributes)


def array(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


ACTIVATIONS: dict[str, list[float]] = {
    "Relu": [],
    "Sigmoid": [],
    "Tanh": [],
    "LeakyRelu": [0.3],
    "Clip": [-0.5, 1.5],
    "HardSigmoid": [0.3, 0.4],
}


@pytest.mark.parametrize("added", [False, pytest.param(True, marks=newer_runtime)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_convolution_is_taken_apart(activation: str, added: bool) -> None:
    node = ours(
        "FusedConv",
        ["x", "w", "b", *(["z"] if added else [])],
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
        strides=[2, 1],
        activation=activation,
        activation_params=ACTIVATIONS[activation] or None,
    )
    inputs = {"x": (FLOAT, [1, 2, 6, 6])}
    model = made(
        [node],
        {**inputs, **({"z": (FLOAT, [1, 4, 3, 6])} if added else {})},
        {"y": (FLOAT, [1, 4, 3, 6])},
        {"w": array(4, 2, 3, 3), "b": array(4)},
    )
    expected = ["Conv", *(["Add"] if added else []), activation]
    assert operators(rewritten(model, FUSED)) == expected


def test_an_unknown_activation_stays() -> None:
    node = ours("FusedConv", ["x", "w"], activation="Swish")
    inputs = {"x": (FLOAT, [1, 2, 6, 6])}
    model = made([node], inputs, {"y": (FLOAT, [1, 4, 4, 4])}, {"w": array(4, 2, 3, 3)})
    assert untouched(model, FUSED)


@pytest.mark.parametrize(("activation", "alpha"), [("Relu", None), ("LeakyRelu", 0.2)])
def test_a_fused_gemm_is_taken_apart(activation: str, alpha: float | None) -> None:
    node = ours(
        "FusedGemm",
        ["x", "w", "b"],
        alpha=0.5,
        beta=2.0,
        transB=1,
        activation=activation,
        activation_alpha=alpha,
    )
    inputs = {"x": (FLOAT, [3, 4])}
    model = made([node], inputs, {"y": (FLOAT, [3, 5])}, {"w": array(5, 4), "b": array(5)})
    assert operators(rewritten(model, FUSED)) == ["Gemm", activation]


@pytest.mark.parametrize(
    ("attributes", "a", "b"),
    [
        ({"alpha": 0.5}, [2, 3, 4], [2, 4, 5]),
        ({"transA": 1}, [2, 4, 3], [2, 4, 5]),
        ({"transB": 1}, [2, 3, 4], [2, 5, 4]),
        ({"transA": 1, "transB": 1, "alpha": 3.0}, [2, 4, 3], [2, 5, 4]),
        ({"transBatchA": 1}, [3, 2, 4], [2, 4, 5]),
        ({"transBatchA": 1, "transA": 1, "transBatchB": 1}, [4, 2, 3], [4, 2, 5]),
    ],
)
def test_a_fused_product_is_taken_apart(attributes: Any, a: list[int], b: list[int]) -> None:
    node = ours("FusedMatMul", ["a", "b"], **attributes)
    inputs = {"a": (FLOAT, a), "b": (FLOAT, b)}
    model = made([node], inputs, {"y": (FLOAT, [2, 3, 5])})
    assert {"Transpose", "MatMul", "Mul"} >= set(operators(rewritten(model, FUSED)))


@pytest.mark.parametrize(
    "node",
    [
        ours("QuickGelu", ["x"], alpha=1.5),
        ours("QuickGelu", ["x"]),
        ours("Gelu", ["x"]),
        ours("BiasGelu", ["x", "v"]),
        ours("FastGelu", ["x"]),
        ours("FastGelu", ["x", "v"]),
        ours("SkipLayerNormalization", ["x", "s", "v", "u"], epsilon=1e-3),
        ours("SkipLayerNormalization", ["x", "s", "v", "u", "v"], "y", "", "", "sum"),
        ours("SkipSimplifiedLayerNormalization", ["x", "s", "v"], "y", "", "", "sum"),
        helper.make_node("SimplifiedLayerNormalization", ["x", "v"], ["y"], axis=-1),
    ],
    ids=lambda node: node.op_type,
)
@pytest.mark.filterwarnings("ignore")
def test_what_onnx_runtime_fuses_is_taken_apart(node: onnx.NodeProto) -> None:
    shape = [2, 3, 8]
    after = rewritten(
        made(
            [node],
            {"x": (FLOAT, shape), "s": (FLOAT, shape)},
            {name: (FLOAT, shape) for name in node.output if name},
            {"v": array(8), "u": array(8)},
        ),
        FUSED,
    )
    assert node.op_type not in {each.op_type for each in after.graph.node}


def test_values_behind_a_fused_operator_have_known_shapes() -> None:
    nodes = [
        ours("QuickGelu", ["x"], "g"),
        ours("FusedMatMul", ["g", "w"], "m", transA=1),
        ours("Gelu", ["m"], "y"),
    ]
    model = made(nodes, {"x": (FLOAT, [2, 4, 3])}, {"y": (FLOAT, [2, 3, 5])}, {"w": array(4, 5)})
    assert not any("com.microsoft" in each for each in operators(rewritten(model, FUSED)))


def test_what_needs_an_operator_of_a_newer_opset_stays() -> None:
    # Erf is of opset 9.
    shapes = {"x": (FLOAT, [8])}
    assert untouched(made([ours("Gelu", ["x"])], shapes, {"y": (FLOAT, [8])}, opset=8), FUSED)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("operator", "elem_type"),
    [
        ("ReduceLogSumExp", FLOAT),
        ("ReduceL2", FLOAT),
        ("ReduceL1", TensorProto.INT32),
        ("ReduceSumSquare", TensorProto.INT32),
    ],
)
def test_a_reduction_over_all_axes_is_a_sum(operator: str, elem_type: int, keepdims: int) -> None:
    node = helper.make_node(operator, ["x"], ["y"], keepdims=keepdims)
    shape = [1, 1] if keepdims else []
    model = made([node], {"x": (elem_type, [3, 4])}, {"y": (elem_type, shape)}, opset=13)
    assert "ReduceSum" in operators(rewritten(model, FUNCTIONS))


def test_a_sum_of_large_powers_does_not_overflow() -> None:
    node = helper.make_node("ReduceLogSumExp", ["x"], ["y"], axes=[1])
    model = made([node], {"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 1])}, opset=13)
    check_equal(model, rewritten(model, FUNCTIONS), scale=300)


@pytest.mark.parametrize("opset", [7, 13, 17])
def test_a_computed_batch_normalization_is_its_formula(opset: int) -> None:
    """As converters write LayerNormalization."""
    model = made(
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0, 2], keepdims=0),
            helper.make_node("ReduceMean", ["x"], ["wide"], axes=[0, 2]),
            helper.make_node("Sub", ["x", "wide"], ["away"]),
            helper.make_node("Mul", ["away", "away"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["variance"], axes=[0, 2], keepdims=0),
            helper.make_node("BatchNormalization", ["x", "v", "v", "mean", "variance"], ["y"]),
        ],
        {"x": (FLOAT, [2, 8, 3])},
        {"y": (FLOAT, [2, 8, 3])},
        {"v": array(8)},
        opset=opset,
    )
    assert "BatchNormalization" not in operators(rewritten(model, FUNCTIONS))


@pytest.mark.parametrize(("opset", "approximate"), [(20, "none"), (20, "tanh")])
def test_a_gelu_is_taken_apart(opset: int, approximate: str) -> None:
    nodes = [helper.make_node("Gelu", ["x"], ["y"], approximate=approximate)]
    model = made(nodes, {"x": (FLOAT, [2, 8])}, {"y": (FLOAT, [2, 8])}, opset=opset)
    assert "Gelu" not in operators(rewritten(model, FUNCTIONS))


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("opset", [17, 18])
def test_a_layer_normalization_is_taken_apart(opset: int, axis: int) -> None:
    shape = [2, 3, 4]
    node = helper.make_node(
        "LayerNormalization",
        ["x", "scale", "bias"],
        ["y", "mean", "inverse"],
        axis=axis,
        epsilon=0.1,
    )
    kept = [size if index < axis % 3 else 1 for index, size in enumerate(shape)]
    model = made(
        [node],
        {"x": (FLOAT, shape)},
        {"y": (FLOAT, shape), "mean": (FLOAT, kept), "inverse": (FLOAT, kept)},
        {"scale": array(*shape[axis % 3 :]), "bias": array(*shape[axis % 3 :])},
        opset=opset,
    )
    assert "LayerNormalization" not in operators(rewritten(model, FUNCTIONS))


@pytest.mark.parametrize(
    ("shape", "bias", "expected"),
    [
        ([3, 32], [], ["Reshape", "com.microsoft.MatMulNBits", "Reshape"]),
        ([2, 2, 3, 32], ["", "", "b"], ["Reshape", "com.microsoft.MatMulNBits", "Add", "Reshape"]),
        ([2, 3, 32], ["", "", "b"], ["com.microsoft.MatMulNBits", "Add"]),
        ([2, 3, 32], [], None),
    ],
)
def test_a_product_with_blocks_is_one_of_a_batch_and_a_sum(
    shape: list[int], bias: list[str], expected: list[str] | None
) -> None:
    node = ours("MatMulNBits", ["x", "w", "s", *bias], K=32, N=5, bits=4, block_size=32)
    stored = {"w": RNG.integers(0, 256, (5, 1, 16)).astype(np.uint8), "s": array(5)}
    stored |= {"b": array(5)} if bias else {}
    model = made([node], {"x": (FLOAT, shape)}, {"y": (FLOAT, [*shape[:-1], 5])}, stored)
    if expected is None:
        assert untouched(model, FUSED)
    else:
        assert operators(rewritten(model, FUSED)) == expected


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("places", [False, True])
def test_embeddings_and_the_attention_with_their_mask_are_taken_apart(
    segments: bool, places: bool
) -> None:
    """As ONNX Runtime's optimizer of transformers writes BERT."""
    tables = ["words", "places", "segments" if segments else "", "v", "v", "kept"]
    names = ["i", "j" if segments else "", *tables, *(["k"] if places else [])]
    nodes = [
        helper.make_node("Cast", ["c"], ["kept"], to=TensorProto.INT32),
        ours("EmbedLayerNormalization", names, "e", "m", "sum", epsilon=1e-3),
        ours("Attention", ["e", "w", "b", "m"], num_heads=2),
    ]
    ids = RNG.integers(0, 5, (3, 2, 5)).astype(np.int32)
    stored = {
        **dict(zip("ijk", ids, strict=True)),
        **{name: array(5, 8) for name in ("words", "places", "segments")},
        "v": array(8),
        "w": array(8, 24),
        "b": array(24),
    }
    outputs = {"y": (FLOAT, [2, 5, 8]), "sum": (FLOAT, [2, 5, 8]), "m": (TensorProto.INT32, [2])}
    after = rewritten(made(nodes, {"c": (BOOL, [2, 5])}, outputs, stored), FUSED)
    assert not any("microsoft" in each for each in operators(after))


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_to_a_part_of_a_cache_is_its_definition(causal: int, queries: int) -> None:
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=causal)
    shapes = {"q": (FLOAT, [2, 2, queries, 4]), **{n: (FLOAT, [2, 2, 9, 4]) for n in "kv"}}
    stored = {"n": np.array([4, 7])}
    model = made([node], shapes, {"y": (FLOAT, [2, 2, queries, 4])}, stored, opset=24)
    assert "Attention" not in operators(rewritten(model, DEFINITIONS))


BOOL = TensorProto.BOOL


def _attention(
    given: dict[str, bool], parts: dict[str, list[int]], stored: dict[str, Any], **attributes: Any
) -> onnx.ModelProto:
    """Attention for two batches of 5 queries, of each of two heads; ``given`` says what else it reads."""
    merged = "w" in stored
    operator = "Attention" if merged else "MultiHeadAttention"
    keys = [*parts.values()][-1][1]
    names = [*parts, *(["w"] if merged else []), "b" if given["bias"] else ""]
    names += ["m" if given["mask"] else "", *([""] if merged else [])]
    names += ["z"] if given["added"] else []
    nodes = [ours(operator, names, num_heads=2, **attributes)]
    inputs = {name: (FLOAT, shape) for name, shape in parts.items()}
    if given["mask"]:
        nodes.insert(0, helper.make_node("Cast", ["kept"], ["m"], to=TensorProto.INT32))
        inputs["kept"] = (BOOL, [2, keys])
    if given["added"]:
        inputs["z"] = (FLOAT, [2, 2, 5, keys])
    width = stored["b"].size // 3 if merged else parts["v"][2]
    return made(nodes, inputs, {"y": (FLOAT, [2, 5, width])}, stored)


EXTRAS = [
    {"bias": bias, "mask": mask, "added": added}
    for bias, mask, added in [(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
]


@pytest.mark.parametrize("given", EXTRAS)
@pytest.mark.parametrize("attributes", [{}, {"scale": 0.2}, {"mask_filter_value": -9.0}])
def test_attention_is_taken_apart(given: dict[str, bool], attributes: Any) -> None:
    stored = {"w": array(6, 24), "b": array(24)}
    model = _attention(given, {"x": [2, 5, 6]}, stored, **attributes)
    after = operators(rewritten(model, FUSED))
    assert (after.count("MatMul"), after.count("Softmax")) == (3, 1)
    assert not any("Attention" in each for each in after)


@pytest.mark.parametrize("given", [*EXTRAS, {"bias": False, "mask": False, "added": False}])
@pytest.mark.parametrize("attributes", [{}, {"scale": 0.2}, {"mask_filter_value": -9.0}])
def test_attention_of_several_heads_is_taken_apart(given: dict[str, bool], attributes: Any) -> None:
    parts = {"q": [2, 5, 8], "k": [2, 7, 8], "v": [2, 7, 4]}
    model = _attention(given, parts, {"b": array(20)}, **attributes)
    after = operators(rewritten(model, FUSED))
    assert (after.count("MatMul"), after.count("Softmax")) == (2, 1)


@pytest.mark.parametrize("attributes", [{"unidirectional": 1}, {"do_rotary": 1}])
def test_attention_that_sees_positions_stays(attributes: Any) -> None:
    stored = {"w": array(6, 24), "b": array(24)}
    given = {"bias": True, "mask": False, "added": False}
    assert untouched(_attention(given, {"x": [2, 5, 6]}, stored, **attributes), FUSED)


def test_attention_with_a_cache_or_packed_parts_stays() -> None:
    node = ours("MultiHeadAttention", ["q", "k", "v"], "y", "key", "value", num_heads=2)
    given = {name: (FLOAT, [2, 5, 8]) for name in "qkv"}
    outputs = {"y": (FLOAT, [2, 5, 8]), **{n: (FLOAT, [2, 2, 5, 4]) for n in ("key", "value")}}
    assert untouched(made([node], given, outputs), FUSED)
    packed = ours("MultiHeadAttention", ["q"], num_heads=2)
    model = made([packed], {"q": (FLOAT, [2, 5, 2, 3, 4])}, {"y": (FLOAT, [2, 5, 8])})
    assert untouched(model, FUSED)

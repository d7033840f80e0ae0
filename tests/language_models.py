"""A tiny random Llama as a folder of onnxruntime-genai, in the layout of its model builder.

``python -m tests.language_models DIR`` writes one, of 180 kB. Its tokenizer has one token for each byte.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 259, 32, 2, 2, 1, 16, 64
CONTEXT, BLOCK = 256, 32

PROMPTS = (
    "",
    "a",
    "x" * 61,
    "y" * 63,
    "yes " * 16,
    "Hello</s><s>A model.</s><s>Why? " * 4,
    "n" * 147,
)
"""Prompts of 1 to 148 tokens, with the first token: also a whole chunk, one more, and several turns."""


TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn['content'] + eos_token }}{% endfor %}"


def make_folder(
    folder: Path,
    dtype: Any = "float32",
    *,
    int4: bool = False,
    positions: bool = False,
    head_sizes: tuple[int, ...] = (HEAD_SIZE,) * LAYERS,
    **changes: Any,
) -> Path:
    """Write the folder, with ``changes`` of ``model`` in its genai_config.json; returns it.

    ``int4``: whether the weights of products are stored in four bits. ``positions``: whether nodes before the
    attention rotate, by an input. ``head_sizes``: of the layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    decoder, config = _decoder(np.dtype(dtype), head_sizes, int4=int4), _config(changes)
    if positions:
        _rotate_before(decoder.graph)
        config["model"]["decoder"]["inputs"]["position_ids"] = "position_ids"
    onnx.save(
        decoder,
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=1024,
    )
    files = {"genai_config": config, "tokenizer": tokenizer()}
    files["tokenizer_config"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def _decoder(dtype: np.dtype[Any], head_sizes: tuple[int, ...], *, int4: bool) -> onnx.ModelProto:
    random, float_type = np.random.default_rng(0), helper.np_dtype_to_tensor_dtype(dtype)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Any] = {}

    def constant(name: str, value: Any) -> str:
        weights[name] = value
        return name

    def weight(name: str, *shape: int) -> str:
        return constant(name, random.normal(0, 0.3, shape).astype(dtype))

    def add(operator: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        name = f"/{outputs[0]}"
        nodes.append(helper.make_node(operator, inputs, outputs, name=name, **attributes))
        return outputs[0]

    def matmul(value: str, name: str, rows: int, columns: int) -> str:
        factor = weight(f"{name}.weight", rows, columns)
        if int4:
            weights[factor] = (weights[factor] / 0.06).clip(-8, 7).round().astype(ml_dtypes.int4)
            scale = constant(f"{name}.scale", np.full((rows // BLOCK, columns), 0.06, dtype))
            factor = add(
                "DequantizeLinear", [factor, scale], f"{name}.floats", axis=0, block_size=BLOCK
            )
        return add("MatMul", [value, factor], name)

    def norm(value: str, name: str) -> str:
        ones = constant(f"{name}.weight", np.ones(HIDDEN, dtype))
        return add("SimplifiedLayerNormalization", [value, ones], name, axis=-1, epsilon=1e-5)

    def tensor(name: str, type_: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, type_, shape)

    def rotary(size: int) -> list[str]:
        angles = np.outer(np.arange(CONTEXT), 10000 ** (-np.arange(0, size, 2) / size))
        functions = (np.cos, np.sin)
        return [constant(f"{f.__name__}{size}", f(angles).astype(dtype)) for f in functions]

    add("ReduceSum", ["attention_mask", constant("axis", np.array([1]))], "tokens", keepdims=1)
    add("Sub", ["tokens", constant("one", np.array([1]))], "before")
    add("Shape", ["attention_mask"], "mask_shape")
    add("Gather", ["mask_shape", constant("last", np.array(1))], "slots")
    lengths = [add("Cast", [n], f"{n}_int32", to=TensorProto.INT32) for n in ("before", "slots")]
    value = add("Gather", [weight("embedding", VOCABULARY, HIDDEN), "input_ids"], "hidden")
    tokens = ("batch_size", "sequence_length")
    inputs = [
        tensor("input_ids", TensorProto.INT64, *tokens),
        tensor("attention_mask", TensorProto.INT64, "batch_size", "total_sequence_length"),
    ]
    outputs = [tensor("logits", float_type, *tokens, VOCABULARY)]
    for layer, head_size in enumerate(head_sizes):
        at, kinds = f"layers.{layer}", ("key", "value")
        past = [f"past_key_values.{layer}.{kind}" for kind in kinds]
        present = [f"present.{layer}.{kind}" for kind in kinds]
        for names, values, length in ((past, inputs, "past"), (present, outputs, "total")):
            shape = ("batch_size", KV_HEADS, f"{length}_sequence_length", head_size)
            values.extend(tensor(name, float_type, *shape) for name in names)
        normed = norm(value, f"{at}.norm")
        heads = (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        qkv = [matmul(normed, f"{at}.{n}", HIDDEN, count * head_size) for n, count in heads]
        attention = add(
            "GroupQueryAttention",
            [*qkv, *past, *lengths, *rotary(head_size)],
            f"{at}.attention",
            *present,
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
            scale=head_size**-0.5,
        )
        projected = matmul(attention, f"{at}.o", HEADS * head_size, HIDDEN)
        value = add("Add", [value, projected], f"{at}.attended")
        normed = norm(value, f"{at}.norm2")
        gate = matmul(normed, f"{at}.gate", HIDDEN, INNER)
        gate = add("Mul", [gate, add("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.silu")
        up = add("Mul", [gate, matmul(normed, f"{at}.up", HIDDEN, INNER)], f"{at}.gated")
        value = add("Add", [value, matmul(up, f"{at}.down", INNER, HIDDEN)], f"{at}.output")
    matmul(norm(value, "norm"), "logits", HIDDEN, VOCABULARY)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _rotate_before(graph: onnx.GraphProto) -> None:
    """Let nodes before the attention rotate, by an input, and not the attention itself."""
    shape = ("batch_size", "sequence_length")
    graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape))
    for node in [*graph.node]:
        if node.op_type == "GroupQueryAttention":
            angles = [node.input.pop() for _ in range(2)][::-1]
            at = [*graph.node].index(node)
            for index, heads in enumerate((HEADS, KV_HEADS)):
                rotated = f"{node.input[index]}.rotated"
                inputs = [node.input[index], "position_ids", *angles]
                domain, name = node.domain, f"/{rotated}"
                rotary = helper.make_node(
                    "RotaryEmbedding", inputs, [rotated], name, domain=domain, num_heads=heads
                )
                graph.node.insert(at, rotary)
                node.input[index] = rotated
            (does,) = (attribute for attribute in node.attribute if attribute.name == "do_rotary")
            does.i = 0


def _config(changes: dict[str, Any]) -> dict[str, Any]:
    past = {f"past_{n}_names": f"past_key_values.%d.{n}" for n in ("key", "value")}
    present = {f"present_{n}_names": f"present.%d.{n}" for n in ("key", "value")}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": HEAD_SIZE,
        "hidden_size": HIDDEN,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **past},
        "outputs": {"logits": "logits", **present},
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
    }
    model = {
        "type": "llama",
        "bos_token_id": 1,
        "context_length": CONTEXT,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "vocab_size": VOCABULARY,
        "decoder": {**decoder, **changes.pop("decoder", {})},
        **changes,
    }
    search = {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": True}
    return {"model": model, "search": search}


def tokenizer() -> dict[str, Any]:
    """The tokenizer.json with one token for each byte."""
    special = ["<pad>", "<s>", "</s>"]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [*special, *(letters[byte] for byte in range(256))]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    about = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, **about} for i, token in enumerate(special)
        ],
        "pre_tokenizer": {**bytes_, "use_regex": True},
        "decoder": {**bytes_, "use_regex": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []},
    }


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))

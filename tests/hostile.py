"""Models that are made to harm: each is written below a folder, and none of them may be compiled.

`HOSTILE` has those that reading alone refuses, each with the words that the message must contain, and
`HOSTILE_TO_RUN` those that only a session finds invalid. `CONTEXTS` are hostile context models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models import parsed, value, weights

Make = Callable[[Path], None]
"""Writes ``a.onnx`` and what belongs to it into a folder."""

_FAR = 2**62


def _graph(*nodes: onnx.NodeProto, **parts: Any) -> onnx.ModelProto:
    """An unchecked model of ``x`` and ``y``, both float32 of 2 x 2."""
    inputs = parts.pop("inputs", [value("x", [2, 2])])
    outputs = parts.pop("outputs", [value("y", [2, 2])])
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "graph",
        inputs,
        outputs,
        parts.pop("initializers", [weights("w", 2, 2)]),
    )
    opsets = [helper.make_opsetid("", parts.pop("opset", 17)), helper.make_opsetid("our.own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **parts)


def _saved(make: Callable[[], onnx.ModelProto]) -> Make:
    return lambda folder: _write(folder, make())


def _write(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "a.onnx").write_bytes(model.SerializeToString())


def _bytes(content: bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / "a.onnx").write_bytes(content)

    return make


def _sparse(name: str, size: int, model: onnx.ModelProto | None = None) -> Make:
    """A file of ``size`` bytes, of which none takes space where the system can do that."""

    def make(folder: Path) -> None:
        if model is not None:
            _write(folder, model)
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


def external(prepare: Make | None = None, dims: tuple[int, ...] = (2, 2), **entries: str) -> Make:
    """A model whose weights are in a file, as ``entries`` say; ``prepare`` makes the file."""

    def make(folder: Path) -> None:
        model = _graph()
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        del tensor.dims[:]
        tensor.dims.extend(dims)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in {"location": "data.bin", **entries}.items():
            tensor.external_data.add(key=key, value=text)
        (prepare or _sparse("data.bin", 16))(folder)
        _write(folder, model)

    return make


def _loop(folder: Path) -> None:
    (folder / "data.bin").symlink_to("other.bin")
    (folder / "other.bin").symlink_to("data.bin")


def _pointer(folder: Path) -> None:
    (folder / "data.bin").write_bytes(_POINTER)


def _hub(folder: Path) -> None:
    blob = folder / "../../blobs/4d7a"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(bytes(1024))
    (folder / "data.bin").symlink_to("../../blobs/4d7a")


def _device(folder: Path) -> None:
    (folder / "data.bin").symlink_to("/dev/zero")


def _node(op: str, inputs: list[str], **attributes: Any) -> Callable[[], onnx.ModelProto]:
    return lambda: _graph(
        helper.make_node(op, inputs, ["y"], "the node", **attributes),
        initializers=[weights("w", 2, 2), numpy_helper.from_array(np.empty(0, np.int64), "empty")],
    )


def _nodes(nodes: str) -> Make:
    return _saved(lambda: parsed(f"(float[2, 2] x) => (float[2, 2] y) {{ {nodes} }}", check=False))


def _replaced(old: bytes, new: bytes) -> Make:
    """A model with ``new`` in the place of a name of the same length."""

    def make(folder: Path) -> None:
        content = _graph().SerializeToString()
        assert old in content
        assert len(old) == len(new)
        (folder / "a.onnx").write_bytes(content.replace(old, new))

    return make


def _changed(change: Callable[[onnx.ModelProto], object]) -> Make:
    def make(folder: Path) -> None:
        model = _graph()
        change(model)
        _write(folder, model)

    return make


def _functions(*calls: tuple[str, list[str]]) -> Make:
    """Functions by name, each with the functions that it calls; the model calls the first."""
    text = f"(float[2, 2] x) => (float[2, 2] y) {{ [call] y = our.own.{calls[0][0]} (x) }}"
    for name, called in calls:
        values = ["a", *(f"v{index}" for index in range(len(called)))]
        nodes = "".join(
            f"{after} = {op if op == 'Relu' else f'our.own.{op}'} ({before}) "
            for op, before, after in zip(called, values, values[1:], strict=False)
        )
        opsets = '<domain: "our.own", opset_import: ["" : 17, "our.own" : 1]>'
        text += f"{opsets} {name} (a) => ({values[-1]}) {{ {nodes} }}\n"
    return _saved(lambda: parsed(text, check=False))


def _with_reference(name: str) -> onnx.ModelProto:
    """A model with an attribute that stands for one of a function, outside of any function."""
    model = _node("Gather", ["w", "x"], axis=0)()
    (attribute,) = model.graph.node[0].attribute
    attribute.ref_attr_name = name
    return model


def _nested(depth: int) -> bytes:
    """The bytes of graphs inside each other: protobuf itself does not write so many."""

    def field(number: int, content: bytes) -> bytes:
        length, size = len(content), b""
        while length > 127:
            size += bytes([length & 127 | 128])
            length >>= 7
        return bytes([number << 3 | 2]) + size + bytes([length]) + content

    graph = field(1, field(4, b"Relu"))
    for _ in range(depth):
        # A node with an attribute that is a graph.
        graph = field(1, field(5, field(6, graph)))
    return b"\x08\x08" + field(7, graph)


def endless() -> onnx.ModelProto:
    """A ``Loop`` that runs 2^62 times."""
    return parsed(
        f"""(float[2, 2] x) => (float[2, 2] y) <int64 times = {{{_FAR}}}, bool go_on = {{1}}> {{
            [loop] y = Loop (times, go_on, x) <
                body = body (int64 i, bool go, float[2, 2] before) => (bool on, float[2, 2] after)
                    {{ on = Identity (go) after = Relu (before) }}> }}""",
        check=False,
    )


def _sequence() -> onnx.ModelProto:
    inputs = [helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]
    return _graph(helper.make_node("SequenceAt", ["x", "w"], ["y"]), inputs=inputs)


def _set_raw(model: onnx.ModelProto, content: bytes) -> None:
    model.graph.initializer[0].raw_data = content


def _set_dims(model: onnx.ModelProto, *dims: int) -> None:
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)


def _range(array: np.ndarray[Any, Any], op: str = "Equal") -> Make:
    """A model that compares its input with a stored range, or takes it as index of a stored table."""

    def make(folder: Path) -> None:
        inputs = ["x", "w"] if op == "Equal" else ["x", "w", "v"]
        stored = [numpy_helper.from_array(array, "w"), weights("v", 2)]
        _write(folder, _graph(helper.make_node(op, inputs, ["y"]), initializers=stored))

    return make


_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)

HOSTILE: dict[str, tuple[Make, str]] = {
    "empty file": (_bytes(b""), "is empty"),
    "text": (_bytes(b"hello, this is text"), "is not an ONNX model"),
    "half a file": (_bytes(_graph().SerializeToString()[:-40]), "is not an ONNX model"),
    "graph of zeros": (_bytes(b"\x08\x08\x3a\x02\0\0"), "is not an ONNX model"),
    "deeply nested": (_bytes(_nested(200)), "nested too deeply"),
    "name that is no text": (_replaced(b"product", b"pro\xffuct"), "is not UTF-8 text"),
    "NUL in a name": (_replaced(b"product", b"pro\0uct"), "has a NUL character"),
    "NUL in a dimension": (
        _saved(lambda: _graph(inputs=[value("x", ["a\0b", 2])])),
        "has a NUL character",
    ),
    "unknown dtype of an input": (
        _saved(lambda: _graph(inputs=[value("x", [2, 2], 77)])),
        "'x'",
    ),
    "sequence as input": (_saved(_sequence), "the input 'x' is not a tensor"),
    "two inputs of one name": (
        _saved(lambda: _graph(inputs=[value("x", [2, 2]), value("x", [3])])),
        "two inputs are called 'x'",
    ),
    "input of 2^62 values": (
        _saved(lambda: _graph(inputs=[value("x", [_FAR, 2])])),
        "'x'",
    ),
    "input of 10^11 values": (
        _saved(lambda: _graph(inputs=[value("x", [10**5, 10**6])])),
        "'x'",
    ),
    "wrong raw data": (_changed(lambda model: _set_raw(model, b"123")), "the tensor 'w'"),
    "no data": (_changed(lambda model: _set_raw(model, b"")), "the tensor 'w'"),
    "negative size": (_changed(lambda model: _set_dims(model, -2, -2)), "the tensor 'w'"),
    "huge size": (_changed(lambda model: _set_dims(model, _FAR, _FAR)), "the tensor 'w'"),
    "unknown dtype of a tensor": (
        _changed(lambda model: setattr(model.graph.initializer[0], "data_type", 99)),
        "the tensor 'w'",
    ),
    "no dtype": (
        _changed(lambda model: setattr(model.graph.initializer[0], "data_type", 0)),
        "the tensor 'w'",
    ),
    "function that calls itself": (_functions(("f", ["f"])), "calls itself"),
    "functions that call each other": (_functions(("f", ["g"]), ("g", ["f"])), "calls itself"),
    "functions of 2^60 nodes": (
        _functions(*((f"f{n}", [f"f{n + 1}"] * 2) for n in range(60)), ("f60", ["Relu"])),
        "expand",
    ),
    "offset in words": (external(offset="ten"), "the tensor 'w'"),
    "offset of 10^5 digits": (external(offset="9" * 10**5), "the tensor 'w'"),
    "negative offset": (external(offset="-16"), "the tensor 'w'"),
    "huge offset": (external(offset=str(2**50)), "is shorter than the model requires"),
    "length in words": (external(length="0x10"), "the tensor 'w'"),
    "negative length": (external(length="-1"), "the tensor 'w'"),
    "wrong length": (external(length="12"), "the tensor 'w'"),
    "data with the name of a manifest": (
        external(location="manifest.json"),
        "has the name of a model package's manifest",
    ),
    "no location": (external(location=""), "is outside the model's folder"),
    "absolute location": (external(location="/etc/passwd"), "is outside the model's folder"),
    "location above the folder": (external(location="../data.bin"), "is outside the model's"),
    "location that is an address in memory": (
        external(location="*/_ORT_MEM_ADDR_/*", offset="140000000"),
        "is outside the model's folder",
    ),
    "location with NUL": (external(location="data\0.bin"), "is outside the model's folder"),
    "location that is very long": (external(location="d" * 5000), "is missing"),
    "pointer as data": (
        external(_pointer),
        "is a Git LFS pointer, not the data itself",
    ),
    "folder as data": (
        external(lambda folder: (folder / "data.bin").mkdir()),
        "is a folder, a pipe or a device, and not a file",
    ),
    "data that is too short": (
        external(_sparse("data.bin", 3)),
        "is shorter than the model requires",
    ),
}

if sys.platform != "win32":
    HOSTILE |= {
        "sparse model of 1 TB": (_sparse("a.onnx", 2**40), "cannot be larger than 2 GiB"),
        "sparse data of 1 TB": (external(_sparse("data.bin", 2**40)), "is larger than"),
        "sparse tensor of 1 TB": (external(_sparse("data.bin", 2**40), (2**38,)), "is larger than"),
        "links in a circle": (external(_loop), "Too many levels of symbolic links"),
        "link into a hub's cache": (
            external(_hub),
            "is a link to ../../blobs/4d7a, outside the model's",
        ),
        "link to a device": (
            external(_device),
            "is a link to /dev/zero, outside the model's folder",
        ),
        "pipe as data": (
            external(lambda folder: os.mkfifo(folder / "data.bin")),
            "is a folder, a pipe or a device, and not a file",
        ),
    }

HOSTILE_TO_RUN: dict[str, Make] = {
    "operator without inputs": _saved(_node("Gather", [])),
    "one input of two": _saved(_node("Equal", ["x"])),
    "three inputs of two": _saved(_node("Equal", ["x", "w", "w"])),
    "axis as text": _saved(_node("Gather", ["w", "x"], axis="one")),
    "axis of a function that is not there": _saved(lambda: _with_reference("axis")),
    "axis as a list": _saved(_node("Gather", ["w", "x"], axis=[1])),
    "table of NaN": _range(np.full(2, np.nan, np.float32), "OneHot"),
    "table of words": _range(np.array(["a", "b"], object)),
    "opset 0": _saved(lambda: _graph(opset=0)),
    "opset 10^9": _saved(lambda: _graph(opset=10**9)),
    "cycle": _nodes("a = Relu (b) b = Add (a, x)"),
    "two nodes of one output": _nodes("y = Relu (x) y = Abs (x)"),
    "unknown operator": _saved(_node("Strange", ["x"])),
}


def context(**attributes: Any) -> onnx.ModelProto:
    """A context model whose node has these attributes besides the usual ones, or instead of them."""
    usual = {
        "main_context": 1,
        "embed_mode": 0,
        "ep_cache_context": "blob.bin",
        "source": "QNNExecutionProvider",
        "partition_name": "p",
        "ep_sdk_version": "2.7",
    }
    given = {name: each for name, each in {**usual, **attributes}.items() if each is not None}
    node = helper.make_node("EPContext", ["x"], ["y"], "the node", domain="com.microsoft", **given)
    return _graph(node, initializers=[])


_TEXTS = ("ep_cache_context", "source", "partition_name", "ep_sdk_version")
_NUMBERS = ("main_context", "embed_mode")


def _context(**attributes: Any) -> Make:
    return _saved(lambda: context(**attributes))


def _folder(folder: Path) -> None:
    (folder / "blob.bin").mkdir()
    _write(folder, context())


_NO_TEXT = {"int": 2**40, "float": 1.5, "list": ["a"], "tensor": weights("t", 2)}
_NO_NUMBER = {"text": "1", "float": 0.0, "tensor": weights("t", 2)}

CONTEXTS: dict[str, tuple[Make, str]] = {
    **{
        f"{name} as {kind}": (_context(**{name: wrong}), repr(name))
        for names, values in ((_TEXTS, _NO_TEXT), (_NUMBERS, _NO_NUMBER))
        for name in names
        for kind, wrong in values.items()
    },
    "sidecar above the folder": (_context(ep_cache_context="../b"), "'../b'"),
    "sidecar that is absolute": (_context(ep_cache_context="/etc/passwd"), "'/etc/passwd'"),
    "sidecar with NUL": (_context(ep_cache_context="b\0b"), "'b\\x00b'"),
    "sidecar that is missing": (_context(ep_cache_context="no.bin"), "'no.bin'"),
    "sidecar with a very long name": (_context(ep_cache_context="b" * 5000), "'bbb"),
    "sidecar that is a folder": (_folder, "'blob.bin'"),
}

if sys.platform != "win32":
    CONTEXTS |= {
        "sparse sidecar of 1 TB": (_sparse("blob.bin", 2**40, context()), "'blob.bin'"),
    }

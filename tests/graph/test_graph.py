from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.graph import external, graph, reading
from tests.models import (
    initializer_among_the_inputs,
    model,
    network,
    save,
    save_with_data,
    value,
    weights,
)

KEY = Key(("models", 0))


def context_model() -> onnx.ModelProto:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")
    made = helper.make_graph([node], "g", [value("x", [1])], [value("y", [1])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets)


def branching() -> onnx.ModelProto:
    """An ``If`` with one node in each branch, one of them with a tensor of its own."""
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["t"], "add")],
        "then",
        [],
        [value("t", [2])],
        [weights("one", 2)],
    )
    other = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["e"], "relu")], "else", [], [value("e", [2])]
    )
    return model(
        [helper.make_node("If", ["c"], ["y"], "if", then_branch=then, else_branch=other)],
        [value("x", [2]), value("c", [], TensorProto.BOOL)],
        [value("y", [2])],
    )


def problem(path: Path) -> Problem:
    """The problem of a file that is not a source model."""
    with pytest.raises(ModelError) as raised:
        reading.read(path, KEY)
    (found,) = raised.value.problems
    assert found.key == KEY
    return found


def test_a_source_model_is_read(tmp_path: Path) -> None:
    assert reading.read(save(network(), tmp_path / "a.onnx"), KEY).graph.name == "graph"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"", "is empty"),
        (b"hello, this is text", "is not an ONNX model"),
        (b"\x08\x08", "it has no graph"),
        (network().SerializeToString()[:2000], "is not an ONNX model"),
    ],
)
def test_a_file_that_is_not_a_model_is_an_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(content)
    found = problem(path)
    assert found.kind is Kind.INVALID_MODEL
    assert message in found.message


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["x"], "has nothing to compile: its outputs are inputs or stored values"),
        ([], "its graph has no node"),
    ],
)
def test_a_graph_without_nodes_has_nothing_to_compile(
    tmp_path: Path, outputs: list[str], message: str
) -> None:
    ends = [value(name, [1]) for name in outputs]
    assert message in problem(save(model([], [value("x", [1])], ends), tmp_path / "a.onnx")).message


def test_a_graph_without_outputs_is_an_error(tmp_path: Path) -> None:
    made = network()
    del made.graph.output[:]
    assert "its graph has no output" in problem(save(made, tmp_path / "a.onnx")).message


def test_a_context_model_is_not_a_source_model(tmp_path: Path) -> None:
    found = problem(save(context_model(), tmp_path / "a.onnx"))
    assert found.kind is Kind.COMPILED_MODEL
    assert "is a context model already" in found.message


def test_nested_nodes_are_found() -> None:
    found = [node.op_type for node in graph.nodes(branching().graph)]
    assert sorted(found) == ["Add", "If", "Relu"]
    assert len(graph.compute_nodes(network().graph)) == 4


def test_external_data_is_found(tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "a.onnx")
    loaded = reading.read(path, KEY)
    assert external.external_data(loaded, tmp_path / "a.onnx", KEY) == ("network.data",)
    assert external.external_data(network(), tmp_path / "a.onnx", KEY) == ()


def test_external_data_of_nested_nodes_is_found(tmp_path: Path) -> None:
    path = save_with_data(branching(), tmp_path / "a.onnx")
    assert external.external_data(reading.read(path, KEY), path, KEY) == ("network.data",)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("../.git/annex/objects/x/y/SHA256E-s1", "git annex get"),
        ("../../cache/files/md5/ab/cd", "dvc pull"),
        ("nowhere", "dvc pull"),
    ],
)
def test_external_data_that_is_a_link_to_nothing_is_named_as_one(
    tmp_path: Path, target: str, hint: str
) -> None:
    path = save_with_data(network(), tmp_path / "models" / "a.onnx")
    data = path.with_name("network.data")
    data.unlink()
    data.symlink_to(target)
    with pytest.raises(ModelError, match="is a link to") as raised:
        external.external_data(reading.read(path, KEY), path, KEY)
    (found,) = raised.value.problems
    assert hint in (found.hint or "")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_external_data_that_the_user_may_not_read_is_an_error(tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "models" / "a.onnx")
    path.with_name("network.data").chmod(0)
    with pytest.raises(ModelError, match="Permission denied"):
        external.external_data(reading.read(path, KEY), path, KEY)


@pytest.mark.parametrize("harm", ["missing", "short", "outside", "absolute"])
def test_invalid_external_data_is_an_error(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "models"
    path = save_with_data(network(), folder / "a.onnx")
    loaded = reading.read(path, KEY)
    data = folder / "network.data"
    message = {"missing": "is missing", "short": "is shorter than"}.get(harm, "is outside the")
    if harm == "missing":
        data.unlink()
    elif harm == "short":
        data.write_bytes(data.read_bytes()[:10])
    else:
        elsewhere = tmp_path / "network.data"
        data.rename(elsewhere)
        location = "../network.data" if harm == "outside" else str(elsewhere)
        for tensor in loaded.graph.initializer:
            tensor.external_data[0].value = location
    with pytest.raises(ModelError, match=message) as raised:
        external.external_data(loaded, path, KEY)
    (found,) = raised.value.problems
    assert (found.kind, found.key) == (Kind.EXTERNAL_DATA, KEY)


@pytest.mark.parametrize(
    "location",
    ["", "/a", "../a", "a/../../b", "C:\\a", "C:a", "\\a", "..\\a", "\\\\host\\share\\a"],
)
def test_names_outside_the_folder_on_any_system(tmp_path: Path, location: str) -> None:
    assert not external.stays_inside(tmp_path / "a.onnx", location)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_a_link_to_a_file_outside_the_folder(tmp_path: Path) -> None:
    inside = tmp_path / "models"
    inside.mkdir()
    (tmp_path / "data").touch()
    (inside / "data").symlink_to(tmp_path / "data")
    assert not external.stays_inside(inside / "a.onnx", "data")
    assert external.stays_inside(inside / "a.onnx", "sub/data")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
@pytest.mark.parametrize(
    ("model", "data", "fits"),
    [
        # As in the cache of the Hugging Face Hub.
        ("blobs/4d", "blobs/7a", True),
        ("blobs/4d", "blobs/below/7a", True),
        ("blobs/4d", None, True),
        ("blobs/4d", "elsewhere/7a", False),
        (None, "blobs/7a", False),
        ("elsewhere/4d", "blobs/7a", False),
    ],
)
def test_links_to_data_are_taken_as_onnxruntime_takes_them(
    tmp_path: Path, model: str | None, data: str | None, fits: bool
) -> None:
    path = save_with_data(network(), tmp_path / "snapshots" / "1" / "a.onnx")
    for file, target in ((path, model), (path.with_name("network.data"), data)):
        if target is not None:
            (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
            file.rename(tmp_path / target)
            file.symlink_to(f"../../{target}")
    loaded = reading.read(path, KEY)
    with nullcontext() if fits else pytest.raises(ModelError, match="outside the model's folder"):
        assert external.external_data(loaded, path, KEY) == ("network.data",)
    with nullcontext() if fits else pytest.raises(Exception, match="escapes model directory"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_initializers_among_the_inputs_are_not_inputs() -> None:
    made = initializer_among_the_inputs()
    assert [each.name for each in graph.inputs(made.graph)] == ["x"]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (TensorProto.FLOAT, "float32"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.BFLOAT16, "bfloat16"),
        (TensorProto.INT64, "int64"),
        (TensorProto.BOOL, "bool"),
        (TensorProto.STRING, "string"),
    ],
)
def test_dtypes_have_numpys_names(dtype: int, name: str) -> None:
    assert graph.facts(value("x", [1], dtype)).dtype == name


def test_an_invalid_dtype_is_undefined() -> None:
    damaged = value("x", [1])
    damaged.type.tensor_type.elem_type = 84
    assert graph.facts(damaged).dtype == "undefined"


def test_an_open_dimension_has_its_name_or_none() -> None:
    assert graph.facts(value("x", [2, "batch", None, "?"])).shape == (2, "batch", None, None)


def test_an_unknown_rank_is_open_and_a_scalar_is_fixed() -> None:
    unknown = graph.facts(value("x", None))
    scalar = graph.facts(value("x", []))
    assert (unknown.shape, unknown.is_fixed, unknown.shape_text) == (None, False, "any rank")
    assert unknown.takes(())
    assert unknown.takes((2, 3))
    assert (scalar.shape, scalar.is_fixed, scalar.takes((2,))) == ((), True, False)


def test_the_dtype_of_a_sequence_is_its_kind() -> None:
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [1])
    assert graph.facts(sequence).dtype == "sequence_type"


def test_types_are_inferred_beside_tensors_in_another_file(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Reshape", ["x", "sizes"], ["a"]), helper.make_node("Neg", ["a"], ["y"])],
        [value("x", [4])],
        [value("y", [2, 2])],
        [helper.make_tensor("sizes", TensorProto.INT64, [2], [2, 2])],
    )
    path = save_with_data(made, tmp_path / "a.onnx")
    (found,) = graph.inferred(onnx.load(path, load_external_data=False)).value_info
    assert (found.name, len(graph.facts(found).sizes)) == ("a", 2)

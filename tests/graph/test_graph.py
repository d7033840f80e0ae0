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
from hatch_epcontext.graph import external, graph, inference
from hatch_epcontext.worker.source import data_of, read_source
from tests.conftest import newer_runtime
from tests.models import (
    initializer_among_the_inputs,
    network,
    parsed,
    save,
    save_with_data,
    value,
    weights,
)

KEY = Key(("models", 0))


def branching() -> onnx.ModelProto:
    """An ``If`` with one node in each branch, one of them with a tensor of its own."""
    made = parsed(
        """(float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = one () => (float[2] t) { t = Add (x, stored) },
                    else_branch = other () => (float[2] e) { e = Relu (x) }> }""",
        check=False,
    )
    (branch,) = (each.g for each in made.graph.node[0].attribute if each.name == "then_branch")
    branch.initializer.append(weights("stored", 2))
    return made


def problem(path: Path) -> Problem:
    """The problem of a file that is not a source model."""
    with pytest.raises(ModelError) as raised:
        read_source(path, KEY)
    (found,) = raised.value.problems
    assert found.key == KEY
    return found


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
    ("text", "kind", "message"),
    [
        (
            "(float[1] x) => (float[1] x) {}",
            Kind.INVALID_MODEL,
            "has nothing to compile: its outputs",
        ),
        ("(float[1] x) => () {}", Kind.INVALID_MODEL, "its graph has no node"),
        ("(float[1] x) => () { y = Relu (x) }", Kind.INVALID_MODEL, "its graph has no output"),
        (
            "(float[1] x) => (float[1] y) { y = com.microsoft.EPContext (x) }",
            Kind.COMPILED_MODEL,
            "is a context model already",
        ),
    ],
)
def test_a_graph_that_cannot_be_compiled_is_an_error(
    tmp_path: Path, text: str, kind: Kind, message: str
) -> None:
    found = problem(save(parsed(text, check=False), tmp_path / "a.onnx"))
    assert (found.kind, found.key) == (kind, KEY)
    assert message in found.message


def test_nested_nodes_are_found() -> None:
    found = [node.op_type for node in graph.nodes(branching().graph)]
    assert sorted(found) == ["Add", "If", "Relu"]
    assert len(graph.compute_nodes(network().graph)) == 4


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
        data_of(read_source(path, KEY), path, KEY)
    (found,) = raised.value.problems
    assert hint in (found.hint or "")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything"
)
def test_external_data_that_the_user_may_not_read_is_an_error(tmp_path: Path) -> None:
    path = save_with_data(network(), tmp_path / "models" / "a.onnx")
    path.with_name("network.data").chmod(0)
    with pytest.raises(ModelError, match="Permission denied"):
        data_of(read_source(path, KEY), path, KEY)


@pytest.mark.parametrize("harm", ["missing", "short", "outside", "absolute"])
def test_invalid_external_data_is_an_error(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "models"
    path = save_with_data(network(), folder / "a.onnx")
    loaded = read_source(path, KEY)
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
        data_of(loaded, path, KEY)
    (found,) = raised.value.problems
    assert (found.kind, found.key) == (Kind.EXTERNAL_DATA, KEY)


@pytest.mark.parametrize(
    "location",
    ["", "/a", "../a", "a/../../b", "C:\\a", "C:a", "\\a", "..\\a", "\\\\host\\share\\a"],
)
def test_names_outside_the_folder_on_any_system(tmp_path: Path, location: str) -> None:
    assert not external.stays_inside(tmp_path / "a.onnx", location)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
@pytest.mark.parametrize(
    ("model", "data", "fits"),
    [
        # As in the cache of the Hugging Face Hub.
        ("blobs/4d", "blobs/7a", True),
        ("blobs/4d", "blobs/below/7a", True),
        ("blobs/4d", None, True),
        pytest.param("blobs/4d", "elsewhere/7a", False, marks=newer_runtime),
        pytest.param(None, "blobs/7a", False, marks=newer_runtime),
        pytest.param("elsewhere/4d", "blobs/7a", False, marks=newer_runtime),
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
    loaded = read_source(path, KEY)
    with nullcontext() if fits else pytest.raises(ModelError, match="outside the model's folder"):
        assert data_of(loaded, path, KEY) == ("network.data",)
    with nullcontext() if fits else pytest.raises(Exception, match="escapes model directory"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_initializers_among_the_inputs_are_not_inputs() -> None:
    made = initializer_among_the_inputs()
    assert [each.name for each in graph.inputs(made.graph)] == ["x"]


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        (value("x", [1], TensorProto.FLOAT), "float32"),
        (value("x", [1], TensorProto.BFLOAT16), "bfloat16"),
        (value("x", [1], TensorProto.BOOL), "bool"),
        (value("x", [1], TensorProto.STRING), "string"),
        (value("x", [1], 84), "undefined"),
        (helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [1]), "sequence_type"),
    ],
)
def test_dtypes_have_numpys_names(info: onnx.ValueInfoProto, dtype: str) -> None:
    assert graph.facts(info).dtype == dtype


def test_an_open_dimension_has_its_name_or_none() -> None:
    assert graph.facts(value("x", [2, "batch", None, "?"])).shape == (2, "batch", None, None)


def test_an_unknown_rank_is_open_and_a_scalar_is_fixed() -> None:
    unknown = graph.facts(value("x", None))
    scalar = graph.facts(value("x", []))
    assert (unknown.shape, unknown.is_fixed, unknown.shape_text) == (None, False, "any rank")
    assert unknown.takes(())
    assert unknown.takes((2, 3))
    assert (scalar.shape, scalar.is_fixed, scalar.takes((2,))) == ((), True, False)


def test_types_are_inferred_beside_tensors_in_another_file(tmp_path: Path) -> None:
    text = "(float[4] x) => (float[2, 2] y) { a = Reshape (x, sizes) y = Neg (a) }"
    path = save_with_data(parsed(text, sizes=[2, 2]), tmp_path / "a.onnx")
    inferred = inference.inferred(onnx.load(path, load_external_data=False))
    facts = {value.name: graph.facts(value) for value in inferred.value_info}
    assert len(facts["a"].sizes) == 2

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from hatch_epcontext.package.external_data import external_data, model_files
from tests.models import network, save


def tensor(location: str, *, external: bool = True) -> onnx.TensorProto:
    proto = helper.make_tensor(f"of {location}", onnx.TensorProto.FLOAT, [1], [0.0])
    proto.external_data.add(key="location", value=location)
    proto.external_data.add(key="length", value="4")
    if external:
        proto.data_location = onnx.TensorProto.EXTERNAL
    return proto


def everywhere() -> onnx.ModelProto:
    """A model with a tensor in each place that can hold one."""
    model = network()
    graph = model.graph
    graph.initializer.append(tensor("initializer.bin"))
    graph.initializer.append(tensor("inside.bin", external=False))
    graph.sparse_initializer.add(values=tensor("values.bin"), indices=tensor("indices.bin"))
    node = graph.node.add(op_type="Any")
    node.attribute.append(helper.make_attribute("one", tensor("constant.bin")))
    node.attribute.append(helper.make_attribute("some", [tensor("listed.bin")]))
    inner = helper.make_graph([], "inner", [], [], [tensor("sub/inner.bin")])
    deeper = helper.make_node("If", [], [], then_branch=inner)
    branch = helper.make_graph([deeper], "branch", [], [])
    node.attribute.append(helper.make_attribute("branches", [branch]))
    function = model.functions.add(name="f", domain="d")
    function.node.add(op_type="Any").attribute.append(
        helper.make_attribute("value", tensor("function.bin"))
    )
    return model


def test_the_files_are_found_wherever_a_tensor_can_be(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(everywhere().SerializeToString())
    assert external_data(path) == (
        "constant.bin",
        "function.bin",
        "indices.bin",
        "initializer.bin",
        "listed.bin",
        "sub/inner.bin",
        "values.bin",
    )


def test_the_files_of_a_model_are_those_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    assert model_files(path) == []
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert model_files(path) == [path]
    path.write_bytes(everywhere().SerializeToString())
    (tmp_path / "values.bin").touch()
    assert model_files(path) == [path, tmp_path / "values.bin"]


def test_a_model_without_external_data_names_no_file(tmp_path: Path) -> None:
    save(network(), tmp_path / "a.onnx")
    assert external_data(tmp_path / "a.onnx") == ()


def test_any_other_file_is_an_error_in_words(tmp_path: Path) -> None:
    whole = everywhere().SerializeToString()
    path = tmp_path / "a.onnx"
    for content, message in (
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "."),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "the file has no graph"),
        (whole[:-1], "the file ends too early"),
        (b"\xff" * 20, "no message of protobuf"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            external_data(path)

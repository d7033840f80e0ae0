"""NVIDIA's real library, which needs no GPU to compile."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import helper

from hatch_epcontext.config.genai_config import Genai, read_config
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import BuildError, InspectionError, Kind, Problem
from hatch_epcontext.graph import graph
from hatch_epcontext.providers import HEADER, PROVIDERS
from hatch_epcontext.tools.inspecting import inspect_model, verify_model
from hatch_epcontext.worker import rtx_library, session
from hatch_epcontext.worker.actions import check, validate
from hatch_epcontext.worker.requests import CheckRequest, ValidateRequest
from hatch_epcontext.worker.results import ValidationStatus
from hatch_epcontext.worker.rtx_library import check_engine, compile_with_library
from tests.conftest import needs
from tests.language_models import make_folder
from tests.models import network, parsed, save, save_with_data
from tests.worker.actions.test_compile import MODEL, compiled, target

pytestmark = needs("tensorrt_rtx_bindings")

GPUS = ("8.6", "8.9", "12.0")
EP = PROVIDERS["tensorrt-rtx"].ep


def rtx(
    gpus: tuple[str, ...] = GPUS, options: Mapping[str, str] | None = None, **settings: Any
) -> Target:
    """A target that NVIDIA's library compiles for."""
    known: dict[str, Any] = {"compile_with": "library", "compute_capabilities": gpus}
    return target("tensorrt-rtx", options, **known, **settings)


def engine_of(made: onnx.ModelProto, tmp_path: Path, to: Target) -> bytes:
    """The engine of ``made``, which is compiled as it is."""
    path = save(made, tmp_path / "models" / "a.onnx")
    compile_with_library(path, tmp_path / "a_ctx.onnx", to)
    return (tmp_path / "a_ctx.engine").read_bytes()


def refusal(made: onnx.ModelProto, tmp_path: Path, to: Target) -> Problem:
    """The only problem of compiling ``made``."""
    with pytest.raises(BuildError) as raised:
        engine_of(made, tmp_path, to)
    (problem,) = raised.value.problems
    return problem


def test_an_engine_for_several_gpus_is_beside_the_context_model(tmp_path: Path) -> None:
    source = network(1)
    helper.set_model_props(source, {"sample_rate": "22050"})
    path = save_with_data(source, tmp_path / "models" / "a.onnx")
    reply, folder = compiled(path, rtx(), tmp_path)
    (context,) = reply.contexts
    assert sorted(file.name for file in folder.iterdir()) == ["a_ctx.engine", "a_ctx.onnx"]
    assert context.coverage is not None
    assert (context.coverage.partitions, context.coverage.share) == (1, 1.0)
    assert [each.shape for each in context.inputs] == [(1, 1, 8, 8)]
    made = onnx.load(folder / "a_ctx.onnx")
    onnx.checker.check_model(made)
    properties = {entry.key: entry.value for entry in made.metadata_props}
    assert properties["sample_rate"] == "22050"
    (node,) = made.graph.node
    assert graph.text(node, "ep_cache_context") == "a_ctx.engine"
    assert graph.text(node, "hardware_architecture") == "86,89,120"
    assert graph.text(node, "source") == EP
    assert (graph.attribute(node, "main_context", 1), graph.is_embedded(node)) == (0, False)
    facts = PROVIDERS["tensorrt-rtx"].compiled_for(context.compatibility)
    engine = (folder / "a_ctx.engine").read_bytes()
    assert engine[:HEADER].hex() == context.compatibility
    assert facts["compute capability"] == "8.6, 8.9, 12.0"
    major, minor, patch, _ = map(int, facts["TensorRT RTX"].split("."))
    assert context.ep_sdk_version == str(10_000 * major + 100 * minor + patch)


def test_profiles_have_the_shapes_of_open_inputs(tmp_path: Path) -> None:
    open_ = network()
    to = rtx(("8.9",))
    path = save(open_, tmp_path / "models" / "a.onnx")
    with pytest.raises(BuildError) as raised:
        check.handle(CheckRequest((Model("a", path, MODEL, targets=(to,)),)))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.OPEN_DIMENSION
    assert "'x'" in problem.message
    assert [str(each) for each in problem.settings] == [f"{MODEL}.dims = {{ batch = 1 }}"]
    shapes = {"min": (1, 1, 8, 8), "opt": (4, 1, 8, 8), "max": (8, 1, 8, 8)}
    to = replace(to, profiles=({"x": shapes}, {"x": {**shapes, "max": (16, 1, 8, 8)}}))
    assert engine_of(open_, tmp_path, to)
    too_many = replace(to, profiles=({"x": {**shapes, "min": (1, 2, 8, 8)}},))
    with pytest.raises(BuildError) as raised:
        engine_of(open_, tmp_path, too_many)
    assert {each.kind for each in raised.value.problems} <= {
        Kind.INVALID_PROFILE,
        Kind.COMPILE_FAILED,
    }


def test_the_nodes_that_the_parser_refuses_are_named(tmp_path: Path) -> None:
    made = parsed("(float[3, 3] x) => (float y) { [first] a = Relu (x) [second] y = Det (a) }")
    problem = refusal(made, tmp_path, rtx())
    assert problem.kind is Kind.COMPILE_FAILED
    assert "'second' (Det)" in problem.message
    assert "first" not in problem.message


@pytest.mark.parametrize(
    ("heads", "kind", "message", "hint"),
    [
        (0, Kind.COMPILE_FAILED, "crashes on 'rotated'", "-e NvTensorRtRtx"),
        (
            2,
            Kind.UNLOADABLE_LIBRARY,
            "no plugins for RotaryEmbedding: libcuda.so.1",
            "libcuda1 from",
        ),
    ],
)
def test_a_language_model_needs_another_format_or_the_driver(
    tmp_path: Path, heads: int, kind: Kind, message: str, hint: str
) -> None:
    if heads and find_library("cuda"):
        pytest.skip("this machine has NVIDIA's driver")
    made = parsed(
        f"""(float16[1, 4, 8] x, int64[1, 4] at) => (float16[1, 4, 8] y) {{ [rotated] y =
        com.microsoft.RotaryEmbedding <num_heads = {heads}> (x, at, cos, sin) }}""",
        cos=(16, 2),
        sin=(16, 2),
    )
    problem = refusal(made, tmp_path, rtx())
    assert problem.kind is kind
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert not problem.settings


@pytest.mark.parametrize("eps", [[], [{"NvTensorRtRtx": {}}]])
def test_only_a_folder_for_another_ep_is_to_be_built_for_this_one(
    tmp_path: Path, eps: list[Mapping[str, Any]]
) -> None:
    options = {"session_options": {"provider_options": eps}}
    config = read_config(make_folder(tmp_path / "llama", decoder=options))
    made = parsed(
        """(float16[1, 4, 8] x) => (float16[1, 4, 8] y)
        { y = com.microsoft.PackedAttention <num_heads = 2> (x, x, x) }"""
    )
    path = save(made, tmp_path / "models" / "a.onnx")
    model = Model("a", path, MODEL, genai=Genai(config, ()))
    with pytest.raises(BuildError, match=r"does not take .+ \(PackedAttention\)") as raised:
        compile_with_library(path, tmp_path / "a_ctx.onnx", rtx(), model)
    (problem,) = raised.value.problems
    assert ("-e NvTensorRtRtx" in (problem.hint or "")) == (not eps)


def test_a_type_that_the_library_changes_is_refused(tmp_path: Path) -> None:
    made = parsed("(float[3, 3] x) => (double[3, 3] y) { y = Cast <to = 11> (x) }")
    problem = refusal(made, tmp_path, rtx())
    assert problem.kind is Kind.WRONG_RESULT
    assert "'y' FLOAT, and it is float64 in the model" in problem.message


def test_an_output_may_have_no_shape_in_the_file(tmp_path: Path) -> None:
    made = parsed("(float[2, 3] x) => (float[2, 3] y) { y = Relu (x) }")
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert engine_of(made, tmp_path, rtx())


def test_another_gpu_than_that_of_the_engine_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the GPU, which this machine does not have."""
    path = save(network(1), tmp_path / "models" / "a.onnx")
    to = rtx(("8.9",))
    reply, folder = compiled(path, to, tmp_path)
    request = ValidateRequest(Model("a", path, MODEL), to, reply.contexts[0], str(folder), None)
    asked = []

    def compare(devices: Any, compatibility: str) -> Any:
        asked.append(compatibility)
        return SimpleNamespace(name="EP_UNSUPPORTED")

    monkeypatch.setattr(validate, "_options", lambda request: None)
    monkeypatch.setattr(session, "_devices", lambda provider, settings: [])
    name = "onnxruntime.capi._pybind_state.get_model_compatibility_for_ep_devices"
    monkeypatch.setattr(name, compare)
    assert validate.handle(request).validation.status is ValidationStatus.STRUCTURE
    assert asked == [reply.contexts[0].compatibility]


def test_what_a_gpu_does_not_have_is_refused_with_the_librarys_reason(tmp_path: Path) -> None:
    made = parsed("(float[3, 3] x) => (float[3, 3] y) { y = MatMul (x, x) }")
    assert engine_of(made, tmp_path, rtx(("8.6",)))
    with pytest.raises(BuildError) as raised:
        engine_of(made, tmp_path, rtx(("7.5",)))
    assert "FP32 GEMM" in raised.value.problems[0].message


@pytest.mark.parametrize("size", ["1", str(2**64 - 1)])
def test_a_limit_that_fits_no_engine_is_named(tmp_path: Path, size: str) -> None:
    to = rtx(("8.9",), {"nv_max_workspace_size": size})
    problem = refusal(network(1), tmp_path, to)
    assert problem.kind is Kind.COMPILE_FAILED
    assert "nv_max_workspace_size" in str(problem.hint)


def test_an_engine_that_no_onnx_file_can_hold_is_not_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rtx_library, "PROTOBUF_LIMIT", rtx_library._MAX_REST + 1000)
    assert engine_of(network(1), tmp_path, rtx())
    problem = refusal(network(1), tmp_path, rtx(embed=True))
    assert problem.kind is Kind.TOO_LARGE
    assert [(each.key.parts[-1], each.value) for each in problem.settings] == [("embed", False)]


def test_an_input_that_decides_shapes_is_to_be_frozen(tmp_path: Path) -> None:
    made = parsed("(float[3, 4] x, int64[2] s) => (float[?, ?] y) { y = Reshape (x, s) }")
    path = save(made, tmp_path / "models" / "a.onnx")
    with pytest.raises(BuildError) as raised:
        compile_with_library(path, tmp_path / "a_ctx.onnx", rtx(), Model("a", path, MODEL))
    (problem,) = raised.value.problems
    assert [str(each.key) for each in problem.settings] == [str(MODEL / "constants" / "s")]


@pytest.mark.parametrize("embed", [False, True])
def test_an_engine_is_compared_with_its_header_and_the_compatibility_string(
    tmp_path: Path, embed: bool
) -> None:
    path = save(network(1), tmp_path / "models" / "a.onnx")
    result = tmp_path / "a_ctx.onnx"
    compile_with_library(path, result, rtx(embed=embed))
    made = onnx.load(result)
    (blob,) = [each for each in made.graph.node[0].attribute if each.name == "ep_cache_context"]
    (compatibility,) = made.metadata_props
    engine = blob.s if embed else (tmp_path / "a_ctx.engine").read_bytes()
    header = engine[:HEADER]

    def altered(at: int, value: bytes) -> bytes:
        return header[:at] + value + header[at + len(value) :]

    def problem(content: bytes, written: bytes = header) -> str:
        if embed:
            blob.s = content
        else:
            (tmp_path / "a_ctx.engine").write_bytes(content)
        compatibility.value = written.hex()
        onnx.save(made, result)
        with pytest.raises(InspectionError) as raised:
            verify_model(result, inspect_model(result))
        assert {problem.kind for problem in raised.value.problems} == {Kind.CHANGED_FILE}
        return str(raised.value)

    facts = inspect_model(result)
    assert verify_model(result, facts) == (0 if embed else 1)
    assert (facts.contexts[0].main, facts.contexts[0].header) == (True, header.hex())
    assert "its header counts" in problem(engine[:-1])
    assert "has no header that is known" in problem(bytes(len(engine)))
    assert ("has no context" if embed else "is empty") in problem(b"")
    assert "is for TensorRT RTX 1.7.1.116, and" in problem(engine, altered(24, bytes([1, 6])))
    assert "is for compute capability" in problem(engine, altered(32, b"\x01"))
    size = len(engine) + 1
    wrong = problem(engine, altered(16, size.to_bytes(8, "little")))
    assert f"is of an engine of {size} bytes, which is not there" in wrong


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_no_refusal(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "models" / "a.onnx")
    (tmp_path / "a_ctx.engine").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        compile_with_library(path, tmp_path / "a_ctx.onnx", rtx())


def test_a_damaged_engine_and_one_for_other_gpus_are_refused(tmp_path: Path) -> None:
    to = rtx()
    engine = engine_of(network(1), tmp_path, to)
    check_engine(engine[:HEADER], len(engine), to)
    flipped = bytes([engine[0] ^ 1]) + engine[1:]
    for damaged in (engine[:-1], engine + b"x", engine[:10], b"", flipped):
        with pytest.raises(BuildError) as raised:
            check_engine(damaged[:HEADER], len(damaged), to)
        assert {problem.kind for problem in raised.value.problems} == {Kind.WRONG_RESULT}
    with pytest.raises(BuildError):
        check_engine(engine[:HEADER], len(engine), rtx(("8.6",)))


def test_without_a_gpu_only_the_structure_is_validated(tmp_path: Path) -> None:
    path = save(network(1), tmp_path / "models" / "a.onnx")
    to = rtx(("8.9",))
    reply, folder = compiled(path, to, tmp_path)
    spec = Model("a", path, MODEL)
    request = ValidateRequest(spec, to, reply.contexts[0], str(folder), None)
    found = validate.handle(request)
    if found.validation.status is ValidationStatus.RAN:
        pytest.skip("this machine has an RTX GPU")
    assert found.validation.agreements == ()

"""Compile with real EPs, in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import BuildError, Key, Kind, Setting
from hatch_epcontext.files import temp_dir
from hatch_epcontext.providers import PROVIDERS, Plugin
from hatch_epcontext.worker.actions import compile as compile_worker
from hatch_epcontext.worker.actions import prepare as prepare_worker
from hatch_epcontext.worker.compiling import compile_context
from hatch_epcontext.worker.explaining import Explainer
from hatch_epcontext.worker.requests import (
    CompileReply,
    CompileRequest,
    Prepared,
    PrepareRequest,
)
from hatch_epcontext.worker.results import Simplifier
from hatch_epcontext.worker.session import context_options, cpu_options, open_session
from tests.conftest import needs_qnn, newer_runtime
from tests.graph.test_bodies import OPERATORS, POSITIONS, feeds_of, with_body
from tests.models import (
    half_for_the_cpu,
    interrupted,
    network,
    parsed,
    save,
    save_with_data,
)

X_ELITE = {"soc_model": "60", "htp_arch": "73"}
MODEL = Key(("models", 0))


def target(
    provider: str,
    options: Mapping[str, str] | None = None,
    *,
    plugin: Plugin | None = None,
    **settings: Any,
) -> Target:
    """A target with the provider's defaults, and with ``settings`` instead of those."""
    known = PROVIDERS[provider]
    device = settings.get("device", known.devices[0])
    complete = known.complete(device, options or {})
    defaults: dict[str, Any] = {
        "provider": provider,
        "ep": known.ep,
        "provider_options": complete,
        "device": device,
    }
    return Target(
        name=provider,
        settings=CompileSettings(**{**defaults, **settings}),
        plugin=plugin or known.plugin,
        load_options=known.loading(complete),
    )


def prepared(spec: Model, tmp_path: Path, simplifier: Simplifier = "onnxruntime") -> Prepared:
    """Prepare the model of ``spec`` in a folder of its own."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    return prepare_worker.handle(PrepareRequest(spec, simplifier, str(folder), True))


def compile_request(spec: Model, to: Target, tmp_path: Path) -> CompileRequest:
    """A request to compile the model of ``spec``, which is prepared for the target."""
    folder = tmp_path / "compiled"
    folder.mkdir(parents=True)
    unoptimized = to.settings.optimization == "none"
    reply = prepared(spec, tmp_path, "none" if unoptimized else "onnxruntime")
    return CompileRequest((spec,), (reply.path,), to, str(folder))


def run_compile(request: CompileRequest) -> CompileReply:
    """The reply to ``request``, in a working directory of its own, as each request to a worker has."""
    with temp_dir() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return compile_worker.handle(request)


def compiled(path: Path, to: Target, tmp_path: Path) -> tuple[CompileReply, Path]:
    """Compile the model at ``path``; returns the reply and the artifact's folder."""
    spec = Model("a", path, MODEL, {"batch": 1} if "batch" in path.name else {})
    request = compile_request(spec, to, tmp_path)
    return run_compile(request), Path(request.folder)


def compile_context_of(made: onnx.ModelProto, tmp_path: Path, options: Mapping[str, str]) -> Path:
    """Compile ``made`` with QNN; returns the context model, with its sidecar beside it."""
    path = save(made, tmp_path / "models" / "a.onnx")
    reply, folder = compiled(path, target("qnn", options), tmp_path)
    return folder / reply.contexts[0].model_file


@needs_qnn
def test_a_context_is_compiled_for_a_chip_that_the_machine_does_not_have(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "batch.onnx")
    reply, folder = compiled(path, target("qnn", X_ELITE), tmp_path)
    (context,) = reply.contexts
    assert sorted(file.name for file in folder.iterdir()) == ["a_ctx.onnx", "a_ctx_qnn.bin"]
    assert context.model_file == "a_ctx.onnx"
    assert context.inputs[0].shape == (1, 1, 8, 8)
    assert context.compatibility.split(":")[4:6] == ["73", "60"]
    assert context.ep_sdk_version
    assert context.coverage is not None
    assert (context.coverage.partitions, context.coverage.uncovered) == (1, ())
    assert context.coverage.share == 1.0
    (node,) = onnx.load(folder / "a_ctx.onnx").graph.node
    assert node.op_type == "EPContext"


@needs_qnn
@pytest.mark.parametrize(
    ("made", "counts", "op", "reason"),
    [
        (
            half_for_the_cpu(),
            (3, 2, 1),
            "NonZero",
            "the shape of its output 'y' depends on the data",
        ),
        (interrupted(), (5, 4, 2), "Hardmax", "the EP does not have this operator"),
    ],
    ids=["where", "hardmax"],
)
def test_uncovered_nodes_are_named_with_a_reason(
    tmp_path: Path, made: onnx.ModelProto, counts: tuple[int, int, int], op: str, reason: str
) -> None:
    reply, _ = compiled(save(made, tmp_path / "a.onnx"), target("qnn", X_ELITE), tmp_path)
    coverage = reply.contexts[0].coverage
    assert coverage is not None
    assert (coverage.nodes, coverage.compiled, coverage.partitions) == counts
    assert [(node.op, node.reason) for node in coverage.uncovered] == [(op, reason)]


@needs_qnn
@pytest.mark.parametrize("from_memory", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(float[2, 2] x) => (int64[2, ?] y) { y = NonZero (x) }", "QNN.* compiled no node of the"),
        ("() => (float[2, 3] y) { y = MatMul (one, other) }", "None of them depends on an input"),
        # What the EP says of its nodes stands instead of a guess about the chip.
        ("(float[1, 4] x) => (float[1, 4] y) { y = Hardmax (x) }", r"It refuses Hardmax y \("),
    ],
)
def test_nothing_compiled_is_an_error(
    tmp_path: Path, text: str, message: str, from_memory: bool
) -> None:
    path = save(parsed(text, one=(2, 4), other=(4, 3)), tmp_path / "a.onnx")
    to = target("qnn", X_ELITE, embed=from_memory, from_memory=from_memory)
    with pytest.raises(BuildError, match=message) as raised:
        compiled(path, to, tmp_path)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOTHING_COMPILED
    assert "chip" not in problem.advice() or "Hardmax" not in text


@needs_qnn
@pytest.mark.parametrize("name", PROVIDERS["qnn"].chips)
def test_the_ep_compiles_for_each_chip_that_has_a_name(tmp_path: Path, name: str) -> None:
    chip = PROVIDERS["qnn"].chips[name]
    quantized = """(uint8[4, 8] x) => (uint8[4, 8] y) {
        [x] a = DequantizeLinear (x, s, zero) [w] b = DequantizeLinear (w, s, zero)
        [product] c = MatMul (a, b) [y] y = QuantizeLinear (c, s, zero) }"""
    values: dict[str, Any] = {"w": np.full((8, 8), 130, np.uint8)}
    values |= {"s": np.float32(0.02), "zero": np.uint8(128)}
    floats = chip.compiled.startswith("floats")
    source = network(1) if floats else parsed(quantized, **values)
    reply, _ = compiled(save(source, tmp_path / "a.onnx"), target("qnn", chip.facts), tmp_path)
    assert PROVIDERS["qnn"].compiled_for(reply.contexts[0].compatibility) == chip.facts


@pytest.mark.parametrize("optimization", ["none", "basic", "extended", "all"])
def test_the_cpu_provider_gives_an_optimized_graph_and_no_context(
    tmp_path: Path, optimization: str
) -> None:
    path = save(network(), tmp_path / "batch.onnx")
    reply, folder = compiled(path, target("cpu", optimization=optimization), tmp_path)
    (context,) = reply.contexts
    assert context.coverage is None
    assert [file.name for file in folder.iterdir()] == ["a_optimized.onnx"]
    operators = {node.op_type for node in onnx.load(folder / "a_optimized.onnx").graph.node}
    # From the level extended on, the ReLU is fused into the convolution.
    assert ("Relu" in operators) == (optimization in ("none", "basic"))


@needs_qnn
@pytest.mark.parametrize("external", [False, True])
def test_compilation_from_memory_gives_one_file_and_the_same_context(
    tmp_path: Path, external: bool
) -> None:
    path = (save_with_data if external else save)(network(1), tmp_path / "models" / "a.onnx")
    to = target("qnn", X_ELITE, embed=True, from_memory=True)
    reply, folder = compiled(path, to, tmp_path)
    assert [file.name for file in folder.iterdir()] == ["a_ctx.onnx"]
    by_file, _ = compiled(path, target("qnn", X_ELITE, embed=True), tmp_path / "file")
    assert reply.contexts == by_file.contexts


@needs_qnn
def test_a_failure_of_the_compiler_names_what_the_ep_refuses(tmp_path: Path) -> None:
    text = """(float[2, 3] x) => (double[2, 3] y)
        { [relu] t = Relu (x) [cast] d = Cast <to = 11> (t) [exp] y = Exp (d) }"""
    path, to = save(parsed(text), tmp_path / "a.onnx"), target("qnn", X_ELITE)
    message = r"failed: .*\. It refuses Cast cast \(.* float64\); Exp exp \(.* float64\)\."
    with pytest.raises(BuildError, match=message) as raised:
        compile_context(path, tmp_path / "b.onnx", to, model=Model("a", path, MODEL))
    assert raised.value.problems[0].settings == ()


def choosing(dtype: str) -> onnx.GraphProto:
    """An ``If`` whose branch ``x`` chooses."""
    nodes = "c = Cast <to = 9> (x) [choice] y = If (c)"
    return parsed(f"({dtype} x) => (float y) {{ {nodes} }}", check=False).graph


FROZEN = Setting(MODEL / "constants" / "x")
NOTHING = "Unable to compile any nodes"
UNCONVERTED = (
    "-- Conv-11 with a message:\nWhile validating ONNX node '<Node(Conv): then/y>': Check 'false' "
    "failed at a.cpp:38:\nThe rank has to be known\n\nSummary:"
)


@pytest.mark.parametrize(
    ("ep", "error", "dtype", "key", "message", "settings"),
    [
        ("qnn", NOTHING, "bool", MODEL, "It has If, which few EPs compile", (FROZEN,)),
        # Data cannot be frozen.
        ("qnn", NOTHING, "float", MODEL, "It has If, which few EPs compile", ()),
        ("qnn", NOTHING, "bool", None, "It has If, which few EPs compile", ()),
        ("openvino", UNCONVERTED, "int64", MODEL,
         "cannot convert the node Conv(?s:.*)branch of the If 'choice'", (FROZEN,)),
        ("openvino", UNCONVERTED, "float", MODEL,
         "cannot convert the node Conv(?s:(?!.*branch of))", ()),
    ],
)  # fmt: skip
def test_an_error_of_the_compiler_is_explained_with_what_chooses_a_branch(
    ep: str,
    error: str,
    dtype: str,
    key: Key | None,
    message: str,
    settings: tuple[Setting, ...],
) -> None:
    graph = choosing(dtype)
    with (
        pytest.raises(BuildError) as raised,
        Explainer(PROVIDERS[ep], lambda: graph, key).explaining(),
    ):
        raise RuntimeError(error)
    (problem,) = raised.value.problems
    assert re.search(message, f"{problem.message}\n{problem.hint}")
    assert problem.settings == settings


@needs_qnn
@newer_runtime
@pytest.mark.parametrize(
    ("where", "write"), [*((where, save) for where in POSITIONS), ("in the body", save_with_data)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_bodies_on_the_cpu_keep_their_weights(
    tmp_path: Path, operator: str, where: str, write: Callable[[onnx.ModelProto, Path], Path]
) -> None:
    to = target("qnn", X_ELITE)
    source = write(with_body(operator, where), tmp_path / "models" / "a.onnx")
    reply, folder = compiled(source, to, tmp_path)
    coverage = reply.contexts[0].coverage
    assert coverage is not None
    # What is before the body is compiled, and what is after it, too.
    assert coverage.compiled >= 2
    assert "SequenceConstruct" not in {node.op for node in coverage.uncovered}
    context = folder / reply.contexts[0].model_file
    found, expected = (
        open_session(path, each).run(["y"], feeds_of(operator))[0]
        for path, each in (
            (context, context_options(to)),
            (source, cpu_options()),
        )
    )
    # QNN compiles an If that has all its weights, and its Tanh is inexact.
    assert np.allclose(found, expected, rtol=0.02)


@pytest.mark.parametrize(
    ("provider", "options", "opsets"),
    [
        pytest.param("qnn", X_ELITE, {"": 7, "com.microsoft": 1}, marks=needs_qnn),
        pytest.param("cpu", {}, {"": 13}, marks=newer_runtime),
    ],
)
@pytest.mark.parametrize("embed", [False, True])
def test_older_releases_of_onnx_runtime_can_read_a_product_with_the_sources_metadata(
    tmp_path: Path, provider: str, options: Mapping[str, str], opsets: dict[str, int], embed: bool
) -> None:
    """The metadata: k2-fsa/sherpa-onnx#574; the version: notAI-tech/NudeNet#156."""
    source = network(1)
    source.ir_version, source.opset_import[0].version = 13, 22
    source.doc_string, source.graph.doc_string, source.model_version = "a text", "of a graph", 3
    source.graph.input[0].doc_string = "an image"
    helper.set_model_props(source, {"sample_rate": "22050"})
    reply, folder = compiled(
        save(source, tmp_path / "a.onnx"),
        target(provider, options, embed=embed, recompile=provider == "qnn"),
        tmp_path,
    )
    made = onnx.load(folder / reply.contexts[0].model_file)
    onnx.checker.check_model(made)
    assert (made.ir_version, {o.domain: o.version for o in made.opset_import}) == (8, opsets)
    prepared = [onnx.load(path) for path in folder.glob("prepared/*.onnx")]
    for each in (made, *prepared):
        assert each.ir_version == 8
        assert {e.key: e.value for e in each.metadata_props}["sample_rate"] == "22050"
        assert (each.doc_string, each.graph.doc_string) == ("a text", "of a graph")
        assert (each.model_version, each.graph.input[0].doc_string) == (3, "an image")

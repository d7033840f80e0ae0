"""Cut models in whole builds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hatch_epcontext import loader
from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import build
from hatch_epcontext.jobs.sources import check_unchanged, cut_models, read_sources
from hatch_epcontext.package.bundle import bundle
from tests.jobs.conftest import Run
from tests.models import network, parsed, save, save_with_data, weights
from tests.results import MODULES, install

CUT = """
targets.cpu.provider = "cpu"
fallback = "source"
models = [{ path = "models/a.onnx", dims = { batch = 2 }, cut = { inputs = ["c"] } }]
"""


@pytest.fixture
def run(run: Run, project: Path) -> Run:
    save_with_data(network(), project / "models" / "a.onnx")
    return run


def test_the_shipped_source_is_cut_as_the_artifact_is(
    run: Run, project: Path, tmp_path: Path
) -> None:
    before = (project / "models" / "a.onnx").read_bytes()
    bundled = bundle(run(CUT), tmp_path, MODULES)
    package = tmp_path / "shipped"
    # As a wheel has it: the files of the bundle are links.
    shutil.copytree(bundled.folder, package)
    x = np.ones((2, 4, 8, 8), np.float32)
    for target in ("cpu", "source"):
        session = loader.load("a", target=target, package=package)
        assert [value.name for value in session.get_inputs()] == ["c"]
        assert session.run(None, {"c": x})[0].shape == (2, 10)
    assert set(bundled.files) >= {"a/source/a.onnx", "a/source/a.onnx.data"}
    assert (project / "models" / "a.onnx").read_bytes() == before


def test_a_build_without_changes_cuts_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: Path
) -> None:
    first = run(CUT)
    monkeypatch.setattr(Workers, "call", None)
    assert run(CUT).sources[0].sha256 == first.sources[0].sha256
    only_from_cache = {"HATCH_EPCONTEXT_FROM_CACHE": "all"}
    assert run(CUT, only_from_cache).built[0].cached
    # What a build reads is in use, also where it is never written again.
    for path in (tmp_path / "cache" / LAYOUT).glob("*/*"):
        os.utime(path, (0, 0))
    run(CUT)
    assert Store(tmp_path / "cache").prune(30) == []
    assert run(CUT, only_from_cache).built[0].cached
    monkeypatch.undo()
    # Other data is another model, although the file that names it is the same.
    data = project / "models" / "network.data"
    data.write_bytes(bytes(data.stat().st_size))
    assert run(CUT).sources[0].sha256 != first.sources[0].sha256
    assert list((tmp_path / "cache").rglob("cut/*/files/a.onnx"))
    Store(tmp_path / "cache").prune(None)
    assert not list((tmp_path / "cache").rglob("cut/*/files/a.onnx"))
    # It is cut again, and not compiled, which needs the artifact.
    with pytest.raises(BuildError, match="HATCH_EPCONTEXT_FROM_CACHE"):
        run(CUT, only_from_cache)


def test_what_a_model_is_made_of_identifies_it(run: Run, project: Path) -> None:
    whole = CUT.replace(', cut = { inputs = ["c"] }', "")
    same = whole.replace('"cpu"', '"cpu"\ntargets.cpu.optimization = "none"')
    first, equal = (run(toml).sources[0].identity for toml in (whole, same))
    cut = run(CUT).sources[0].identity
    others = {cut, run(CUT.replace('inputs = ["c"]', 'outputs = ["c"]')).sources[0].identity}
    others.add(run(whole.replace("batch = 2", "batch = 3")).sources[0].identity)
    data = project / "models" / "network.data"
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    others |= {run(toml).sources[0].identity for toml in (whole, CUT)}
    assert first == equal
    assert len({first, *others}) == 6


def test_a_damaged_cut_model_is_made_again(run: Run, tmp_path: Path) -> None:
    first = run(CUT)
    (kept,) = (tmp_path / "cache").rglob("cut/*/files/a.onnx")
    kept.write_bytes(b"damaged")
    assert run(CUT).sources[0].sha256 == first.sources[0].sha256


def test_a_cut_model_of_the_cache_is_compiled(run: Run, project: Path, tmp_path: Path) -> None:
    # ONNX Runtime refuses weights of bodies in a file with several hard links.
    branches = parsed(
        """(float[4, 500] x) => (float[4, 500] y) {
            c = Relu (x)
            largest = ReduceMax <keepdims = 0> (c)
            positive = Cast <to = 9> (largest)
            y = If (positive) <then_branch = one () => (float[4, 500] a) { a = Mul (c, k) },
                               else_branch = other () => (float[4, 500] b) { b = Neg (c) }> }""",
        check=False,
    )
    then_branch = next(
        attribute.g
        for attribute in branches.graph.node[-1].attribute
        if attribute.g.node[0].op_type == "Mul"
    )
    then_branch.initializer.append(weights("k", 500))
    save_with_data(branches, project / "models" / "a.onnx")
    toml = CUT.replace("dims = { batch = 2 }, ", "")
    first = run(toml)
    for entry in Store(tmp_path / "cache").entries():
        if entry.kind != "cut":
            shutil.rmtree(entry.folder)
    second = run(toml)
    assert second.sources[0].sha256 == first.sources[0].sha256
    assert not second.built[0].cached


def test_an_editable_install_has_the_cut_source(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    config = load(project, parse(CUT), {}, {})
    cache, workers = Cache(None, print), Workers(60)
    config = cut_models(config, cache, workers, tmp_path)
    folder = project / "my_app" / "epcontext"
    install(Result(read_sources(config, cache, workers, tmp_path / "check"), ()), folder)
    session = loader.load("a", package=folder)
    assert [value.name for value in session.get_inputs()] == ["c"]
    assert "a/source/a.onnx" in json.dumps(json.loads((folder / "manifest.json").read_text()))


def test_what_cannot_be_cut_is_an_error_of_the_build(run: Run, project: Path) -> None:
    renamed = network()
    renamed.graph.node[0].output[0] = renamed.graph.node[1].input[0] = "renamed"
    onnx.save(renamed, project / "models" / "a.onnx")
    with pytest.raises(ModelError, match="computes 'c'"):
        run(CUT)


def test_each_shape_of_a_cut_model_begins_with_its_own(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    several = CUT.replace("{ batch = 2 }", "[{ batch = 1 }, { batch = 3 }]")
    several = f"targets.cpu.static-shapes = true\n{several}"
    config = load(project, parse(several), {}, {})
    workers = Workers(60)
    config = cut_models(config, Cache(None, print), workers, tmp_path)
    sources = read_sources(config, Cache(None, print), workers, tmp_path / "check")
    assert [source.facts.inputs[0].shape for source in sources] == [(1, 4, 8, 8), (3, 4, 8, 8)]
    # One file for all shapes, which stays open.
    assert len({source.sha256 for source in sources}) == 1
    assert sources[0].facts.own_inputs[0].sizes[1:] == (4, 8, 8)


def test_the_shipped_source_has_its_constants_in_it(project: Path, tmp_path: Path) -> None:
    onnx_model = network()
    onnx_model.graph.input.append(helper.make_tensor_value_info("sr", TensorProto.INT64, [1]))
    onnx_model.graph.node[-1].output[0] = "before"
    onnx_model.graph.node.append(helper.make_node("Cast", ["sr"], ["rate"], to=TensorProto.FLOAT))
    onnx_model.graph.node.append(helper.make_node("Mul", ["before", "rate"], ["y"]))
    save_with_data(onnx_model, project / "models" / "a.onnx")
    toml = """
targets.cpu.provider = "cpu"
fallback = "source"
models = [
    { name = "two", path = "models/a.onnx", constants = { sr = 2 } },
    { name = "three", path = "models/a.onnx", constants = { sr = 3 } },
]
"""
    planned = plan(load(project, parse(toml), {}, {}))
    (tmp_path / "staging").mkdir()
    result = build(planned, tmp_path / "staging", Cache(None, print), print)
    # A hook that changes the user's own file later is noticed.
    (before,) = {file for source in result.sources for file in source.users_files}
    assert before == project / "models" / "a.onnx"
    # As a wheel has it: the files of the bundle are links.
    package = shutil.copytree(bundle(result, tmp_path, MODULES).folder, tmp_path / "shipped")
    x = np.ones((1, 1, 8, 8), np.float32)
    answers = {}
    for name in ("two", "three"):
        for target in ("cpu", "source"):
            session = loader.load(name, target=target, package=package)
            assert [value.name for value in session.get_inputs()] == ["x"]
            (answers[name, target],) = session.run(None, {"x": x})
            with pytest.raises(Exception, match="Invalid input name: sr"):
                session.run(None, {"x": x, "sr": np.array([2])})
    np.testing.assert_allclose(answers["two", "cpu"], answers["two", "source"], rtol=1e-5)
    check_unchanged(result.sources, "")
    before.write_bytes(b"changed")
    with pytest.raises(ModelError, match="was changed or removed"):
        check_unchanged(result.sources, "")
    np.testing.assert_allclose(
        answers["three", "source"] * 2, answers["two", "source"] * 3, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("constants", "message"),
    [("{ sr = 1 }", "has no input 'sr'"), ('{ x = "a" }', "does not fit the input")],
)
def test_a_constant_that_does_not_fit_is_an_error_with_its_key(
    project: Path, tmp_path: Path, constants: str, message: str
) -> None:
    save(network(), project / "models" / "a.onnx")
    toml = f"""targets.cpu.provider = "cpu"
models = [{{ path = "models/a.onnx", constants = {constants} }}]
"""
    config = load(project, parse(toml), {}, {})
    with pytest.raises(ModelError, match=message) as raised:
        cut_models(config, Cache(None, print), Workers(60), tmp_path)
    (problem,) = raised.value.problems
    assert str(problem.key).startswith("tool.epcontext.models[0].constants.")


LORA = """(float[1, 2] x, float[2, 2] lora, float[2] bias) => (float[1, 2] y, float[2, 2] twice)
    <float[2] bias = {3, 4}> {
        a = MatMul(x, lora)
        y = Add(a, bias)
        twice = Add(lora, lora)
    }"""
TWO = 'targets = {cpu.provider = "cpu", second.provider = "cpu"}\nfallback = "source"\n'
OPTIONAL = {
    "": (["x"], [[4, 6]], ["'lora' and 'bias'"]),
    "constants.lora = [[0, 0], [0, 0]]": (["x"], [[3, 4]], ["'bias'"]),
    "constants = { lora = 2 }": (["x"], [[7, 8]], ["'bias'"]),
    'cut.inputs = ["x", "lora"]': (["x", "lora"], [[5, 6]], ["'bias'"]),
}


@pytest.mark.parametrize("keys", OPTIONAL)
def test_optional_inputs_are_the_same_for_all_that_is_shipped(
    run: Run, project: Path, tmp_path: Path, log: list[str], keys: str
) -> None:
    """See microsoft/onnxruntime#16600, and microsoft/Olive#1326 for LoRA."""
    names, expected, frozen = OPTIONAL[keys]
    keys = keys and f", {keys}"
    lora = np.array([[1, 0], [0, 2]], np.float32)
    save_with_data(parsed(LORA, lora=lora), project / "models" / "a.onnx")
    package = tmp_path / "shipped"
    toml = f"{TWO}models = [{{ path = 'models/a.onnx'{keys} }}]"
    shutil.copytree(bundle(run(toml), tmp_path, MODULES).folder, package)
    feeds = {"x": np.ones((1, 2), np.float32), "lora": np.ones((2, 2), np.float32)}
    for target in ("cpu", "second", "source"):
        session = loader.load("a", target=target, package=package)
        assert [value.name for value in session.get_inputs()] == names
        assert session.get_overridable_initializers() == []
        assert session.run(["y"], {name: feeds[name] for name in names})[0].tolist() == expected
    lines = [line for line in log if "frozen" in line]
    assert [name for line, name in zip(lines, frozen, strict=True) if name in line] == frozen


def test_weights_that_old_exports_list_as_inputs_are_no_optional_inputs(
    run: Run, project: Path, log: list[str]
) -> None:
    lora = np.eye(2, dtype=np.float32)
    save(parsed(LORA, ir_version=3, lora=lora), project / "models" / "a.onnx")
    result = run(f"{TWO}models = [{{ path = 'models/a.onnx' }}]")
    assert result.sources[0].model.origin is None
    assert not [line for line in log if "frozen" in line]


@pytest.mark.parametrize(
    ("keys", "value", "ignored"),
    [
        ("", [[1, 0], [0, 2]], None),
        ("", [[1, 0], [0, 3]], "'lora'"),
        ("constants = { lora = 2 }", [[[2, 2], [2, 2]]] * 2, None),
        ("constants = { lora = 2 }", [[1, 0], [0, 2]], "'lora'"),
    ],
)
def test_samples_with_other_values_for_a_frozen_input_are_named(
    run: Run, project: Path, log: list[str], keys: str, value: list[object], ignored: str | None
) -> None:
    lora = np.array([[1, 0], [0, 2]], np.float32)
    save(parsed(LORA, lora=lora), project / "models" / "a.onnx")
    x = np.ones((1, 2), np.float32)
    np.savez(project / "samples.npz", x=x, lora=np.array(value, np.float32))
    keys = ", ".join(filter(None, ["validate.inputs = 'samples.npz'", keys]))
    run(f"{TWO}models = [{{ path = 'models/a.onnx', {keys} }}]")
    lines = [line for line in log if "validate.inputs has other values for" in line]
    assert [f"for {ignored}, " in line for line in lines] == [True] * bool(ignored)


def test_an_input_with_a_sparse_initializer_is_optional(
    run: Run, project: Path, log: list[str]
) -> None:
    made = parsed("(float[1, 2] x, float[2, 2] w) => (float[1, 2] y) { y = MatMul(x, w) }")
    sparse = made.graph.sparse_initializer.add(dims=[2, 2])
    sparse.values.CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0]))
    sparse.indices.CopyFrom(helper.make_tensor("at", TensorProto.INT64, [1], [3]))
    save(made, project / "models" / "a.onnx")
    run(f"{TWO}models = [{{ path = 'models/a.onnx' }}]")
    assert [line for line in log if "frozen to the default: the optional input 'w'" in line]

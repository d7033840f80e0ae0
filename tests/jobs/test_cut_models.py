"""Cut models in whole builds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import onnx
import pytest

from hatch_epcontext import loader
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, ModelError
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.cache import LAYOUT
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.cleaning import Store
from hatch_epcontext.jobs.cut_models import FOLDER, cut_models
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import build
from hatch_epcontext.jobs.sources import read_sources
from hatch_epcontext.package import editable
from hatch_epcontext.package.bundle import bundle
from tests.models import network, save, save_with_data
from tests.results import MODULES

CUT = """
targets.cpu.provider = "cpu"
fallback = "source"
models = [{ path = "models/a.onnx", dims = { batch = 2 }, cut = { inputs = ["c"] } }]
"""

Run = Callable[..., Result]


@pytest.fixture
def run(project: Path, tmp_path: Path) -> Run:
    save_with_data(network(), project / "models" / "a.onnx")
    count = iter(range(100))

    def built(environ: dict[str, str] | None = None) -> Result:
        staging = tmp_path / f"staging-{next(count)}"
        staging.mkdir()
        planned = plan(load(project, parse(CUT), {}, environ or {}))
        return build(planned, staging, Cache(tmp_path / "cache", print), print)

    return built


def test_the_shipped_source_is_cut_as_the_artifact_is(
    run: Run, project: Path, tmp_path: Path
) -> None:
    before = (project / "models" / "a.onnx").read_bytes()
    made = bundle(run(), tmp_path, MODULES)
    package = tmp_path / "shipped"
    # As a wheel has it: the files of the bundle are links.
    shutil.copytree(made.folder, package)
    x = np.ones((2, 4, 8, 8), np.float32)
    for target in ("cpu", "source"):
        session = loader.load("a", target=target, package=package)
        assert [each.name for each in session.get_inputs()] == ["c"]
        assert session.run(None, {"c": x})[0].shape == (2, 10)
    assert set(made.files) >= {"a/source/a.onnx", "a/source/a.onnx.data"}
    assert (project / "models" / "a.onnx").read_bytes() == before


def test_a_build_without_changes_cuts_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: Path
) -> None:
    first = run()
    monkeypatch.setattr(Workers, "call", None)
    assert run().sources[0].sha256 == first.sources[0].sha256
    only_from_cache = {"HATCH_EPCONTEXT_FROM_CACHE": "all"}
    assert run(only_from_cache).built[0].cached
    # What a build reads is in use, also where it is never written again.
    for path in (tmp_path / "cache" / LAYOUT).glob("*/*"):
        os.utime(path, (0, 0))
    run()
    assert Store(tmp_path / "cache").prune(timedelta(days=30)) == []
    assert run(only_from_cache).built[0].cached
    monkeypatch.undo()
    # Other data is another model, although the file that names it is the same.
    data = project / "models" / "network.data"
    data.write_bytes(bytes(data.stat().st_size))
    assert run().sources[0].sha256 != first.sources[0].sha256
    assert list((tmp_path / "cache").rglob(f"{FOLDER}/*/a.onnx"))
    Store(tmp_path / "cache").prune(None)
    assert not list((tmp_path / "cache").rglob(f"{FOLDER}/*/a.onnx"))
    with pytest.raises(BuildError, match="does not have the cut model"):
        run(only_from_cache)


def test_a_damaged_cut_model_is_made_again(run: Run, tmp_path: Path) -> None:
    first = run()
    (kept,) = (tmp_path / "cache").rglob(f"{FOLDER}/*/a.onnx")
    kept.write_bytes(b"damaged")
    assert run().sources[0].sha256 == first.sources[0].sha256


def test_an_editable_install_has_the_cut_source(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    config = load(project, parse(CUT), {}, {})
    index, workers = Cache(None, print).index(), Workers(60)
    config = cut_models(config, index, workers, tmp_path)
    folder = project / "my_app" / "epcontext"
    editable.write(
        Result(read_sources(config, index, workers, tmp_path / "check"), ()), folder, MODULES
    )
    session = loader.load("a", package=folder)
    assert [each.name for each in session.get_inputs()] == ["c"]
    assert "a/source/a.onnx" in json.dumps(json.loads((folder / "manifest.json").read_text()))
    assert editable.remove(folder) == []
    assert not folder.exists()


def test_what_cannot_be_cut_is_an_error_of_the_build(run: Run, project: Path) -> None:
    made = network()
    made.graph.node[0].output[0] = made.graph.node[1].input[0] = "renamed"
    onnx.save(made, project / "models" / "a.onnx")
    with pytest.raises(ModelError, match="has no tensor 'c'"):
        run()


def test_each_shape_of_a_cut_model_begins_with_its_own(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    several = CUT.replace("{ batch = 2 }", "[{ batch = 1 }, { batch = 3 }], static-shapes = true")
    config = load(project, parse(several), {}, {})
    workers = Workers(60)
    config = cut_models(config, Cache(None, print).index(), workers, tmp_path)
    sources = read_sources(config, Cache(None, print).index(), workers, tmp_path / "check")
    assert [source.facts.inputs[0].shape for source in sources] == [(1, 4, 8, 8), (3, 4, 8, 8)]
    # One file for all shapes, which stays open.
    assert len({source.sha256 for source in sources}) == 1
    assert sources[0].facts.own_inputs[0].sizes[1:] == (4, 8, 8)

"""Models that change while they are built: by a worker, at the moment that the test needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import begin
from tests.altered_workers import workers_with
from tests.models import network, save, save_with_data

TOML = """
targets.cpu.provider = "cpu"
[[models]]
path = "models/a.onnx"
targets.cpu.quantize = { inputs = "models/samples" }
validate = { inputs = "models/a.npz" }
"""

CHANGES = {
    "replaced": ("a.onnx", "os.replace(path + '.new', path)"),
    "edited": ("a.onnx", "open(path, 'r+b').write(open(path + '.new', 'rb').read())"),
    "put back": ("a.onnx", "kept = open(path, 'rb').read(); open(path, 'wb').write(kept)"),
    "removed": ("a.onnx", "os.remove(path)"),
    "data": ("a.data", "open(path, 'r+b').write(b'other')"),
    "inputs": ("a.npz", "open(path, 'ab').write(b'more')"),
    "samples": ("samples/0.npz", "open(path, 'ab').write(b'more')"),
}
"""The file that changes, and how, as the source of a worker."""


@pytest.fixture
def models(project: Path) -> Path:
    folder = project / "models"
    save_with_data(network(1), folder / "a.onnx", "a.data")
    other = network(1)
    other.producer_name = "x" * len(other.producer_name)
    save(other, folder / "a.onnx.new")
    (folder / "samples").mkdir()
    for inputs in ("a.npz", "samples/0.npz"):
        np.savez(folder / inputs, x=np.ones((1, 1, 8, 8), np.float32))
    for path in folder.rglob("*"):
        os.utime(path, (10**9, 10**9))
    return folder


@pytest.fixture(scope="module")
def change(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with what workers do around their work: action, before or after, path and source."""
    return tmp_path_factory.mktemp("site") / "change"


@pytest.fixture(scope="module")
def workers(change: Path) -> Iterator[Workers]:
    source = f"""
        import importlib, os, pathlib
        def patch(action):
            module = importlib.import_module(f"hatch_epcontext.worker.actions.{{action}}")
            real = module.handle
            def handle(request):
                now, when, path, source = pathlib.Path({str(change)!r}).read_text().split("|")
                if (now, when) == (action, "before"): exec(source)
                reply = real(request)
                if (now, when) == (action, "after"): exec(source)
                return reply
            module.handle = handle
        for action in ("check", "prepare", "compile", "validate"): patch(action)
        """
    with workers_with(change.parent, source) as started:
        yield started


@pytest.mark.parametrize(
    ("action", "when", "how"),
    [
        ("check", "before", "replaced"),
        ("check", "after", "edited"),
        ("prepare", "before", "replaced"),
        ("prepare", "before", "data"),
        ("prepare", "after", "put back"),
        ("compile", "after", "removed"),
        ("compile", "after", "samples"),
        ("validate", "before", "inputs"),
    ],
)
def test_nothing_of_a_changed_model_is_stored(
    project: Path,
    models: Path,
    workers: Workers,
    change: Path,
    tmp_path: Path,
    action: str,
    when: str,
    how: str,
) -> None:
    name, source = CHANGES[how]
    change.write_text(f"{action}|{when}|{models / name}|{source}", encoding="utf-8")
    cache = tmp_path / "cache"
    planned = plan(load(project, parse(TOML), {}, {}))

    def run() -> None:
        build = begin(planned, tmp_path / "staging", Cache(cache, pytest.fail), workers)
        run_job(build, planned.jobs[0])

    with pytest.raises(BuildError) as raised:
        run()
    assert [(problem.kind, problem.location) for problem in raised.value.problems] == [
        (Kind.MODEL_CHANGED, str(models / name))
    ]
    # What was compiled before the inputs changed is right: the search has no validation.
    kinds = {entry.kind for entry in Store(cache).entries()}
    after = {"check": set(), "validate": {"facts", "artifacts", "searches"}}
    assert kinds == after.get(action, {"facts"})

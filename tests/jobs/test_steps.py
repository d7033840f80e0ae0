"""Which workers take the steps of a job, with real ones, and what happens if one misbehaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.errors import AccidentError, Kind
from hatch_epcontext.files import record_file
from hatch_epcontext.graph.number_format import ALWAYS
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.notes import notes
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.recipe import Recipe, Stop
from hatch_epcontext.jobs.steps import Build, Steps
from hatch_epcontext.system import cores
from hatch_epcontext.worker.results import ModelFacts, Preparation, Validated
from tests.altered_workers import workers_with
from tests.conftest import needs_qnn
from tests.models import network, parsed, save, weights
from tests.results import configured

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'

SIMULATED = """
targets.npu = { provider = "qnn", chip = "snapdragon-x-elite" }
models = ["models/a.onnx"]
"""


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source that a worker runs before ONNX Runtime prepares a model; ``tries`` is how often it did."""
    return tmp_path_factory.mktemp("site") / "body.py"


@pytest.fixture(scope="module")
def altered(body: Path) -> Iterator[Workers]:
    """Workers that run ``body``, and write into the folder of each step their number, and whether it has
    one core.
    """
    body.touch()
    source = f"""
        import importlib, os, pathlib
        for name in ("prepare", "rewrite", "compile", "validate"):
            module = importlib.import_module("hatch_epcontext.worker.actions." + name)
            def handle(request, real=module.handle):
                open("pid", "w").write(str(os.getpid()))
                open("on-one-core", "w").write(str(getattr(request, "core", None) is not None))
                if getattr(request, "simplifier", None) == "onnxruntime":
                    with open({str(body.with_name("tries"))!r}, "a") as file:
                        file.write("x")
                        tries = file.tell()
                    exec(pathlib.Path({str(body)!r}).read_text(), {{"tries": tries}})
                return real(request)
            module.handle = handle
        """
    with workers_with(body.parent, source) as started:
        yield started


@pytest.fixture
def workers(altered: Workers, body: Path) -> Workers:
    for file in (body, body.with_name("tries")):
        file.write_bytes(b"")
    altered.close_idle()
    return altered


def new_build(workers: Workers, staging: Path, *jobs: Job) -> Build:
    sources = {}
    for model in (model for job in jobs for model in job.models):
        record = record_file(model.path)
        facts, files = ModelFacts((), (), ()), {model.path.name: record}
        sources[model.name] = Source(model, facts, record.sha256, files)
    versions = {job.target.name: dict[str, str]() for job in jobs}
    return Build(workers, Cache(None, pytest.fail), staging, versions, sources)


def run(build: Build, job: Job) -> Validated:
    """Compile and validate ``job``."""
    steps, folder = Steps(build, build.staging / "prepared"), build.staging / job.target.name
    record = steps.attempt(job, Recipe("onnxruntime"), folder).record
    assert record is not None
    return steps.validate(job, 0, folder, record)


@needs_qnn
@pytest.mark.parametrize("others", [0, cores() - 1])
def test_a_short_run_of_a_simulator_has_one_core_while_other_tasks_need_the_others(
    project: Path, tmp_path: Path, workers: Workers, others: int
) -> None:
    save(network(1), project / "models" / "a.onnx")
    (job,) = plan(configured(project, SIMULATED)).jobs
    with contextlib.ExitStack() as tasks:
        for _ in range(others):
            tasks.enter_context(workers.process())
        run(new_build(workers, tmp_path / "staging", job), job)
    (step,) = (tmp_path / "staging").rglob("*-validate/on-one-core")
    assert step.read_text(encoding="ascii") == str(others == cores() - 1)


def answering(staging: Path) -> list[tuple[str, str]]:
    """Each step, with the number of the process that has answered it."""
    return [
        (file.parent.name.rpartition("-")[2], file.read_text(encoding="ascii"))
        for file in staging.rglob("pid")
    ]


@pytest.mark.parametrize("target", ["cpu", pytest.param("qnn", marks=needs_qnn)])
def test_jobs_share_the_processes_that_validate_and_no_vendor_compiles_twice_in_one(
    project: Path, tmp_path: Path, workers: Workers, target: str
) -> None:
    save(network(1), project / "models" / "a.onnx")
    (job,) = plan(configured(project, SIMULATED if target == "qnn" else TOML)).jobs
    numbers = []
    for name in ("first", "second"):
        run(new_build(workers, tmp_path / name, job), job)
        numbers.append(dict(answering(tmp_path / name)))
    first, second = numbers
    assert first["validate"] == second["validate"] not in (first["compile"], second["compile"])
    assert (first["compile"] == second["compile"]) == (target == "cpu")
    assert first["call"] == first["compile" if target == "cpu" else "validate"]


def test_without_what_is_folded_into_convolutions_a_model_keeps_its_nodes(
    project: Path, tmp_path: Path, workers: Workers
) -> None:
    scaled = network(1)
    scaled.graph.initializer.append(weights("scale", 4, 1, 1))
    scaled.graph.node[0].output[0] = "plain"
    scaled.graph.node.insert(1, helper.make_node("Mul", ["plain", "scale"], ["c"], "scaled"))
    save(scaled, project / "models" / "a.onnx")
    save(network(1), project / "models" / "b.onnx")
    toml = TOML.replace('"models/a.onnx"', '"models/a.onnx", "models/b.onnx"')
    folded, other = plan(configured(project, toml)).jobs
    steps = Steps(new_build(workers, tmp_path, folded, other), tmp_path / "prepared")
    unfused = Recipe("onnxruntime", fuse=False)
    before = steps.prepare_and_change(folded, 0, Recipe("onnxruntime"))
    after = steps.prepare_and_change(folded, 0, unfused)
    assert after.preparation.nodes == before.preparation.nodes + 1
    assert after.preparation.rewrites == ("nothing folded into convolutions",)
    assert steps.attempt(other, unfused, tmp_path / "out").stop == Stop("change")


@pytest.mark.parametrize(("operator", "requests"), [("Add", 1), ("Pow", 2)])
def test_a_model_without_what_is_to_be_rewritten_is_only_prepared(
    job: Job, project: Path, tmp_path: Path, workers: Workers, operator: str, requests: int
) -> None:
    text = f"(float[4] x) => (float[4] y) {{ y = {operator} (x, two) }}"
    save(parsed(text, two=np.float32(2)), project / "models" / "a.onnx")
    steps = Steps(new_build(workers, tmp_path, job), tmp_path / "prepared")
    recipe = Recipe("onnxruntime", corrections=ALWAYS)
    prepared = steps.prepare_and_change(job, 0, recipe)
    assert prepared.preparation.rewrites == (("square",) if requests == 2 else ())
    # What is for all models comes last, and is not done again if nothing else changes.
    unrolled = steps.attempt(job, recipe.with_change("unroll", None), tmp_path / "out")
    assert unrolled.stop == Stop("change")
    assert [step for step, _ in answering(tmp_path)] == ["call"] * requests


@pytest.fixture
def job(project: Path) -> Job:
    save(network(1), project / "models" / "a.onnx")
    (job,) = plan(configured(project, TOML)).jobs
    return job


def prepared(job: Job, tmp_path: Path, workers: Workers) -> tuple[Preparation, tuple[str, ...]]:
    """How it was prepared, and what else was tried."""
    built = run_job(new_build(workers, tmp_path, job), job)
    (preparation,) = built.record.preparations
    return preparation, notes(built.search, built.attempt)


on_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")


@on_posix
@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", Kind.WORKER_KILLED, "SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", Kind.WORKER_KILLED, "SIGTERM"),
        ("import os; os.kill(os.getpid(), 11 if tries == 1 else 9)", Kind.WORKER_KILLED, "SIGKILL"),
        ("import time; time.sleep(60)", Kind.WORKER_TIMEOUT, "1 seconds"),
        ("raise MemoryError", Kind.OUT_OF_MEMORY, "out of memory"),
        ("raise OSError(28, 'No space left on device', 'x')", Kind.SYSTEM_ERROR, "No space left"),
        (
            "print('write: No space left on device'); raise ValueError",
            Kind.SYSTEM_ERROR,
            "No space",
        ),
        ("import os, shutil; shutil.rmtree(os.getcwd())", Kind.SYSTEM_ERROR, "was removed"),
        ("raise OSError(24, 'Too many open files', 'x')", Kind.SYSTEM_ERROR, "Too many open"),
    ],
)
def test_what_is_not_the_simplifiers_fault_fails_the_job(
    job: Job,
    tmp_path: Path,
    workers: Workers,
    body: Path,
    source: str,
    kind: Kind,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body.write_text(source, encoding="utf-8")
    if kind is Kind.WORKER_TIMEOUT:
        monkeypatch.setattr(workers, "timeout", 1)
    with pytest.raises(AccidentError) as raised:
        prepared(job, tmp_path, workers)
    (problem,) = raised.value.problems
    assert problem.kind is kind
    assert words in problem.message
    assert problem.where() == f"{job.location}: preparation"


@on_posix
@pytest.mark.parametrize(
    ("source", "tries", "failed"),
    [
        ("if tries == 1:\n    import os\n    os.abort()\n", 2, ()),
        (
            "import os; os.kill(os.getpid(), 11)",
            2,
            ("onnxruntime failed: the worker crashed with SIGSEGV",),
        ),
        ("import os; os._exit(0)", 2, ("onnxruntime failed: the worker ended with exit code 0",)),
        (
            "raise RuntimeError('cannot simplify')",
            1,
            ("onnxruntime failed: RuntimeError: cannot simplify",),
        ),
    ],
)
def test_only_the_simplifiers_own_fault_leads_to_the_next_one(
    job: Job,
    tmp_path: Path,
    workers: Workers,
    body: Path,
    source: str,
    tries: int,
    failed: tuple[str, ...],
) -> None:
    body.write_text(source, encoding="utf-8")
    preparation, notes = prepared(job, tmp_path, workers)
    assert preparation.simplifier == ("onnxslim" if failed else "onnxruntime")
    assert len(notes) == len(failed)
    assert all(map(str.startswith, notes, failed))
    assert len(body.with_name("tries").read_bytes()) == tries

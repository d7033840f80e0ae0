"""What the local executor adds to errors, and which processes it uses for the steps of a job."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Target
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record
from hatch_epcontext.jobs.executors.local import LocalExecutor, _with_static_shapes
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from tests.altered_workers import workers_with
from tests.models import network, save
from tests.results import configured

TWO_TARGETS = """
targets = { one = { provider = "cpu" }, two = { provider = "cpu", optimization = "extended" } }
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""


@pytest.mark.parametrize(
    ("toml", "kind", "hinted"),
    [
        ("dims = { batch = 1 }", Kind.COMPILE_FAILED, True),
        ("dims = { batch = 1 }", Kind.WORKER_TIMEOUT, False),
        ("dims = { batch = 1 }, static-shapes = true", Kind.COMPILE_FAILED, False),
        ("name = 'a'", Kind.COMPILE_FAILED, False),
    ],
)
def test_sizes_that_are_known_can_be_fixed(
    project: Path, toml: str, kind: Kind, hinted: bool
) -> None:
    save(network(), project / "models" / "a.onnx")
    models = f'models = [{{ path = "models/a.onnx", {toml} }}]'
    (job,) = plan(configured(project, f'provider = "openvino"\n{models}\n')).jobs
    error = BuildError(Problem(kind, "a -> openvino", "it failed.", "Try it."))
    (problem,) = _with_static_shapes(error, job).problems
    assert [str(each) for each in problem.settings] == (
        ["tool.epcontext.static-shapes = true"] if hinted else []
    )
    assert (problem.hint == "Try it.") is not hinted


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that write into the folder of each step who answers it."""
    source = """
        import importlib, os
        for name in ("prepare", "compile", "validate"):
            module = importlib.import_module("hatch_epcontext.worker.actions." + name)
            def handle(request, real=module.handle):
                open("pid", "w").write(str(os.getpid()))
                return real(request)
            module.handle = handle
        """
    with workers_with(tmp_path_factory.mktemp("site"), source) as started:
        yield started


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def run(executor: LocalExecutor, job: Job) -> None:
    """Compile and validate ``job``."""
    folder = executor.staging / job.target.name
    record = executor.compile(job, Recipe("onnxruntime"), folder)
    assert isinstance(record, Record)
    executor.validate(job, job.models[0], Artifact(folder, record), record.contexts[0])


def answering(staging: Path) -> dict[str, str]:
    """The number of the process that has answered each step."""
    return {
        each.parent.name.rpartition("-")[2]: each.read_text(encoding="ascii")
        for each in staging.rglob("pid")
    }


def test_a_job_has_a_process_that_prepares_and_compiles_and_one_that_validates(
    project: Path, tmp_path: Path, workers: Workers
) -> None:
    save(network(), project / "models" / "a.onnx")
    (one, _) = plan(configured(project, TWO_TARGETS)).jobs
    run(LocalExecutor.make(workers, tmp_path / "alone", 1, {}, [one]), one)
    found = answering(tmp_path / "alone")
    assert found["call"] == found["compile"] != found["validate"]


def test_what_several_jobs_want_is_prepared_once_in_a_process_of_its_own(
    project: Path, tmp_path: Path, workers: Workers
) -> None:
    save(network(), project / "models" / "a.onnx")
    jobs = plan(configured(project, TWO_TARGETS)).jobs
    executor = LocalExecutor.make(workers, tmp_path / "both", 1, {}, jobs)
    for job in jobs:
        run(executor, job)
    found = [each.read_text(encoding="ascii") for each in (tmp_path / "both").rglob("pid")]
    assert len(found) == len(set(found)) == 5


def test_the_lock_of_a_device_is_not_held_while_a_model_is_prepared(
    project: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(network(), project / "models" / "a.onnx")
    (job, _) = plan(configured(project, TWO_TARGETS)).jobs
    provider = dataclasses.replace(job.target.provider, exclusive_device=True)
    monkeypatch.setattr(Target, "provider", provider)
    device = threading.Lock()
    locks = {f"{provider.ep}: device": device}
    staging = tmp_path / "locked"
    executor = LocalExecutor.make(workers, staging, 1, {}, [job], locks)
    thread = threading.Thread(target=run, args=(executor, job))
    with device:
        thread.start()
        wait_for(lambda: any((staging / "prepared").rglob("simplified-*")))
        assert not (staging / "steps").exists()
    thread.join(60)
    assert len(answering(staging)) == 3

"""Which processes the local executor uses for the steps of a job, and what their requests have."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from hatch_epcontext.config.settings import Target
from hatch_epcontext.errors import Kind
from hatch_epcontext.jobs.artifact import Artifact, Recipe, Record
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.worker.results import Validation
from tests.altered_workers import workers_with
from tests.conftest import wait_for
from tests.models import model, network, save, value
from tests.results import configured

TWO_TARGETS = """
targets = { one = { provider = "cpu" }, two = { provider = "cpu", optimization = "extended" } }
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""


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


def run(executor: LocalExecutor, job: Job) -> Validation:
    """Compile and validate ``job``."""
    folder = executor.staging / job.target.name
    record = executor.compile(job, Recipe("onnxruntime"), folder)
    assert isinstance(record, Record)
    return executor.validate(job, job.models[0], Artifact(folder, record), record.contexts[0])


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


@pytest.mark.parametrize(
    ("targets", "tolerance", "only"),
    [
        ("['one']", "{ cosine = 0.999 }", False),
        ("['one']", "{ targets = { one = { cosine = 0.999 } } }", True),
        ("['one', 'two']", "{ cosine = 0.999 }", True),
    ],
)
def test_more_is_allowed_for_the_target_that_needs_it(
    project: Path, tmp_path: Path, workers: Workers, targets: str, tolerance: str, only: bool
) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    made = model(nodes, [value("x", [10])], [value("y", [10])])
    save(made, project / "models" / "a.onnx")
    data = project / "data"
    data.mkdir()
    x = np.linspace(1, 2, 10, dtype=np.float32)
    onnx.save_tensor(numpy_helper.from_array(x, "x"), data / "input_0.pb")
    onnx.save_tensor(numpy_helper.from_array(np.float32(1.1) * x, "y"), data / "output_0.pb")
    validate = f"{{ inputs = 'data', tolerance = {tolerance} }}"
    table = f"{{ path = 'models/a.onnx', targets = {targets}, validate = {validate} }}"
    toml = f"models = [{table}]\n{TWO_TARGETS.split('models', maxsplit=1)[0]}"
    job, *_ = plan(configured(project, toml)).jobs
    executor = LocalExecutor.make(workers, tmp_path / "staging", 1, {}, [job])
    (problem,) = run(executor, job).problems
    (setting,) = problem.settings
    assert (problem.kind, setting.key) == (
        Kind.OUTPUT_DIFFERS,
        job.models[0].key / "validate" / "tolerance",
    )
    assert list(setting.value) == (["targets"] if only else ["outputs"])
    assert not only or list(setting.value["targets"]) == ["one"]

"""Which simplifier's result is taken, with real workers in which one misbehaves."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import AccidentError, BuildError, Kind
from hatch_epcontext.files import record_file
from hatch_epcontext.jobs.artifact import Preparation, Source
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.job import JobRunner
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.worker.results import ModelFacts
from tests.altered_workers import workers_with
from tests.models import network, save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source that a worker runs before ONNX Runtime prepares a model; ``tries`` is how often it did."""
    return tmp_path_factory.mktemp("site") / "body.py"


@pytest.fixture(scope="module")
def workers(body: Path) -> Iterator[Workers]:
    source = f"""
        import pathlib
        from hatch_epcontext.worker.actions import prepare
        real = prepare.handle
        def handle(request):
            if request.simplifier == "onnxruntime":
                with open({str(body.with_name("tries"))!r}, "a") as file:
                    file.write("x")
                    tries = file.tell()
                exec(pathlib.Path({str(body)!r}).read_text(), {{"tries": tries}})
            return real(request)
        prepare.handle = handle
        """
    with workers_with(body.parent, source) as started:
        yield started


@pytest.fixture
def job(project: Path) -> Job:
    save(network(1), project / "models" / "a.onnx")
    (job,) = plan(load(project, parse(TOML), {}, {})).jobs
    return job


def prepared(job: Job, tmp_path: Path, workers: Workers, body: Path, source: str) -> Preparation:
    body.write_text(source, encoding="utf-8")
    body.with_name("tries").write_bytes(b"")
    (model,) = job.models
    record = record_file(model.path)
    found = Source(model, ModelFacts((), (), ()), record.sha256, {model.path.name: record})
    executor = LocalExecutor.make(workers, tmp_path, 1, {}, [job])
    cache = Cache(None, pytest.fail)
    runner = JobRunner({"a": found}, cache, cache.index, executor, tmp_path, pytest.fail)
    (preparation,) = runner.run(job).artifact.record.preparations
    return preparation


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", Kind.WORKER_KILLED, "SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", Kind.WORKER_KILLED, "SIGTERM"),
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
    job: Job, tmp_path: Path, workers: Workers, body: Path, source: str, kind: Kind, words: str
) -> None:
    if kind is Kind.WORKER_TIMEOUT:
        workers = dataclasses.replace(workers, timeout=1)
    with pytest.raises(AccidentError) as raised:
        prepared(job, tmp_path, workers, body, source)
    (problem,) = raised.value.problems
    assert problem.kind is kind
    assert words in problem.message
    assert problem.where() == f"{job.location}: preparation"


def test_a_crash_that_does_not_happen_again_changes_nothing(
    job: Job, tmp_path: Path, workers: Workers, body: Path
) -> None:
    crash = "if tries == 1:\n    import os\n    os.abort()\n"
    found = prepared(job, tmp_path, workers, body, crash)
    assert found.simplifier == "onnxruntime"
    assert found.failed == ()


def test_a_crash_and_then_a_kill_fail_the_job(
    job: Job, tmp_path: Path, workers: Workers, body: Path
) -> None:
    source = "import os\nos.kill(os.getpid(), 11 if tries == 1 else 9)\n"
    with pytest.raises(BuildError, match="SIGKILL"):
        prepared(job, tmp_path, workers, body, source)


@pytest.mark.parametrize(
    ("source", "tries", "words"),
    [
        (
            "import os; os.kill(os.getpid(), 11)",
            2,
            "crashes on this model, in a process of its own",
        ),
        ("import os; os._exit(0)", 2, "crashes on this model, in a process of its own"),
        ("raise RuntimeError('cannot simplify')", 1, "failed: RuntimeError: cannot simplify"),
    ],
)
def test_the_simplifiers_own_fault_leads_to_the_next_one(
    job: Job, tmp_path: Path, workers: Workers, body: Path, source: str, tries: int, words: str
) -> None:
    found = prepared(job, tmp_path, workers, body, source)
    assert found.simplifier == "onnxslim"
    (failed,) = found.failed
    assert failed.startswith(f"onnxruntime {words}")
    assert len(body.with_name("tries").read_bytes()) == tries

"""Builds on a real cluster: a scheduler and several worker processes with different resources."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.cache.shared import Transport
from hatch_epcontext.cache.signing import new_keys
from hatch_epcontext.cache.store import DamagedError, read_record
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import CompileSettings
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import FileRecord, file_sha256
from hatch_epcontext.jobs import cluster as cluster_module
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import FARM
from hatch_epcontext.jobs.run import build, open_cache
from hatch_epcontext.jobs.search import Attempt, Search
from hatch_epcontext.serialize import to_json
from hatch_epcontext.shipped import CPU_EP
from hatch_epcontext.system import Heartbeat
from hatch_epcontext.worker.results import ValidationStatus
from tests.conftest import REPOSITORY, make_record, needs, needs_qnn, wait_for
from tests.language_models import make_folder
from tests.models import network, parsed, save, save_with_data, unknown_operator

pytestmark = pytest.mark.slow

PRELOAD = """
import os
import hatch_epcontext
from hatch_epcontext import system
from hatch_epcontext.jobs.processes import process
from tests.kept_server import KeptServers
hatch_epcontext.__version__ = os.environ.get("PACKAGE_VERSION", hatch_epcontext.__version__)
system._FIRST_BEAT = system._NEXT_BEATS = 0.5
process.ForkServer = KeptServers().get
"""
"""What each dask worker runs at its start, so that no test waits for long, and jobs share a server."""

SLOW_LIBRARY = """
import os, pathlib, time
import onnxruntime_qnn

folder = pathlib.Path(os.environ["SLOW_FOLDER"])

def get_library_path():
    (folder / f"{os.environ['SLOW_NAME']}.pid").write_text(str(os.getpid()))
    while (folder / "hold").exists():
        time.sleep(0.05)
    return onnxruntime_qnn.get_library_path()
"""
"""A package with QNN's library, which is not found while there is a file ``hold``."""


class Cluster:
    """A scheduler, and worker processes by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.slow = folder, folder / "slow"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.slow.mkdir()
        (folder / "temporary").mkdir()
        (self.slow / "slow_qnn.py").write_text(SLOW_LIBRARY, encoding="utf-8")
        (folder / "preload.py").write_text(PRELOAD, encoding="utf-8")
        # It has no types.
        distributed: Any = importlib.import_module("distributed")
        self.scheduler = distributed.LocalCluster(n_workers=0, dashboard_address=":0")

    def start(self, name: str, resources: str, **environ: str) -> None:
        """Start a worker, which has also the variables ``environ``, unless it runs."""
        if name in self.workers:
            return
        paths = filter(None, [environ.pop("PYTHONPATH", ""), str(REPOSITORY), *sys.path])
        environ["HATCH_EPCONTEXT_CACHE_DIR"] = str(self.folder / "caches" / name)
        environ["TMPDIR"] = str(self.folder / "temporary")
        options = [f"--name={name}", f"--resources={resources}", "--nthreads=2", "--no-nanny"]
        options += [f"--local-directory={self.folder}", f"--preload={self.folder / 'preload.py'}"]
        address = self.scheduler.scheduler_address
        self.workers[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", "worker", address, "--no-dashboard", *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
        )

    def wait(self) -> None:
        """Return when all workers are connected."""

        def connected() -> bool:
            assert all(worker.poll() is None for worker in self.workers.values())
            return self.workers.keys() <= {
                worker.name for worker in self.scheduler.scheduler.workers.values()
            }

        wait_for(connected)

    def hold(self, resources: str, *names: str) -> Path:
        """Start workers with `SLOW_LIBRARY`, which compile only when the returned file is gone."""
        for name in names:
            slow = str(self.slow)
            self.start(name, resources, PYTHONPATH=slow, SLOW_FOLDER=slow, SLOW_NAME=name)
        self.wait()
        for file in self.slow.glob("*.pid"):
            file.unlink()
        (self.slow / "hold").touch()
        return self.slow / "hold"

    def held(self, building: Future[Any] | None = None) -> dict[str, int]:
        """The process ids of held compilations by worker, once there is one; those of ``building``."""
        for _ in range(1200):
            files = {file.stem: file.read_text() for file in self.slow.glob("*.pid")}
            if pids := {name: int(text) for name, text in files.items() if text}:
                return pids
            if building is not None and building.done():
                pytest.fail(f"the build ended before: {building.exception() or building.result()}")
            time.sleep(0.05)
        pytest.fail("no worker compiles within 60 s")

    def left(self) -> set[Path]:
        """What workers keep of tasks; workers that were killed leave theirs."""
        return set((self.folder / "temporary").iterdir())

    def kill(self, name: str) -> None:
        self.workers[name].kill()
        self.workers.pop(name).wait()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Workers that work, and one with another version, each with resources of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    only_there = folder / "packages" / "only_there-1.0.dist-info"
    only_there.mkdir(parents=True)
    (only_there / "METADATA").write_text("Metadata-Version: 2.1\nName: only_there\nVersion: 1.0\n")
    cluster = Cluster(folder)
    try:
        cluster.start("board", "NPU=2")
        cluster.start("box", "GPU=1", PYTHONPATH=str(folder / "packages"))
        cluster.start("old", "OLD=1", PACKAGE_VERSION="0.0.1")
        yield cluster
    finally:
        for name in list(cluster.workers):
            cluster.kill(name)
        cluster.scheduler.close()


CPU = """
models = ["models/a.onnx"]
[targets.x]
provider = "cpu"
resources = { NPU = 1 }
"""

SLOW = """
models = [{ path = "models/a.onnx", targets = ["npu"] }]
[targets.npu]
provider = "qnn"
library = "slow_qnn"
resources = { SLOW = 1 }
"""

LOCAL = {"SCHEDULER": ""}


class Builder:
    """Builds the project in ``root`` on a cluster, also ``aside``; all share one cache of this machine."""

    def __init__(self, root: Path, folder: Path, cluster: Cluster, aside: Executor) -> None:
        self.root, self.folder, self.cluster, self.aside = root, folder, cluster, aside
        self.shared = folder / "shared"
        self.log: list[str] = []
        self.progress: list[str] = []

    def __call__(
        self,
        toml: str,
        environ: Mapping[str, str] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> Result:
        config = load(self.root, parse(toml), {}, {**self.variables(), **named(environ or {})})
        workers = Workers(config.build.timeout, progress=self.progress.append)
        cache, staging = open_cache(config, self.log.append), self.folder / "staging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        return build(plan(config), staging, cache, log or self.log.append, workers)

    def problem(self, toml: str, environ: Mapping[str, str] | None = None) -> Problem:
        """The only problem of a build that fails."""
        with pytest.raises(BuildError) as raised:
            self(toml, environ)
        (problem,) = raised.value.problems
        return problem

    def variables(self) -> dict[str, str]:
        places = {"SHARED_CACHE": f"file://{self.shared}", "CACHE_DIR": str(self.folder / "cache")}
        return named({"SCHEDULER": self.cluster.scheduler.scheduler_address, **places})


def named(variables: Mapping[str, str]) -> dict[str, str]:
    return {f"HATCH_EPCONTEXT_{name}": value for name, value in variables.items()}


@pytest.fixture
def run(
    project: Path, tmp_path: Path, started: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Builder]:
    # The scheduler is a thread of this process, which a busy machine may keep waiting.
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 60.0)
    save(network(1), project / "models" / "a.onnx")
    # The workers have done nothing before.
    shutil.rmtree(started.folder / "caches", ignore_errors=True)
    started.wait()
    with ThreadPoolExecutor(1) as pool:
        yield Builder(project, tmp_path, started, pool)
        # A test that failed leaves it, and a build that waits for it.
        (started.slow / "hold").unlink(missing_ok=True)


def entries(cache: Path) -> set[tuple[str, ...]]:
    """The kinds and keys in a cache, without the hashes of files: only those of older files are stored."""
    return {
        path.parts[-3:-1] for path in cache.glob("*/*/*/record.json") if path.parts[-3] != "index"
    }


def test_the_result_is_that_of_a_local_build(run: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    (built,) = run(CPU).built
    assert not built.cached
    # Of the same versions, and validated: no worker runs it again.
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module.Cluster, "_run", None)
        for environ in ({}, LOCAL, {"FROM_CACHE": "all"}):
            assert run(CPU, environ).built[0].cached
    record = built.record
    files = {name: (built.folder / name).read_bytes() for name in record.files}
    stored = entries(run.folder / "cache")
    shutil.rmtree(run.folder / "cache")
    (local,) = run(CPU, LOCAL).built
    assert stored == entries(run.folder / "cache")
    assert local.record == record
    assert local.validations["a"].agreements == built.validations["a"].agreements
    assert files == {name: (local.folder / name).read_bytes() for name in files}


def test_all_files_go_once_through_the_shared_cache_to_where_resources_are(run: Builder) -> None:
    save_with_data(network(), run.root / "models" / "a.onnx")
    np.savez(run.root / "x.npz", x=np.full((2, 1, 8, 8), 0.5, np.float32))
    (run.root / "data").mkdir()
    np.savez(run.root / "data" / "0.npz", x=np.ones((1, 1, 8, 8), np.float32))
    keys = 'path = "models/a.onnx", targets.x.quantize.inputs = "data", validate.inputs = "x.npz"'
    toml = CPU.replace('"models/a.onnx"', f'"models/a.onnx", {{ name = "b", {keys} }}')
    toml += 'requirements = ["only-there>=1"]\n'
    first, second = run(toml.replace("NPU", "GPU")).built
    assert "(1 sample)" in str(second.record.preparations[0].precision)
    # Only that worker has the package; this environment does not need it.
    assert "only-there" in first.record.versions
    # Nobody signs without the key.
    sent = {path: path.stat().st_mtime_ns for path in run.shared.rglob("*") if path.is_file()}
    names = ("models/a.onnx", "models/network.data", "x.npz", "data/0.npz")
    sums = {file_sha256(run.root / name) for name in names}
    sums |= {file.sha256 for b in (first, second) for file in b.record.files.values()}
    assert {path.name for path in sent} == {file_sha256(path) for path in sent} == sums
    # The same again, from the cache of the worker.
    shutil.rmtree(run.folder / "cache")
    run(toml.replace("NPU", "GPU"))
    assert all(path.stat().st_mtime_ns == time for path, time in sent.items())
    assert not run.cluster.left()


def test_only_the_build_signs_what_it_has_checked(
    run: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_files, (private, public) = Transport.fetch_files, new_keys()

    def alter(self: Transport, files: Mapping[str, FileRecord], folder: Path) -> None:
        (sent,) = run.shared.rglob(next(iter(files.values())).sha256)
        sent.write_bytes(sent.read_bytes()[:-1] + b"?")
        fetch_files(self, files, folder)
        pytest.fail("other content was fetched")

    toml = f'{CPU}[build]\nshared-cache-keys = ["{public}"]\n'
    signing = {"SHARED_CACHE_WRITE": "1", "SHARED_CACHE_KEY": private}
    with monkeypatch.context() as patch:
        patch.setattr(Transport, "fetch_files", alter)
        problem = run.problem(toml, signing)
    assert (problem.kind, problem.where()) == (Kind.UNUSABLE_CACHE, "a -> x")
    assert "has other content" in problem.message
    shutil.rmtree(run.shared)
    other = Builder(run.root, tmp_path / "other", run.cluster, run.aside)
    other.folder.mkdir()
    other.shared = run.shared
    assert other.problem(toml, {"FROM_CACHE": "x"}).kind is Kind.NOT_CACHED
    (built,) = run(toml, signing).built
    assert not built.cached
    (fetched,) = other(toml, {"FROM_CACHE": "x"}).built
    assert fetched.record == built.record


@pytest.mark.parametrize("name", ["../evil.bin", "/tmp/evil.bin", "con"])
def test_an_artifact_with_files_elsewhere_is_damaged(name: str) -> None:
    record = make_record({"a_ctx.onnx": FileRecord(1, "0" * 64), name: FileRecord(1, "0" * 64)})
    settings, attempt = (
        CompileSettings(provider="cpu", ep=CPU_EP, device="cpu"),
        Attempt(record.recipe, record),
    )
    result = cluster_module.TaskResult(Search(settings).adding(attempt).won_by(attempt))
    with pytest.raises(DamagedError, match="a file outside of its folder"):
        read_record(to_json(result), cluster_module.TaskResult)


def test_a_model_that_changes_while_it_is_sent_is_refused(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, has_file = run.root / "models" / "a.onnx", Transport.has_file

    def change(self: Transport, file: FileRecord) -> bool:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return has_file(self, file)

    monkeypatch.setattr(Transport, "has_file", change)
    assert run.problem(CPU).kind is Kind.MODEL_CHANGED


def test_errors_and_their_logs_are_as_locally(run: Builder) -> None:
    save(unknown_operator(), run.root / "models" / "a.onnx")
    problems = [run.problem(CPU, environ) for environ in ({}, LOCAL)]
    assert all("Strange" in f"{problem.message}{problem.log}" for problem in problems)
    first, second = (dataclasses.replace(problem, log=None) for problem in problems)
    assert first == second
    run.shared = run.root / "models" / "a.onnx"
    assert run.problem(CPU).kind is Kind.UNUSABLE_CACHE


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("NPU", "OLD", Kind.VERSION_MISMATCH, r"worker old \(tcp://.*\) has hatch-epcontext 0\.0\.1, "),
        ('"cpu"', '"cpu"\nrequirements = ["only-there>=1"]', Kind.MISSING_REQUIREMENT,
         r"on the worker board \(tcp://.*\): 1 build requirement is missing"),
        ("NPU = 1", "NPU = 3, TPU = 1", Kind.NO_WORKER,
         r"no worker with NPU=3,TPU=1 came in"),
    ],
)  # fmt: skip
def test_a_job_without_a_worker_that_fits_fails_and_the_others_run(
    run: Builder, old: str, new: str, kind: Kind, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "WORKER_SECONDS", 0.2)
    other = CPU[CPU.index("[targets") :].replace(".x", ".y").replace(old, new)
    problem = run.problem(CPU + other)
    assert (problem.kind, problem.where()) == (kind, "a -> y")
    assert re.search(message, problem.message)
    assert run.log[0].startswith("a -> x (cpu): ok, optimized graph")


def test_a_worker_whose_packages_have_changed_refuses_the_job(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(self: object, job: object, versions: dict[str, str]) -> None:
        versions["onnxruntime"] = "99"

    monkeypatch.setattr(cluster_module.Cluster, "_known", change)
    message = r"worker board \(tcp://.*\) has .*onnxruntime 1\..* began with .*onnxruntime 99"
    assert re.search(message, run.problem(CPU).message)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nothing://host:1", "silent"])
def test_a_scheduler_that_cannot_be_reached_is_an_error(
    run: Builder, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address.replace("silent", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        problem = run.problem(CPU, {"SCHEDULER": address})
    assert problem.kind is Kind.UNREACHABLE_SCHEDULER
    assert problem.location == "tool.epcontext.build.scheduler"
    # Without a cluster, and from the cache alone, nobody is contacted.
    assert not run(CPU, {"SCHEDULER": ""}).built[0].cached
    assert run(CPU, {"SCHEDULER": address, "FROM_CACHE": "all"}).built[0].cached
    assert plan(load(run.root, parse(CPU), {}, run.variables())).requirements == FARM


@needs_qnn
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_steps_of_a_build_that_is_gone_end(run: Builder, *, is_killed: bool) -> None:
    hold = run.cluster.hold("SLOW=1", "slow-1", "slow-2")
    before = run.cluster.left()
    table = SLOW.replace("[targets", "[tool.epcontext.targets")
    (run.root / "pyproject.toml").write_text(f"[tool.epcontext]{table}", encoding="utf-8")
    # A shell lets what it runs in the background ignore the signal.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hatch_epcontext.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "build"]
    building = subprocess.Popen(command, cwd=run.root, env={**os.environ, **run.variables()})
    ((name, pid),) = run.cluster.held().items()
    building.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
    assert building.wait(timeout=60) != 0
    wait_for(lambda: not (Path(f"/proc/{pid}").exists() or run.cluster.left() - before))
    # The worker goes on.
    hold.unlink()
    assert len(run(SLOW).built) == 1
    assert run.cluster.workers[name].poll() is None


@needs_qnn
def test_a_crash_of_a_compiler_does_not_end_the_dask_worker(run: Builder) -> None:
    # No rewrite changes it, which would be compiled too.
    doubled = parsed("(float[1, 4] x) => (float[1, 4] y) { y = Add (x, x) }")
    save(doubled, run.root / "models" / "a.onnx")
    hold = run.cluster.hold("SLOW=1", "slow-1", "slow-2")
    building = run.aside.submit(run.problem, SLOW)
    ((name, pid),) = run.cluster.held(building).items()
    os.kill(pid, signal.SIGSEGV)
    problem = building.result()
    assert "the worker crashed with SIGSEGV" in problem.message
    assert (problem.where(), bool(problem.log)) == ("a -> npu", True)
    hold.unlink()
    assert run(SLOW).built[0].validations["a"].agreements
    assert run.cluster.workers[name].poll() is None


@needs_qnn
def test_a_group_that_was_validated_alone_on_a_worker_is_known_to_later_builds(
    run: Builder,
) -> None:
    save(network(2), run.root / "models" / "b.onnx")
    models = ", ".join(f'{{ path = "models/{n}.onnx", share-weights = "g" }}' for n in "ab")
    keys = '"qnn"\nchip = "snapdragon-x-elite"'
    toml = CPU.replace('"models/a.onnx"', models).replace('"cpu"', keys)
    (built,) = run(toml).built
    assert {v.status for v in built.validations.values()} == {ValidationStatus.RAN_ALONE}
    for environ in ({}, {"FROM_CACHE": "all"}):
        (known,) = run(toml, environ).built
        assert known.cached
        assert known.validations.keys() == built.validations.keys()


LLAMA = """
models = [{ path = "models/llama", context-length = 160 }]
targets.npu = { provider = "qnn", chip = "snapdragon-x-elite", resources = { NPU = 1 } }
"""


@needs_qnn
@needs("onnxruntime_genai")
def test_a_language_model_answers_on_a_worker(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(run.root / "models" / "llama")
    (built,) = run(LLAMA).built
    assert [answer.others for answer in built.answers] == [0] * 4
    line = "llama -> npu: onnxruntime-genai answers 4 prompts as on the CPU"
    assert any(text.startswith(line) for text in run.log)
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module.Cluster, "_run", None)
        for environ in ({}, LOCAL, {"FROM_CACHE": "all"}):
            assert run(LLAMA, environ).built[0].answers == built.answers


@needs_qnn
def test_another_worker_takes_up_the_job_of_one_that_was_killed(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heartbeat, "due", lambda self: True)
    hold = run.cluster.hold("SLOW=1", "slow-1", "slow-2")
    building = run.aside.submit(run, SLOW)
    (first,) = run.cluster.held(building)
    run.cluster.kill(first)

    def is_taken_up() -> bool:
        # A fast machine finishes the job before the build looks at it for the first time.
        assert not building.done(), building.exception()
        return len(run.cluster.held()) > 1 and "on the cluster" in run.progress[-1]

    wait_for(is_taken_up)
    hold.unlink()
    (built,) = building.result().built
    assert built.validations["a"].agreements
    assert re.fullmatch(r"a -> npu: on the cluster for \d+ s", run.progress[-1])


@needs_qnn
@pytest.mark.parametrize(("failures", "kind"), [(0, Kind.WORKER_LOST), (1, Kind.NO_WORKER)])
def test_a_job_whose_workers_are_lost_fails(
    run: Builder, monkeypatch: pytest.MonkeyPatch, failures: int, kind: Kind
) -> None:
    # Long enough, where a busy machine notices late that the worker is lost.
    seconds = 1.0 if kind is Kind.NO_WORKER else 20.0
    monkeypatch.setattr(cluster_module, "WORKER_SECONDS", seconds)
    monkeypatch.setattr(run.cluster.scheduler.scheduler, "allowed_failures", failures)
    # One that an earlier test has left is enough.
    first, *others = sorted(run.cluster.workers.keys() & {"slow-1", "slow-2"}) or ["slow-1"]
    for name in others:
        run.cluster.kill(name)
    run.cluster.hold("SLOW=1", first)
    building = run.aside.submit(run.problem, SLOW)
    ((name, _),) = run.cluster.held().items()
    run.cluster.kill(name)
    problem = building.result()
    assert (problem.kind, problem.where()) == (kind, "a -> npu")
    assert (name if failures == 0 else "no worker with SLOW=1") in problem.message

"""Builds on a real cluster: a scheduler and several worker processes with different resources."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.files import FileRecord, file_sha256
from hatch_epcontext.jobs.artifact import Artifact, Record, Result, Times
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.shared import Transport
from hatch_epcontext.jobs.cache.signing import new_keys
from hatch_epcontext.jobs.executors import dask as dask_module
from hatch_epcontext.jobs.executors.dask import DaskExecutor
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes import process
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import FARM
from hatch_epcontext.jobs.run import DryRun, build, dry_run, open_cache
from hatch_epcontext.worker.results import ValidationStatus
from tests.conftest import REPOSITORY, needs_qnn, newer_runtime
from tests.graph.test_dequantize import recurrent
from tests.jobs.test_quantization import save_dynamic
from tests.models import network, save, save_with_data, unknown_operator

pytestmark = pytest.mark.slow

PRELOAD = """
import os
from hatch_epcontext.jobs.executors import dask_worker
from hatch_epcontext.jobs.processes import process
from tests.kept_server import KeptServers
process._FIRST_BEAT = process._NEXT_BEATS = 0.5
process.ForkServer = KeptServers().get
dask_worker._IDLE_SECONDS = float(os.environ.get("IDLE_SECONDS", 300))
"""
"""What each dask worker runs at its start, so that no test waits for long, and builds share a server."""

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


SLOW_WORKERS = frozenset({"slow-1", "slow-2"})


IMPATIENT = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
"""How long the scheduler tries to reach a worker that was lost."""


class Cluster:
    """A scheduler, and workers by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "preload.py").write_text(PRELOAD, encoding="utf-8")
        info = folder / "scheduler.json"
        self._scheduler = self._start("scheduler", "--port=0", f"--scheduler-file={info}")
        # It is not written at once.
        while not info.is_file() or not info.read_text(encoding="utf-8").endswith("}"):
            assert self._scheduler.poll() is None, (folder / "scheduler.log").read_text()
            time.sleep(0.05)
        self.address: str = json.loads(info.read_text(encoding="utf-8"))["address"]

    def start(self, name: str, resources: str, **environ: str) -> None:
        """Start a worker, which has also the variables ``environ``."""
        self.workers[name] = self._start(
            "worker",
            self.address,
            f"--name={name}",
            f"--resources={resources}",
            "--nthreads=2",
            "--no-nanny",
            f"--local-directory={self.folder}",
            f"--preload={self.folder / 'preload.py'}",
            log=name,
            **environ,
        )

    def start_slow(self, names: Set[str] = SLOW_WORKERS, resources: str = "SLOW=1") -> None:
        """Start those of the workers ``names`` with `SLOW_LIBRARY` that do not run."""
        folder = self.folder / "slow"
        folder.mkdir(exist_ok=True)
        (folder / "slow_qnn.py").write_text(SLOW_LIBRARY, encoding="utf-8")
        for name in names - self.workers.keys():
            environ = {"PYTHONPATH": str(folder), "SLOW_FOLDER": str(folder), "SLOW_NAME": name}
            self.start(name, resources, **environ)

    def kept(self) -> set[Path]:
        """What workers keep for builds, a folder each; workers that were killed leave theirs."""
        return set(self.folder.glob("dask-scratch-space/*/hatch-epcontext/*"))

    def wait(self) -> None:
        """Return when all workers are connected."""
        for name, worker in self.workers.items():
            log = self.folder / f"{name}.log"
            while "Registered to" not in log.read_text(encoding="utf-8"):
                assert worker.poll() is None, log.read_text(encoding="utf-8")
                time.sleep(0.05)

    def stop(self) -> None:
        for each in (*self.workers.values(), self._scheduler):
            each.kill()
            each.wait()

    def _start(
        self, role: str, *arguments: str, log: str = "scheduler", **environ: str
    ) -> subprocess.Popen[bytes]:
        own, around = environ.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join(filter(None, [own, str(REPOSITORY), around]))
        command = [sys.executable, "-m", "dask", role, "--host=127.0.0.1", "--no-dashboard"]
        with (self.folder / f"{log}.log").open("wb") as file:
            return subprocess.Popen(
                [*command, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, **IMPATIENT, **environ},
            )


def fake_package(folder: Path, name: str, version: str) -> str:
    """A folder for PYTHONPATH in which a distribution is installed, or seems to be."""
    place = folder / f"with-{name}"
    info = place / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    return str(place)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers that work, and workers with other versions, each with resources of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    started = Cluster(folder)
    try:
        started.start("board", "NPU=2,MIXED=1")
        package = fake_package(folder, "only_there", "1.0")
        started.start("box", "GPU=1", PYTHONPATH=package)
        other = fake_package(folder, "onnxruntime", "99.0")
        started.start("other", "OTHER=1,MIXED=1", PYTHONPATH=other)
        old = fake_package(folder, "hatch_epcontext", "0.0.1")
        started.start("old", "OLD=1", PYTHONPATH=old)
        started.start_slow()
        started.wait()
        yield started
    finally:
        started.stop()


CPU = """
models = ["models/a.onnx"]
[targets.x]
provider = "cpu"
resources = { NPU = 1 }
"""


class Builder:
    """Builds the project in ``root`` on a cluster; all builds share one cache of this machine."""

    def __init__(self, root: Path, folder: Path, cluster: Cluster) -> None:
        self.root, self.folder, self.cluster = root, folder, cluster
        self.log: list[str] = []
        self.lines: list[str] = []
        self.progress: list[str] = []
        self.shared, self.use_shared = folder / "shared", False
        self._count = 0

    def __call__(
        self,
        toml: str,
        environ: Mapping[str, str] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> Result:
        variables = {**self.variables(), **(environ or {})}
        named = {f"HATCH_EPCONTEXT_{name}": value for name, value in variables.items()}
        config = load(self.root, parse(toml), {}, named)
        workers = Workers(config.build.timeout, self.lines.append, progress=self.progress.append)
        cache = open_cache(config, self.log.append) if self.use_shared else self.cache()
        return build(plan(config), self.staging(), cache, log or self.log.append, workers)

    def variables(self) -> Mapping[str, str]:
        return {
            "EXECUTOR": "dask",
            "SCHEDULER": self.cluster.address,
            "CACHE": f"file://{self.shared}",
            "CACHE_DIR": str(self.folder / "cache"),
        }

    def staging(self) -> Path:
        self._count += 1
        staging = self.folder / f"staging-{self._count}"
        staging.mkdir()
        return staging

    def cache(self) -> Cache:
        return Cache(self.folder / "cache", self.log.append)


@pytest.fixture
def run(project: Path, tmp_path: Path, cluster: Cluster) -> Builder:
    save(network(), project / "models" / "a.onnx")
    return Builder(project, tmp_path, cluster)


LOCAL = {"EXECUTOR": "local"}


def without_times(record: Record) -> Record:
    return dataclasses.replace(record, times=Times(0, 0))


def test_the_result_is_that_of_a_local_build(run: Builder, tmp_path: Path) -> None:
    (built,) = run(CPU).built
    assert not built.cached
    assert built.validations["a"].status is ValidationStatus.RAN
    assert built.validations["a"].load is not None
    # The same fingerprint, and the same validation.
    assert run(CPU, LOCAL).built[0].cached
    alone = Builder(run.root, tmp_path / "alone", run.cluster)
    alone.folder.mkdir()
    (local,) = alone(CPU, LOCAL).built
    assert without_times(local.artifact.record) == without_times(built.artifact.record)
    assert local.validations["a"].agreements == built.validations["a"].agreements
    for name in local.artifact.record.files:
        ours, theirs = (each.artifact.folder / name for each in (built, local))
        assert ours.read_bytes() == theirs.read_bytes()


@needs_qnn
@newer_runtime
def test_quantization_is_undone_on_a_cluster_as_locally(run: Builder) -> None:
    save_dynamic(run.root, recurrent())
    toml = CPU.replace('"cpu"', '"qnn"\nprovider-options = { soc_model = 60 }')
    (built,) = run(toml).built
    assert built.artifact.record.recipe.dequantize
    assert built.validations["a"].float_form_db is not None
    (local,) = run(toml, LOCAL).built
    assert local.cached
    assert local.validations == built.validations


def test_jobs_run_where_their_resources_are(run: Builder) -> None:
    save(network(3), run.root / "models" / "b.onnx")
    toml = """
models = ["models/a.onnx", "models/b.onnx"]
[targets.x]
provider = "cpu"
resources = { NPU = 1 }
[targets.y]
provider = "cpu"
optimization = "extended"
requirements = ["only-there>=1"]
resources = { GPU = 1 }
"""
    result = run(toml)
    assert [each.job.location for each in result.built] == ["a -> x", "a -> y", "b -> x", "b -> y"]
    assert [line.split(" (")[0] for line in run.log] == ["a -> x", "a -> y", "b -> x", "b -> y"]
    # Only the one worker has the package; this environment does not need it.
    versions = [each.artifact.record.versions for each in result.built]
    assert ["only-there" in each for each in versions] == [False, True, False, True]


def test_lines_of_workers_arrive_as_those_of_local_ones(run: Builder) -> None:
    run(CPU)
    found = [line for line in run.lines if line.startswith("a -> x")]
    assert [re.sub(r"\d+\.\d", "0", line) for line in found] == [
        "a -> x: preparation: prepare ...",
        "a -> x: preparation: prepare took 0 s",
        "a -> x: compile ...",
        "a -> x: compile took 0 s",
        "a -> x: validation: validate ...",
        "a -> x: validation: validate took 0 s",
    ]


def test_all_files_go_through_the_shared_cache_once(run: Builder) -> None:
    save_with_data(network(), run.root / "models" / "a.onnx")
    np.savez(run.root / "x.npz", x=np.full((2, 1, 8, 8), 0.5, np.float32))
    table = '{ name = "b", path = "models/a.onnx", validate = { inputs = "x.npz" } }'
    toml = CPU.replace('"models/a.onnx"', f'"models/a.onnx", {table}')
    kept = run.cluster.kept()
    result = run(toml)
    assert [each.validations[each.job.name].status for each in result.built] == [
        ValidationStatus.RAN,
        ValidationStatus.RAN,
    ]
    inputs = {
        file_sha256(run.root / name) for name in ("models/a.onnx", "models/network.data", "x.npz")
    }
    # Workers do not sign, and nor does a build that may not.
    assert [path.name for path in (run.shared / "v6").iterdir()] == ["blobs"]
    sent = {path.name: path for path in (run.shared / "v6" / "blobs").iterdir()}
    assert inputs < sent.keys()
    assert all(file_sha256(path) == name for name, path in sent.items())
    # Their recipes and files are equal, but not the names of the models.
    assert len(sent) == len(inputs) + 2
    changed = {name: path.stat().st_mtime_ns for name, path in sent.items()}
    shutil.rmtree(run.folder / "cache")
    run(toml)
    assert {path.name for path in (run.shared / "v6" / "blobs").iterdir()} >= sent.keys()
    assert not run.cluster.kept() - kept
    assert changed == {name: path.stat().st_mtime_ns for name, path in sent.items()}


def test_a_build_with_the_key_signs_what_workers_compiled(
    run: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = new_keys()
    toml = f'{CPU}[build]\ncache-keys = ["{public}"]\n'
    signing = {"CACHE_WRITE": "1", "CACHE_KEY": private}
    run.use_shared = True
    (built,) = run(toml, signing).built
    assert not built.cached
    other = Builder(run.root, tmp_path / "other", run.cluster)
    other.folder.mkdir()
    other.use_shared, other.shared = True, run.shared
    (taken,) = other(toml, {"FROM_CACHE": "all"}).built
    assert taken.artifact.record == built.artifact.record
    assert not [line for line in other.log if "shared cache" in line]


def test_workers_that_cannot_use_the_shared_cache_say_so(run: Builder) -> None:
    run.shared.touch()
    with pytest.raises(BuildError) as raised:
        run(CPU)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.where()) == (Kind.UNUSABLE_CACHE, "a -> x")
    assert str(run.shared) in f"{problem.message}{problem.hint}"


def test_a_damaged_file_in_the_shared_cache_is_sent_again(run: Builder) -> None:
    model = run.root / "models" / "a.onnx"
    blob = run.shared / "v6" / "blobs" / file_sha256(model)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(reversed(model.read_bytes())))
    (built,) = run(CPU).built
    assert built.validations["a"].status is ValidationStatus.RAN
    assert blob.read_bytes() == model.read_bytes()


def test_a_damaged_archive_in_the_shared_cache_is_sent_again(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged: list[Path] = []
    archive_of = DaskExecutor._archive

    def damage(self: DaskExecutor, job: Job, artifact: Artifact) -> FileRecord:
        archive = archive_of(self, job, artifact)
        if not damaged:
            damaged.append(run.shared / "v6" / "blobs" / archive.sha256)
            damaged[0].write_bytes(bytes(damaged[0].stat().st_size))
            # The worker that compiled it frees its own.
            self.finished(job)
        return archive

    monkeypatch.setattr(DaskExecutor, "_archive", damage)
    (built,) = run(CPU).built
    assert built.validations["a"].status is ValidationStatus.RAN
    assert file_sha256(damaged[0]) == damaged[0].name


def test_folders_of_inputs_travel(run: Builder) -> None:
    import onnx
    from onnx import numpy_helper

    folder = run.root / "data"
    folder.mkdir()
    tensor = numpy_helper.from_array(np.ones((1, 1, 8, 8), np.float32), "x")
    onnx.save_tensor(tensor, folder / "input_0.pb")
    toml = CPU.replace(
        '"models/a.onnx"',
        '{ path = "models/a.onnx", quantize = { inputs = "data" }, validate = { inputs = "data" } }',
    )
    (built,) = run(toml).built
    assert built.validations["a"].status is ValidationStatus.RAN
    assert "(1 sample)" in str(built.artifact.record.preparations[0].precision)


def test_a_model_that_changes_while_it_is_sent_is_refused(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.root / "models" / "a.onnx"
    has_file = Transport.has_file

    def changed(self: Transport, blob: FileRecord) -> bool:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return has_file(self, blob)

    save(network(5), path)
    monkeypatch.setattr(Transport, "has_file", changed)
    with pytest.raises(BuildError, match=r"a\.onnx: EPC211\n    changed during the build"):
        run(CPU)
    # Nothing stays there under the name of other content.
    assert not run.shared.exists()


def test_errors_and_their_logs_are_as_locally(run: Builder) -> None:
    save(unknown_operator(), run.root / "models" / "a.onnx")
    found = []
    for environ in ({}, LOCAL):
        with pytest.raises(BuildError) as raised:
            run(CPU, environ)
        found.append([dataclasses.replace(each, log=None) for each in raised.value.problems])
        (problem,) = raised.value.problems
        assert "Strange" in f"{problem.message}{problem.log}"
    assert found[0] == found[1]
    assert run.log == ["a -> x (cpu): FAILED"] * 2


def test_a_job_that_no_worker_can_take_is_an_error_and_the_others_run(
    run: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_module, "WORKER_SECONDS", 0.2)
    toml = CPU + '[targets.y]\nprovider = "cpu"\nresources = { NPU = 3, TPU = 1 }\n'
    with pytest.raises(BuildError) as raised:
        run(toml)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.where()) == (Kind.NO_WORKER, "a -> y")
    assert "the job needs a worker with NPU 3, TPU 1" in problem.message
    assert "1 worker with GPU 1; " in problem.message
    assert '--resources "NPU=3,TPU=1"' in problem.advice()
    assert f"a -> y: {WAITING.format('NPU 3, TPU 1')}" in run.progress
    assert run.log[0].startswith("a -> x (cpu): optimized graph")


def test_unequal_versions_are_listed(run: Builder) -> None:
    with pytest.raises(BuildError) as raised:
        run(CPU.replace("NPU", "MIXED"))
    (problem,) = raised.value.problems
    assert (problem.kind, problem.where()) == (Kind.VERSION_MISMATCH, "a -> x")
    assert re.search(r"board \(tcp://.*\): onnxruntime 1\.", problem.message)
    assert re.search(r"other \(tcp://.*\): onnxruntime 99\.0", problem.message)


def test_another_version_of_the_package_is_refused(run: Builder) -> None:
    with pytest.raises(BuildError) as raised:
        run(CPU.replace("NPU", "OLD"))
    (problem,) = raised.value.problems
    assert problem.kind is Kind.VERSION_MISMATCH
    assert re.search(r"old \(tcp://.*\): Python 3\.\d+, hatch-epcontext 0\.0\.1", problem.message)


def test_what_a_worker_misses_is_an_error_that_names_it(run: Builder) -> None:
    toml = f'{CPU}requirements = ["only-there>=1"]\n'
    with pytest.raises(BuildError) as raised:
        run(toml)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.MISSING_REQUIREMENT
    assert re.match(
        r"on the worker board \(tcp://.*\): 1 build requirement is missing", problem.message
    )


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nothing://host:1"])
def test_a_scheduler_that_cannot_be_reached_is_an_error(
    run: Builder, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(dask_module, "CONNECT_SECONDS", 0.5)
    with pytest.raises(BuildError, match="cannot be reached") as raised:
        run(CPU, {"SCHEDULER": address})
    (problem,) = raised.value.problems
    assert problem.kind is Kind.UNREACHABLE_SCHEDULER
    assert problem.location == "tool.epcontext.build.scheduler"


def test_an_empty_variable_contacts_nobody(run: Builder) -> None:
    toml = f'build = {{ executor = "dask", scheduler = "tcp://127.0.0.1:9" }}\n{CPU}'
    assert not run(toml, {"SCHEDULER": ""}).built[0].cached
    nowhere = {"SCHEDULER": "tcp://127.0.0.1:9"}
    for environ in ({"EXECUTOR": ""}, {"FROM_CACHE": "all"}, {"FROM_CACHE": "x"}):
        assert run(toml, {**nowhere, **environ}).built[0].cached


def test_a_dry_run_knows_the_fingerprints(run: Builder) -> None:
    farm = {
        "HATCH_EPCONTEXT_EXECUTOR": "dask",
        "HATCH_EPCONTEXT_SCHEDULER": run.cluster.address,
        "HATCH_EPCONTEXT_CACHE": f"file://{run.shared}",
    }
    found: list[DryRun] = []
    for environ in (farm, {}):
        planned = plan(load(run.root, parse(CPU), {}, environ))
        found += dry_run(planned, run.staging(), run.cache())
    assert found[0].fingerprint == found[1].fingerprint
    assert not found[0].cached


def test_this_environment_needs_only_what_reads_models(project: Path) -> None:
    # Not for this Python, or not for this system.
    target = '[targets.directml]\nprovider = "directml"\noptimization = "all"\n'
    toml = f'models = ["models/a.onnx"]\n{target}'
    environ = {
        "HATCH_EPCONTEXT_EXECUTOR": "dask",
        "HATCH_EPCONTEXT_SCHEDULER": "tcp://127.0.0.1:9",
        "HATCH_EPCONTEXT_CACHE": "file:///shared",
    }
    planned = plan(load(project, parse(toml), {}, environ))
    assert planned.requirements == FARM
    assert planned.local_targets == ()


SLOW = """
models = [{ path = "models/a.onnx", targets = ["npu"] }]
[targets.npu]
provider = "qnn"
library = "slow_qnn"
resources = { SLOW = 1 }
"""


WAITING = "the cluster has no worker with {}; waiting for one"


class Slow:
    """The workers with the resource ``SLOW``, which compile only when there is no file ``hold``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder / "slow"
        self.hold = self.folder / "hold"
        self.hold.touch()
        for file in self.folder.glob("*.pid"):
            file.unlink()

    def taken(self, *names: str) -> list[str]:
        """The names of the workers that wait in a compilation, once all of ``names`` or any do."""
        while True:
            found = sorted(file.stem for file in self.folder.glob("*.pid") if file.read_text())
            if set(names) <= set(found) and found:
                return found
            time.sleep(0.05)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text(encoding="utf-8"))

    def kill(self, name: str) -> None:
        os.kill(self.cluster.workers[name].pid, signal.SIGKILL)
        self.cluster.workers.pop(name).wait()


@pytest.fixture
def slow(cluster: Cluster) -> Slow:
    cluster.start_slow()
    cluster.wait()
    return Slow(cluster)


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Result]]]:
    """Runs something in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


@needs_qnn
def test_another_worker_takes_up_the_job_of_one_that_was_killed(
    run: Builder, slow: Slow, aside: Callable[..., Future[Result]]
) -> None:
    save(network(1), run.root / "models" / "a.onnx")
    building = aside(run, SLOW)
    (first,) = slow.taken()
    slow.kill(first)
    (other,) = {"slow-1", "slow-2"} - {first}
    slow.taken(other)
    slow.hold.unlink()
    (built,) = building.result().built
    assert built.validations["a"].status is ValidationStatus.RAN
    assert len([line for line in run.lines if line.endswith("compile ...")]) == 2


@needs_qnn
def test_a_worker_that_is_lost_at_the_start_is_left_out(
    run: Builder, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_workers = dask_module.DaskExecutor._wait_for_workers

    def lose_one(*arguments: Any) -> Mapping[str, str]:
        names = wait_for_workers(*arguments)
        if "slow-1" in slow.cluster.workers:
            slow.kill("slow-1")
        return names

    monkeypatch.setattr(dask_module.DaskExecutor, "_wait_for_workers", lose_one)
    for name in ("a", "b"):
        save(network(1), run.root / "models" / f"{name}.onnx")
    slow.hold.unlink()
    toml = SLOW.replace("models = [", 'models = [{ path = "models/b.onnx", targets = ["npu"] }, ')
    built = run(toml).built
    assert [each.validations.keys() for each in built] == [{"b"}, {"a"}]


@needs_qnn
def test_a_build_that_loses_the_only_worker_for_a_job_says_so_and_ends(
    run: Builder, slow: Slow, aside: Callable[..., Future[Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_module, "WORKER_SECONDS", 4.0)
    monkeypatch.setattr(dask_module, "_WATCH_SECONDS", 0.2)
    monkeypatch.setattr(process, "_FIRST_BEAT", 0.2)
    monkeypatch.setattr(process, "_NEXT_BEATS", 0.2)
    slow.cluster.start_slow({"alone"}, "ALONE=1")
    slow.cluster.wait()
    save(network(1), run.root / "models" / "a.onnx")
    save(network(2), run.root / "models" / "b.onnx")
    # The second job waits for the same worker.
    toml = SLOW.replace("models = [", 'models = [{ path = "models/b.onnx", targets = ["npu"] }, ')
    building = aside(run, toml.replace("SLOW", "ALONE"))
    slow.taken("alone")
    slow.kill("alone")
    error = building.exception()
    assert isinstance(error, BuildError)
    assert {(each.kind, each.where()) for each in error.problems} == {
        (Kind.NO_WORKER, "a -> npu"),
        (Kind.NO_WORKER, "b -> npu"),
    }
    assert all("the job needs a worker with ALONE 1" in each.message for each in error.problems)
    lost = [f"{name} -> npu: {WAITING.format('ALONE 1')}" for name in ("a", "b")]
    assert [run.progress.count(line) for line in lost] == [1, 1]
    assert "2 jobs wait for a free worker" in run.progress[run.progress.index(lost[0]) :]


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@needs_qnn
def test_an_interrupted_build_ends_its_steps_on_the_workers(run: Builder, slow: Slow) -> None:
    save(network(1), run.root / "models" / "a.onnx")
    quick = '{ name = "quick", path = "models/a.onnx", targets = ["x"] }, { path'
    toml = SLOW.replace("{ path", quick) + CPU.partition("\n[")[2].join(["[", ""])

    def interrupt(line: str) -> None:
        # A job has ended, and another one is in the middle.
        slow.taken()
        while not any(
            re.match(r"a -> npu: compile has run for \d+ s", each) for each in run.progress
        ):
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(toml, log=interrupt)
    for name in slow.taken():
        while is_running(slow.pid(name)):
            time.sleep(0.05)
    # The workers go on.
    slow.hold.unlink()
    assert len(run(SLOW).built) == 1


@needs_qnn
def test_the_steps_of_a_build_that_was_killed_end(run: Builder, slow: Slow) -> None:
    save(network(1), run.root / "models" / "a.onnx")
    table = SLOW.replace("[targets", "[tool.epcontext.targets")
    (run.root / "pyproject.toml").write_text(f"[tool.epcontext]{table}", encoding="utf-8")
    named = {f"HATCH_EPCONTEXT_{name}": value for name, value in run.variables().items()}
    kept = slow.cluster.kept()
    killed = subprocess.Popen(
        [sys.executable, "-c", "from hatch_epcontext.cli import main; main()", "build"],
        cwd=run.root,
        env={**os.environ, **named},
    )
    (name,) = slow.taken()
    killed.kill()
    killed.wait()
    while is_running(slow.pid(name)) or slow.cluster.kept() - kept:
        time.sleep(0.05)


@needs_qnn
def test_a_worker_that_gets_no_tasks_of_a_build_frees_what_it_keeps(
    run: Builder, slow: Slow, aside: Callable[..., Future[Result]]
) -> None:
    slow.cluster.start("idle", "IDLE=1", IDLE_SECONDS="0")
    slow.cluster.wait()
    save(network(1), run.root / "models" / "a.onnx")
    quick = '{ name = "quick", path = "models/a.onnx", targets = ["x"] }, { path'
    toml = SLOW.replace("{ path", quick) + CPU.partition("\n[")[2].join(["[", ""])
    kept = slow.cluster.kept()
    building = aside(run, toml.replace("NPU", "IDLE"))
    (name,) = slow.taken()
    while not run.log or len(slow.cluster.kept() - kept) != 1:
        time.sleep(0.05)
    assert is_running(slow.pid(name))
    slow.hold.unlink()
    assert len(building.result().built) == 2
    slow.kill("idle")


@needs_qnn
def test_a_crash_of_a_compiler_does_not_end_the_dask_worker(run: Builder, slow: Slow) -> None:
    save(network(1), run.root / "models" / "a.onnx")

    def crash() -> None:
        (name,) = slow.taken()
        os.kill(slow.pid(name), signal.SIGSEGV)

    killer = threading.Thread(target=crash)
    killer.start()
    with pytest.raises(BuildError, match="the worker crashed with SIGSEGV") as raised:
        run(SLOW)
    killer.join()
    assert raised.value.problems[0].where() == "a -> npu"
    assert raised.value.problems[0].log
    slow.hold.unlink()
    assert run(SLOW).built[0].validations["a"].status is ValidationStatus.RAN
    assert all(process.poll() is None for process in slow.cluster.workers.values())

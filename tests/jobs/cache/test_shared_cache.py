"""Builds on several machines, each with a cache folder of its own, that share a remote."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.files import record_files
from hatch_epcontext.jobs.artifact import Artifact, Built, Result
from hatch_epcontext.jobs.cache import shared
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.shared import SharedCache
from hatch_epcontext.jobs.cache.signing import new_keys
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import build, dry_run, open_cache
from hatch_epcontext.jobs.sources import read_sources
from hatch_epcontext.worker.results import ModelFacts, ValidationStatus
from hatch_epcontext.worker.results import Validation as ValidationOf
from tests.conftest import needs_qnn
from tests.models import network, save
from tests.remotes import WebServer, make_bucket, s3_server, use_s3, web_server

KEY = "ab" * 32

PRIVATE_KEY, PUBLIC_KEY = new_keys()

ONE = """
models = ["models/a.onnx"]
targets.cpu.provider = "cpu"
"""

MATRIX = """
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
[targets.npu]
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
[targets.any]
provider = "cpu"
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with web_server(tmp_path / "served") as running:
        yield running


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@dataclasses.dataclass
class Machine:
    """A machine with a cache folder of its own."""

    folder: Path
    root: Path
    warnings: list[str] = dataclasses.field(default_factory=list)

    def config(self, toml: str, **variables: str) -> Config:
        environ = {
            "CACHE_DIR": str(self.folder / "cache"),
            "CACHE_KEYS": PUBLIC_KEY,
            "CACHE_KEY": PRIVATE_KEY,
            **variables,
        }
        return load(
            self.root, parse(toml), {}, {PREFIX + name: text for name, text in environ.items()}
        )

    def build(self, toml: str, *, compiles: bool = True, **variables: str) -> tuple[Built, ...]:
        """The jobs of a build; without ``compiles`` it is an error to start a worker."""
        staging = self.folder / f"staging-{len(list(self.folder.glob('staging-*')))}"
        staging.mkdir(parents=True)
        config = self.config(toml, **variables)
        workers = Workers(120)
        if not compiles:
            workers.stop()
        cache = open_cache(config, self.warnings.append)
        result: Result = build(plan(config), staging, cache, lambda _: None, workers)
        for built in result.built:
            assert record_files(built.artifact.folder) == built.artifact.record.files
        return result.built


@pytest.fixture
def machine(project: Path, tmp_path: Path) -> Callable[[str], Machine]:
    """A new machine with the same project, by its name."""
    save(network(), project / "models" / "a.onnx")

    def make(name: str) -> Machine:
        # As from an sdist: unpacked again, in another place.
        root = tmp_path / name / "project"
        shutil.copytree(project, root)
        return Machine(tmp_path / name, root)

    return make


def test_a_build_that_needs_a_cache_that_is_dead_names_it(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SharedCache", partial(shared.SharedCache, timeout=0.5))
    first = machine("first")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        with pytest.raises(BuildError) as raised:
            first.build(ONE, compiles=False, CACHE=url, FROM_CACHE="all")
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOT_CACHED
    assert f"The shared cache {url} kept the build waiting for too long" in problem.message
    # One that can compile goes on without it.
    (built,) = first.build(ONE, CACHE=url)
    assert built.artifact.record.files


def test_what_one_machine_compiled_is_compiled_nowhere_else(
    machine: Callable[[str], Machine], s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    url = f"s3://{make_bucket(s3)}/team"
    first, second = machine("first"), machine("second")
    (compiled,) = first.build(ONE, CACHE=url, CACHE_WRITE="1")
    (taken,) = second.build(ONE, compiles=False, CACHE=url)
    assert not compiled.cached
    assert taken.cached
    assert taken.artifact.record == compiled.artifact.record
    assert taken.validations == compiled.validations
    # From now on the second machine needs nobody.
    (again,) = second.build(ONE, compiles=False, CACHE="")
    assert again.artifact.record == compiled.artifact.record
    assert not first.warnings + second.warnings


def test_a_build_without_the_right_to_write_sends_nothing(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE, CACHE=server.url)
    assert {method for method, _ in server.requests} == {"GET"}
    (built,) = second.build(ONE, CACHE=server.url)
    assert not built.cached


def test_a_build_without_a_key_reads_what_others_signed_and_writes_nothing(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    main, request, compiling = map(machine, ("main", "request", "compiling"))
    main.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    server.requests.clear()
    # As for the CI of a pull request, which has the same workflow, and none of its secrets.
    request.build(ONE, compiles=False, CACHE=server.url, CACHE_WRITE="1", CACHE_KEY="")
    (warning,) = request.warnings
    assert "CACHE_WRITE is set without HATCH_EPCONTEXT_CACHE_KEY" in warning
    other = f'{ONE}targets.cpu.optimization = "basic"\n'
    compiling.build(other, CACHE=server.url, CACHE_WRITE="1", CACHE_KEY="")
    assert {method for method, _ in server.requests} == {"GET"}


def test_a_build_that_finds_everything_in_its_own_folder_asks_nobody(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    second.build(ONE, compiles=False, CACHE=server.url)
    server.requests.clear()
    (built,) = second.build(ONE, compiles=False, CACHE=server.url)
    assert built.cached
    assert server.requests == []


def test_a_forged_artifact_is_compiled_again(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    stranger, second, third = map(machine, ("stranger", "second", "third"))
    private, public = new_keys()
    settings: dict[str, Any] = {"CACHE": server.url, "CACHE_WRITE": "1"}
    stranger.build(ONE, **settings, CACHE_KEY=private, CACHE_KEYS=public)
    (built,) = second.build(ONE, **settings)
    assert not built.cached
    (warning,) = second.warnings
    assert "a statement is not signed by any of build.cache-keys" in warning
    # It has replaced what the stranger wrote.
    third.build(ONE, compiles=False, CACHE=server.url)
    assert not third.warnings


def test_a_folder_without_keys_has_what_nobody_signed(
    machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    folder: dict[str, Any] = {
        "CACHE": (tmp_path / "shared").as_uri(),
        "CACHE_KEYS": "",
        "CACHE_KEY": "",
    }
    first, second = machine("first"), machine("second")
    first.build(ONE, **folder, CACHE_WRITE="1")
    second.build(ONE, compiles=False, **folder)
    assert not first.warnings + second.warnings


def test_a_build_that_may_write_also_sends_what_was_compiled_before(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE)
    first.build(ONE, compiles=False, CACHE=server.url, CACHE_WRITE="1")
    second.build(ONE, compiles=False, CACHE=server.url)
    second.build(ONE, compiles=False, CACHE=server.url, FROM_CACHE="all")
    assert not first.warnings + second.warnings
    sent = [path for method, path in server.requests if method == "PUT"]
    assert len(sent) == len(set(sent))


def test_a_build_that_may_write_repairs_what_the_store_removed(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, last = machine("first"), machine("last")
    first.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    for blob in (server.folder / "cache" / "v6" / "blobs").glob("*"):
        blob.unlink()
    first.build(ONE, compiles=False, CACHE=server.url, CACHE_WRITE="1")
    last.build(ONE, compiles=False, CACHE=server.url, FROM_CACHE="all")
    assert not first.warnings + last.warnings


def test_an_empty_variable_and_no_cache_ask_nobody(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    toml = f'{ONE}build = {{ cache = "{server.url}" }}\n'
    machine("first").build(toml, CACHE="")
    machine("second").build(toml, NO_CACHE="1", CACHE_WRITE="1")
    assert not server.requests


def test_an_unreachable_remote_is_one_warning_and_the_build_compiles(
    machine: Callable[[str], Machine],
) -> None:
    first = machine("first")
    (built,) = first.build(ONE, CACHE="http://127.0.0.1:1/cache", CACHE_WRITE="1")
    assert not built.cached
    (warning,) = first.warnings
    assert "cannot be reached" in warning


def test_a_damaged_artifact_is_compiled_again_and_replaced(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, second, third = map(machine, ("first", "second", "third"))
    first.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    for blob in server.folder.glob("cache/v6/blobs/*"):
        blob.write_bytes(bytes(reversed(blob.read_bytes())))
    (again,) = second.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    assert not again.cached
    (warning,) = second.warnings
    assert "something damaged or forged" in warning
    (taken,) = third.build(ONE, compiles=False, CACHE=server.url)
    assert taken.artifact.record.files == again.artifact.record.files
    assert not third.warnings


def test_a_dry_run_downloads_no_files(
    machine: Callable[[str], Machine], server: WebServer, tmp_path: Path
) -> None:
    machine("first").build(ONE, CACHE=server.url, CACHE_WRITE="1")
    server.requests.clear()
    second = machine("second")
    config = second.config(ONE, CACHE=server.url)
    (run,) = dry_run(plan(config), tmp_path, open_cache(config, second.warnings.append))
    assert run.cached
    assert not [path for _, path in server.requests if "/blobs/" in path]


def test_without_a_folder_that_can_be_written_the_fetched_files_are_used(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    machine("first").build(ONE, CACHE=server.url, CACHE_WRITE="1")
    second = machine("second")
    (second.folder / "cache").touch()
    (built,) = second.build(ONE, compiles=False, CACHE=server.url)
    assert built.cached
    (warning,) = second.warnings
    assert "cannot be written" in warning


@needs_qnn
def test_each_machine_compiles_its_targets_and_the_last_one_none(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    toml = MATRIX.replace(
        "[targets.npu]", f'build = {{ cache = "{server.url}" }}\n[targets.npu]', 1
    )
    machine("npu").build(toml, TARGETS="npu", CACHE_WRITE="1")
    last = machine("last")
    with pytest.raises(BuildError, match="the cache has no artifact of this model"):
        last.build(toml, compiles=False, FROM_CACHE="all")
    machine("any").build(toml, TARGETS="any", CACHE_WRITE="1")
    config = last.config(toml, FROM_CACHE="all")
    assert plan(config).requirements == ()
    built = last.build(toml, compiles=False, FROM_CACHE="all")
    assert [each.job.target.name for each in built] == ["npu", "any"]
    assert all(each.cached for each in built)
    assert all(each.validations["a"].status is ValidationStatus.RAN for each in built)
    assert not last.warnings


@needs_qnn
def test_cache_folders_of_several_machines_can_be_copied_into_one(
    machine: Callable[[str], Machine],
) -> None:
    last = machine("last")
    for target in ("npu", "any"):
        one = machine(target)
        one.build(MATRIX, TARGETS=target)
        shutil.copytree(one.folder / "cache", last.folder / "cache", dirs_exist_ok=True)
    built = last.build(MATRIX, compiles=False, FROM_CACHE="all")
    assert all(each.cached for each in built)
    assert not last.warnings


def test_the_last_machine_knows_models_that_others_checked_for_their_own_targets(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    toml = f"""
build = {{ cache = "{server.url}" }}
models = [{{ path = "models/a.onnx", dims = {{ batch = 1 }}, validate = {{ inputs = "x.npz" }} }}]
[targets.npu]
provider = "qnn"
[targets.rtx]
provider = "tensorrt-rtx"
profiles = [{{ x = {{ min = [1, 1, 8, 8], opt = [1, 1, 8, 8], max = [1, 1, 8, 8] }} }}]
"""

    def read(name: str, **variables: str) -> ModelFacts:
        its = machine(name)
        np.savez(its.root / "x.npz", x=np.ones((1, 1, 8, 8), np.float32))
        config = its.config(toml, **variables)
        workers = Workers(120)
        if "FROM_CACHE" in variables:
            workers.stop()
        cache = open_cache(config, print)
        (source,) = read_sources(config, cache, workers, its.folder / "scratch")
        return source.facts

    facts = read("npu", TARGETS="npu", CACHE_WRITE="1")
    assert read("last", FROM_CACHE="all") == facts


def test_the_latest_artifact_is_the_remotes(
    artifact: Artifact, server: WebServer, tmp_path: Path
) -> None:
    def cache(name: str) -> Cache:
        return Cache(
            tmp_path / name, print, SharedCache(server.url, print, can_write=name != "old")
        )

    Cache(tmp_path / "old", print).set_ref("ee" * 32, "cd" * 32)
    assert cache("old").ref("ee" * 32) == "cd" * 32
    cache("new").set_ref("ee" * 32, KEY)
    assert cache("old").ref("ee" * 32) == KEY
    # Unless the own folder may answer, which then asks nobody.
    server.requests.clear()
    assert cache("old").ref("ee" * 32, own_first=True) == "cd" * 32
    assert server.requests == []
    assert cache("empty").ref("ee" * 32, own_first=True) == KEY


def test_damaged_facts_of_a_remote_are_a_miss(
    artifact: Artifact, server: WebServer, tmp_path: Path
) -> None:
    warnings: list[str] = []

    def cache(name: str) -> Cache:
        return Cache(
            tmp_path / name, print, SharedCache(server.url, warnings.append, can_write=True)
        )

    run = ValidationOf(ValidationStatus.RAN)
    cache("a").store_validation(KEY, "random", run)
    assert cache("b").validation(KEY, "random") == run
    (file,) = server.folder.glob("cache/v6/facts/*.json")
    file.write_text(file.read_text(encoding="utf-8").replace("ran", "RAN"), encoding="utf-8")
    assert cache("c").validation(KEY, "random") is None
    assert "something damaged or forged" in warnings[0]


def test_facts_of_a_remote_name_no_files_outside_of_the_models_folder(
    machine: Callable[[str], Machine], server: WebServer, tmp_path: Path
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE, CACHE=server.url, CACHE_WRITE="1")
    remote = SharedCache(server.url, print, can_write=True)
    cache = Cache(None, print, remote)
    (second.root / "secret").touch()
    for file in list(server.folder.glob("cache/v6/facts/*")):
        if facts := cache.get("facts", file.stem, ModelFacts):
            cache.put("facts", file.stem, dataclasses.replace(facts, external_data=("../secret",)))
    config = second.config(ONE, CACHE=server.url)
    (source,) = read_sources(config, Cache(None, print, remote), Workers(120), tmp_path / "scratch")
    assert source.facts.external_data == ()

"""Builds on several machines, each with a cache folder of its own, that share a second one."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.cache import shared
from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.signing import new_keys
from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.files import record_files
from hatch_epcontext.jobs.artifact import Built, Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import build, open_cache
from hatch_epcontext.jobs.sources import read_sources
from hatch_epcontext.worker.results import ModelFacts
from tests.conftest import needs_qnn
from tests.models import network, save
from tests.remotes import WebServer

KEY = "ab" * 32

PRIVATE_KEY, PUBLIC_KEY = new_keys()

ONE = """
models = ["models/a.onnx"]
targets.cpu.provider = "cpu"
"""

MATRIX = """
models = [{ path = "models/a.onnx", dims = { batch = 1 }, cut = { inputs = ["c"] } }]
[targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
[targets.any]
provider = "cpu"
"""


@dataclasses.dataclass
class Machine:
    """A machine with a cache folder of its own."""

    folder: Path
    root: Path
    warnings: list[str] = dataclasses.field(default_factory=list)

    def config(self, toml: str, **variables: str) -> Config:
        environ = {
            "CACHE_DIR": str(self.folder / "cache"),
            "SHARED_CACHE_KEYS": PUBLIC_KEY,
            "SHARED_CACHE_KEY": PRIVATE_KEY,
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
            assert record_files(built.folder) == built.record.files
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
    monkeypatch.setattr(shared, "Transport", partial(shared.Transport, timeout=0.5))
    first = machine("first")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/cache"
        with pytest.raises(BuildError) as raised:
            first.build(ONE, compiles=False, SHARED_CACHE=url, FROM_CACHE="all")
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOT_CACHED
    assert f"The shared cache {url} cannot be used (0.5 s without an answer)." in problem.message
    # One that can compile goes on without it.
    (built,) = first.build(ONE, SHARED_CACHE=url, SHARED_CACHE_WRITE="1")
    assert built.record.files
    assert len(first.warnings) == 2


def test_what_one_machine_compiled_is_compiled_nowhere_else(
    machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    # Without keys everybody is trusted.
    url = (tmp_path / "shared").as_uri()
    settings: dict[str, Any] = {
        "SHARED_CACHE": url,
        "SHARED_CACHE_KEYS": "",
        "SHARED_CACHE_KEY": "",
    }
    first, second = machine("first"), machine("second")
    (compiled,) = first.build(ONE, **settings, SHARED_CACHE_WRITE="1")
    (taken,) = second.build(ONE, compiles=False, **settings)
    assert not compiled.cached
    assert taken.cached
    assert taken.record == compiled.record
    assert taken.validations == compiled.validations
    # From now on the second machine needs nobody.
    (again,) = second.build(ONE, compiles=False, SHARED_CACHE="")
    assert again.record == compiled.record
    assert not first.warnings + second.warnings


@pytest.mark.parametrize("write", ["0", "1"])
def test_a_build_that_finds_everything_in_its_own_folder_makes_no_request(
    machine: Callable[[str], Machine], server: WebServer, write: str
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    second.build(ONE, compiles=False, SHARED_CACHE=server.url, SHARED_CACHE_WRITE=write)
    for builder in (first, second):
        server.requests.clear()
        (built,) = builder.build(
            ONE, compiles=False, SHARED_CACHE=server.url, SHARED_CACHE_WRITE=write
        )
        assert built.cached
        assert server.requests == []


def test_a_build_that_may_write_sends_what_was_compiled_before_and_later_removed(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    first, last = machine("first"), machine("last")
    first.build(ONE)
    first.build(ONE, compiles=False, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    last.build(ONE, compiles=False, SHARED_CACHE=server.url, FROM_CACHE="all")
    sent = [path for method, path in server.requests if method == "PUT"]
    assert len(sent) == len(set(sent))
    # As an expiration rule of the store does.
    for blob in server.folder.glob(f"cache/{LAYOUT}/blobs/*"):
        blob.unlink()
    marks = first.folder / "cache" / LAYOUT / "sent"
    for record in marks.rglob("record.json"):
        record.write_text(str(time.time() - 25 * 3600), encoding="utf-8")
    first.build(ONE, compiles=False, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    machine("other").build(ONE, compiles=False, SHARED_CACHE=server.url, FROM_CACHE="all")
    assert not first.warnings + last.warnings
    assert list(marks.iterdir())
    Store(first.folder / "cache").prune(None)
    assert not list(marks.iterdir())


def test_an_empty_variable_and_no_cache_ask_nobody(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    toml = f'{ONE}build = {{ shared-cache = "{server.url}" }}\n'
    machine("first").build(toml, SHARED_CACHE="")
    machine("second").build(toml, NO_CACHE="1", SHARED_CACHE_WRITE="1")
    assert not server.requests


def test_without_a_folder_that_can_be_written_the_fetched_files_are_used(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    machine("first").build(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    second = machine("second")
    (second.folder / "cache").touch()
    (built,) = second.build(ONE, compiles=False, SHARED_CACHE=server.url)
    assert built.cached
    (warning,) = second.warnings
    assert "cannot be written" in warning


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
    assert all(job.cached for job in built)
    assert not last.warnings


def test_what_one_machine_validated_is_not_lost_to_what_another_one_knows(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    other = ONE.replace('"models/a.onnx"', '{ path = "models/a.onnx", validate.inputs = "ones" }')
    first, second, reader, last = map(machine, ("first", "second", "reader", "last"))
    first.build(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    reader.build(ONE, compiles=False, SHARED_CACHE=server.url, FROM_CACHE="all")
    (built,) = second.build(other, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    assert built.cached
    # This machine knows the job, but not how it was validated.
    reader.build(other, compiles=False, SHARED_CACHE=server.url, FROM_CACHE="all")
    # Neither does this one, which sends what it knows again.
    shutil.rmtree(first.folder / "cache" / LAYOUT / "sent")
    first.build(ONE, compiles=False, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    last.build(other, compiles=False, SHARED_CACHE=server.url, FROM_CACHE="all")


def test_the_latest_artifact_is_that_of_the_shared_cache(
    machine: Callable[[str], Machine], server: WebServer
) -> None:
    def cache(name: str, write: str) -> Cache:
        config = machine(name).config(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE=write)
        return open_cache(config, print)

    cache("new", "1").put("refs", "ee" * 32, KEY)
    old = cache("old", "0")
    old.put("refs", "ee" * 32, "cd" * 32)
    assert old.get("refs", "ee" * 32, str, latest=True) == KEY


def test_shared_facts_name_no_files_outside_of_the_models_folder(
    machine: Callable[[str], Machine], server: WebServer, tmp_path: Path
) -> None:
    first, second = machine("first"), machine("second")
    first.build(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    config = second.config(ONE, SHARED_CACHE=server.url, SHARED_CACHE_WRITE="1")
    cache = Cache(None, print, open_cache(config, print).shared)
    (second.root / "secret").touch()
    changed = 0
    for file in list(server.folder.glob(f"cache/{LAYOUT}/facts/*")):
        if facts := cache.get("facts", file.name, ModelFacts):
            cache.put("facts", file.name, dataclasses.replace(facts, external_data=("../secret",)))
            changed += 1
    assert changed
    (source,) = read_sources(config, cache, Workers(120), tmp_path / "scratch")
    assert source.facts.external_data == ()

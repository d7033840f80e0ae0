from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from hypothesis import HealthCheck, settings

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.files import FileRecord, record_files
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.processes import process, running
from hatch_epcontext.jobs.recipe import Recipe, Record
from hatch_epcontext.worker.results import Context, Preparation
from tests.kept_server import KeptServers, inherited
from tests.results import Artifact

# Examples share temporary folders on purpose: that is faster, and each writes what it reads.
_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

# The same few examples each time; CONTRIBUTING.md says how to run many.
settings.register_profile(
    "short",
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SHARED,
)
settings.register_profile(
    "long", max_examples=100_000, database=None, deadline=None, suppress_health_check=_SHARED
)
settings.load_profile("short")

REPOSITORY = Path(__file__).resolve().parents[1]

# Importing numpy takes a quarter longer with OpenBLAS's threads, which nothing here needs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_USUAL = inherited()

_NUMBERS = itertools.count()


newer_runtime = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24),
    reason="ONNX Runtime 1.23, the last one for Python 3.10, lacks or breaks what is tested",
)


def printed_json(output: str) -> Any:
    """The value in the last line of ``output`` that is JSON.

    QNN's simulator prints a line of its own, before or after it: whose buffer is written first, differs.
    """
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise AssertionError(f"no line is JSON:\n{output}")


ONLY_BY_NAME = ("adopters", "front_ends", "packagers")
"""Marks of tests that run only where ``-m`` names them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``-m`` must name, and begin with the files that have slow tests.

    Each file is run by one process.
    """
    chosen = str(config.option.markexpr)
    left_out = [name for name in ONLY_BY_NAME if name not in chosen]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One process more than cores, because tests wait for other processes; xdist's variable wins."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    # The container or the user may allow only some.
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return allowed + 1


def pytest_configure(config: pytest.Config) -> None:
    """Set what all tests and the processes that they start share."""
    # Archives that tests write get no date from the environment: it may be one that none can have.
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    # Bytecode is stored once, despite PYTHONDONTWRITEBYTECODE: hundreds of processes import the package.
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(REPOSITORY / "hatch_epcontext", quiet=2)
    # All that is imported and collected stays.
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each process import its own part of all test files first, and then those of the others.

    In a new checkout, what one has compiled the others only load. The coverage of it is already measured.
    """
    process: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if process is None or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    number = int(process["workerid"].removeprefix("gw"))
    for file in files[len(files) * number // process["workercount"] :]:
        # It fails again where pytest collects it.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(REPOSITORY).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Let the garbage collector look seldom at what has been collected, which takes it most of its time."""
    # Not frozen: hypothesis asks it who refers to a generator of random numbers.
    gc.set_threshold(100_000)
    gc.enable()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for at most a minute until ``condition`` is true."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether the process runs; POSIX only, because on Windows the call would end it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    if sys.platform != "linux":
        return True
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    # Where nothing waits for orphans, they stay as zombies.
    return status.rpartition(")")[2].split()[0] != "Z"


def needs(package: str) -> pytest.MarkDecorator:
    """A mark for tests that run an EP; its package is a test dependency where it has wheels."""
    name = package.replace("_", "-")
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{name} has no wheels for this Python or platform",
    )


needs_qnn = needs("onnxruntime_qnn")


@pytest.fixture
def user_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache of a test, or of a file; most write nothing there, and do not wait for a folder."""
    has = request.node.get_closest_marker
    is_shared = has("one_cache") and not has("own_cache")
    name = request.node.module.__name__ if is_shared else str(next(_NUMBERS))
    return tmp_path_factory.getbasetemp() / "user-caches" / name


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, user_cache: Path) -> None:
    """Tests neither see the user's settings nor write to the user's cache."""
    for name in os.environ:
        if name.startswith((PREFIX, "HATCH_BUILD")):
            monkeypatch.delenv(name)
    monkeypatch.setenv(f"{PREFIX}CACHE_DIR", str(user_cache))


@pytest.fixture(scope="session")
def kept_servers() -> Iterator[KeptServers]:
    servers = KeptServers()
    yield servers
    servers.end()


@pytest.fixture(autouse=True)
def one_server(kept_servers: KeptServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Builds in this process share the server that forks their workers."""
    # Fixtures of a module may have set some, for all of its tests.
    before = inherited()
    monkeypatch.setattr(process, "ForkServer", kept_servers.get)
    if running.CAN_FORK:
        monkeypatch.setattr(process, "Interpreter", kept_servers.fork)
    yield
    kept_servers.end(_USUAL, before)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as in a container that runs as any user."""
    if sys.platform == "win32":
        pytest.skip("Windows has no such users")
    import pwd

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", f"{PREFIX}CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions that plans and checks of this environment see."""
    present: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in present:
            raise metadata.PackageNotFoundError(name)
        return present[name]

    monkeypatch.setattr("hatch_epcontext.jobs.requirements.metadata.version", version)
    return present


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder of a project with a package and two (empty) models."""
    root = tmp_path / "project"
    (root / "my_app").mkdir(parents=True)
    (root / "my_app" / "__init__.py").touch()
    (root / "models").mkdir()
    for name in ("a", "b"):
        (root / "models" / f"{name}.onnx").write_bytes(b"model " + name.encode())
    return root


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """An artifact of one model ``a`` in a folder of its own."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "a_ctx.onnx").write_bytes(b"context")
    (folder / "a_ctx_qnn.bin").write_bytes(b"blob" * 100)
    return Artifact(folder, make_record(record_files(folder)))


def make_record(files: dict[str, FileRecord]) -> Record:
    tensor = TensorFacts("x", "float32", (1, 4))
    context = Context("a", "a_ctx.onnx", (tensor,), (tensor,))
    return Record(
        Recipe("onnxruntime"),
        (Preparation("onnxruntime", 5, 4),),
        (context,),
        files,
        {"onnxruntime": "1.0"},
    )

"""Builds many projects at once on one cache, with others that clean it, and opens a model in many threads.

    pip install -e . --group bench
    python -m benchmarks.together                          # 20 builds, 3 rounds, 64 threads
    python -m benchmarks.together --builds 5 --rounds 1 --threads 8

Each build is a process of its own. It fails, or prints a warning, or its wheel has other models than that
of a build alone: all of these are counted, and must be none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from benchmarks import project
from benchmarks.many import generate
from benchmarks.measure import show
from benchmarks.project import PACKAGE, TARGETS

T = TypeVar("T")

_CLEANING = {"all": ("prune", "--all")}

_CLI = "from hatch_epcontext.cli import main; main()"

_OPEN = """
import json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, sys.argv[1])
import numpy as np
from {package} import epcontext

threads = int(sys.argv[2])
ready = threading.Barrier(threads)

def work(number):
    ready.wait()
    session = epcontext.load(sys.argv[3])
    (found,) = session.run(None, {{"x": np.ones((1, 3, 16, 16), np.float32)}})
    return found.tobytes().hex()

start = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    outputs = list(pool.map(work, range(threads)))
print(json.dumps([time.perf_counter() - start, len(set(outputs))]))
"""


@dataclass(frozen=True)
class Round:
    """Builds that ran at once: their number and seconds, the models they compiled, and what went wrong."""

    name: str
    builds: int
    seconds: float
    compiled: int
    wrong: tuple[str, ...]


def builds_at_once(builds: int, cleaning: Sequence[str], name: str, folder: Path) -> Round:
    """Build as many equal projects at once; ``cleaning``: arguments of ``epcontext cache``, in a loop."""
    cache = folder / "cache"
    sources = [generate(folder / f"{model}.onnx", n) for n, model in enumerate("abc")]
    roots = [folder / f"project-{number}" for number in range(builds)]
    for root in roots:
        project.write(root, sources, {"cpu": TARGETS["cpu"]}, fallback="none")
    with _cleaned(cache, cleaning) as problems:
        start = time.perf_counter()
        with ThreadPoolExecutor(builds) as pool:
            done = list(pool.map(lambda root: _build(root, cache), roots))
        seconds = time.perf_counter() - start
    wrong = [text for code, text in done if code or "warning" in text.lower()]
    contents = {_models(root) for root in roots if (root / "dist").is_dir()}
    if len(contents) > 1:
        wrong.append(f"{len(contents)} different wheels")
    lines = [line for _, text in done for line in text.splitlines() if " -> cpu " in line]
    compiled = sum("from the cache" not in line for line in lines)
    return Round(name, builds, seconds, compiled, (*wrong, *problems))


def _build(root: Path, cache: Path) -> tuple[int, str]:
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    done = subprocess.run(
        command,
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@contextmanager
def _cleaned(cache: Path, arguments: Sequence[str]) -> Iterator[list[str]]:
    """While it is entered, the cache is cleaned again and again; the list gets what goes wrong."""
    problems: list[str] = []
    ended = threading.Event()
    command = [sys.executable, "-c", _CLI, "cache", *arguments]
    env = {**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(cache)}

    def clean() -> None:
        while not ended.is_set():
            done = subprocess.run(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                problems.append(done.stdout)

    thread = threading.Thread(target=clean if arguments else ended.wait)
    thread.start()
    try:
        yield problems
    finally:
        ended.set()
        thread.join()


def _models(root: Path) -> str:
    """A digest of the models in the wheel of ``root``."""
    with zipfile.ZipFile(project.wheel(root)) as archive:
        names = [n for n in sorted(archive.namelist()) if n.endswith((".onnx", ".bin"))]
        return sha256(b"".join(archive.read(name) for name in names)).hexdigest()


def threads_at_once(threads: int, folder: Path) -> tuple[float, int]:
    """The seconds in which as many threads open and run one model, and how many answers they got."""
    source = generate(folder / "m.onnx", 0)
    project.write(folder / "project", [source], {"cpu": TARGETS["cpu"]}, fallback="none")
    project.build(folder / "project", folder / "cache")
    project.unpack(folder / "project", folder / "app")
    script = _OPEN.format(package=PACKAGE)
    command = [sys.executable, "-c", script, str(folder / "app"), str(threads), "m"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, answers = json.loads(done.stdout)
    return seconds, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builds", type=int, default=20, help="builds at once")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind")
    parser.add_argument("--threads", type=int, default=64, help="threads that open one model")
    arguments = parser.parse_args()
    table = Table("beside", "builds", "seconds", "models compiled", "failures and warnings")
    found: list[Round] = []
    ways: dict[str, Sequence[str]] = {"nothing": (), **_CLEANING}
    for name, cleaning in ways.items():
        for _ in range(arguments.rounds):
            made = _in_folder(partial(builds_at_once, arguments.builds, cleaning, name))
            found.append(made)
            table.add_row(
                made.name,
                str(made.builds),
                f"{made.seconds:.1f}",
                str(made.compiled),
                str(len(made.wrong)),
            )
    show(table)
    for threads in (1, arguments.threads):
        seconds, answers = _in_folder(partial(threads_at_once, threads))
        print(f"{threads} threads open and run one model: {seconds:.2f} s, {answers} answer")
    wrong = [text for made in found for text in made.wrong]
    if wrong:
        raise SystemExit("\n\n".join(wrong[:5]))


def _in_folder(work: Callable[[Path], T]) -> T:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        return work(Path(temporary).resolve())


if __name__ == "__main__":
    main()

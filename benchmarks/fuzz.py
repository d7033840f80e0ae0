"""Mutated ONNX files through what reads models: how many are accepted, refused, and what is a defect.

``python -m benchmarks.fuzz --count 100000 --seed 1``. Files are read in forks of this process: one that
crashes is counted, and the next fork goes on behind its file. Nothing is run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import EpcontextError, Key
from hatch_epcontext.serialize import to_json
from hatch_epcontext.tools.inspecting import verify_model
from hatch_epcontext.worker.actions import check, inspect
from hatch_epcontext.worker.readback import read_context
from hatch_epcontext.worker.requests import CheckRequest, InspectRequest
from tests.mutants import mutants, sources

_BATCH = 500

_DEFECTS = ("traceback", "crash", "no sentence", "slow")

_TARGET = Target(
    "npu", CompileSettings(provider="qnn", ep="QNNExecutionProvider", device="npu"), None
)


def read(path: Path) -> None:
    """Read the file at ``path`` as commands and builds do; raises what they raise."""
    spec = Model("a", path, Key(("models", 0)))
    errors: list[EpcontextError] = []
    for reader in (_check, _inspect, _read_back):
        try:
            reader(path, spec)
        except EpcontextError as error:
            # The message is made too, because it is what the user gets.
            str(error)
            errors.append(error)
    # What is a source model or a context model is refused as the other.
    if len(errors) == len((_check, _inspect, _read_back)):
        raise errors[0]


def _check(path: Path, spec: Model) -> None:
    to_json(check.handle(CheckRequest((spec,))))


def _inspect(path: Path, spec: Model) -> None:
    reply = inspect.handle(InspectRequest(str(path)))
    to_json(reply)
    verify_model(path, reply)


def _read_back(path: Path, spec: Model) -> None:
    to_json(read_context(spec, path.with_name("source.onnx"), path, _TARGET))


def outcome(path: Path, seconds: float) -> str:
    """What reading the file at ``path`` ends in; the beginning of it is a key of the counts."""
    start = time.perf_counter()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read(path)
        found = "accepted"
    except EpcontextError as error:
        message = error.problems[0].message
        found = "refused" if message.strip() else "no sentence"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [
            f for f in traceback.extract_tb(error.__traceback__) if "hatch_epcontext" in f.filename
        ]
        at = own[-1] if own else place
        found = (
            f"traceback {type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {error}"[
                :160
            ]
        )
    took = time.perf_counter() - start
    return f"slow {took:.1f} s" if took > seconds else found


def outcomes(files: list[tuple[str, bytes]], folder: Path, seconds: float) -> Iterator[str]:
    """The outcome of each file, each read in a process that a crash does not end with this one."""
    waiting = list(files)
    while waiting:
        found = _in_fork(waiting, folder, seconds)
        yield from found
        waiting = waiting[len(found) :]
        if waiting:
            yield "crash"
            waiting = waiting[1:]


def _in_fork(files: list[tuple[str, bytes]], folder: Path, seconds: float) -> list[str]:
    """The outcomes up to the file that crashes the process."""
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        os.close(reading)
        # A file on which it hangs is a crash too.
        signal.alarm(int(60 + 10 * seconds))
        with open(writing, "w", encoding="utf-8") as lines:  # noqa: PTH123
            for _, content in files:
                (folder / "a.onnx").write_bytes(content)
                print(
                    outcome(folder / "a.onnx", seconds).replace("\n", " "), file=lines, flush=True
                )
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
        found = [line.rstrip("\n") for line in lines]
    os.waitpid(process_id, 0)
    return found


def prepare(folder: Path) -> None:
    """Put what mutated files name into ``folder``."""
    (folder / "w.bin").write_bytes(b"\0" * 20_000)
    (folder / "source.onnx").write_bytes(sources()["network"].SerializeToString())


def fuzz(count: int, seed: int, seconds: float, report: Callable[[str], None]) -> Counter[str]:
    """Read ``count`` mutated files; ``report`` gets a line for each defect."""
    counts: Counter[str] = Counter()
    files = mutants(seed, count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        while batch := list(islice(files, _BATCH)):
            for index, (file, found) in enumerate(
                zip(batch, outcomes(batch, folder, seconds), strict=True), counts.total()
            ):
                kind = found.split(" ")[0] if not found.startswith("no ") else "no sentence"
                counts[kind] += 1
                if kind in _DEFECTS:
                    report(f"{index} ({file[0]}): {found}")
    return counts


def main() -> int:
    """Print the counts; the exit code is 1 when there are defects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="how many files")
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutations")
    parser.add_argument(
        "--slow", type=float, default=5.0, help="seconds from which a file is a defect"
    )
    given = parser.parse_args()
    start = time.perf_counter()
    counts = fuzz(given.count, given.seed, given.slow, print)
    print(f"{given.count} files in {time.perf_counter() - start:.0f} s, seed {given.seed}")
    for kind, number in counts.most_common():
        print(f"{number:8} {kind}")
    return 1 if any(counts[kind] for kind in _DEFECTS) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Opens models with the loader and with a bare InferenceSession, in turn in one process.

    pip install -e . --group bench
    python -m benchmarks.opening

Prints the median times of both on each EP that this machine has, and what importing the loader costs
beside onnxruntime and numpy.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime as ort
from rich.table import Table

from benchmarks import project
from benchmarks.measure import run, show
from benchmarks.models import FIVE, fetch
from benchmarks.plain import available

_IMPORTS = 15
"""Fresh interpreters for each import time."""


def package(models: Path, folder: Path, providers: Sequence[str], names: Sequence[str]) -> Path:
    """Build the models called ``names`` for ``providers``; returns the folder of their package."""
    sources = fetch(models, [model for model in FIVE if model.name in names])
    targets = {name: {**project.TARGETS[name], "static-shapes": True} for name in providers}
    project.write(folder / "project", sources, targets)
    project.build(folder / "project", folder / "cache")
    return project.unpack(folder / "project", folder / "installed")


def shipped_loader(folder: Path) -> ModuleType:
    """The loader in a package, imported as an app does."""
    spec = importlib.util.spec_from_file_location("shipped", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shipped"] = module
    spec.loader.exec_module(module)
    return module


def bare(file: Path, ep: str, options: dict[str, str]) -> ort.InferenceSession:
    """What an app writes that knows its EP: it is registered already."""
    session_options = ort.SessionOptions()
    if ep == "CPUExecutionProvider":
        return ort.InferenceSession(file, session_options, providers=[ep])
    device = next(each for each in ort.get_ep_devices() if each.ep_name == ep)
    session_options.add_session_config_entry("session.disable_model_compile", "1")
    session_options.add_provider_for_devices([device], options)
    return ort.InferenceSession(file, session_options)


def seconds(open_: Callable[[], object]) -> float:
    """The time of one opening; the session is closed outside of it."""
    start = time.perf_counter()
    session = open_()
    elapsed = time.perf_counter() - start
    del session
    gc.collect()
    return elapsed


def import_seconds(code: str) -> float:
    """The median time of ``code`` in fresh interpreters, after onnxruntime and numpy are imported."""
    timed = (
        "import onnxruntime, numpy, sys, time\nstart = time.perf_counter()\n"
        f"{code}\nprint(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", timed]
    times = [float(run(command, Path.cwd()).stdout.splitlines()[-1]) for _ in range(_IMPORTS)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder that keeps the downloaded packages")
    parser.add_argument("--rounds", type=int, default=100, help="openings of each kind")
    parser.add_argument(
        "--provider", choices=project.TARGETS, action="append", help="only this one; repeatable"
    )
    parser.add_argument("--model", action="append", help="only this model; repeatable")
    arguments = parser.parse_args()
    ort.set_default_logger_severity(3)
    table = Table(*("model", "EP", "bare", "loader", "difference", "ratio"))
    table.title = "medians; goal: a ratio of 1.05, or 1 ms"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        models = (arguments.models or folder / "models").resolve()
        chosen = arguments.provider or list(filter(available, project.TARGETS))
        names = arguments.model or ["ocr-direction", "voice-16k"]
        installed = package(models, folder, chosen, names)
        app: Any = shipped_loader(installed)
        for name in app.models():
            for target in chosen:
                _compare(table, app, name, target, arguments.rounds)
        imported = import_seconds(
            f"sys.path.insert(0, {str(installed.parent)!r}); import {installed.name}"
        )
    show(table)
    print(f"importing the loader: {1000 * imported:.1f} ms beside onnxruntime and numpy")


def _compare(table: Table, app: Any, name: str, target: str, rounds: int) -> None:
    session = app.load(name, target=target, device="any")
    ep = session.get_providers()[0]
    options = {"backend_type": "htp"} if target == "qnn" else {}
    times: dict[str, list[float]] = {"bare": [], "loader": []}
    with app.path(name, target) as file:
        ways = {
            "bare": lambda: bare(file, ep, options),
            "loader": lambda: app.load(name, target=target, device="any"),
        }
        for number in range(rounds):
            # Each is the first as often as the other.
            for kind in ("bare", "loader") if number % 2 else ("loader", "bare"):
                times[kind].append(seconds(ways[kind]))
    plain, ours = (statistics.median(times[kind]) for kind in ("bare", "loader"))
    table.add_row(
        name,
        ep,
        f"{1000 * plain:.2f} ms",
        f"{1000 * ours:.2f} ms",
        f"{1000 * (ours - plain):.2f} ms",
        f"{ours / plain:.3f}",
    )


if __name__ == "__main__":
    main()

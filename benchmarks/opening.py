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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS, fetch
from hatch_epcontext.build.cache import Cache
from hatch_epcontext.build.plan import plan
from hatch_epcontext.build.run import build
from hatch_epcontext.config.load import load as load_config
from hatch_epcontext.package.bundle import bundle

TARGETS: dict[str, dict[str, Any]] = {
    "qnn": {"provider": "qnn", "provider-options": {"soc_model": 60, "htp_arch": 73}},
    "openvino": {"provider": "openvino"},
    "cpu": {"provider": "cpu"},
}

_IMPORTS = 15
"""Fresh interpreters for each import time."""


def package(root: Path, staging: Path, targets: dict[str, Any], names: list[str]) -> Path:
    """Build the models called ``names`` for ``targets``; returns the folder of their package."""
    paths = fetch(root)
    tables = [
        {
            "name": model.name,
            "path": paths[model.name].relative_to(root).as_posix(),
            "shapes": model.shapes,
            "constants": model.constants,
            "static-shapes": True,
        }
        for model in MODELS
        if model.name in names
    ]
    table = {"targets": targets, "models": tables}
    cache = Cache(None, print)
    result = build(plan(load_config(root, table, {}, {})), staging, cache, print)
    return bundle(result, staging).folder


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
    times = []
    # As an installed package, which pip compiles.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(_IMPORTS):
        command = [sys.executable, "-c", timed]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        times.append(float(done.stdout.splitlines()[-1]))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder that keeps the downloaded packages")
    parser.add_argument("--rounds", type=int, default=100, help="openings of each kind")
    parser.add_argument(
        "--provider", choices=TARGETS, action="append", help="only this one; repeatable"
    )
    parser.add_argument("--model", action="append", help="only this model; repeatable")
    arguments = parser.parse_args()
    ort.set_default_logger_severity(3)
    table = Table("model", "EP", "bare", "loader", "difference", "ratio")
    with tempfile.TemporaryDirectory() as temporary:
        staging = Path(temporary).resolve() / "staging"
        staging.mkdir()
        root = (arguments.models or Path(temporary).resolve() / "models").resolve()
        root.mkdir(parents=True, exist_ok=True)
        chosen = {name: TARGETS[name] for name in arguments.provider or TARGETS}
        names = arguments.model or ["ocr-direction", "voice-16k"]
        folder = package(root, staging, chosen, names)
        app: Any = shipped_loader(folder)
        for name in app.models():
            for target in chosen:
                _compare(table, app, name, target, arguments.rounds)
        imported = import_seconds(
            f"sys.path.insert(0, {str(folder.parent)!r}); import {folder.name}"
        )
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
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

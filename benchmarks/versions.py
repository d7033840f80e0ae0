"""Opens one wheel with many versions of ONNX Runtime and of the EPs' packages, each in its own environment.

    pip install -e . --group bench
    python -m benchmarks.versions                      # prints the tables, in about four minutes
    python -m benchmarks.versions --write              # writes them to docs/versions.md
    python -m benchmarks.versions --python python3.13 --python python3.14

The wheel is built with the versions in this environment. Of each minor release that the package index has
for a Python the last patch is installed, with the newest of all else. EPs are installed without their own
requirements, so that the tables also show what these forbid. It needs an Intel CPU, the network, and 1 GB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from benchmarks import project
from benchmarks.measure import run
from benchmarks.project import PACKAGE, TARGETS

PAGE = Path(__file__).parents[1] / "docs" / "versions.md"

RUNTIME = "onnxruntime"

EPS = {"qnn": "onnxruntime-qnn", "openvino": "onnxruntime-ep-openvino"}
"""The package of each EP that runs on a CPU."""

MODELS = (*EPS, "cpu", "source")
"""What is opened: the targets, and the source model."""

_NUMPY_2 = Version("1.19")
"""The first release of ONNX Runtime that was built for NumPy 2 (its release notes)."""

MAX_ERROR = 0.05
"""Of logits up to 20, computed in float16."""

_MAX_REASON = 200

_VERSION = "import sys; print(*sys.version_info[:2], sep='.')"

_MODEL = Path(__file__).parents[1] / "example_project" / "models" / "digits.onnx"

_OPEN = f"""
import json, sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(4)
from {PACKAGE}.epcontext import LoadError, load
try:
    session = load("digits", target=sys.argv[1], device="any" if sys.argv[1] in {[*EPS]} else None)
    (logits,) = session.run(None, {{"image": np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)}})
    print("result", json.dumps(["", logits[0].tolist()]))
except LoadError as error:
    print("result", json.dumps([error.attempts[0].reason, []]))
"""


@dataclass(frozen=True)
class Opening:
    """How a model opened: the reason why it did not, or the logits, float32, shape (10,)."""

    reason: str = ""
    logits: Sequence[float] = ()


@dataclass(frozen=True)
class Row:
    """The versions of the packages in an environment, by name, and how each model opened there."""

    versions: Mapping[str, str]
    openings: Mapping[str, Opening]


def build(folder: Path) -> Path:
    """Build a wheel with the model for all targets, in the present environment; returns it."""
    sources = [project.Source("digits", _MODEL, {"image": (1, 1, 8, 8)})]
    targets = {name: TARGETS[name] for name in (*EPS, "cpu")}
    project.write(folder, sources, targets, fallback="source")
    project.build(folder, folder / "cache")
    return project.wheel(folder)


def releases(package: str, python: str) -> list[str]:
    """The last patch of each minor release of ``package`` for that version of Python, newest first."""
    only = ("--python-version", python, "--json")
    command = [sys.executable, "-m", "pip", "index", "versions", package, *only]
    return newest_patches(json.loads(run(command, Path.cwd()).stdout)["versions"])


def newest_patches(versions: Iterable[str]) -> list[str]:
    """The last patch of each minor release in ``versions``, newest first."""
    chosen: dict[tuple[int, int], Version] = {}
    for version in sorted(map(Version, versions)):
        chosen[version.major, version.minor] = version
    return [str(version) for version in reversed(chosen.values())]


def combinations(available: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """The versions of each environment: at most one is not the newest of those that are ``available``."""
    newest = {package: versions[0] for package, versions in available.items()}
    yield newest
    for package, versions in available.items():
        for version in versions[1:]:
            yield {**newest, package: version}


def try_versions(versions: Mapping[str, str], python: str, wheel: Path, folder: Path) -> Row:
    """Open all models of ``wheel`` in a new environment in ``folder``, of ``python`` with ``versions``."""
    run(["uv", "venv", "--quiet", "--python", python, folder], folder.parent)
    executable = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install: list[str | Path] = ["uv", "pip", "install", "--quiet", "--python", executable]
    exact = {package: f"{package}=={version}" for package, version in versions.items()}
    numpy = "numpy<2" if Version(versions[RUNTIME]) < _NUMPY_2 else "numpy"
    run([*install, exact[RUNTIME], numpy, wheel], folder)
    run([*install, "--no-deps", *(exact[package] for package in EPS.values())], folder)
    return Row(versions, {model: open_model(executable, model, folder) for model in MODELS})


def open_model(python: Path | str, model: str, folder: Path) -> Opening:
    """Open ``model`` by the wheel that ``python`` has installed, in a process of its own."""
    done = subprocess.run(
        [str(python), "-c", _OPEN, model],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result := re.search(r"^result (.*)", done.stdout, re.MULTILINE):
        return Opening(*json.loads(result[1]))
    last = done.stderr.strip().splitlines()[-1:]
    return Opening(f"the process ends with {done.returncode}{': ' * bool(last)}{''.join(last)}")


def page(tables: Mapping[str, Sequence[Row]], built: Mapping[str, str]) -> str:
    """The page, of the rows by the version of Python; ``built``: the versions that compiled."""
    date = datetime.datetime.now(datetime.timezone.utc).date()
    machine = f"{platform.system()}, {platform.machine()}"
    lines = [
        "<!-- Written by: python -m benchmarks.versions --write -->",
        "# Versions tested together",
        "",
        f"One wheel, built with {_show(built)},",
        f"was opened with other versions ({machine}, {date}).",
        "A model that opens also ran, and its results are those of the newest versions. QNN ran on its",
        "simulator, OpenVINO on the CPU. `cpu` is the optimized graph for the CPU, `source` the source",
        "model. The other EPs were not run.",
        "",
        "So a context needs the release of the EP's package that compiled it, or a newer one, and an ONNX",
        "Runtime with which that works. [`epcontext init` and builds](adopting.md) compare your dependencies",
        "with these bounds, and name what to write.",
    ]
    for python, rows in tables.items():
        newest = rows[0]
        for package in newest.versions:
            others = {name: text for name, text in newest.versions.items() if name != package}
            models = [m for m in MODELS if package in (RUNTIME, EPS.get(m))]
            own = [row for row in rows if row.versions.items() >= others.items()]
            lines += ["", f"## {package} on Python {python}", "", f"With {_show(others)}:", ""]
            lines += _table(package, own, models, newest)
    return "\n".join(lines) + "\n"


def _show(versions: Mapping[str, str]) -> str:
    *most, last = (f"{package} {version}" for package, version in versions.items())
    return f"{', '.join(most)} and {last}" if most else last


def _table(package: str, rows: Sequence[Row], models: Sequence[str], newest: Row) -> Iterator[str]:
    """The lines of a table, and the reasons why models do not open."""
    yield f"| {package} | {' | '.join(f'`{model}`' for model in models)} |"
    yield "| --- |" + " --- |" * len(models)
    reasons: dict[str, int] = {}
    for row in rows:
        cells = []
        for model in models:
            opening, best = row.openings[model], newest.openings[model]
            if opening.reason:
                reason = opening.reason.replace(f"{package} {row.versions[package]}", package)
                number = reasons.setdefault(_first_line(reason), len(reasons) + 1)
                cells.append(f"no ({number})")
            else:
                pairs = zip(opening.logits, best.logits, strict=True)
                error = max(abs(one - other) for one, other in pairs)
                cells.append("opens" if error <= MAX_ERROR else f"opens, error {error:.2g}")
        yield f"| {row.versions[package]} | {' | '.join(cells)} |"
    if reasons:
        yield ""
    for reason, number in reasons.items():
        yield f"{number}. `{reason}`"


def _first_line(reason: str) -> str:
    """The first line of ``reason``, without the paths and codes that ONNX Runtime puts around its texts."""
    noise = r"\[ONNXRuntimeError\] : \d+ : |/onnxruntime_src/\S+ [^:]*: ?|/\S+/site-packages/"
    return re.sub(noise, "", reason.splitlines()[0])[:_MAX_REASON].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/versions.md")
    parser.add_argument("--python", action="append", help="interpreters, such as python3.13")
    arguments = parser.parse_args()
    packages = (RUNTIME, *EPS.values())
    tables: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary).resolve()
        wheel = build(folder / "project")
        for python in arguments.python or [sys.executable]:
            version = run([python, "-c", _VERSION], folder).stdout.strip()
            available = {package: releases(package, version) for package in packages}
            tables[version] = []
            for number, versions in enumerate(combinations(available)):
                environment = folder / f"{version}-{number}"
                row = try_versions(versions, python, wheel, environment)
                shutil.rmtree(environment, ignore_errors=True)
                opened = [model for model, opening in row.openings.items() if not opening.reason]
                print(
                    f"Python {version}, {_show(versions)}: {', '.join(opened) or 'none'}",
                    flush=True,
                )
                tables[version].append(row)
    text = page(tables, {package: metadata.version(package) for package in packages})
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()

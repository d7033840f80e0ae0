"""Imports what Hatch imports of the hook, after Hatch's own part, in fresh interpreters.

    pip install -e . --group bench
    python -m benchmarks.importing

Hatch imports the entry point in every command, and loads the hook's class in every build of an
environment that has the package. Fails when one of them imports numpy, onnx or onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from benchmarks.measure import run, show

WAYS: Mapping[str, tuple[str, str]] = {
    "the entry point": ("hatchling.plugin", "hatch_epcontext.hooks"),
    "the hook's class": ("hatchling.builders.hooks.plugin.interface", "hatch_epcontext.plugin"),
}
"""What is imported: the module of Hatch that it builds on, and the module of this package."""

FORBIDDEN = {"numpy", "onnx", "onnxruntime"}
"""Packages that the build process never imports."""

_TIMED = """
import json, sys, time
start = time.perf_counter()
import {hatch}
middle, before = time.perf_counter(), len(sys.modules)
import {ours}
end = time.perf_counter()
print(json.dumps([middle - start, end - middle, before, list(sys.modules)]))
"""


def imported(hatch: str, ours: str) -> tuple[float, float, int, set[str]]:
    """Import ``hatch`` and then ``ours`` in a fresh interpreter.

    Returns the milliseconds of both, how many modules ``ours`` imported, and the names of all.
    """
    done = run([sys.executable, "-c", _TIMED.format(hatch=hatch, ours=ours)], Path.cwd())
    base, more, before, modules = json.loads(done.stdout.splitlines()[-1])
    return 1000 * base, 1000 * more, len(modules) - before, set(modules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="fresh interpreters for each import")
    arguments = parser.parse_args()
    table = Table(title="imports; goal: 5 ms for the entry point", title_justify="left")
    for column in ("import", "after", "Hatch: least", "median", "the hook: least", "median"):
        table.add_column(column, justify="left" if column in {"import", "after"} else "right")
    table.add_column("modules", justify="right")
    table.add_column("ratio of medians", justify="right")
    found: set[str] = set()
    for name, (hatch, ours) in WAYS.items():
        rows = [imported(hatch, ours) for _ in range(arguments.rounds)]
        base, more = [row[0] for row in rows], [row[1] for row in rows]
        times = [of(each) for each in (base, more) for of in (min, statistics.median)]
        found |= FORBIDDEN & rows[0][3]
        table.add_row(
            name,
            hatch,
            *(f"{milliseconds:.2f} ms" for milliseconds in times),
            str(rows[0][2]),
            f"{(times[1] + times[3]) / times[1]:.2f}",
        )
    show(table)
    if found:
        raise SystemExit(f"imported by the build process: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()

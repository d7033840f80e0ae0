"""Runs the same work in two ways, in turn, and compares what they cost."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Cost:
    """Seconds of wall time and of CPU time, in all processes."""

    wall: float
    cpu: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)


@dataclass(frozen=True)
class Done:
    """A finished command: its cost, and what it printed."""

    cost: Cost
    stdout: str
    stderr: str


def run(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run ``command`` in the folder ``cwd``, with ``env`` added to the environment.

    Raises SystemExit with the command's output when it fails.
    """
    # As an installed package, which pip compiles.
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = _cpu_of_children(), time.perf_counter()
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    cost = Cost(time.perf_counter() - start, _cpu_of_children() - before)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}")
    return Done(cost, done.stdout, done.stderr)


def _cpu_of_children() -> float:
    """Seconds of all children that ended and were waited for, and of theirs; 0 on Windows."""
    if sys.platform == "win32":
        return 0.0
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def alternate(ways: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """The costs of each way, run ``rounds`` times; each is the first as often as the others."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            costs[name].append(ways[name]())
    return costs


def comparison(title: str, costs: Mapping[str, Sequence[Cost]]) -> Table:
    """A table of several ways: the least and the median times, and their ratios to the last way's."""
    table = Table(title=title, title_justify="left")
    for column in ("way", "runs", "wall: least", "median", "CPU: least", "median"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, each in costs.items():
        walls, cpus = [cost.wall for cost in each], [cost.cpu for cost in each]
        times = (f"{seconds:.2f} s" for values in (walls, cpus) for seconds in _both(values))
        table.add_row(name, str(len(each)), *times)
    *others, base = costs
    for name in others:
        cells = []
        for take in (_walls, _cpus):
            pairs = zip(_both(take(costs[name])), _both(take(costs[base])), strict=True)
            cells += [f"{ours / theirs:.2f}" if theirs else "-" for ours, theirs in pairs]
        table.add_row(f"ratio: {name} / {base}", "", *cells, style="bold")
    return table


def least(costs: Sequence[Cost]) -> float:
    """The smallest wall time."""
    return min(_walls(costs))


def _walls(costs: Sequence[Cost]) -> list[float]:
    return [cost.wall for cost in costs]


def _cpus(costs: Sequence[Cost]) -> list[float]:
    return [cost.cpu for cost in costs]


def _both(values: Sequence[float]) -> tuple[float, float]:
    return min(values), statistics.median(values)


def show(table: Table) -> None:
    """Print a table, with all its columns where the output is no terminal."""
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)

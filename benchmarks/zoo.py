"""Builds open models as a project does, and compares that with a script that does the same by hand.

    pip install -e . --group bench
    python -m benchmarks.zoo
    python -m benchmarks.zoo --provider openvino    # on an Intel processor
    python -m benchmarks.zoo --slow                 # models that QNN's simulator runs for seconds

Each way begins with nothing: the build without a cache of earlier builds, and the script in a new
process, followed by Hatch alone, which packs the script's files into a wheel. Both run each model as often
on the target: as often as the build does. Prints the facts of all models, what each step of the script
costs, both ways' times, and those of a script that runs each model once. Slow models are built one by one,
and the script runs them only once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import project
from benchmarks.measure import Cost, alternate, comparison, show
from benchmarks.models import ELEVEN, FIVE, SLOW, fetch
from benchmarks.plain import MORE, STEPS, by_hand, steps

MODELS = {"qnn": ELEVEN, "openvino": FIVE}


class Zoo:
    """Both ways, each in a new folder in each round; ``report`` and ``steps`` are the last round's.

    ``once``: in each round, what the script without its runs beyond the first costs. ``is_slow``: whether it
    has no others.
    """

    def __init__(
        self,
        provider: str,
        sources: Sequence[project.Source],
        folder: Path,
        *,
        is_slow: bool = False,
    ) -> None:
        self.is_slow = is_slow
        self.report: Any = None
        self.steps: dict[str, dict[str, Cost]] = {}
        self.once: list[Cost] = []
        self._provider, self._sources, self._folder = provider, sources, folder

    def build(self) -> Cost:
        """Build a project of all models."""
        root = self._new("ours")
        targets = {self._provider: project.TARGETS[self._provider]}
        project.write(root / "project", self._sources, targets)
        done = project.build(root / "project", root / "cache", root / "report.json")
        self.report = json.loads((root / "report.json").read_text(encoding="utf-8"))
        return done.cost

    def by_hand(self) -> Cost:
        """Run the script, and pack its files and the sources, which the build ships as a fallback."""
        root = self._new("plain")
        done = by_hand(self._provider, self._sources, root / "files", self.runs)
        for source in self._sources:
            shutil.copy(source.path, root / "files")
        project.write_plain(root / "project", root / "files")
        packed = project.build(root / "project").cost
        self.steps = steps(done)
        self.steps["packing"] = {"packing": packed}
        more = [each[MORE] for each in self.steps.values() if MORE in each]
        wall, cpu = sum(each.wall for each in more), sum(each.cpu for each in more)
        self.once.append(done.cost + packed + Cost(-wall, -cpu))
        return done.cost + packed

    @property
    def runs(self) -> dict[str, int]:
        """How often the script runs each model on the target: as the last build did, unless it is slow."""
        if self.is_slow:
            return {}
        validations = {
            m["model"]: m["validation"] for j in self.report["jobs"] for m in j["models"]
        }
        return {
            name: sum(map(_frames_of, validation["samples"])) or 1
            for name, validation in validations.items()
        }

    def _new(self, name: str) -> Path:
        root = self._folder / name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        return root


def _frames_of(sample: str) -> int:
    """How many runs a sample of a report is: a recurrent model is run for several frames."""
    number, _, unit = sample.partition(" ")
    return int(number) if unit == "frames" else 1


def facts(report: Any) -> Table:
    """One row for each model, from the report of the build."""
    table = Table(title="the build", title_justify="left")
    for column in ("model", "prepared with", "nodes", "contexts", "coverage"):
        table.add_column(column)
    for column in ("prepare", "compile", "open", "largest difference"):
        table.add_column(column, justify="right")
    for job in report["jobs"]:
        (model,), times = job["models"], job["times"]
        preparation, coverage = model["preparation"], model["coverage"]
        agreements = model["validation"]["agreements"]
        table.add_row(
            model["model"],
            preparation["simplifier"],
            f"{preparation['nodes_before']} -> {preparation['nodes']}",
            str(coverage["partitions"]),
            f"{coverage['compiled']} of {coverage['nodes']}",
            f"{times['prepare']:.2f} s",
            f"{times['compile']:.2f} s",
            f"{model['load']:.3f} s",
            f"{max(each['max_abs'] for each in agreements):.2g}",
        )
    return table


def profile(costs: dict[str, dict[str, Cost]]) -> Table:
    """What each step of the script costs in CPU time, and all of them in wall time."""
    table = Table("model", title="the script by hand, CPU seconds", title_justify="left")
    for column in (*STEPS, "other", "all", "all, wall"):
        table.add_column(column, justify="right")
    rows = [*costs.items()]
    total: dict[str, Cost] = {}
    for each in costs.values():
        for step, cost in each.items():
            total[step] = total.get(step, Cost(0, 0)) + cost
    for name, each in [*rows, ("all", total)]:
        other = [cost.cpu for step, cost in each.items() if step not in STEPS]
        cells = [each[step].cpu if step in each else 0.0 for step in STEPS]
        cells += [sum(other), sum(cells) + sum(other), sum(cost.wall for cost in each.values())]
        table.add_row(
            name or "imports, library", *(f"{cell:.2f}" for cell in cells), end_section=name != ""
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder that keeps the downloaded packages")
    parser.add_argument(
        "--provider", choices=MODELS, default="qnn", help="the provider to compile for"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--model", action="append", help="only this model; repeatable")
    parser.add_argument("--slow", action="store_true", help="the slow models, on qnn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        models = [
            model
            for model in (SLOW if arguments.slow else MODELS[arguments.provider])
            if not arguments.model or model.name in arguments.model
        ]
        sources = fetch((arguments.models or folder / "models").resolve(), models)
        if arguments.slow:
            for source in sources:
                zoo = Zoo("qnn", [source], folder, is_slow=True)
                costs = alternate({"build": zoo.build, "by hand": zoo.by_hand}, arguments.rounds)
                show(comparison(f"{source.name}, cold, one run by hand; goal: 5.00", costs))
            return
        zoo = Zoo(arguments.provider, sources, folder)
        costs = alternate({"build": zoo.build, "by hand": zoo.by_hand}, arguments.rounds)
    show(facts(zoo.report))
    show(profile(zoo.steps))
    runs, once = sum(zoo.runs.values()), {"build": costs["build"], "by hand, once": zoo.once}
    title = f"{len(sources)} models on {arguments.provider}, cold"
    show(comparison(f"{title}, {runs} runs on the target each; goal: 1.00", costs))
    show(comparison(f"{title}, {runs} runs against {len(sources)}", once))


if __name__ == "__main__":
    main()

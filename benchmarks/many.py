"""Builds projects of many trivial models, and compares that with the same work by hand.

    pip install -e . --group bench
    python -m benchmarks.many                                   # 40 models on each provider that works here
    python -m benchmarks.many --provider cpu --counts 1,10,100,1000

Cold is a build without a cache of earlier builds, against a script that does the same by hand and Hatch
alone, which packs the script's files. Warm is the same build again, with everything in the cache,
against Hatch alone, which packs the same files. With several counts it prints the constant: seconds for
a build, and seconds for each model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table

from benchmarks import project
from benchmarks.measure import Cost, alternate, comparison, least, run, show
from benchmarks.plain import available, by_hand
from benchmarks.project import Source

SHAPE = (1, 3, 16, 16)
"""The input of each model, float32."""

WAYS = (("cold", "by hand"), ("warm", "packing"))
"""The ways that are compared."""

GOALS = {"cpu": "; goal: 2.0", "qnn": "; goal: 1.3"}
"""The goal of a cold build, for 40 models. For warm ones see `benchmarks.warm`, with a larger wheel."""

YARDSTICK = "import numpy, onnx, onnxruntime"
"""What each process of a build would import by itself; its time tells how fast the machine is now."""

SETTLE = 3
"""Seconds before a warm build: files that changed a moment ago are read again."""


def generate(path: Path, seed: int, width: int = 16) -> Source:
    """Write a network of a convolution and two matrix products, with weights of its own.

    The weights are about 8 kB multiplied by ``width``.
    """
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (8, 3, 3, 3), "first": (8 * 16 * 16, width), "second": (width, 10)}
    weights = [
        numpy_helper.from_array(
            rng.standard_normal(shape, np.float32) / np.float32(np.prod(shape[:-1])) ** 0.5, name
        )
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Flatten", ["r"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "first"], ["h"], "gemm"),
        helper.make_node("Relu", ["h"], ["s"], "second_relu"),
        helper.make_node("Gemm", ["s", "second"], ["y"], "second_gemm"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 10))]
    graph = helper.make_graph(nodes, "trivial", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return Source(path.stem, path, {"x": SHAPE})


class Many:
    """Projects of the same models, which are built in both ways; cold ones in new folders."""

    def __init__(self, provider: str, sources: Sequence[Source], folder: Path) -> None:
        self._provider, self._sources, self._folder = provider, sources, folder

    def cold(self) -> Cost:
        """Build the project without a cache of earlier builds."""
        root = self._new("ours")
        targets = {self._provider: project.TARGETS[self._provider]}
        # What both wheels contain is the same: no sources.
        project.write(root / "project", self._sources, targets, fallback="none")
        return project.build(root / "project", root / "cache").cost

    def by_hand(self) -> Cost:
        """Run the script, and pack its files."""
        root = self._new("plain")
        done = by_hand(self._provider, self._sources, root / "files")
        project.write_plain(root / "project", root / "files")
        return done.cost + project.build(root / "project").cost

    def warm(self) -> Cost:
        """Build the project of `cold` again."""
        return project.build(
            self._folder / "ours" / "project", self._folder / "ours" / "cache"
        ).cost

    def settle(self) -> None:
        """Build the project of `cold` twice more, and make the project that `pack` packs."""
        self.warm()
        self.warm()
        files = project.unpack(self._folder / "ours" / "project", self._new("unpacked"))
        project.write_plain(self._new("packed") / "project", files)
        time.sleep(SETTLE)

    def pack(self) -> Cost:
        """Pack the files of the wheel of `cold` with Hatch alone."""
        return project.build(self._folder / "packed" / "project").cost

    def wheel_size(self) -> int:
        """Bytes of the wheel of `cold`."""
        return project.wheel(self._folder / "ours" / "project").stat().st_size

    def _new(self, name: str) -> Path:
        root = self._folder / name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        return root


def measure(provider: str, count: int, rounds: int, folder: Path) -> dict[str, list[Cost]]:
    """The costs of all ways, for ``count`` models on ``provider``."""
    models = folder / "models"
    models.mkdir(parents=True)
    sources = [generate(models / f"m{number}.onnx", number) for number in range(count)]
    many = Many(provider, sources, folder)
    costs = alternate({"cold": many.cold, "by hand": many.by_hand}, rounds)
    many.settle()
    return {**costs, **alternate({"warm": many.warm, "packing": many.pack}, rounds)}


def line(points: Mapping[int, float]) -> tuple[float, float]:
    """Fit ``seconds = fixed + each * count``; the relative error counts the same at each point."""
    counts = np.array(list(points), float)
    seconds = np.array(list(points.values()))
    rows = np.stack([np.ones_like(counts), counts], axis=1) / seconds[:, None]
    (fixed, each), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    return float(fixed), float(each)


def linear(found: Mapping[str, Mapping[int, Mapping[str, list[Cost]]]]) -> Table:
    """The least wall times by count, and the line through them."""
    counts = list(next(iter(found.values())))
    table = Table("provider", "way", title="cost by count, wall: least", title_justify="left")
    for count in counts:
        table.add_column(str(count), justify="right")
    table.add_column("fixed", justify="right")
    table.add_column("for each model", justify="right")
    table.add_column("largest error of the line", justify="right")
    for provider, by_count in found.items():
        for way in next(iter(by_count.values())):
            points = {count: least(costs[way]) for count, costs in by_count.items()}
            fixed, each = line(points)
            errors = [abs(fixed + each * count - s) / s for count, s in points.items()]
            times = (f"{seconds:.2f} s" for seconds in points.values())
            fit = (f"{fixed:.2f} s", f"{1000 * each:.1f} ms", f"{max(errors):.0%}")
            table.add_row(provider, way, *times, *fit)
    return table


def yardstick() -> float:
    """The least seconds of three fresh interpreters for `YARDSTICK`."""
    command = [sys.executable, "-c", YARDSTICK]
    return least([run(command, Path.cwd()).cost for _ in range(3)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--provider", choices=project.TARGETS, action="append", help="only this one; repeatable"
    )
    parser.add_argument("--counts", default="40", help="numbers of models, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.counts.split(",")]
    found: dict[str, dict[int, dict[str, list[Cost]]]] = {}
    for provider in arguments.provider or filter(available, project.TARGETS):
        found[provider] = {}
        for count in counts:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary).resolve()
                costs = measure(provider, count, arguments.rounds, folder)
            found[provider][count] = costs
            for ways in WAYS:
                chosen = {way: costs[way] for way in ways}
                goal = GOALS.get(provider, "") if "cold" in ways else ""
                show(comparison(f"{provider}, {count} models{goal}", chosen))
    if len(counts) > 1:
        show(linear(found))
    print(f"to compare machines: {YARDSTICK} takes {yardstick():.2f} s")


if __name__ == "__main__":
    main()

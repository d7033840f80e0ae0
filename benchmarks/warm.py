"""Builds a project again with everything in the cache, and compares that with Hatch alone.

    pip install -e . --group bench
    python -m benchmarks.warm

The wheel is of about 22 MB. Hatch alone packs the same files, without the hook. Measure it in an environment
with only the group ``bench``, as builds have: for a project with a hook Hatch imports the plugins of all
packages that are installed, and for one without a hook none.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from benchmarks import project
from benchmarks.many import Many, generate
from benchmarks.measure import alternate, comparison, show

WIDTH = 290
"""Ten models of this width are a wheel of about 22 MB on the CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--provider", choices=project.TARGETS, default="cpu")
    parser.add_argument("--models", type=int, default=10, help="of 2.4 MB each")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        (folder / "models").mkdir()
        sources = [
            generate(folder / "models" / f"m{number}.onnx", number, WIDTH)
            for number in range(arguments.models)
        ]
        many = Many(arguments.provider, sources, folder)
        many.cold()
        many.settle()
        costs = alternate({"warm": many.warm, "packing": many.pack}, arguments.rounds)
        size = many.wheel_size() / 10**6
    title = f"{arguments.provider}, warm, a wheel of {size:.1f} MB; goal: 1.10"
    show(comparison(title, costs))
    if others := sorted({plugin.name for plugin in entry_points(group="hatch")} - {"epcontext"}):
        print(f"with the hook Hatch has also imported other plugins: {', '.join(others)}")


if __name__ == "__main__":
    main()

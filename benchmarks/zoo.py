"""Builds open models as a project does, and compares that with a script that does the same by hand.

    pip install -e . --group bench
    python -m benchmarks.zoo
    python -m benchmarks.zoo --provider openvino    # on an Intel processor, with onnxruntime-ep-openvino

Prints a table of all models and both total times, measured in the same run, without a cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS, fetch
from benchmarks.plain import plain
from hatch_epcontext.build.artifact import Result
from hatch_epcontext.build.cache import Cache
from hatch_epcontext.build.plan import plan
from hatch_epcontext.build.run import build
from hatch_epcontext.config.load import load

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "qnn": {"provider": "qnn", "provider-options": {"soc_model": 60, "htp_arch": 73}},
    # The script fixes the shapes too.
    "openvino": {"provider": "openvino", "static-shapes": True},
}


def ours(paths: dict[str, Path], root: Path, staging: Path, provider: str = "qnn") -> Result:
    """Build all models for ``provider`` from the configuration of a project in ``root``."""
    tables = [
        {
            "name": model.name,
            "path": paths[model.name].relative_to(root).as_posix(),
            "shapes": model.shapes,
            "constants": model.constants,
        }
        for model in MODELS
    ]
    table = {**TARGETS[provider], "models": tables}
    cache = Cache(None, print)
    return build(plan(load(root, table, {}, {})), staging, cache, print)


def table_of(result: Result) -> Table:
    """One row for each model."""
    table = Table()
    for column in ("model", "prepared with", "nodes", "contexts", "coverage", "compile"):
        table.add_column(column)
    for column in ("open", "largest difference"):
        table.add_column(column)
    for built in result.built:
        record = built.artifact.record
        (context,), (preparation,), times = record.contexts, record.preparations, record.times
        assert context.coverage is not None
        validation = built.validations[context.model]
        largest = max(agreement.max_abs for agreement in validation.agreements)
        table.add_row(
            context.model,
            preparation.simplifier,
            f"{preparation.nodes_before} -> {preparation.nodes}",
            str(context.coverage.partitions),
            f"{context.coverage.share:.0%}",
            f"{times.compile:.2f} s",
            f"{built.loads[context.model]:.3f} s",
            f"{largest:.2g}"
            + (f", cosine {validation.cosine:.5f}" if validation.cosine is not None else ""),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="a folder that keeps the downloaded packages")
    parser.add_argument(
        "--provider", choices=TARGETS, default="qnn", help="the provider to compile for"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        root = (arguments.models or folder / "models").resolve()
        root.mkdir(parents=True, exist_ok=True)
        paths = fetch(root)
        staging, by_hand = folder / "staging", folder / "plain"
        staging.mkdir()
        by_hand.mkdir()
        start = time.monotonic()
        result = ours(paths, root, staging, arguments.provider)
        middle = time.monotonic()
        # In a separate process, because an EP's library stays registered until its process ends.
        process = multiprocessing.get_context("spawn").Process(
            target=plain, args=(paths, by_hand, arguments.provider)
        )
        process.start()
        process.join()
        end = time.monotonic()
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    console.print(table_of(result))
    if process.exitcode != 0:
        raise SystemExit(f"the plain script failed: exit code {process.exitcode}")
    print(f"all models: {middle - start:.1f} s, {end - middle:.1f} s with the plain script")
    print(f"ratio: {(middle - start) / (end - middle):.2f}")


if __name__ == "__main__":
    main()

"""Draws a bar chart of a `Bench`; needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from hatch_epcontext.text import printable
from hatch_epcontext.tools.measuring import WAYS, Bench

_COLOURS = {"cpu": "#d9a441", "source": "#9aa5b1", "compiled": "#2f6fb3", "cached": "#1b7440"}

_THICKNESS = 0.36
"""The height of a bar in inches."""


def draw(bench: Bench, path: Path) -> None:
    """Write the chart to ``path``, in the format of its suffix: PNG or SVG.

    It has a group of bars for each model: medians, with the range of all runs.
    """
    opened = [opening for opening in bench.openings if opening.load]
    models = list(dict.fromkeys(opening.model for opening in opened))
    ways = [way for way in WAYS if any(opening.way == way for opening in opened)]
    width = 0.8 / max(len(ways), 1)
    height = 1.6 + max(len(models), 1) * (len(ways) * _THICKNESS + 0.3)
    figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, way in enumerate(ways):
        openings = [opening for opening in opened if opening.way == way]
        medians = [statistics.median(opening.load) for opening in openings]
        below = [median - min(o.load) for median, o in zip(medians, openings, strict=True)]
        above = [max(o.load) - median for median, o in zip(medians, openings, strict=True)]
        bars = axes.barh(
            [models.index(o.model) - 0.4 + width * (number + 0.5) for o in openings],
            medians,
            width * 0.9,
            xerr=[below, above],
            label=WAYS[way],
            color=_COLOURS[way],
            error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 2},
        )
        axes.bar_label(bars, [f"{median:.3f} s" for median in medians], padding=6, fontsize=8)
    axes.set_yticks(range(len(models)), map(_label, models))
    place = "memory" if bench.from_memory else "disk"
    axes.set_xlabel(f"seconds until the session is open, from {place}")
    axes.spines[["top", "right"]].set_visible(False)
    # Space for the numbers beside the bars.
    axes.margins(x=0.18)
    if models:
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    versions = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    title = f"{bench.provider}: {versions}; median of {bench.runs} runs"
    figure.suptitle(_label(title), fontsize=10)
    # Marks the chart, so that the next one may replace it; in SVG by the title.
    key = "Software" if path.suffix == ".png" else "Title"
    figure.savefig(path, metadata={key: bench.generator})


def _label(text: str) -> str:
    # matplotlib reads text between two dollar signs as a formula.
    return printable(text).replace("$", r"\$")

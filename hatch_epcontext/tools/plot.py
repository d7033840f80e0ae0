"""Draws a bar chart of a `Bench`; needs matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from hatch_epcontext.text import printable
from hatch_epcontext.tools.measuring import Bench, Measured

_SERIES = {
    ("cpu", None): ("source model on the CPU", "#d9a441"),
    ("source", None): ("source model on the EP", "#9aa5b1"),
    ("artifact", None): ("optimized graph", "#2f6fb3"),
    ("artifact", False): ("context, blob beside", "#2f6fb3"),
    ("artifact", True): ("context, blob inside", "#7fb0df"),
    ("cache", None): ("optimized graph + runtime cache", "#1b7440"),
    ("cache", False): ("context + runtime cache, blob beside", "#1b7440"),
    ("cache", True): ("context + runtime cache, blob inside", "#7fc79b"),
}
"""The name and the colour of each kind of case, from the top of a group to its bottom."""

_THICKNESS = 0.36
"""The height of a bar in inches."""


def draw(bench: Bench, path: Path) -> None:
    """Write the chart to ``path``, in the format of its suffix: PNG, SVG or PDF.

    There is a panel for loading from disk and one for loading from memory, and in each a group of bars
    for each model: medians, with the range of all runs.
    """
    shown = [each for each in bench.measured if each.load is not None]
    models = list(dict.fromkeys(each.case.model for each in shown))
    kinds = [
        kind for kind in _SERIES if any((e.case.opened, e.case.embedded) == kind for e in shown)
    ]
    height = 1.6 + max(len(models), 1) * (len(kinds) * _THICKNESS + 0.3)
    figure = Figure(figsize=(12, height), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, buffer in zip(panels, (False, True), strict=True):
        for kind in kinds:
            rows = {
                models.index(e.case.model): e
                for e in shown
                if (e.case.opened, e.case.embedded) == kind and e.case.buffer == buffer
            }
            if rows:
                _bars(axes, rows, kinds.index(kind), len(kinds), *_SERIES[kind])
        axes.set_title("from memory" if buffer else "from disk", loc="left")
        axes.set_yticks(range(len(models)), map(_label, models))
        axes.set_xlabel("seconds until the session is open")
        axes.spines[["top", "right"]].set_visible(False)
    if models:
        panels[0].invert_yaxis()
    # Space for the numbers beside the bars.
    panels[0].margins(x=0.18)
    # A case that failed from disk can have a bar only in the panel for memory.
    named = {
        name: handle
        for axes in panels
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False
        )
    versions = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    title = f"{bench.provider}: {versions}; median of {bench.runs} runs"
    figure.suptitle(_label(title), fontsize=10)
    # Marks the chart, so that the next one may replace it; in SVG by the title.
    key = "Software" if path.suffix == ".png" else "Title"
    figure.savefig(path, metadata={key: bench.generator})


def _label(text: str) -> str:
    # matplotlib reads text between two dollar signs as a formula.
    return printable(text).replace("$", r"\$")


def _bars(
    axes: object, rows: dict[int, Measured], place: int, count: int, name: str, colour: str
) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    width = 0.8 / count
    medians, below, above = [], [], []
    for each in rows.values():
        assert each.load is not None
        median = each.load.median
        medians.append(median)
        below.append(median - min(each.load.values))
        above.append(max(each.load.values) - median)
    bars = axes.barh(
        [row - 0.4 + width * (place + 0.5) for row in rows],
        medians,
        width * 0.9,
        xerr=[below, above],
        label=name,
        color=colour,
        error_kw={"ecolor": "#444444", "elinewidth": 1, "capsize": 2},
    )
    axes.bar_label(bars, [f"{median:.3f} s" for median in medians], padding=6, fontsize=8)

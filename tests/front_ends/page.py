"""The table in ``docs/builds.md``: a row for each way to build, a column for each front end."""

from __future__ import annotations

from collections.abc import Mapping

from tests.conftest import REPOSITORY
from tests.front_ends.front_ends import FRONT_ENDS

PAGE = REPOSITORY / "docs" / "builds.md"

ROWS = {
    "wheel": "a wheel",
    "sdist": "an sdist, and a wheel from it",
    "install": "install",
    "editable": "editable install",
    "no isolation": "without isolation",
    "second": "a second build",
    "beside": "beside hatch-vcs, hatch-fancy-pypi-readme and a custom hook",
    "lines": "what the hook prints, such as the line of each model",
    "failing": "the message of a failing build",
    "failing install": "the message of a failing editable install",
    "quiet": "the message of a failing build, with `-q`",
}
"""The rows of the table, by the name of the observation."""

_BEGIN, _END = "<!-- begin: front-ends -->\n", "\n<!-- end: front-ends -->"

Cells = dict[str, dict[str, str]]
"""What was seen, by front end and row."""


def read() -> Cells:
    """The cells of the table in the page."""
    text = PAGE.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]
    table = [line.strip("|").split("|") for line in text.splitlines()]
    heading, _, *rows = [[cell.strip() for cell in line] for line in table]
    names = [each.partition(" ")[0] for each in heading[1:]]
    by_label = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    return {
        name: {key: by_label[label][name] for key, label in ROWS.items() if label in by_label}
        for name in names
    }


def write(cells: Mapping[str, Mapping[str, str]]) -> None:
    """Put the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    PAGE.write_text(f"{before}{_BEGIN}{_table(cells)}{_END}{after}", encoding="utf-8")


def _table(cells: Mapping[str, Mapping[str, str]]) -> str:
    heading = ["", *(each.heading for each in FRONT_ENDS)]
    rows = [
        [label, *(cells.get(each.name, {}).get(key, "not tested") for each in FRONT_ENDS)]
        for key, label in ROWS.items()
    ]
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)

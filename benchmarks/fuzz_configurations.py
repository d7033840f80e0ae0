"""Random configurations with known faults: whether each is reported, with its key and its line, all at once.

``python -m benchmarks.fuzz_configurations --count 6000 --seed 1``. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hatch_epcontext.config import tables
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import FILE, PyprojectNames, tool_table
from hatch_epcontext.errors import ConfigError, Key, Problem
from hatch_epcontext.text import toml_key

PROVIDERS = ("qnn", "openvino", "cpu", "cuda", "tensorrt")

_OF_TARGETS = (
    ("min-coverage", "2"),
    ("unroll-limit", "-1"),
    ("platforms", '["Windows 11"]'),
    ("requirements", '["not a requirement!"]'),
    ("resources", "{ NPU = 0 }"),
    ("provider-options.nope", "1"),
    ("load-options.nope", "1"),
    ("session-options.nope", "1"),
    ("ep-name", '"X"'),
    ("quantize.inputs", '"nowhere"'),
    ("chip", "[]"),
)

FAULTS = {
    tables.RootTable: (("output", '"a-b"'), ("editable", '"x"'), ("fallback", '"x"')),
    tables.BuildTable: (
        ("jobs", "0"),
        ("timeout", "0"),
        ("memory-limit", '"much"'),
        ("shared-cache", '"ftp://host"'),
        ("shared-cache-keys", '["x"]'),
    ),
    tables.WheelTable: (("tag", '"x"'),),
    tables.TargetTable: _OF_TARGETS,
    tables.ModelTable: (
        ("name", '"a/b"'),
        ("license", '"No License"'),
        ("sha256", '"12"'),
        ("dims.n", "0"),
        ("shapes.x", "[-1]"),
        ("cut", "{}"),
        ("validate.inputs", '"nowhere.npz"'),
        ("validate.tolerance.cosine", "2"),
    ),
}
"""For each table keys with TOML values that are wrong wherever they are."""

_NESTED = ("models", "targets", "build", "wheel")
"""Keys whose type is not changed: nothing inside of them would be checked."""

_NOT_TOGETHER = ("path", "url", "provider", "library")
"""Keys on whose values other checks of a table depend."""


@dataclass
class Configuration:
    """The lines of a ``pyproject.toml``, and its faults: their lines, by key."""

    lines: list[str] = field(default_factory=lambda: ["[project]", 'name = "a"', 'version = "1"'])
    faults: dict[Key, int] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Append ``line``."""
        self.lines.append(line)

    def add_faults(self, rng: random.Random, table: type, key: Key, prefix: str = "") -> None:
        """Append up to two faults of the table at ``key``, whose keys have a ``prefix``."""
        wrong_types = (
            (toml_key(name.name), "1979-05-27")
            for name in dataclasses.fields(table)
            if toml_key(name.name) not in (*_NESTED, *_NOT_TOGETHER)
        )
        possible = [*FAULTS[table], *wrong_types, ("no-such-key", "1"), ("no-such-table.a", "1")]
        first_keys = set[str]()
        for name, value in rng.sample(possible, rng.choice((0, 0, 1, 2))):
            first, *inside = name.split(".")
            if first in first_keys:
                continue
            first_keys.add(first)
            self.add(f"{prefix}{name} = {value}")
            self.faults[Key((*key.parts, first, *inside))] = len(self.lines)


def configuration(rng: random.Random) -> Configuration:
    """A configuration with targets, models that change them in all forms, and some faults."""
    made, root = Configuration(), Key()
    targets = [f"t{number}" for number in range(rng.randint(1, 3))]
    made.add("[tool.epcontext]")
    made.add_faults(rng, tables.RootTable, root)
    for name, table in (("build", tables.BuildTable), ("wheel", tables.WheelTable)):
        if rng.random() < 0.4:
            made.add(f"[tool.epcontext.{name}]")
            made.add_faults(rng, table, root / name)
    for name in targets:
        made.add(f"[tool.epcontext.targets.{name}]")
        made.add(f'provider = "{rng.choice(PROVIDERS)}"')
        made.add_faults(rng, tables.TargetTable, root / "targets" / name)
    for index in range(rng.randint(1, 4)):
        _add_model(made, rng, index, targets)
    return made


def _add_model(made: Configuration, rng: random.Random, index: int, targets: list[str]) -> None:
    key = Key() / "models" / index
    made.add("[[tool.epcontext.models]]")
    # Without names of their own they would be duplicates.
    made.add(f'path = "models/m{index}.onnx"')
    made.add_faults(rng, tables.ModelTable, key)
    chosen = rng.sample(targets, rng.randint(1, len(targets)))
    match rng.choice(("all", "list", "unknown", "table", "tables")):
        case "list":
            made.add(f"targets = {chosen}".replace("'", '"'))
        case "unknown":
            made.add('targets = ["nowhere"]')
            made.faults[key / "targets"] = len(made.lines)
        case "table":
            for name in chosen:
                place, before = key / "targets" / name, len(made.lines)
                made.add_faults(rng, tables.TargetTable, place, f"targets.{name}.")
                if len(made.lines) == before and name != targets[0]:
                    made.add(f"targets.{name} = false")
        case "tables":
            for name in chosen:
                made.add(f"[tool.epcontext.models.targets.{name}]")
                made.add_faults(rng, tables.TargetTable, key / "targets" / name)


def defects(made: Configuration, root: Path) -> Iterator[str]:
    """What is wrong with the problems that are reported for ``made`` in the project ``root``."""
    text = "\n".join(made.lines)
    (root / FILE).write_text(text, encoding="utf-8")
    problems: tuple[Problem, ...] = ()
    try:
        load(root, tool_table(root), {}, {})
    except ConfigError as error:
        problems = error.problems
    except Exception:
        yield f"traceback: {traceback.format_exc().splitlines()[-1]}"
        return
    names = PyprojectNames(root)
    for problem in problems:
        if problem.key is None or f"{FILE}:" not in problem.text(names):
            yield f"without key or line: {problem.text(names)}"
    for fault, line in made.faults.items():
        about = [
            problem
            for problem in problems
            if problem.key and (problem.key.contains(fault) or fault.contains(problem.key))
        ]
        if not about:
            yield f"not reported: {fault}, {made.lines[line - 1]}"
        elif not any(f"{FILE}:{line}:" in problem.text(names) for problem in about):
            yield f"not at line {line}: {about[0].text(names)}"


def fuzz(count: int, seed: int, report: Callable[[str], None]) -> int:
    """Check ``count`` configurations; ``report`` gets a line for each defect. The number of all faults."""
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        for index in range(4):
            (Path(folder) / "models" / f"m{index}.onnx").touch()
        for number in range(count):
            made = configuration(random.Random(f"{seed} {number}"))  # noqa: S311, no secret
            faults += len(made.faults)
            for defect in defects(made, Path(folder)):
                report(f"{number}: {defect}")
    return faults


def main() -> int:
    """Print the defects and the counts; the exit code is 1 when there are defects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6_000, help="how many configurations")
    parser.add_argument("--seed", type=int, default=1, help="chooses the configurations")
    given = parser.parse_args()
    lines: list[str] = []
    start = time.perf_counter()
    faults = fuzz(given.count, given.seed, lines.append)
    print("\n".join(lines[:50]))
    seconds = time.perf_counter() - start
    print(
        f"{given.count} configurations with {faults} faults in {seconds:.0f} s: {len(lines)} defects"
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

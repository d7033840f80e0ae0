from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.measure import Cost, alternate, comparison, least, run


def test_the_cpu_time_of_grandchildren_counts(tmp_path: Path) -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    cost = run([sys.executable, "-c", nested], tmp_path).cost
    if sys.platform != "win32":
        assert cost.cpu >= 0.3
    assert cost.wall > 0


def test_the_environment_and_the_output_of_a_command(tmp_path: Path) -> None:
    code = "import os; print(os.environ['EXTRA'], os.path.samefile('.', os.environ['FOLDER']))"
    done = run([sys.executable, "-c", code], tmp_path, {"EXTRA": "x", "FOLDER": str(tmp_path)})
    assert done.stdout.split() == ["x", "True"]


def test_a_failed_command_ends_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path)
    assert "why" in capsys.readouterr().err


def test_each_way_is_the_first_as_often_as_the_others() -> None:
    order: list[str] = []

    def way(name: str) -> Cost:
        order.append(name)
        return Cost(len(order), 0)

    costs = alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert [cost.wall for cost in costs["a"]] == [1, 4]
    assert least(costs["b"]) == 2


def test_a_comparison_has_the_ratios_of_the_least_and_of_the_medians() -> None:
    output = StringIO()
    ours, theirs = [Cost(3, 8), Cost(5, 8)], [Cost(2, 4), Cost(2, 4)]
    table = comparison("title", {"ours": ours, "theirs": theirs})
    Console(file=output, width=120).print(table)
    (ratios,) = [line for line in output.getvalue().splitlines() if "ours / theirs" in line]
    assert [cell.strip() for cell in ratios.split("│")[3:-1]] == ["1.50", "2.00", "2.00", "2.00"]

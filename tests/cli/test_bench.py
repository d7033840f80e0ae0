from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.cli.bench import _faster
from hatch_epcontext.tools.measuring import Bench, Case, Measured, Series, bench
from tests.cli.conftest import Cli
from tests.conftest import needs_qnn
from tests.models import network, save, unknown_operator


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(network(), tmp_path / "models" / "net.onnx")


def test_a_table_a_chart_and_all_measurements(cli: Cli, source: Path, tmp_path: Path) -> None:
    file, chart = tmp_path / "b.json", tmp_path / "b.png"
    before = set(source.parent.iterdir())
    result = cli(
        "bench", source, "-p", "cpu", "-n", "2", "--markdown", "--json", file, "--plot", chart
    )
    rows = [line for line in result.stdout.splitlines() if line.startswith("| net ")]
    assert [row.split("|")[2].strip() for row in rows] == ["disk", "memory"]
    assert all(" x " in row and " -> " in row for row in rows)
    assert "optimized load" in result.stdout
    assert {len(line.split("|")) for line in result.stdout.splitlines() if "|" in line} == {13}
    assert result.stderr.count("net: ") == 6
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [len(each["load"]["values"]) for each in found["measured"]] == [2] * 6
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert set(source.parent.iterdir()) == before


@pytest.mark.parametrize(("before", "after", "shown"), [(3, 1, "3.0 x"), (1, 20, "20.0 x slower")])
def test_a_slower_artifact_is_called_slower(before: float, after: float, shown: str) -> None:
    case = Case("net", "artifact", None, buffer=False)
    first, second = (Measured(case, Series((seconds,))) for seconds in (before, after))
    assert _faster(first, second) == shown


def test_charts_and_measurements_replace_only_what_epcontext_wrote(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Bench] = []

    def measure_once(*arguments: Any) -> Bench:
        if not measured:
            measured.append(bench(*arguments))
        return measured[0]

    monkeypatch.setattr("hatch_epcontext.cli.bench.bench", measure_once)
    arguments = ("bench", source, "-p", "cpu", "-n", "1", "-q")
    for suffix in (".png", ".svg"):
        chart, file = tmp_path / f"b{suffix}", tmp_path / "b.json"
        for _ in range(2):
            cli(*arguments, "--plot", chart, "--json", file)
        mine = tmp_path / f"mine{suffix}"
        mine.write_bytes(source.read_bytes())
        for place in (
            ("--plot", mine),
            ("--json", mine),
            ("--json", source),
        ):
            assert "EPC501" in cli(*arguments, *place, code=1).stderr
        assert mine.read_bytes() == source.read_bytes()


def test_without_models_those_of_the_project_are_measured(
    cli: Cli, app_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(app_project)
    rows = cli("bench", "-t", "one", "-n", "1", "-q", "--markdown").stdout.splitlines()
    assert [row.split()[1] for row in rows[2:6]] == ["a", "a", "b", "b"]
    assert "--target one or two" in cli("bench", code=2).stderr
    model = app_project / "models" / "a.onnx"
    for wrong in (("-p", "cpu"), ("--no-embed",), (model,), (model, "-p", "cpu", "-t", "one")):
        cli("bench", *wrong, code=2)


def test_a_failed_model_is_reported_and_the_others_are_measured(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    other = save(unknown_operator(), tmp_path / "other.onnx")
    result = cli("bench", source, other, "-p", "cpu", "-n", "1", "-q", code=1)
    assert " net " in result.stdout
    assert "not every model could be measured" in result.stderr
    assert "cannot be run on the CPU" in result.stderr


@needs_qnn
def test_without_measurements_there_is_no_table_and_each_problem_once(
    cli: Cli, tmp_path: Path
) -> None:
    source = save(unknown_operator(), tmp_path / "other.onnx")
    result = cli("bench", source, "-p", "qnn", "-n", "1", "-q", code=1)
    assert result.stdout == ""
    assert result.stderr.count("cannot be run on the CPU") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runs", "0"), "0 is not in the range"),
        (("--plot", "chart.txt"), "--plot writes .png or .svg"),
        (("--json", "nowhere/b.json"), "There is no folder"),
        (("-O", "nothing=1"), "--option nothing"),
    ],
)
def test_wrong_usage(cli: Cli, source: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("bench", source, "-p", "cpu", *arguments, code=2).stderr


@needs_qnn
def test_a_context_for_several_chips_is_not_measured_and_the_reason_is_printed(
    cli: Cli, tmp_path: Path
) -> None:
    source = save(network(1), tmp_path / "net.onnx")
    printed = cli("bench", source, "-p", "qnn", "-O", "soc_model=60,57", "--runs", "1", code=1)
    assert "net -> qnn: EPC404" in printed.stderr
    assert "cannot open contexts for several chips on this machine" in printed.stderr

"""Real models are opened in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.cli.bench import measure
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.requests import TimeOpeningRequest
from tests.cli.conftest import Cli
from tests.conftest import needs_qnn
from tests.models import network, parsed, save, unknown_operator


def test_a_table_and_a_chart(cli: Cli, source: Path, tmp_path: Path) -> None:
    chart = tmp_path / "b.png"
    before = set(source.parent.iterdir())
    result = cli("bench", source, "-p", "cpu", "--starts", "2", "-n", "7", "--plot", chart)
    rows = [line for line in result.stdout.splitlines() if line.startswith("net ")]
    assert [row.count(" s (") for row in rows] == [2, 2, 2, 2]
    assert [row.count(" ms") for row in rows] == [3, 3, 3, 3]
    ways = ["source on the CPU", "source on the EP", "compiled", "compiled, from a buffer"]
    assert [way for row, way in zip(rows, ways, strict=True) if f"  {way}  " in row] == ways
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert set(source.parent.iterdir()) == before


def test_json_has_each_time_and_the_percentiles_of_the_runs_after_the_warm_up(
    cli: Cli, source: Path
) -> None:
    flags = ("-p", "cpu", "--starts", "2", "-n", "39", "--json")
    printed = json.loads(cli("bench", source, *flags).stdout)
    assert "onnxruntime" in printed["versions"]
    openings = printed["openings"]
    assert [opening["way"] for opening in openings] == ["cpu", "source", "compiled", "buffer"]
    for opening in openings:
        assert [len(opening[key]) for key in ("load", "first", "later")] == [2, 2, 40]
        later, latency = sorted(opening["later"]), opening["latency"]
        assert (latency["p95"], latency["p99"]) == (later[37], later[39])
        assert later[19] <= latency["median"] <= later[20]


@needs_qnn
def test_runs_on_a_simulator_are_not_measured(cli: Cli, tmp_path: Path) -> None:
    source = save(network(1), tmp_path / "net.onnx")
    printed = cli(
        "bench", source, "-p", "qnn", "--starts", "1", "--plot", tmp_path / "c.svg"
    ).stdout
    cpu, *others = [line for line in printed.splitlines() if line.startswith("net ")]
    assert (cpu.count(" ms"), cpu.count("simulator")) == (3, 0)
    # The time to compile, and to open.
    assert [row.partition("simulator")[2].count(" s") for row in others] == [1, 2, 2]
    assert "not those of a device" in printed


@needs_qnn
def test_a_runtime_cache_is_filled_before_it_is_measured(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(network(1), project / "models" / "a.onnx")
    toml = """
    models = ["models/a.onnx"]
    targets.x.provider = "qnn"
    targets.x.chip = "snapdragon-x-elite"
    """
    # QNN has no runtime cache; this option stands for one, and does nothing here.
    stand_in = PROVIDERS["qnn"].changed(runtime_cache="json_qnn_graph_dir")
    monkeypatch.setitem(PROVIDERS, "qnn", stand_in)
    sent: list[str | None] = []
    call = Workers.call

    def record(workers: Workers, request: Any, folder: Path, **where: Any) -> Any:
        if isinstance(request, TimeOpeningRequest) and request.target is not None:
            sent.append(request.target.load_options.get("json_qnn_graph_dir"))
        return call(workers, request, folder, **where)

    monkeypatch.setattr(Workers, "call", record)
    staging = tmp_path / "bench"
    staging.mkdir()
    with Workers(120) as workers:
        planned = plan(load(project, parse(toml), {}))
        openings, versions = measure(planned, staging, workers, 1, 1)
    assert sent == [None, None, None, str(staging / "cache-0")] * 2
    assert [opening.way for opening in openings] == [
        "cpu",
        "source",
        "compiled",
        "buffer",
        "cached",
    ]
    for opening in openings:
        assert (len(opening.load), min(opening.load) > 0) == (1, True)
    assert [opening.compile > 0 for opening in openings] == [False, False, True, True, True]
    assert "onnxruntime" in versions


def test_the_source_on_the_cpu_gets_the_inputs_that_are_frozen(cli: Cli, tmp_path: Path) -> None:
    text = "(float[2] x, float[1] factor) => (float[2] y) { y = Mul (x, factor) }"
    source = save(parsed(text), tmp_path / "a.onnx")
    cli("bench", source, "-p", "cpu", "--set", "constants.factor=2.0", "--starts", "1", "-n", "1")


def test_without_models_those_of_the_project_are_measured(
    cli: Cli, app_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(app_project)
    printed = cli("bench", "--target", "one", "--starts", "1", "-n", "1").stdout
    rows = [line.split()[0] for line in printed.splitlines() if " compiled  " in line]
    assert rows == ["a", "b"]
    assert "--target one or two" in cli("bench", code=2).stderr
    model = app_project / "models" / "a.onnx"
    for wrong in (("-p", "cpu"), (model,), (model, "-p", "cpu", "--target", "one")):
        cli("bench", *wrong, code=2)


def test_a_model_that_cannot_be_compiled_ends_it_with_its_problem_once(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    other = save(unknown_operator(), tmp_path / "other.onnx")
    result = cli("bench", source, other, "-p", "cpu", "--starts", "1", "-n", "1", code=1)
    assert result.stdout == ""
    assert "nothing was measured" in result.stderr
    assert result.stderr.count("cannot be run on the CPU") == 1


@needs_qnn
def test_an_artifact_that_cannot_be_opened_is_an_error_beside_the_other_times(
    cli: Cli, tmp_path: Path
) -> None:
    source = save(network(1), tmp_path / "net.onnx")
    broken = tmp_path / "libQnnHtp.so"
    broken.touch()
    options = f"load-options={{ backend_path = '{broken.as_posix()}' }}"
    settings = ("--set", options, "--set", "validate=false", "--set", "allow-unknown-options=true")
    chart = ("--plot", tmp_path / "c.svg")
    result = cli(
        "bench", source, "-p", "qnn", "--starts", "1", "-n", "1", *settings, *chart, code=1
    )
    assert "<svg" in chart[1].read_text(encoding="utf-8")
    rows = [line for line in result.stdout.splitlines() if line.startswith("net ")]
    assert [row.count("failed") for row in rows] == [0, 0, 1, 1]
    assert "net: compiled: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runs", "0"), "0 is not in the range"),
        (("--plot", "chart.txt"), "--plot writes .png or .svg"),
        (("-O", "nothing=1"), "--set provider-options.nothing"),
    ],
)
def test_wrong_usage(cli: Cli, source: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("bench", source, "-p", "cpu", *arguments, code=2).stderr


@needs_qnn
def test_a_context_for_several_chips_is_not_measured_and_the_reason_is_printed(
    cli: Cli, tmp_path: Path
) -> None:
    source = save(network(1), tmp_path / "net.onnx")
    printed = cli(
        "bench",
        source,
        "-p",
        "qnn",
        "--set",
        'chip=["snapdragon-x-elite", "snapdragon-8-gen-3"]',
        "--starts",
        "1",
        code=1,
    )
    assert "net -> qnn: EPC404" in printed.stderr
    assert "cannot open contexts for several chips on this machine" in printed.stderr

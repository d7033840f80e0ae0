"""Real models are opened in real processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.tools.measuring import Bench, Case, Opened, bench
from hatch_epcontext.worker.requests import WorkerRequest
from tests.conftest import needs_qnn
from tests.models import interrupted, model, network, save, unknown_operator, value

pytestmark = pytest.mark.slow

QNN = """
provider = "qnn"
provider-options = { soc_model = 60, htp_arch = 73 }
embed = EMBED
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
"""
CPU = 'provider = "cpu"\nmodels = ["models/a.onnx", "models/b.onnx"]\n'


def planned(project: Path, toml: str) -> Plan:
    return plan(load(project, parse(toml), {}))


def run(plans: Mapping[bool | None, Plan], folder: Path, runs: int) -> tuple[Bench, list[str]]:
    """What was measured, and the lines about it: with forks, which start quickly."""
    lines: list[str] = []
    with Workers(120) as workers:
        return bench(plans, folder, runs, workers, lines.append), lines


@needs_qnn
def test_each_case_is_measured_in_each_run(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    plans: dict[bool | None, Plan] = {
        embed: planned(project, QNN.replace("EMBED", str(embed).lower())) for embed in (False, True)
    }
    found, lines = run(plans, tmp_path / "bench", 2)
    kinds: list[tuple[Opened, bool | None]] = [
        ("cpu", None),
        ("source", None),
        ("artifact", False),
        ("artifact", True),
    ]
    assert {each.case for each in found.measured} == {
        Case("a", opened, embedded, buffer)
        for buffer in (False, True)
        for opened, embedded in kinds
    }
    assert len(lines) == 2 + 8
    for each in found.measured:
        assert each.load is not None
        assert each.first is not None
        assert each.memory is not None
        assert len(each.load.values) == len(each.first.values) == 2
        assert min(each.load.values) <= each.load.median <= max(each.load.values)
        # In bytes: more than Python with ONNX Runtime needs, and less than a machine has.
        assert 2**24 < each.memory.median < 2**34
    assert [(each.embedded, each.size > 0, each.seconds > 0) for each in found.compiled] == [
        (False, True, True),
        (True, True, True),
    ]
    assert {"onnxruntime", "onnxruntime-qnn"} <= found.versions.keys()


@needs_qnn
def test_a_runtime_cache_is_filled_before_it_is_measured(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(network(), project / "models" / "a.onnx")
    made = planned(project, QNN.replace("EMBED", "false"))
    (job,) = made.jobs
    # QNN has no runtime cache; this option stands for one, and does nothing here.
    stands_for_it = dataclasses.replace(PROVIDERS["qnn"], runtime_cache="json_qnn_graph_dir")
    monkeypatch.setitem(PROVIDERS, "qnn", stands_for_it)
    sent: dict[Path, str] = {}
    call = Workers.call

    def record(workers: Workers, request: WorkerRequest[Any], folder: Path, **where: Any) -> Any:
        sent[folder] = to_json(request)
        return call(workers, request, folder, **where)

    monkeypatch.setattr(Workers, "call", record)
    found, _ = run({False: dataclasses.replace(made, jobs=(job,))}, tmp_path / "bench", 1)
    cached = [each for each in found.measured if each.case.opened == "cache"]
    assert [len(each.load.values) for each in cached if each.load] == [1, 1]
    runs = tmp_path / "bench" / "runs"
    numbers = [found.measured.index(each) for each in cached]
    for number in numbers:
        first, second = (sent[runs / f"{number}-{run}"] for run in (-1, 0))
        assert first == second
        assert json.dumps(str(runs / f"cache-{number}")) in first
    assert len(list(runs.glob("*--1"))) == 2, "no other case has a run before the first"


def test_the_source_on_the_cpu_gets_the_inputs_that_are_frozen(
    project: Path, tmp_path: Path
) -> None:
    made = model(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        [value("x", [2]), value("factor", [1])],
        [value("y", [2])],
    )
    save(made, project / "models" / "a.onnx")
    toml = 'provider = "cpu"\n[[models]]\npath = "models/a.onnx"\nconstants = { factor = 2.0 }\n'
    found, _ = run({None: planned(project, toml)}, tmp_path / "bench", 1)
    assert [each.case.opened for each in found.measured if each.first] == [
        *("cpu", "source", "artifact"),
        *("cpu", "source", "artifact"),
    ]


def test_other_models_are_measured_when_one_cannot_be_compiled(
    project: Path, tmp_path: Path
) -> None:
    save(network(), project / "models" / "a.onnx")
    save(unknown_operator(), project / "models" / "b.onnx")
    found, _ = run({None: planned(project, CPU)}, tmp_path / "bench", 1)
    assert {each.case.model for each in found.measured if each.load} == {"a"}
    assert "cannot be run on the CPU" in found.failures[0].message
    assert {each.case.embedded for each in found.measured} == {None}


@needs_qnn
def test_a_failed_case_has_an_error_and_the_others_are_measured(
    project: Path, tmp_path: Path
) -> None:
    save(interrupted(), project / "models" / "a.onnx")
    toml = QNN.replace("EMBED", "false").replace(", dims = { batch = 1 }", "")
    made = planned(project, toml + "min-coverage = 0.1\n")
    (job,) = made.jobs
    # A missing backend, which only the artifact is opened with.
    target = dataclasses.replace(
        job.target, load_options={"backend_path": "/nowhere/libNothing.so"}
    )
    model = dataclasses.replace(job.models[0], validate=ValidateTable(mode=False))
    job = dataclasses.replace(job, target=target, models=(model,))
    found, lines = run({False: dataclasses.replace(made, jobs=(job,))}, tmp_path / "bench", 1)
    by_opened = {each.case.opened: each for each in found.measured}
    assert by_opened["source"].load is not None
    assert by_opened["artifact"].load is None
    assert by_opened["artifact"].error
    assert "a: artifact from disk, blob beside: FAILED" in lines

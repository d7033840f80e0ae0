"""Real models, opened in real processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hatch_epcontext.build.plan import Plan, plan
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.tools.bench import Bench, Case, bench
from tests.conftest import needs_qnn
from tests.models import interrupted, network, save, unknown_operator

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
    told: list[str] = []
    return bench(plans, folder, runs, Workers(120), told.append), told


@needs_qnn
def test_each_way_is_opened_as_often_as_is_wanted(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    plans: dict[bool | None, Plan] = {
        embed: planned(project, QNN.replace("EMBED", str(embed).lower())) for embed in (False, True)
    }
    found, told = run(plans, tmp_path / "bench", 2)
    assert {each.case for each in found.measured} == {
        Case("a", opened, embedded, buffer)
        for buffer in (False, True)
        for opened, embedded in (("source", None), ("artifact", False), ("artifact", True))
    }
    assert len(told) == 2 + 6
    for each in found.measured:
        assert each.load is not None
        assert each.first is not None
        assert each.memory is not None
        assert len(each.load.values) == len(each.first.values) == 2
        assert min(each.load.values) <= each.load.median <= max(each.load.values)
        # Bytes: more than Python with ONNX Runtime needs at least, and less than a machine has.
        assert 2**24 < each.memory.median < 2**34
    assert [(each.embedded, each.size > 0, each.seconds > 0) for each in found.compiled] == [
        (False, True, True),
        (True, True, True),
    ]
    assert {"onnxruntime", "onnxruntime-qnn"} <= found.versions.keys()


@needs_qnn
def test_a_runtime_cache_is_filled_before_it_is_measured(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    made = planned(project, QNN.replace("EMBED", "false"))
    (job,) = made.jobs
    # This one has none; its place is taken by an option of which the EP makes nothing.
    provider = dataclasses.replace(job.target.provider, runtime_cache="json_qnn_graph_dir")
    job = dataclasses.replace(job, target=dataclasses.replace(job.target, provider=provider))
    found, _ = run({False: dataclasses.replace(made, jobs=(job,))}, tmp_path / "bench", 1)
    cached = [each for each in found.measured if each.case.opened == "cache"]
    assert [len(each.load.values) for each in cached if each.load] == [1, 1]
    runs = tmp_path / "bench" / "runs"
    numbers = [found.measured.index(each) for each in cached]
    for number in numbers:
        first, second = (
            (runs / f"{number}-{run}" / "request.json").read_text(encoding="utf-8")
            for run in (-1, 0)
        )
        assert first == second
        assert str(runs / f"cache-{number}") in first
    assert len(list(runs.glob("*--1"))) == 2, "only these are run beforehand"


def test_a_model_that_cannot_be_compiled_does_not_keep_the_others_from_it(
    project: Path, tmp_path: Path
) -> None:
    save(network(), project / "models" / "a.onnx")
    save(unknown_operator(), project / "models" / "b.onnx")
    found, _ = run({None: planned(project, CPU)}, tmp_path / "bench", 1)
    assert {each.case.model for each in found.measured if each.load} == {"a"}
    assert "cannot be run on the CPU" in found.failures[0].what
    assert {each.case.embedded for each in found.measured} == {None}


@needs_qnn
def test_a_way_that_fails_says_why_and_the_others_go_on(project: Path, tmp_path: Path) -> None:
    save(interrupted(), project / "models" / "a.onnx")
    toml = QNN.replace("EMBED", "false").replace(", dims = { batch = 1 }", "")
    made = planned(project, toml + "min-coverage = 0.1\n")
    (job,) = made.jobs
    # A backend that is not there, asked for when the artifact is opened.
    target = dataclasses.replace(
        job.target, load_options={"backend_path": "/nowhere/libNothing.so"}
    )
    model = dataclasses.replace(job.models[0], validate=False)
    job = dataclasses.replace(job, target=target, models=(model,))
    found, told = run({False: dataclasses.replace(made, jobs=(job,))}, tmp_path / "bench", 1)
    by_opened = {each.case.opened: each for each in found.measured}
    assert by_opened["source"].load is not None
    assert by_opened["artifact"].load is None
    assert by_opened["artifact"].failed
    assert "a: artifact from disk, blob beside: FAILED" in told

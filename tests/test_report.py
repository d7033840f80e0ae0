from __future__ import annotations

import dataclasses
from pathlib import Path

from hatch_epcontext import report
from hatch_epcontext.artifact import Artifact, Preparation, Proof
from hatch_epcontext.protocol import Agreement, Coverage
from hatch_epcontext.report import describe
from hatch_epcontext.structure import from_json, to_json
from tests.results import configured, resulting


def test_the_report_says_what_was_done_and_how_long_it_took(
    project: Path, artifact: Artifact
) -> None:
    result = resulting(configured(project), artifact)
    made = report.make(result)
    (job,) = made.jobs
    assert (job.target, job.provider, job.cached) == ("cpu", "cpu", False)
    assert (job.times.compile, job.speedup) == (0.5, 4.0)
    assert job.size == 407
    (model,) = job.models
    assert (model.model, model.source_size) == ("a", 7)
    assert model.preparation == Preparation("onnxruntime", 5, 4)
    assert from_json(to_json(made), report.Report) == made


def test_a_job_in_one_line(project: Path, artifact: Artifact) -> None:
    (built,) = resulting(configured(project), artifact).built
    assert describe(built) == (
        "a -> cpu (cpu): optimized graph, structure checked, NOT run, 407 bytes, compiled in 0.5 s"
    )
    proof = Proof("run", (Agreement("y", 0.0125, 0.99876), Agreement("z", 0.001, None)))
    (context,) = artifact.record.contexts
    context = dataclasses.replace(context, coverage=Coverage(12, 10, 2))
    record = dataclasses.replace(artifact.record, contexts=(context,))
    artifact = dataclasses.replace(artifact, record=record)
    done = dataclasses.replace(built, artifact=artifact, proofs={"a": proof}, cached=True)
    assert describe(done) == (
        "a -> cpu (cpu): 10/12 nodes in 2 contexts, "
        "ran and agrees with the CPU (cosine 0.99876, at most 0.013 apart), "
        "407 bytes, from the cache"
    )


def test_another_way_of_preparing_is_told_with_what_failed(
    project: Path, artifact: Artifact
) -> None:
    prepared = Preparation(
        "onnxslim", 5, 4, (), ("onnxruntime: the worker\ncrashed with SIGSEGV.",)
    )
    record = dataclasses.replace(artifact.record, preparations=(prepared,))
    artifact = dataclasses.replace(artifact, record=record)
    (built,) = resulting(configured(project), artifact).built
    assert "prepared with onnxslim (onnxruntime: the worker crashed with SIGSEGV)" in describe(
        built
    )

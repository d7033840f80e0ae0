from __future__ import annotations

import dataclasses
from pathlib import Path

from hatch_epcontext.errors import Kind, Problem
from hatch_epcontext.jobs.recipe import Recipe, Stop, Times
from hatch_epcontext.jobs.report import (
    Report,
    describe_validation,
    describe_values,
    make_report,
    summarize,
    validation_warnings,
)
from hatch_epcontext.jobs.report_file import render_page
from hatch_epcontext.jobs.search import Attempt
from hatch_epcontext.serialize import from_json, to_json
from hatch_epcontext.worker.results import (
    Agreement,
    Coverage,
    InputValues,
    Preparation,
    Validated,
    Validation,
    ValidationStatus,
)
from tests.results import Artifact, built_from, configured, resulting


def test_the_report_has_the_jobs_and_their_times(project: Path, artifact: Artifact) -> None:
    result = resulting(configured(project), artifact)
    report = make_report(result)
    (job,) = report.jobs
    assert (job.target, job.provider, job.cached) == ("cpu", "cpu", False)
    assert (job.times, job.load) == (Times(0.1, 0.5), 0.2)
    assert job.size == 407
    (model,) = job.models
    assert (model.model, model.source_size) == ("a", 7)
    assert model.preparation == Preparation("onnxruntime", 5, 4)
    assert from_json(to_json(report), Report) == report


def test_a_job_in_one_line(project: Path, artifact: Artifact) -> None:
    (built,) = resulting(configured(project), artifact).built
    assert summarize(built, 4.12) == (
        "a -> cpu (cpu): compiled, optimized graph, structure checked, NOT run, 4.1 s"
    )
    validation = Validation(
        ValidationStatus.RAN,
        (Agreement("y", 0.0125, 0.99876), Agreement("z", 0.001, None)),
        samples=("random",),
    )
    (context,) = artifact.record.contexts
    context = dataclasses.replace(context, coverage=Coverage(12, 10, 2))
    record = dataclasses.replace(artifact.record, contexts=(context,))
    artifact = dataclasses.replace(artifact, record=record)
    done = built_from(built.job, artifact, {"a": Validated(validation)})
    cached = dataclasses.replace(done, cached=True)
    assert summarize(cached, 0.1) == (
        "a -> cpu (cpu): ok, 10/12 nodes in 2 contexts, agrees on synthetic inputs, from the cache"
    )


def test_how_it_was_prepared_is_in_the_line_and_what_was_tried_in_the_report(
    project: Path, artifact: Artifact
) -> None:
    prepared = Preparation(
        "onnxslim",
        5,
        4,
        rewrites=("slice_as_gather",),
        replaced=2,
        options=("offload = 0",),
    )
    record = dataclasses.replace(artifact.record, preparations=(prepared,))
    artifact = dataclasses.replace(artifact, record=record)
    result = resulting(configured(project), artifact)
    line = summarize(result.built[0], 1)
    assert "compiled, optimized graph, 1 rewrite of 2 nodes, with offload = 0, " in line
    (built,) = result.built
    reason = "the graph cannot be loaded."
    stop = Stop("prepare", (Problem(Kind.COMPILE_FAILED, "", reason),))
    failed = Attempt(Recipe("onnxruntime", fuse=False), stop=stop)
    built = dataclasses.replace(built, search=built.search.adding(failed))
    page = render_page(make_report(dataclasses.replace(result, built=(built,))), "a")
    assert "slice_as_gather" in page
    assert "onnxruntime failed: the graph cannot be loaded." in page


def test_a_warning_says_where_the_arithmetic_of_an_input_ends() -> None:
    """QNN casts int64 to int32: microsoft/onnxruntime#24351."""
    ends = -(2.0**31), 2.0**31 - 1
    inputs = (
        InputValues("x", -4.25, 4.5),
        InputValues("count", 0, 255, True, *ends, bits=32),
        InputValues("user", -1000, 2000, True, *ends, bits=32, expected=True),
        InputValues("time", 3, 3, True, -30908, 231108, in_floats=131008, expected=True),
        InputValues("a", 1, 3, True, -131008, 131008, 32, 131008, several=True, expected=True),
    )
    validation = Validation(ValidationStatus.RAN, inputs=inputs)
    user, time, gap = validation_warnings("m", validation)
    assert user == (
        "m: 'user' was compared from -1000 to 2000; the EP computes integers in 32 bits: values above "
        "2147483647 are not supported, and may give wrong answers"
    )
    assert time.startswith(
        "m: 'time' was 3; the EP ends integers of 32 bits in floats at 131008: values above 231108, or below "
    )
    assert "131008: sums with other values above 131008 are not" in gap
    # What the graph does not expect is a fact, and no warning.
    assert "integers in 32 bits, integers in floats up to 131008" in describe_validation(validation)
    assert "2147483647" in describe_values(inputs[1])

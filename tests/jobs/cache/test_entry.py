from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from hatch_epcontext.files import FileRecord
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.artifact import (
    Artifact,
    Record,
    Source,
    Validation,
    ValidationRun,
    ValidationStatus,
)
from hatch_epcontext.jobs.cache.entry import Check, check_for, read_record, read_validation
from hatch_epcontext.jobs.cache.envelope import DamagedError
from hatch_epcontext.serialize import to_json
from hatch_epcontext.worker.facts import Agreement, Coverage, ModelFacts
from tests.config.examples import read as load
from tests.conftest import make_record

X = TensorFacts("x", "float32", (1, 4))
VERSIONS = {"onnxruntime": "1.0"}


@pytest.fixture
def check(project: Path) -> Check:
    """The check for the model ``a`` of a configuration."""
    config = load(project, 'models = ["models/a.onnx"]\nprovider = "qnn"\n')
    (model,) = config.models
    source = Source(model, ModelFacts((X,), (X,), ()), "", {})
    return check_for([source], model.targets[0], VERSIONS)


def changed(record: Record, **changes: object) -> Record:
    """The record with other facts of its only model."""
    context = dataclasses.replace(record.contexts[0], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(record, contexts=(context,))


def test_the_record_of_the_same_model_fits(check: Check, artifact: Artifact) -> None:
    check(artifact.record)
    # An open shape, as some EPs leave it.
    check(changed(artifact.record, outputs=(TensorFacts("x", "float32", ("batch", None)),)))


def test_a_record_of_something_else_is_damaged(check: Check, artifact: Artifact) -> None:
    record = artifact.record
    wrong = {
        "is not that of a": [
            changed(record, model="b"),
            dataclasses.replace(record, contexts=()),
            dataclasses.replace(record, contexts=record.contexts * 2),
        ],
        "is not that of a context": [dataclasses.replace(record, product="optimized")],
        "has other versions": [dataclasses.replace(record, versions={"onnxruntime": "2.0"})],
        "does not have the inputs and outputs of a": [
            changed(record, inputs=(TensorFacts("other", "float32", (1, 4)),)),
            changed(record, outputs=(TensorFacts("x", "int8", (1, 4)),)),
            changed(record, outputs=()),
            changed(record, inputs=(TensorFacts("x", "float32", (1, 5)),)),
            changed(record, inputs=(TensorFacts("x", "float32", (1,)),)),
        ],
    }
    for reason, records in wrong.items():
        for each in records:
            with pytest.raises(DamagedError, match=reason):
                check(each)


FILE = FileRecord(7, "ab" * 32)


@pytest.mark.parametrize(
    "record",
    [
        make_record({"a_ctx.onnx": FILE, "a_ctx.onnx/blob.bin": FILE}),
        make_record({"a_ctx.onnx": FILE, "\u00e9.bin": FILE, "e\u0301.bin": FILE}),
        make_record({"a_ctx.onnx": FILE, "../evil.py": FILE}),
        changed(make_record({"a_ctx.onnx": FILE}), model_file="/etc/passwd"),
        dataclasses.replace(make_record({"a_ctx.onnx": FILE}), preparations=()),
        changed(make_record({"a_ctx.onnx": FILE}), coverage=Coverage(4, 5, 1)),
    ],
)
def test_a_record_that_no_build_writes_is_damaged(record: Record) -> None:
    with pytest.raises(DamagedError, match="its record has"):
        read_record(to_json(record))


@pytest.mark.parametrize(
    ("largest", "cosine"),
    [(math.nan, 1.0), (math.inf, 1.0), (-1.0, 1.0), (0.1, 2.0), (0.1, math.nan)],
)
def test_an_agreement_that_no_build_writes_is_damaged(largest: float, cosine: float) -> None:
    agreements = (Agreement("y", 0.1, None), Agreement("z", largest, cosine))
    text = to_json(ValidationRun(Validation(ValidationStatus.RAN, agreements)))
    with pytest.raises(DamagedError, match=r"its output z has an agreement|cannot be read"):
        read_validation(text)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -5.0])
def test_times_that_no_build_writes_are_damaged(seconds: float) -> None:
    run = ValidationRun(Validation(ValidationStatus.RAN), seconds)
    with pytest.raises(DamagedError, match=r"a time that cannot be right|cannot be read"):
        read_validation(to_json(run))
    record = make_record({"a_ctx.onnx": FILE})
    record = dataclasses.replace(record, times=dataclasses.replace(record.times, compile=seconds))
    with pytest.raises(DamagedError, match=r"a figure that cannot be right|cannot be read"):
        read_record(to_json(record))
    # What JSON makes infinite.
    with pytest.raises(DamagedError, match="a time that cannot be right"):
        read_validation(
            to_json(run).replace('"load": NaN', '"load": 1e999').replace("Infinity", "1e999")
        )


@pytest.mark.parametrize("text", ["", "[]", "[" * 10**5, "9" * 10**5, '{"product": NaN}', "\ud800"])
def test_what_is_no_record_and_no_validation_is_damaged(text: str) -> None:
    with pytest.raises(DamagedError, match="record cannot be read"):
        read_record(text)
    with pytest.raises(DamagedError, match="validation cannot be read"):
        read_validation(text)

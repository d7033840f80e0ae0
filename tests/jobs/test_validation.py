from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hatch_epcontext.cache.build import Index
from hatch_epcontext.config.tables import ToleranceTable, ValidateTable
from hatch_epcontext.errors import Kind, UnavailableError
from hatch_epcontext.jobs.job import (
    check_required,
    validation_without_run,
    worst_alone,
)
from hatch_epcontext.jobs.keys import comparison_key
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.report import describe_validation, validation_warnings
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Emulation,
    Validated,
    Validation,
    ValidationStatus,
)
from tests.results import configured

AGREEMENTS = (Agreement("y", 0.0125, 0.9987, 31.4), Agreement("z", 0.5, None))


NOTHING = Agreement("n", 0.0, None, status=AgreementStatus.INCONCLUSIVE, reason="it is NaN")
CHANCE = Agreement("c", 0.0, None, status=AgreementStatus.RANDOM)
AGREES = "agrees on synthetic inputs"

EMULATION = Emulation(
    "float16",
    "a simulator",
    72,
    Agreement("y", 0.1, 0.9, 23.4, margin=3.4),
    "Sqrt root is 0",
)


@pytest.fixture
def job(project: Path) -> Job:
    return plan(configured(project)).jobs[0]


def with_validate(job: Job, **changes: Any) -> Job:
    (model,) = job.models
    validate = dataclasses.replace(model.validate, **changes)
    return dataclasses.replace(job, models=(dataclasses.replace(model, validate=validate),))


@pytest.mark.parametrize(
    ("validation", "text"),
    [
        (
            Validation(ValidationStatus.RAN, AGREEMENTS),
            AGREES,
        ),
        (
            Validation(ValidationStatus.RAN, AGREEMENTS, simulated=True),
            f"{AGREES}, simulator (31 dB)",
        ),
        (
            Validation(ValidationStatus.RAN, AGREEMENTS, emulation=EMULATION),
            f"{AGREES} (31 dB)",
        ),
        (
            Validation(ValidationStatus.RAN, AGREEMENTS, integers=AGREEMENTS[0]),
            "agrees with its float form on synthetic inputs",
        ),
        (
            Validation(ValidationStatus.RAN, AGREEMENTS, synthetic=False),
            "agrees on 2 given inputs",
        ),
        (
            Validation(ValidationStatus.RAN, (*AGREEMENTS, NOTHING, CHANCE, CHANCE)),
            f"{AGREES}, 1 output inconclusive, 2 outputs random",
        ),
        (
            Validation(ValidationStatus.RAN, (NOTHING,)),
            "ran, NOT compared, 1 output inconclusive",
        ),
        (
            Validation(
                ValidationStatus.RAN, (dataclasses.replace(CHANCE, status=AgreementStatus.DIFFERS),)
            ),
            "ran, 1 output differs",
        ),
        (
            Validation(ValidationStatus.RAN, reason="no source"),
            "ran, NOT compared (no source)",
        ),
        (
            Validation(ValidationStatus.RAN_ON_CPU, AGREEMENTS, "no GPU"),
            f"{AGREES}, on the CPU only (no GPU)",
        ),
        (
            Validation(ValidationStatus.RAN_ALONE, AGREEMENTS, "shared", simulated=True),
            f"{AGREES}, compiled alone, simulator (31 dB)",
        ),
        (
            Validation(ValidationStatus.STRUCTURE, reason="no NPU"),
            "structure checked, NOT run (no NPU)",
        ),
        (Validation(ValidationStatus.NOT_VALIDATED), "NOT validated (validate = false)"),
    ],
)
def test_each_status_has_its_text(validation: Validation, text: str) -> None:
    validation = dataclasses.replace(validation, samples=("random", "tone at 0.1"))
    assert describe_validation(validation) == text


def test_only_synthetic_inputs_are_to_be_replaced_by_real_ones() -> None:
    agreement = dataclasses.replace(
        AGREEMENTS[0], status=AgreementStatus.SENSITIVE, reason="it is only 3 dB above its limit"
    )
    for synthetic in (True, False):
        found = Validation(ValidationStatus.RAN, (agreement,), synthetic=synthetic)
        (warning,) = validation_warnings("a", found)
        assert "only 3 dB" in warning
        assert ("validate.inputs" in warning) is synthetic


def test_a_reason_of_several_outputs_is_given_once() -> None:
    reason = "float16 leaves 18 dB. Perhaps the cause is that GRU a is coarse"
    sensitive = tuple(
        dataclasses.replace(agreement, status=AgreementStatus.SENSITIVE, reason=reason)
        for agreement in AGREEMENTS[:2]
    )
    (warning,) = validation_warnings("a", Validation(ValidationStatus.RAN, sensitive))
    assert reason in warning


def test_a_simulator_and_an_emulation_are_named() -> None:
    sensitive = dataclasses.replace(
        AGREEMENTS[0], status=AgreementStatus.SENSITIVE, reason=EMULATION.reason
    )
    validation = Validation(
        ValidationStatus.RAN,
        (sensitive,),
        samples=("random",),
        emulation=EMULATION,
        simulated=True,
    )
    assert describe_validation(validation) == f"{AGREES}, but is SENSITIVE, simulator (31 dB)"
    (warning,) = validation_warnings("a", validation)
    assert "Sqrt root is 0" in warning
    assert validation.margin == 3.4


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        (False, ValidationStatus.NOT_VALIDATED),
        ("structure", ValidationStatus.STRUCTURE),
        ("auto", None),
        ("require", None),
    ],
)
def test_the_mode_decides_whether_a_model_is_run(
    job: Job, mode: Any, status: ValidationStatus | None
) -> None:
    job = with_validate(job, mode=mode)
    found = validation_without_run(job, job.models[0])
    assert (found.validation.status if found else None) is status


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, 'tool.epcontext.models[0].validate = "auto"'),
        ({"inputs": "ones"}, 'tool.epcontext.models[0].validate.mode = "auto"'),
    ],
)
def test_the_hint_keeps_the_other_settings_of_validate(
    job: Job, changes: dict[str, Any], setting: str
) -> None:
    job = with_validate(job, mode="require", **changes)
    not_run = Validation(ValidationStatus.STRUCTURE, reason="no NPU.")
    with pytest.raises(UnavailableError) as raised:
        check_required(job, job.models[0], not_run)
    (problem,) = raised.value.problems
    assert (problem.kind, problem.message) == (
        Kind.NOT_RUN,
        'no NPU, and validate is "require".',
    )
    assert [str(each) for each in problem.settings] == [setting]


RAN = Validation(ValidationStatus.RAN, AGREEMENTS)
STRUCTURE = Validation(ValidationStatus.STRUCTURE, reason="x")


def for_several_chips(job: Job) -> Job:
    qnn = PROVIDERS["qnn"]
    settings = dataclasses.replace(
        job.target.settings,
        provider=qnn.name,
        ep=qnn.ep,
        provider_options={"soc_model": "60,57"},
    )
    target = dataclasses.replace(job.target, plugin=qnn.plugin, settings=settings)
    return dataclasses.replace(job, target=target)


def test_a_context_for_several_chips_has_the_worst_validation_of_the_chips(job: Job) -> None:
    reason = for_several_chips(job).reason_not_to_open
    near, nearer = (
        Validated(
            Validation(ValidationStatus.RAN, (Agreement("y", 0.02, 0.9991, 40.0, margin=margin),))
        )
        for margin in (3.0, 12.0)
    )
    found = worst_alone([nearer, near], reason)
    assert found.validation.agreements == near.validation.agreements
    assert found.validation.status is ValidationStatus.RAN_ALONE
    assert found.validation.reason == (
        "QNNExecutionProvider cannot open contexts for several chips on this machine"
    )
    not_run = Validated(STRUCTURE)
    assert worst_alone([Validated(RAN), not_run], reason) is not_run
    agreement = Agreement("y", 0.02, 0.9991, 40.0, status=AgreementStatus.SENSITIVE, margin=30.0)
    sensitive = Validated(Validation(ValidationStatus.RAN, (agreement,)))
    assert worst_alone([nearer, sensitive], reason).validation.sensitive


def test_the_reason_not_to_open_names_all_that_is_special(job: Job) -> None:
    assert not job.reason_not_to_open
    both = dataclasses.replace(for_several_chips(job), group="both")
    assert both.reason_not_to_open == (
        "QNNExecutionProvider cannot open contexts for several chips that share weights on this "
        "machine"
    )


def test_inputs_tolerance_and_load_options_are_in_the_key(job: Job, tmp_path: Path) -> None:
    def key_of(job: Job) -> str:
        return comparison_key(job, job.models[0], Index())

    file = tmp_path / "x.npz"
    np.savez(file, x=np.ones(1))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "0.npz").write_bytes(b"1")
    jobs = [
        job,
        with_validate(job, inputs="ones"),
        with_validate(job, inputs=str(file)),
        with_validate(job, inputs=str(folder)),
        with_validate(job, tolerance=ToleranceTable(atol=0.5)),
        # The provider's own limit, but as the user's choice it is never relaxed.
        with_validate(job, tolerance=ToleranceTable(snr=job.target.provider.tolerance.snr)),
        with_validate(job, tolerance=False),
        dataclasses.replace(job, target=dataclasses.replace(job.target, load_options={"a": "1"})),
    ]
    keys = [key_of(each) for each in jobs]
    assert len(set(keys)) == len(keys)
    np.savez(file, x=np.zeros(1))
    assert key_of(jobs[2]) != keys[2]
    (folder / "0.npz").write_bytes(b"2")
    assert key_of(jobs[3]) != keys[3]
    # The mode does not change the result of a validation.
    assert key_of(with_validate(job, mode="require")) == keys[0]
    assert job.models[0].validate == ValidateTable()

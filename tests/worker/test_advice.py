from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import Setting
from hatch_epcontext.graph.dtypes import Arrays
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.advice import Explained, Subject, explain, problems_of
from hatch_epcontext.worker.comparison.compare import Difference
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun
from hatch_epcontext.worker.results import Agreement, AgreementStatus, Excess
from tests.worker.actions.test_compile import MODEL

SPEC = Model("a", Path("a.onnx"), MODEL)
WANTED: Arrays = {"y": np.linspace(1, 2, 10, dtype=np.float32)}


def differing(
    outputs: Arrays,
    tolerance: Tolerance,
    spec: Model = SPEC,
    wanted: Arrays = WANTED,
    what: str = "the compiled model",
) -> list[Explained]:
    run = ReferenceRun("given", ({},), outputs=(wanted,), on_target=True)
    reference = Reference((run,), Facts())
    difference = Difference(tuple(reference.compare(run, 0, outputs, tolerance)), run, 0)
    return explain(difference, tolerance, Subject(spec, what), reference.facts)


@pytest.mark.parametrize("difference", [1e-6, 0.0123456, 3.0])
def test_the_limits_of_a_message_are_enough(difference: float) -> None:
    outputs = {"y": np.add(WANTED["y"], difference, dtype=np.float32)}
    ((setting,),) = (item.settings for item in differing(outputs, Tolerance(-200, 0.0, atol=1e-9)))
    assert isinstance(setting.value, dict)
    allowed = setting.value["outputs"]["y"]
    assert 0 < allowed["atol"] < 1.1 * difference
    limits = Tolerance(-200, 0.0, outputs={"y": allowed})
    assert not differing(outputs, limits)


@pytest.mark.parametrize("wrong", [11, 15, 20])
def test_the_limits_of_a_message_are_enough_for_values_that_are_equal_or_not(wrong: int) -> None:
    wanted: Arrays = {"y": np.zeros(100, bool)}
    outputs: Arrays = {"y": np.arange(100) < wrong}
    ((setting,),) = (
        item.settings for item in differing(outputs, Tolerance(20, 0.99), wanted=wanted)
    )
    assert isinstance(setting.value, dict)
    assert setting.value["outputs"]["y"].keys() == {"snr"}
    limits = Tolerance(20, 0.99, outputs=setting.value["outputs"])
    assert not differing(outputs, limits, wanted=wanted)


def test_inputs_that_are_given_are_not_asked_for() -> None:
    outputs = {"y": np.multiply(0.2, WANTED["y"], dtype=np.float32)}
    ((setting,),) = (item.settings for item in differing(outputs, Tolerance(20, 0.99)))
    assert "inputs" in str(setting)
    given = replace(SPEC, validate=ValidateTable(inputs="/tmp/a.npz"))
    (item,) = differing(outputs, Tolerance(20, 0.99), given)
    assert not item.settings


def test_no_limits_are_suggested_for_a_slice_that_is_wrong() -> None:
    wanted = np.tile(np.array([600, 1], np.float32), (20, 1))
    wrong = wanted * np.array([1, 0], np.float32)
    (item,) = differing({"y": wrong}, Tolerance(20, 0.99), wanted={"y": wanted})
    assert "signal to noise in [:, 1] " in item.agreement.excess
    (setting,) = item.settings
    assert setting.key == SPEC.key / "validate" / "inputs"


def test_a_hint_names_what_is_wrong() -> None:
    arrays = {"y": np.ones((2, 8), np.float32)}
    wrong = {"y": -arrays["y"]}
    given = replace(SPEC, validate=ValidateTable(inputs="samples.npz"))
    compiled, prepared = (
        differing(wrong, Tolerance(20, 0.99), given, arrays, what)[0].hint or ""
        for what in ("the compiled model", "the prepared model on the CPU")
    )
    assert "compiled model" in compiled
    assert "do not ship" in compiled
    assert "prepared model" in prepared
    assert "compiled" not in prepared
    assert "do not ship" not in prepared


def test_outputs_that_differ_are_one_problem_with_the_worst_first() -> None:
    place = MODEL / "validate" / "tolerance"
    excesses = tuple(Excess(f"measure {n}", f"{n} dB", "at least 20 dB") for n in range(4))
    status = AgreementStatus.DIFFERS
    first, second = (
        Explained(
            Agreement(
                output, 0.1, None, status=status, reason="differs from the CPU's",
                margin=margin, excesses=excesses,
            ),
            "Allow more:",
            (Setting(place, {"outputs": {output: {"snr": margin}}}),),
        )
        for output, margin in (("boxes", -9), ("y", -3))
    )  # fmt: skip
    (problem,) = problems_of([second, replace(first, cause="boxes is the cause.")])
    assert problem.message.splitlines() == [
        "the output 'boxes' differs from the CPU's, and so does 1 other output:",
        *(f"  boxes  measure {n}  {n} dB  at least 20 dB" for n in range(4)),
        "  y      measure 0  0 dB  at least 20 dB",
        "  and 3 more",
        "boxes is the cause.",
    ]
    outputs = {"boxes": {"snr": -9}, "y": {"snr": -3}}
    assert problem.settings == (Setting(place, {"outputs": outputs}),)

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.tools.configure import JobSettings
from hatch_epcontext.tools.plugin_library import (
    StepStatus,
    Trial,
    TrialStep,
    Verdict,
    _choose,
    _failed,
    _Offer,
    _table,
    _verdict,
    _with_library,
)
from hatch_epcontext.worker.requests import EpDevice, LibraryReply, LibraryRequest

DONE, REFUSED = TrialStep(StepStatus.DONE, ""), TrialStep(StepStatus.REFUSED, "")
SKIPPED = TrialStep(StepStatus.SKIPPED, "")
FAILED = _failed(BuildError(Problem(Kind.WORKER_CRASHED, "", "the worker crashed.")))


def device(ep: str, kind: str = "npu") -> EpDevice:
    return EpDevice(ep, "Vendor", kind, "Maker", 1, 2, {}, {})


def offer(*devices: EpDevice, name: str = "Ep", main: str | None = None, path: str = "") -> _Offer:
    module = "" if path else "my_ep"
    request = LibraryRequest(path, module, None if path else name, "default")
    return _Offer(request, LibraryReply(module, name, main, devices))


def trial(run: TrialStep, compiled: TrialStep, loaded: TrialStep = SKIPPED) -> Trial:
    taken = {} if run is REFUSED else {"Gemm": 1}
    return Trial("gemm", taken, {}, run, compiled, loaded)


@pytest.mark.parametrize(
    ("trials", "verdict"),
    [
        ([trial(DONE, DONE, DONE), trial(REFUSED, REFUSED)], Verdict.WORKS),
        ([trial(SKIPPED, DONE)], Verdict.NOT_RUN),
        ([trial(DONE, DONE, DONE), trial(FAILED, REFUSED)], Verdict.FAULTY),
        ([trial(DONE, DONE, FAILED)], Verdict.FAULTY),
        ([trial(DONE, FAILED)], Verdict.FAULTY),
        ([trial(DONE, REFUSED), trial(FAILED, REFUSED)], Verdict.NO_CONTEXTS),
        ([trial(REFUSED, REFUSED)], Verdict.NO_NODES),
    ],
)
def test_the_verdict_follows_from_all_graphs(trials: list[Trial], verdict: Verdict) -> None:
    assert _verdict(trials) is verdict


def test_of_several_eps_one_must_be_chosen() -> None:
    several = device("A"), device("B"), device("B", "gpu")
    with pytest.raises(ConfigError, match=r"several EPs: A and B") as raised:
        _choose(offer(*several), None, None)
    assert raised.value.problems[0].hint == "Choose one with --ep-name."
    assert _choose(offer(*several), "B", "gpu") == several[2]
    # Its package names the main one.
    assert _choose(offer(*several, main="A"), None, "any") == several[0]


def test_a_kind_of_device_that_an_ep_does_not_offer_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"A offers no gpu on this machine") as raised:
        _choose(offer(device("A"), device("B", "gpu")), "A", "gpu")
    assert raised.value.problems[0].hint == "It offers npu."


@pytest.mark.parametrize(
    ("path", "names", "expected"),
    [
        ("", ("Ep", "Ep"), {"library": "my_ep", "requirements": ["my-ep>=1.0"]}),
        ("", ("Registered", "Ep"), {"library": "my_ep", "registration-name": "Registered"}),
        ("project/libs/libep.so", ("Ep", "Ep"), {"library": "libs/libep.so"}),
        ("project/libs/libep.so", ("ep", "Other"), {"ep-name": "Other"}),
        ("elsewhere/libep.so", ("Ep", "Ep"), {"library": "{tmp}/elsewhere/libep.so"}),
    ],
)
def test_the_table_names_the_library_as_it_was_found(
    tmp_path: Path, path: str, names: tuple[str, str], expected: dict[str, object]
) -> None:
    name, ep = names
    given = JobSettings(provider_options={"n": "2"}, settings={"optimization": "all"})
    made = offer(device(ep), name=name, path=str(tmp_path / path) if path else "")
    job = _with_library(given, made, device(ep), None)
    table = _table(job, {"my-ep": "1.0"}, tmp_path / "project")
    (target,) = parse(table)["tool"]["epcontext"]["targets"].values()
    wanted = {
        key: value.replace("{tmp}", tmp_path.as_posix()) if isinstance(value, str) else value
        for key, value in expected.items()
    }
    assert wanted.items() <= target.items()
    assert target["provider"] == "plugin"
    assert target["device"] == "npu"
    assert target["provider-options"] == {"n": "2"}
    assert target["optimization"] == "all"
    # The package brings what it needs; a file has no requirement.
    assert ("requirements" in target) is not bool(path)
    assert "unroll-limit" not in target
    assert ("registration-name" in target) is (name == "Registered")


def test_a_known_ep_gets_its_own_options_unless_some_are_given() -> None:
    qnn = PROVIDERS["qnn"]
    made = offer(device(qnn.ep, "cpu"), name=qnn.ep)
    job = _with_library(JobSettings(), made, device(qnn.ep, "cpu"), qnn)
    assert job.provider_options == {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"}
    # It compiles anywhere, for an NPU.
    assert job.device is None
    given = JobSettings(provider_options={"backend_type": "cpu"})
    job = _with_library(given, made, device(qnn.ep, "cpu"), qnn)
    assert job.provider_options == {"backend_type": "cpu"}

"""What `check` says of a target is what `load` does with it, unless it says that it does not know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from tests.conftest import needs_qnn
from tests.loader.shipped import (
    CPU,
    CPU_EP,
    NPU,
    QNN,
    Shipper,
    Table,
    changed,
    component,
    damage,
    device,
    variant,
)

X = "a/cpu/a_optimized.onnx"

RAN: Table = {
    "compiled_with": {"onnxruntime": onnxruntime.__version__},
    "validation": {"status": "ran"},
}

BUILT = changed(CPU, **RAN)

SIMULATED = changed(NPU, **{**RAN, "compiled_with": {**RAN["compiled_with"], "no-such-ep": "1.0"}})

AMD = variant(
    "a/cpu", "a_optimized.onnx", settings={"ep": "MIGraphXExecutionProvider", "device": "gpu"}
)


def compare(app: Any, **arguments: Any) -> list[str]:
    """The answers of `check`, after opening what it is about."""
    expectations = app.check("a", **arguments)
    candidates, request = app._resolve_request("a", app.Request(**arguments))
    opened = {variants[0].target: False for variants, _ in candidates}
    reasons = set()
    for variants, method in candidates:
        attempt, session = app.open_variant(method, variants, request)
        opened[attempt.target] |= session is not None
        reasons.add((attempt.target, attempt.reason))
    assert [expectation.target for expectation in expectations] == list(opened)
    for expectation in expectations:
        assert expectation.reason
        if expectation.answer == "cannot":
            assert (expectation.target, expectation.reason) in reasons
        if expectation.answer != "unknown":
            assert (expectation.answer == "opens") == opened[expectation.target], str(expectation)
    return [expectation.answer for expectation in expectations]


@pytest.mark.parametrize(
    ("variants", "arguments", "answers"),
    [
        ({"cpu": BUILT}, {}, "opens opens"),
        ({"cpu": BUILT}, {"verify": True}, "opens opens"),
        ({"cpu": BUILT}, {"device": "cpu"}, "opens opens"),
        ({"cpu": BUILT}, {"device": "any"}, "opens opens"),
        ({"cpu": BUILT}, {"device": "npu"}, "cannot cannot"),
        ({"cpu": BUILT}, {"target": "cpu"}, "opens"),
        ({"cpu": BUILT}, {"target": "source"}, "opens"),
        ({"cpu": BUILT}, {"fallback": False}, "opens"),
        ({"cpu": BUILT}, {"shapes": {"x": (3, 1, 8, 8)}}, "opens opens"),
        ({"cpu": BUILT}, {"shapes": {"x": (1, 1, 9, 8)}}, "cannot cannot"),
        ({"cpu": BUILT}, {"provider_options": {"no": "such"}}, "unknown opens"),
        ({"cpu": BUILT}, {"session_options": lambda: 5}, "unknown unknown"),
        ({"cpu": BUILT}, {"fallback_providers": [CPU_EP]}, "unknown unknown"),
        ({"cpu": CPU}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, validation={"status": "skipped"})}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, validation=None)}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, validation="ran")}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, compiled_with=[])}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, settings={"optimization": "all"})}, {}, "unknown opens"),
        ({"npu": SIMULATED}, {}, "cannot opens"),
        ({"npu": NPU, "cpu": BUILT}, {"target": "source"}, "opens"),
        ({"cpu": changed(BUILT, compiled_with={"onnxruntime": "99.0"})}, {}, "unknown unknown"),
        ({"cpu": changed(BUILT, compiled_with={"onnxruntime": "1.9.1"})}, {}, "opens opens"),
        ({"npu": NPU}, {}, "cannot unknown"),
        ({"npu": NPU}, {"device": "any"}, "cannot unknown"),
        ({"npu": NPU, "cpu": BUILT}, {}, "cannot opens opens"),
        ({"npu": NPU, "cpu": BUILT}, {"fallback": False}, "cannot opens"),
        ({"npu": NPU}, {"target": "npu"}, "cannot"),
        ({"npu": changed(NPU, prepared="prepared/a.onnx")}, {"recompile": True}, "cannot unknown"),
        ({"amd": AMD}, {}, "cannot unknown"),
    ],
)
def test_no_session_is_needed_to_know_what_load_does(
    ship: Shipper, variants: Table, arguments: Table, answers: str
) -> None:
    assert compare(ship(**variants), **arguments) == answers.split()


@pytest.mark.parametrize(
    ("how", "verify", "answer"),
    [
        ("missing", False, "cannot"),
        ("truncated", False, "cannot"),
        ("a folder", False, "cannot"),
        ("altered", False, "unknown"),
        ("altered", True, "cannot"),
    ],
)
def test_damaged_files_are_seen(ship: Shipper, how: str, verify: bool, answer: str) -> None:
    app = ship(cpu=BUILT)
    damage(ship.folder / X, how)
    assert compare(app, verify=verify) == [answer, "opens"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_a_link_out_of_the_package_is_seen(ship: Shipper, tmp_path: Path) -> None:
    app = ship(cpu=BUILT)
    file = ship.folder / X
    file.rename(tmp_path / "elsewhere.onnx")
    file.symlink_to(tmp_path / "elsewhere.onnx")
    assert compare(app) == ["unknown", "opens"]


def test_variables_count_as_in_load(ship: Shipper, monkeypatch: pytest.MonkeyPatch) -> None:
    app = ship(npu=NPU, cpu=BUILT)
    monkeypatch.setenv("EPCONTEXT_TARGET", "cpu")
    assert compare(app) == ["opens"]
    monkeypatch.setenv("EPCONTEXT_DEVICE", "npu")
    assert compare(app, device="cpu") == ["cannot"]
    monkeypatch.setenv("EPCONTEXT_DEVICE", "tpu")
    with pytest.raises(app.LoadError, match="EPCONTEXT_DEVICE must be one of"):
        app.check("a")


def test_a_companion_that_is_not_installed_cannot_be_opened(ship: Shipper) -> None:
    body = component({"cpu": BUILT}, modules={"npu": "no_such_companion"})
    app = ship.write({"a": body}, {"no_such_companion": "no-such-companion==1"})
    assert compare(app) == ["cannot", "opens"]


def test_a_device_that_is_there_proves_nothing(ship: Shipper) -> None:
    app = ship(npu=NPU)
    app.Opener._offered = lambda self: [device("NPU")]
    app.Opener._add_devices = lambda self, options, more: "SomeExecutionProvider on npu"
    (npu, _) = app.check("a")
    assert str(npu) == "npu: unknown, only opening it shows what SomeExecutionProvider does"


@needs_qnn
@pytest.mark.parametrize(
    ("ours", "arguments", "answer"),
    [
        ({}, {}, "cannot"),
        ({}, {"device": "any"}, "unknown"),
        ({}, {"device": "any", "verify": True}, "unknown"),
        ({"needs_device": True}, {"device": "any"}, "cannot"),
        ({}, {"device": "any", "recompile": True}, "unknown"),
    ],
)
def test_a_simulator_may_lack_a_library_that_it_loads_later(
    qnn: Shipper, ours: Table, arguments: Table, answer: str
) -> None:
    npu = changed(QNN, **{**RAN, **ours})
    assert compare(qnn(source=None, npu=npu), **arguments) == [answer]


@needs_qnn
@pytest.mark.parametrize(("built", "is_named"), [("99.0.1", True), ("2.0", False)])
def test_an_older_release_of_the_ep_than_the_one_that_compiled_is_named(
    qnn: Shipper, built: str, is_named: bool
) -> None:
    app = qnn(source=None, npu=changed(QNN, compiled_with={"onnxruntime-qnn": built}))
    (npu,) = app.check("a", device="any")
    assert npu.answer == "unknown"
    assert (f"; onnxruntime-qnn {built} compiled it, and " in npu.reason) == is_named


@needs_qnn
def test_what_is_shipped_for_another_machine_may_compile(qnn: Shipper) -> None:
    app = qnn(source=None, npu=QNN)
    damage(Path(qnn.folder / "a/npu/a_ctx.onnx"), "truncated")
    (npu,) = app.check("a", device="any", recompile=True)
    assert str(npu) == "npu: unknown, it is compiled on this machine, once"

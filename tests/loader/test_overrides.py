"""Variables that win over what the app asks for, an app's earlier providers, and editable installs."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest

from tests.loader.shipped import CPU, CPU_EP, NPU, SOURCE, Shipper, component, outcomes


def test_a_variable_chooses_the_target(ship: Shipper, monkeypatch: pytest.MonkeyPatch) -> None:
    app = ship(npu=NPU, cpu=CPU)
    monkeypatch.setenv("EPCONTEXT_TARGET", "source")
    assert outcomes(app.explain("a", target="cpu")) == [("source", "opened")]


def test_an_unknown_target_in_the_variable_is_ignored(
    ship: Shipper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(cpu=CPU)
    monkeypatch.setenv("EPCONTEXT_TARGET", "rtx")
    assert app.target_of(app.load("a")) == "cpu"
    assert "a has no target 'rtx' (EPCONTEXT_TARGET)" in caplog.text


def test_a_variable_chooses_the_device(ship: Shipper, monkeypatch: pytest.MonkeyPatch) -> None:
    app = ship(cpu=CPU)
    monkeypatch.setenv("EPCONTEXT_DEVICE", "npu")
    with pytest.raises(app.LoadError, match="it is for the cpu, and device='npu' was requested"):
        app.load("a", device="cpu")
    monkeypatch.setenv("EPCONTEXT_DEVICE", "tpu")
    with pytest.raises(app.LoadError, match=r"EPCONTEXT_DEVICE must be one of .*, not 'tpu'"):
        app.load("a")


def test_the_source_opens_on_the_providers_that_the_app_used_before(ship: Shipper) -> None:
    app = ship(npu=NPU)
    providers: list[Any] = ["NoSuchExecutionProvider", ("CPUExecutionProvider", {})]
    session = app.load("a", fallback_providers=providers)
    assert (app.target_of(session), session.get_providers()) == ("source", [CPU_EP])
    if "AzureExecutionProvider" in onnxruntime.get_available_providers():
        session = app.load("a", fallback_providers=["AzureExecutionProvider"])
        assert session.get_providers() == ["AzureExecutionProvider", CPU_EP]
        assert session.epcontext_attempts[-1].reason == "AzureExecutionProvider"
        # A target of the CPU hides them no more than the source does, unless the CPU is asked for.
        app, arguments = ship(cpu=CPU), {"fallback_providers": ["AzureExecutionProvider"]}
        providers = app.load("a", **arguments).get_providers()
        assert providers == ["AzureExecutionProvider", CPU_EP]
        for asked in ({"target": "cpu"}, {"device": "cpu"}):
            assert app.load("a", **arguments, **asked).get_providers() == [CPU_EP]


def test_the_targets_of_an_editable_install_are_known(ship: Shipper) -> None:
    targets = {"npu": "QNNExecutionProvider", "cpu": CPU_EP}
    app = ship.write({"a": component({"source": SOURCE}, targets=targets)}, layout="installed")
    assert outcomes(app.explain("a", target="cpu")) == [("source", "opened")]
    with pytest.raises(app.LoadError, match="no compiled target 'npu': install it with editable ="):
        app.load("a", target="npu")
    with pytest.raises(app.LoadError, match="unknown target 'rtx'"):
        app.load("a", target="rtx")

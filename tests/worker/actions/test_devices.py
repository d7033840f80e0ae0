from __future__ import annotations

import onnxruntime
import pytest

from hatch_epcontext.worker.actions.devices import handle
from hatch_epcontext.worker.requests import DevicesRequest


def test_an_onnx_runtime_without_plugins_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(onnxruntime, "get_ep_devices")
    # Releases before 1.22 also lack what adds an EP to a session's options.
    monkeypatch.delattr(onnxruntime.SessionOptions, "add_provider")
    reply = handle(DevicesRequest(("cpu", "qnn")))
    assert not reply.runtime.lists_devices
    assert "CPUExecutionProvider" in reply.runtime.eps
    reason = f"onnxruntime {onnxruntime.__version__} is too old."
    assert {name: devices.reason for name, devices in reply.devices.items()} == {
        "cpu": reason,
        "qnn": reason,
    }

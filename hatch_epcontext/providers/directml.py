"""GPUs and NPUs on Windows through DirectML, which compiles nothing ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named
from hatch_epcontext.shipped import Device


class DirectML(Provider):
    name = "directml"
    ep = "DmlExecutionProvider"
    title = "GPUs and NPUs on Windows through DirectML"
    product = "optimized"
    genai_name = "dml"
    genai_plain = True
    distributions = ("onnxruntime-directml", "onnxruntime-windowsml")
    devices = ("gpu", "npu")
    open_shapes_on = ("gpu",)
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "Windows and a GPU or NPU with a DirectX 12 driver"
    verified = "Only the options."
    systems = ("win32",)
    options: Mapping[str, Option] = {
        **named("device_id", "int", "load"),
        "performance_preference": choice("default high_performance minimum_power", "load"),
        "device_filter": choice("gpu npu any", "load"),
    }
    sources = ("onnxruntime.ai",)
    notes = ("`optimization` above `basic` needs the EP at build time, and so Windows.",)

    def implied(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        # By default it takes a GPU, whatever the target is for.
        is_named = device == "gpu" or not options.keys().isdisjoint({"device_filter", "device_id"})
        return {} if is_named else {"device_filter": device}

    def contradictions(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        kind = options.get("device_filter", device)
        if device in ("any", kind):
            return {}
        return {"device_filter": f"is {kind}, and the target's device is {device}"}


PROVIDER = DirectML()

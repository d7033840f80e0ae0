"""Any other EP in a plugin library. The configuration describes it."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.graph.number_format import FLOAT16, NumberFormat
from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.shipped import Device


class AnyPlugin(Provider):
    name = "plugin"
    ep = ""
    title = "any other plugin EP"
    product = "context"
    distributions = ("onnxruntime", "onnxruntime-gpu")
    devices = ("any", "npu", "gpu", "cpu")
    tolerance = Tolerance(snr=20, cosine=0.99, unit=0.1)
    verified = "With the libraries of QNN and OpenVINO."
    needs_library = True
    shares_weights = True
    loads_shared = True
    notes = (
        "Its options are unknown, so they are not checked.",
        "[Plugin EPs](targets.md#plugin-eps) shows how to try one.",
    )

    def number_format(self, device: Device, options: Mapping[str, str]) -> NumberFormat | None:
        # As most of them do.
        return FLOAT16 if device in ("npu", "any") else None


PROVIDER = AnyPlugin()

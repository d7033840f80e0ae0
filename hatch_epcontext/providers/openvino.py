"""Intel's CPUs, GPUs and NPUs through the plugin EP in onnxruntime-ep-openvino.

Options: those that the plugin's library 1.8.1 reads. Its log names the ignored options of the older,
built-in EP, each with the entry of ``load_config`` that replaces it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hatch_epcontext.graph.facts import Limits
from hatch_epcontext.graph.number_format import FLOAT16, NumberFormat
from hatch_epcontext.providers.base import Plugin, Provider, Tolerance
from hatch_epcontext.providers.option import Option, named
from hatch_epcontext.shipped import Device


def _facts(compatibility: str) -> Mapping[str, Any]:
    try:
        facts = json.loads(compatibility)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


_NOT_CONVERTED = (
    r"(?s)While validating ONNX node '<Node\((?P<op>\w+)\): (?P<name>.*?)>':"
    r"(?P<reason>.*?)(?:\n\s*\n|$)"
)


class OpenVINO(Provider):
    name = "openvino"
    ep = "OpenVINOExecutionProvider"
    title = "Intel CPUs, GPUs and NPUs through OpenVINO"
    product = "context"
    genai_name = "OpenVINO"
    genai_plain = True
    limits = Limits()
    distributions = ("onnxruntime", "onnxruntime-gpu")
    devices = ("cpu", "gpu", "npu")
    open_shapes_on = ("cpu", "gpu")
    # CPUs with AMX compute in bfloat16 unless INFERENCE_PRECISION_HINT is set. Measured on a real
    # model: probabilities that differ by 0.056, with a cosine of 0.9989.
    tolerance = Tolerance(snr=20, cosine=0.99)
    # With 16 bits its CPU device computes wrong: -2 dB in a small network, and 37 dB with 8 bits.
    quantized_activation = "uint8"
    needs = "Intel hardware: on other processors it offers no device, not even the CPU"
    name_fact = "FULL_DEVICE_NAME"
    # OpenVINO's property of NPUs (runtime/intel_npu/properties.hpp).
    driver_fact = "NPU_DRIVER_VERSION"
    verified = "The CPU device, on an Intel Xeon with Linux: compiled, loaded and run, external and embedded."
    hardware = "CPU: verified. GPU and NPU: not verified on hardware."
    requirements = ("onnxruntime-ep-openvino>=1.8",)
    systems = ("linux", "win32")
    plugin = Plugin(
        "onnxruntime_ep_openvino", "onnxruntime-ep-openvino", "OpenVINOExecutionProvider"
    )
    # The library 1.8.1: "Multiple embedded native EPContext main contexts are not supported".
    embeds_one = True
    compares = True
    options: Mapping[str, Option] = {
        **named("load_config", "json", "both"),
        **named("reshape_input", "text"),
        **named("enable_causallm", "bool", "both"),
        **named("hint_enable_gqa", "bool"),
    }
    reserved: Mapping[str, str] = {
        "device_type": 'the EP ignores it: use device = "npu", "gpu" or "cpu"',
        "precision": "the EP ignores it: use load_config = "
        '{ CPU = { INFERENCE_PRECISION_HINT = "f32" } }',
        "num_of_threads": "the EP ignores it: use load_config = { CPU = { INFERENCE_NUM_THREADS = 1 } }",
        "cache_dir": "the EP ignores it: the build has its own cache",
    }
    """Options of older releases that many projects have."""
    sources = ("onnxruntime.ai", "onnxruntime-ep-openvino 1.8.1")
    notes = (
        (
            "A context for the CPU needs the instructions of the build machine's processor: see the report."
        ),
    )

    def number_format(self, device: Device, options: Mapping[str, str]) -> NumberFormat | None:
        if '"f32"' in options.get("load_config", ""):
            return None
        return FLOAT16 if device in ("gpu", "npu", "any") else None

    def error_in_words(self, message: str) -> str | None:
        """Read an error of the frontend that converts ONNX models, which names a node by its first output."""
        if (match := re.search(_NOT_CONVERTED, message)) is None:
            return None
        # The last line has the reason, and those before it the checks that failed.
        lines = [line.strip() for line in match["reason"].splitlines() if line.strip()]
        reason = f": {lines[-1].rstrip('.')}" if lines else ""
        return (
            f"OpenVINO cannot convert the node {match['op']} that makes {match['name']!r}{reason}."
        )

    def compiled_for(self, compatibility: str) -> dict[str, str]:
        """Read ``{"ovep_ver": ..., "ov_compat_string": "meta=1.0;ov=2026.4.1;isa=..."}``."""
        text = str(_facts(compatibility).get("ov_compat_string", ""))
        fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        titles = {"ov": "OpenVINO", "isa": "ISA"}
        return {title: fields[name] for name, title in titles.items() if name in fields}

    def disagreement(
        self, compatibility: str, ep_sdk_version: str, options: Mapping[str, str]
    ) -> str | None:
        """Compare the OpenVINO version of the compatibility string with that of the context."""
        compiled = self.compiled_for(compatibility).get("OpenVINO")
        if not compiled or not ep_sdk_version or f"{compiled}.".startswith(f"{ep_sdk_version}."):
            return None
        return f"the context names OpenVINO {ep_sdk_version}, but its compatibility string names {compiled}"


PROVIDER = OpenVINO()

"""AMD NPUs through the Vitis AI execution provider, a part of Ryzen AI and of Windows ML."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.graph.facts import Limits
from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named


class VitisAI(Provider):
    name = "vitisai"
    ep = "VitisAIExecutionProvider"
    title = "AMD NPUs (Ryzen AI) through Vitis AI"
    product = "context"
    limits = Limits()
    distributions = ("onnxruntime-vitisai", "onnxruntime-windowsml")
    devices = ("npu",)
    # Models for it are quantized.
    tolerance = Tolerance(snr=15, cosine=0.98, unit=0.1)
    needs = "an AMD Ryzen AI processor and its driver"
    verified = "Only the options: its packages are not on PyPI."
    systems = ("linux", "win32")
    options: Mapping[str, Option] = {
        **named("config_file", "file"),
        **named("xclbin", "file", "both"),
        **named("enable_cache_file_io_in_mem", "bool"),
        "opt_level": choice("0 1 2 3 65536"),
        "target": choice("X1 X2", "both"),
        "log_level": choice("error warning info fatal debug", "both"),
    }
    reserved: Mapping[str, str] = {
        "cache_dir": "the build has its own cache",
        "cache_key": "the build has its own cache",
        "encryption_key": "a key does not belong in a configuration, and the wheel would contain it",
    }
    static_shapes = True
    # `runs_on` is the default: only the NPU runs contexts, and without it the EP offers no device.
    sources = ("onnxruntime.ai", "AMD's Ryzen AI documentation")
    notes = (
        (
            "onnxruntime-vitisai is part of AMD's Ryzen AI software, and not on PyPI: build without "
            "isolation in its environment, or configure AMD's index in the build front end."
        ),
        "If the EP is a library of its own (Windows ML), set `library`.",
    )


PROVIDER = VitisAI()

"""AMD NPUs through the Vitis AI execution provider, a part of Ryzen AI and of Windows ML."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.graph.limits import NUMBERS_ONLY
from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, switch

_OPTIONS: Mapping[str, Option] = {
    "config_file": Option("The compiler's configuration", kind="json", in_file=True),
    "target": choice("Backend for int8 models", "X1", "X2", default="X2", scope="both"),
    "xclbin": Option("The NPU's overlay", kind="file", scope="both"),
    "opt_level": choice(
        "Optimization level of int8 models", "0", "1", "2", "3", "65536", default="0"
    ),
    "encryption_key": Option("Key that encrypts the compiled model", secret=True, scope="both"),
    "enable_cache_file_io_in_mem": switch("Keep the EP's own cache in memory", "1"),
    "log_level": choice(
        "Level of the EP's log",
        "error",
        "warning",
        "info",
        "fatal",
        "debug",
        default="error",
        scope="both",
    ),
}


_RESERVED: Mapping[str, str] = {
    "cache_dir": "the build has its own cache",
    "cache_key": "the build has its own cache",
}


class VitisAI(Provider):
    name = "vitisai"
    ep = "VitisAIExecutionProvider"
    title = "AMD NPUs (Ryzen AI) through Vitis AI"
    product = "context"
    limits = NUMBERS_ONLY
    distributions = ("onnxruntime-vitisai", "onnxruntime-windowsml")
    devices = ("npu",)
    # Models for it are quantized.
    tolerance = Tolerance(snr=15, cosine=0.98, unit=0.1)
    needs = "an AMD Ryzen AI processor and its driver"
    verified = "Only the options: its packages are not on PyPI."
    systems = ("linux", "win32")
    options = _OPTIONS
    reserved = _RESERVED
    static_shapes = True
    # `runs_on` is the default: only the NPU runs contexts, and without it the EP offers no device.
    sources = ("AMD's Ryzen AI documentation",)
    notes = (
        (
            "onnxruntime-vitisai is part of AMD's Ryzen AI software, and not on PyPI: build without "
            "isolation in its environment, or configure AMD's index in the build front end."
        ),
        "If the EP is a library of its own (Windows ML), set `library`.",
    )


PROVIDER = VitisAI()

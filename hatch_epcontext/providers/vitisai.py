"""AMD's NPUs through the Vitis AI execution provider, which comes with Ryzen AI and Windows ML."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, switch, text

_OPTIONS: Mapping[str, Option] = {
    "config_file": text("The compiler's configuration"),
    "target": choice("Backend for int8 models", "X1", "X2", default="X2", scope="both"),
    "xclbin": text("The overlay of the NPU", scope="both"),
    "opt_level": choice("Optimization of int8 models", "0", "1", "2", "3", "65536", default="0"),
    "encryption_key": text("Key that encrypts the compiled model", scope="both"),
    "enable_cache_file_io_in_mem": switch("Keep the EP's own cache in memory", "1"),
    "log_level": choice(
        "The EP's log", "error", "warning", "info", "fatal", "debug", default="error", scope="both"
    ),
}

PROVIDER = Provider(
    name="vitisai",
    ep="VitisAIExecutionProvider",
    title="AMD's NPUs (Ryzen AI) through Vitis AI",
    product="context",
    flavours=("onnxruntime-vitisai", "onnxruntime-windowsml"),
    devices=("npu",),
    # Its models are quantized.
    tolerance=Tolerance(rtol=5e-2, atol=1e-1, cosine=0.98),
    needs="an AMD Ryzen AI processor and its driver",
    verified="Nothing but its options: its packages are not on PyPI.",
    systems=("linux", "win32"),
    options=_OPTIONS,
    managed={
        "cache_dir": "artifacts are kept in this package's cache",
        "cache_key": "artifacts are kept in this package's cache",
    },
    static_shapes=True,
    # Only the NPU itself runs what was compiled for it, and then the EP offers it.
    sources=('AMD\'s Ryzen AI documentation, "Vitis AI Execution Provider options"',),
    notes=(
        (
            "onnxruntime-vitisai is in AMD's Ryzen AI software, not on PyPI: build without isolation in "
            "its environment, or name AMD's index to the front end."
        ),
        "Where the EP comes as a library (Windows ML), name it with `library`.",
    ),
)

"""What messages of vendors' libraries and of the system's loader mean."""

from __future__ import annotations

import re

from hatch_epcontext.frozen import dataclass

_SUPPLIERS = {
    "the driver of an NVIDIA GPU": ("cuda.so", "nvcuda", "nvidia-ml"),
    "NVIDIA's TensorRT, which is not a dependency of onnxruntime-gpu": ("nvinfer", "nvonnxparser"),
    'cuDNN, for example with pip install "onnxruntime-gpu[cudnn]"': ("cudnn",),
    'CUDA\'s libraries, for example with pip install "onnxruntime-gpu[cuda]"': (
        *("cudart", "cublas", "cufft", "curand", "nvrtc", "nvJitLink"),
    ),
    "the package of the QNN execution provider again": ("Qnn",),
    "the package of the TensorRT RTX execution provider": ("tensorrt_rtx",),
    "AMD's ROCm": ("amdhip", "hip", "roc"),
    "the driver of an Intel NPU, or the package for Windows": ("openvino_intel_npu_compiler",),
    "the driver of the GPU or NPU": ("ze_loader", "OpenCL", "vulkan"),
    # QNN's libraries need it, and minimal systems lack it.
    "libatomic1 (Debian, Ubuntu) or libatomic (Fedora)": ("atomic.so",),
}
"""For each product the starts of the names of its libraries, without ``lib``."""

_MISSING = (
    r"(?i)(?<![^\s/\\\"'])(?P<name>[^\s/\\\"']+\.so[.\d]*): cannot open shared object file"
    # Windows names the library that is loaded, even if a library that it needs is missing.
    r"|\b(?:error|code):? 126\b.{0,999}?(?P<dll>[^\s/\\\"']{1,255}\.dll)\b"
    # So does Python.
    r"|Could not find module '(?:[^']*[/\\])?(?P<module>[^'/\\]+)' \(or one of its dependencies\)"
)
"""Of texts, which `re` compiles when they are used: few builds read errors."""


@dataclass(frozen=True)
class MissingLibrary:
    """A library that the system did not find, as a noun, and what to do.

    ``is_driver``: whether it comes with the driver of a device.
    """

    name: str
    advice: str
    is_driver: bool = False

    def __str__(self) -> str:
        return self.name


def missing(message: str) -> MissingLibrary | None:
    """The missing library in ``message``, an error of the system's loader, which only names the file.

    None for any other message.
    """
    match = re.search(_MISSING, message)
    if match is None:
        return None
    name = match["name"] or match["dll"] or match["module"]
    advice = (
        f"Install the package that contains {name}. To find it: apt-file search {name} (Debian, Ubuntu) or "
        f"dnf provides '*/{name}' (Fedora)."
    )
    if match["name"] is None:
        advice = "Install the EP's package again, and what its documentation requires."
    is_driver = False
    for supplier, starts in _SUPPLIERS.items():
        if name.removeprefix("lib").startswith(starts):
            advice, is_driver = f"Install {supplier}.", supplier.startswith("the driver of ")
    noun = name if match["name"] else f"{name}, or a library that it needs,"
    return MissingLibrary(noun, advice, is_driver)


_BENIGN = "|".join(
    (
        # QNN, except on Windows for Arm.
        r"File mapped weights feature is only available",
        # An EP for another version of ONNX Runtime.
        r"EPContext encryption config unavailable",
        # The C library that QNN's simulator contains.
        r"# ?LIBNATIVE: No alternate configuration",
        # Whenever nodes are left to the CPU.
        r"Unable to get producer node for OrtValueInfo",
        r"Some nodes were not assigned to the preferred execution providers",
        r"Rerunning with verbose output on a non-minimal build",
        # Exporters write such models.
        r"appears in graph inputs and will not be treated as constant value",
        r"CleanUnusedInitializersAndNodeArgs\] Removing initializer",
    )
)


def is_benign(line: str) -> bool:
    """Whether a line of a log is one that clean runs print too: it explains no failure."""
    return re.search(_BENIGN, line) is not None

"""What messages of vendors' libraries and of the system's loader mean."""

from __future__ import annotations

import re

from hatch_epcontext.frozen import dataclass

_CUDA = 'CUDA\'s libraries, for example with pip install "onnxruntime-gpu[cuda]"'

_SUPPLIERS = (
    ("cuda.so", "the driver of an NVIDIA GPU"),
    ("nvcuda", "the driver of an NVIDIA GPU"),
    ("nvidia-ml", "the driver of an NVIDIA GPU"),
    ("nvinfer", "NVIDIA's TensorRT, which is not a dependency of onnxruntime-gpu"),
    ("nvonnxparser", "NVIDIA's TensorRT, which is not a dependency of onnxruntime-gpu"),
    ("cudnn", 'cuDNN, for example with pip install "onnxruntime-gpu[cudnn]"'),
    ("cudart", _CUDA),
    ("cublas", _CUDA),
    ("cufft", _CUDA),
    ("curand", _CUDA),
    ("nvrtc", _CUDA),
    ("nvJitLink", _CUDA),
    ("Qnn", "the package of the QNN execution provider again"),
    ("tensorrt_rtx", "the package of the TensorRT RTX execution provider"),
    ("amdhip", "AMD's ROCm"),
    ("migraphx", "AMD's ROCm, with MIGraphX"),
    ("hip", "AMD's ROCm"),
    ("roc", "AMD's ROCm"),
    ("openvino_intel_npu_compiler", "the driver of an Intel NPU, or the package for Windows"),
    ("ze_loader", "the driver of an Intel NPU or GPU (Level Zero)"),
    ("OpenCL", "the driver of the GPU (OpenCL)"),
    ("vulkan", "the driver of the GPU, with the Vulkan loader"),
    # Libraries that minimal systems lack.
    ("atomic.so", "libatomic1 (Debian, Ubuntu) or libatomic (Fedora)"),
    ("gomp.so", "libgomp1 (Debian, Ubuntu) or libgomp (Fedora)"),
    ("hwloc.so", "libhwloc15 (Debian, Ubuntu) or hwloc-libs (Fedora)"),
    ("stdc++.so", "libstdc++6 (Debian, Ubuntu) or libstdc++ (Fedora)"),
    ("z.so", "zlib1g (Debian, Ubuntu) or zlib (Fedora)"),
)

_MISSING = re.compile(
    r"(?P<name>[^\s/\\\"']+\.so[.\d]*): cannot open shared object file"
    # Windows names the library that is loaded, even if a library that it needs is missing.
    r"|\b(?:error|code):? 126\b.*?(?P<dll>[^\s/\\\"']+\.dll)\b"
    # So does Python.
    r"|Could not find module '(?:[^']*[/\\])?(?P<module>[^'/\\]+)' \(or one of its dependencies\)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class MissingLibrary:
    """A library that the system did not find; ``supplier``: the product that contains it, if it is known.

    ``or_below``: the missing one may also be a library that this one needs.
    """

    name: str
    supplier: str | None
    or_below: bool = False

    def __str__(self) -> str:
        return f"{self.name}, or a library that it needs," if self.or_below else self.name

    @property
    def advice(self) -> str:
        """What to do."""
        if self.supplier:
            return f"Install {self.supplier}."
        if self.or_below:
            return "Install the EP's package again, and what its documentation requires."
        return (
            f"Install the package that contains {self.name}. To find it: apt-file search {self.name} "
            f"(Debian, Ubuntu) or dnf provides '*/{self.name}' (Fedora)."
        )


def missing(message: str) -> MissingLibrary | None:
    """The missing library in ``message``, an error of the system's loader, which only names the file.

    None for any other message.
    """
    match = _MISSING.search(message)
    if match is None:
        return None
    name = match["name"] or match["dll"] or match["module"]
    stem = name.removeprefix("lib")
    suppliers = (supplier for prefix, supplier in _SUPPLIERS if stem.startswith(prefix))
    return MissingLibrary(name, next(suppliers, None), or_below=match["name"] is None)


_BENIGN = re.compile(
    "|".join(
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
)


def is_benign(line: str) -> bool:
    """Whether a line of a log is one that clean runs print too: it explains no failure."""
    return _BENIGN.search(line) is not None

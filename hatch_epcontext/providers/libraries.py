"""Which product contains a missing shared library: the system's loader only names the file."""

from __future__ import annotations

import re

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
    ("tensorrt_rtx", "the package of the TensorRT RTX execution provider"),
    ("amdhip", "AMD's ROCm"),
    ("migraphx", "AMD's ROCm, with MIGraphX"),
    ("hip", "AMD's ROCm"),
    ("roc", "AMD's ROCm"),
    ("openvino_intel_npu_compiler", "the driver of an Intel NPU, or the package for Windows"),
    ("ze_loader", "the driver of an Intel NPU or GPU (Level Zero)"),
    ("OpenCL", "the driver of the GPU (OpenCL)"),
    ("vulkan", "the driver of the GPU, with the Vulkan loader"),
)

_MISSING = re.compile(r"([^\s/\\\"']+\.so[.\d]*): cannot open shared object file")


def missing(message: str) -> tuple[str, str | None] | None:
    """The missing library that ``message``, of the system's loader, names, and the product that contains
    it, or None if that is unknown. None for any other message.
    """
    found = _MISSING.search(message)
    if found is None:
        return None
    name = found[1]
    stem = name.removeprefix("lib")
    suppliers = (supplier for prefix, supplier in _SUPPLIERS if stem.startswith(prefix))
    return name, next(suppliers, None)

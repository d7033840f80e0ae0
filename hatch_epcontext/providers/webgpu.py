"""Any GPU through the plugin EP in onnxruntime-ep-webgpu, which compiles nothing ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Plugin, Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named

_BUFFERS = choice("disabled lazyRelease simple bucket", "load")

_OPTIONS: Mapping[str, Option] = {
    "preferredLayout": choice("NCHW NHWC", "load"),
    "dawnBackendType": choice("D3D12 Vulkan Metal", "load"),
    "powerPreference": choice("high-performance low-power", "load"),
    "validationMode": choice("disabled wgpuOnly basic full", "load"),
    "storageBufferCacheMode": _BUFFERS,
    "uniformBufferCacheMode": _BUFFERS,
    "queryResolveBufferCacheMode": _BUFFERS,
    "defaultBufferCacheMode": _BUFFERS,
    **named(
        "enableGraphCapture enableInt64 enableRobustness enablePIXCapture preserveDevice",
        "bool",
        "load",
    ),
    **named(
        """
        sessionBufferPoolGenerations maxStorageBufferBindingSize kvCacheQuantizationBits
        multiRotaryCacheConcatOffset deviceId
        """,
        "int",
        "load",
    ),
    **named("maxNumPendingDispatches", "int", "load", minimum=1),
    **named("forceCpuNodeNames", "text", "load"),
    **named("webgpuInstance webgpuDevice dawnProcTable", "pointer", "load"),
}


class WebGpu(Provider):
    name = "webgpu"
    ep = "WebGpuExecutionProvider"
    title = "any GPU through WebGPU (D3D12, Vulkan, Metal)"
    product = "optimized"
    distributions = ("onnxruntime", "onnxruntime-gpu")
    devices = ("gpu",)
    open_shapes_on = ("gpu",)
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "a GPU, and on Linux its Vulkan driver"
    verified = "Optimized on Linux x86-64. Without a GPU the graph runs on the CPU instead."
    requirements = ("onnxruntime-ep-webgpu>=0.4",)
    python = (3, 11)
    plugin = Plugin("onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu", "WebGpuExecutionProvider")
    options = _OPTIONS
    sources = ("onnxruntime-ep-webgpu 0.4.0",)


PROVIDER = WebGpu()

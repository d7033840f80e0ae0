"""Any GPU through the plugin EP in onnxruntime-ep-webgpu, which compiles nothing ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Plugin, Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, number, pointer, switch


def _buffers(doc: str, default: str) -> Option:
    modes = ("disabled", "lazyRelease", "simple", "bucket")
    return choice(doc, *modes, default=default, scope="load")


_OPTIONS: Mapping[str, Option] = {
    "preferredLayout": choice("Preferred layout", "NCHW", "NHWC", default="NHWC", scope="load"),
    "enableGraphCapture": switch("Capture and replay graphs", scope="load"),
    "enableInt64": switch("Run operators on int64", scope="load"),
    "enableRobustness": switch("Check bounds in shaders", scope="load"),
    "enablePIXCapture": switch("Capture for PIX", scope="load"),
    "dawnBackendType": choice("Graphics API", "D3D12", "Vulkan", "Metal", scope="load"),
    "powerPreference": choice(
        "Which GPU is preferred",
        "high-performance",
        "low-power",
        default="high-performance",
        scope="load",
    ),
    "validationMode": choice(
        "How much is checked",
        "disabled",
        "wgpuOnly",
        "basic",
        "full",
        default="basic",
        scope="load",
    ),
    "storageBufferCacheMode": _buffers("Reuse of storage buffers", "bucket"),
    "uniformBufferCacheMode": _buffers("Reuse of uniform buffers", "simple"),
    "queryResolveBufferCacheMode": _buffers("Reuse of query buffers", "disabled"),
    "defaultBufferCacheMode": _buffers("Reuse of other buffers", "disabled"),
    "sessionBufferPoolGenerations": number("Generations of the buffer pool", scope="load"),
    "maxStorageBufferBindingSize": number(
        "Maximum size of one storage buffer in bytes", scope="load"
    ),
    "maxNumPendingDispatches": number(
        "Maximum dispatches that are sent together", "16", 1, scope="load"
    ),
    "kvCacheQuantizationBits": number("Bits of the key-value cache", scope="load"),
    "multiRotaryCacheConcatOffset": number("Token at which LongRoPE changes", scope="load"),
    "forceCpuNodeNames": Option("Nodes that run on the CPU", scope="load"),
    "preserveDevice": switch("Keep the device after the last session", scope="load"),
    "deviceId": number("Number of the device", scope="load"),
    "webgpuInstance": pointer("The app's own WGPUInstance"),
    "webgpuDevice": pointer("The app's own WGPUDevice"),
    "dawnProcTable": pointer("The app's own Dawn procedure table"),
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

"""GPUs through the WebGPU plugin EP in onnxruntime-ep-webgpu, which compiles nothing ahead of time.

Options: those that the plugin's library 0.4.0 reads, with the values in webgpu_provider_options.h.
"""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import NVIDIA_QUERY, OF_THE_APP, Plugin, Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named

_CACHED = choice("disabled lazyRelease simple bucket", "load")


class WebGpu(Provider):
    name = "webgpu"
    ep = "WebGpuExecutionProvider"
    title = "GPUs of all vendors through WebGPU (Vulkan, Direct3D 12 or Metal)"
    product = "optimized"
    genai_name = "WebGPU"
    genai_plain = True
    distributions = ("onnxruntime", "onnxruntime-gpu")
    devices = ("gpu",)
    open_shapes_on = ("gpu",)
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "a GPU with a driver for Vulkan (on Linux with libvulkan.so.1), Direct3D 12 or Metal"
    device_query = NVIDIA_QUERY
    verified = "Optimized, loaded and run. Without a GPU the CPU runs the graph."
    hardware = "Verified on an NVIDIA H200, with Linux and Vulkan."
    requirements = ("onnxruntime-ep-webgpu>=0.4",)
    python = (3, 11)
    systems = ("linux", "win32", "darwin")
    plugin = Plugin("onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu", "WebGpuExecutionProvider")
    options: Mapping[str, Option] = {
        **named(
            "enableGraphCapture enableInt64 enablePIXCapture enableRobustness preserveDevice",
            "bool",
            "load",
        ),
        **named(
            """
            deviceId maxNumPendingDispatches maxStorageBufferBindingSize multiRotaryCacheConcatOffset
            sessionBufferPoolGenerations
            """,
            "int",
            "load",
        ),
        "dawnBackendType": choice("D3D12 Vulkan", "load"),
        "forceCpuNodeNames": Option("text", "load"),
        "kvCacheQuantizationBits": choice("0 4 8", "load"),
        "powerPreference": choice("high-performance low-power", "load"),
        "preferredLayout": choice("NCHW NHWC", "load"),
        "validationMode": choice("disabled wgpuOnly basic full", "load"),
        "defaultBufferCacheMode": _CACHED,
        "queryResolveBufferCacheMode": _CACHED,
        "storageBufferCacheMode": _CACHED,
        "uniformBufferCacheMode": _CACHED,
    }
    reserved: Mapping[str, str] = {
        "dawnProcTable": OF_THE_APP,
        "webgpuDevice": OF_THE_APP,
        "webgpuInstance": OF_THE_APP,
    }
    sources = ("onnxruntime-ep-webgpu 0.4.0",)
    notes = (
        "The EP takes one GPU, which `powerPreference` chooses.",
        (
            "On an H200 (onnxruntime 1.32.0, onnxruntime-ep-webgpu 0.4.0) seven models with real inputs "
            "agreed with the CPU by 74 to 148 dB."
        ),
        (
            "Without a display, as in a container, NVIDIA's driver for Vulkan needs the variable "
            "`VK_DRIVER_FILES`: a copy of `nvidia_icd.json` that names `libEGL_nvidia.so.0`."
        ),
    )


PROVIDER = WebGpu()

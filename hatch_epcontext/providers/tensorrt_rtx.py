"""NVIDIA RTX GPUs through the plugin EP in onnxruntime-ep-nv-tensorrt-rtx-cu12 and -cu13.

Options, their types and defaults: ``tensorrt_rtx_provider_options.h`` in those packages, 0.5.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hatch_epcontext.graph.facts import Limits
from hatch_epcontext.providers.base import (
    HEADER,
    IN_PROFILES,
    KEEPS_NO_FILES,
    NVIDIA_QUERY,
    OF_THE_APP,
    Chip,
    CompilerLibrary,
    Plugin,
    ProfileOptions,
    Provider,
    Tolerance,
)
from hatch_epcontext.providers.option import Option, choice, named

_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""The compute capabilities that an engine can be for, in the order of their bits in its header."""

_NVIDIA = "[NVIDIA](https://developer.nvidia.com/cuda-gpus)"

_MAGIC, _SIZE, _VERSION, _GPUS = b"vtrt", 16, 24, 32
"""An engine begins with a magic number; its size, the library's version and the GPUs are at these bytes of
its header. That is no documented format: it was found by comparing engines of 1.7.1.116."""


def engine_size(header: bytes | memoryview) -> int:
    """The size in bytes of the engine with this header."""
    return int.from_bytes(header[_SIZE : _SIZE + 8], "little")


def sdk_version(version: str) -> str:
    """The library's ``version``, such as ``"1.7.1.116"``, as contexts have it: ``"10701"``."""
    major, minor, patch, *_ = map(int, version.split("."))
    return str(10_000 * major + 100 * minor + patch)


class TensorRTRTX(Provider):
    name = "tensorrt-rtx"
    ep = "NvTensorRTRTXExecutionProvider"
    title = "NVIDIA RTX GPUs through TensorRT for RTX"
    example = '# chip = ["rtx-30", "rtx-40", "rtx-50"]  # without a GPU'
    product = "context"
    limits = Limits()
    distributions = ("onnxruntime-gpu", "onnxruntime")
    devices = ("gpu",)
    # Its builder measures kernels on the GPU, and two at once would disturb each other.
    exclusive_device = True
    tolerance = Tolerance(snr=20, cosine=0.99)
    needs = "an NVIDIA RTX GPU of compute capability 8.6, 8.9, or 12.0 and newer"
    device_query = NVIDIA_QUERY
    verified = (
        "Compiled. On an H100 that was reported to it as an RTX GPU, the EP read every context, up to the "
        "loading of GPU code."
    )
    requirements = ("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.5",)
    conflicts = (
        frozenset({"onnxruntime-ep-nv-tensorrt-rtx-cu12", "onnxruntime-ep-nv-tensorrt-rtx-cu13"}),
    )
    systems = ("linux", "win32")
    plugin = Plugin(
        "onnxruntime_ep_nv_tensorrt_rtx",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "NvTensorRTRTXExecutionProvider",
    )
    compiler_library = CompilerLibrary(
        module="tensorrt_rtx_bindings.tensorrt_rtx",
        compiler="hatch_epcontext.worker.rtx_library",
        requirements=("tensorrt-rtx-cu13-bindings>=1.7,<1.8", "tensorrt-rtx-cu13-libs>=1.7,<1.8"),
        capabilities=_CAPABILITIES,
        options=frozenset(
            {
                "device_id",
                "enable_cuda_graph",
                "nv_multi_profile_enable",
                "nv_max_workspace_size",
                "nv_max_shared_mem_size",
                "nv_detailed_build_log",
            }
        ),
        ep_versions={"1.7.": "0.5"},
        plugins=frozenset(
            {"CausalConvWithState", "GroupQueryAttention", "LinearAttention", "MatMulNBits"}
            | {"QMoE", "RotaryEmbedding"}
        ),
        plugin_requirements=("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.5,<0.6",),
    )
    chips: Mapping[str, Chip] = {
        **{
            name: Chip({"compute capability": capability}, _NVIDIA, "floats")
            for name, capability in (("rtx-30", "8.6"), ("rtx-40", "8.9"), ("rtx-50", "12.0"))
        },
        **{capability: Chip({"compute capability": capability}) for capability in _CAPABILITIES},
        "auto": Chip({}),
    }
    driver_files = ("/proc/driver/nvidia/version",)
    profiles = ProfileOptions("nv_profile", several="nv_multi_profile_enable")
    options: Mapping[str, Option] = {
        **named("nv_max_workspace_size nv_max_shared_mem_size", "int"),
        **named("nv_detailed_build_log", "bool"),
        **named("nv_op_types_to_exclude", "text"),
        "nv_target_sm": choice("sm86 sm89 sm120 sm121"),
        **named("device_id nv_multi_rotary_cache_concat_offset", "int", "both"),
        **named(
            "nv_multi_profile_enable enable_cuda_graph nv_use_external_data_initializer",
            "bool",
            "both",
        ),
        **named("nv_weight_streaming_budget", "text", "both"),
        **named(
            """
            has_user_compute_stream nv_enable_profiling nv_use_sync_gpu_allocator
            nv_persistent_context_memory
            """,
            "bool",
            "load",
        ),
        **named("nv_length_aux_stream_array", "int", "load"),
        **named("nv_runtime_cache_path nv_profiling_output_file", "text", "load"),
    }
    reserved: Mapping[str, str] = {
        "nv_weight_stripped_engine_enable_experimental": "an engine without weights can only be opened "
        "together with the source model",
        "nv_dump_subgraphs": KEEPS_NO_FILES,
        "user_compute_stream": OF_THE_APP,
        "user_aux_stream_array": OF_THE_APP,
        "VkExternalComputeQueueDataParamsNV_data": OF_THE_APP,
        **dict.fromkeys(profiles.names, IN_PROFILES),
        **dict.fromkeys(
            ("profile_min_shapes", "profile_opt_shapes", "profile_max_shapes"), IN_PROFILES
        ),
    }
    compares = True
    genai_name = "NvTensorRtRtx"
    runtime_cache = "nv_runtime_cache_path"
    sources = ("onnxruntime.ai", "onnxruntime-ep-nv-tensorrt-rtx-cu13 0.5.0")
    notes = (
        (
            'For CUDA 12: `requirements = ["onnxruntime-ep-nv-tensorrt-rtx-cu12>=0.5"]`. The two packages '
            "contain the same files, so an environment can have only one."
        ),
        (
            "Without a driver (`libcuda.so.1`) the EP does not load. NVIDIA's own library compiles "
            "[without a GPU](targets.md#tensorrt-rtx-without-a-gpu)."
        ),
        (
            "Set `nv_runtime_cache_path` in `load-options` to a folder on the user's machine, such as "
            '`"{user-cache}/rtx"`.'
        ),
    )

    def wrong_blobs(self, compatibility: str, blobs: Sequence[tuple[str, int]]) -> str | None:
        """Compare engines with their headers, and these with the compatibility string, one of them."""
        written = self.compiled_for(compatibility)
        for header, size in blobs:
            compiled_for = self.compiled_for(header)
            if not compiled_for and (written or not size):
                return f"an engine of {size} bytes has no header that is known"
            if compiled_for and (counted := engine_size(bytes.fromhex(header))) != size:
                return f"an engine has {size} bytes, and its header counts {counted}"
            for name, value in written.items():
                if value != (own := compiled_for[name]):
                    return (
                        f"an engine is for {name} {own}, and the compatibility string says {value}"
                    )
        named = engine_size(bytes.fromhex(compatibility)) if written else None
        if blobs and named not in (None, *(size for _, size in blobs)):
            return f"the compatibility string is of an engine of {named} bytes, which is not there"
        return None

    def compiled_for(self, compatibility: str) -> dict[str, str]:
        """Read the compatibility string, which is the header of an engine in hexadecimal digits."""
        try:
            header = bytes.fromhex(compatibility)
        except ValueError:
            return {}
        if len(header) != HEADER or not header.startswith(_MAGIC):
            return {}
        bits = int.from_bytes(header[_GPUS : _GPUS + 4], "little")
        gpus = [capability for bit, capability in enumerate(_CAPABILITIES) if bits >> bit & 1]
        return {
            "compute capability": ", ".join(gpus),
            "TensorRT RTX": ".".join(map(str, header[_VERSION : _VERSION + 4])),
        }

    def disagreement(
        self, compatibility: str, ep_sdk_version: str, options: Mapping[str, str]
    ) -> str | None:
        """Compare the version in the engine's header with that of the context, such as ``"10701"``."""
        version = self.compiled_for(compatibility).get("TensorRT RTX")
        if version is None or not ep_sdk_version:
            return None
        if ep_sdk_version == sdk_version(version):
            return None
        return f"the context names the version {ep_sdk_version}, and its engine is of {version}"


PROVIDER = TensorRTRTX()

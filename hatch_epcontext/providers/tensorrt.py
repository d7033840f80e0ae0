"""NVIDIA GPUs through the TensorRT execution provider in onnxruntime-gpu."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.graph.limits import NUMBERS_ONLY
from hatch_epcontext.graph.number_format import BFLOAT16, FLOAT16, NumberFormat
from hatch_epcontext.providers.base import ProfileOptions, Provider, Tolerance
from hatch_epcontext.providers.option import Option, number, pointer, switch
from hatch_epcontext.shipped import Device

_PROFILES = ProfileOptions(
    "trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"
)
_SHAPES = "of the profiles, as `input:1x3,...`; prefer `profiles`"

_OPTIONS: Mapping[str, Option] = {
    "device_id": number("Number of the GPU", scope="both"),
    "has_user_compute_stream": switch("Use the stream in `user_compute_stream`", scope="load"),
    "user_compute_stream": pointer("The app's own `cudaStream_t`"),
    "trt_max_workspace_size": number("Maximum workspace in bytes", "0: all of the GPU's memory"),
    "trt_max_partition_iterations": number("Maximum rounds of partitioning", "1000", 1),
    "trt_min_subgraph_size": number("Minimum nodes of a partition", "1", 1),
    "trt_fp16_enable": switch("Compute in float16"),
    "trt_bf16_enable": switch("Compute in bfloat16"),
    "trt_int8_enable": switch("Compute in int8"),
    "trt_int8_calibration_table_name": Option("Calibration table for int8", kind="file"),
    "trt_int8_use_native_calibration_table": switch(
        "The calibration table is in TensorRT's own format"
    ),
    "trt_dla_enable": switch("Use the Deep Learning Accelerator"),
    "trt_dla_core": number("Number of the Deep Learning Accelerator", scope="both"),
    "trt_timing_cache_enable": switch("Cache the timings of kernels"),
    "trt_timing_cache_path": Option("Folder for the timing cache", kind="output"),
    "trt_force_timing_cache": switch("Use the timing cache of another GPU too"),
    "trt_detailed_build_log": switch("Log the building of engines"),
    "trt_build_heuristics_enable": switch("Use heuristics, to build faster"),
    "trt_sparsity_enable": switch("Allow sparse weights"),
    "trt_builder_optimization_level": number("How long to search for fast kernels", "3", 0, 5),
    "trt_auxiliary_streams": number("Streams in addition to the main one", "-1: heuristic", -1),
    "trt_tactic_sources": Option("Sources of tactics, such as `-CUDNN,+CUBLAS`"),
    "trt_preview_features": Option(
        "Preview features of TensorRT, such as `ALIASED_PLUGIN_IO_10_03`"
    ),
    "trt_extra_plugin_lib_paths": Option(
        "Paths of plugin libraries, with `;` between them",
        kind="file",
        scope="both",
        paths=r"[^;]+",
    ),
    "trt_layer_norm_fp32_fallback": switch("Compute LayerNormalization in float32"),
    "trt_op_types_to_exclude": Option("Operators that TensorRT does not run"),
    "trt_engine_hw_compatible": switch("Build engines for all GPUs since Ampere"),
    "trt_force_sequential_engine_build": switch("Build engines one after the other"),
    "trt_context_memory_sharing_enable": switch("Engines share memory", scope="both"),
    "trt_cuda_graph_enable": switch("Capture and replay CUDA graphs", scope="both"),
    "trt_dump_subgraphs": switch("Write the partitions to disk"),
    "trt_engine_decryption_enable": switch("Engines are encrypted", scope="both"),
    "trt_engine_decryption_lib_path": Option(
        "Library that decrypts engines", kind="file", scope="both"
    ),
    "trt_load_user_initializer": switch("Use the app's initializers", scope="load"),
    "trt_profile_min_shapes": Option(f"Smallest shapes {_SHAPES}"),
    "trt_profile_opt_shapes": Option(f"Best shapes {_SHAPES}"),
    "trt_profile_max_shapes": Option(f"Largest shapes {_SHAPES}"),
    "trt_onnx_bytestream": pointer("The source model in memory, for engines without weights"),
    "trt_onnx_bytestream_size": pointer("Size of the source model in memory"),
    "trt_external_data_bytestream": pointer("Its external data in memory"),
    "trt_external_data_bytestream_size": pointer("Size of the external data in memory"),
}

_FIXED = "the paths of the files in the wheel are fixed"

_WEIGHTLESS = "an engine without weights can only be opened together with the source model"

_RESERVED: Mapping[str, str] = {
    "trt_dump_ep_context_model": "always set when a model is compiled",
    "trt_ep_context_file_path": _FIXED,
    "trt_ep_context_embed_mode": "use embed = true or false",
    "trt_engine_cache_enable": "an engine beside the context model is its sidecar",
    "trt_engine_cache_path": _FIXED,
    "trt_engine_cache_prefix": _FIXED,
    "trt_onnx_model_folder_path": _FIXED,
    "trt_weight_stripped_engine_enable": _WEIGHTLESS,
}


class TensorRT(Provider):
    name = "tensorrt"
    ep = "TensorrtExecutionProvider"
    title = "NVIDIA GPUs through TensorRT"
    product = "context"
    limits = NUMBERS_ONLY
    distributions = ("onnxruntime-gpu",)
    devices = ("gpu",)
    # Its builder measures kernels on the GPU, and two at once would disturb each other.
    exclusive_device = True
    tolerance = Tolerance(snr=20, cosine=0.99)
    needs = "an NVIDIA GPU, CUDA and TensorRT"
    verified = (
        "On Linux x86-64 up to the error that the libraries of TensorRT and CUDA are missing."
    )
    aliases = ("trt",)
    systems = ("linux", "win32")
    options = _OPTIONS
    reserved = _RESERVED
    profiles = _PROFILES
    sources = ("onnxruntime.ai", "onnxruntime-gpu 1.31.1")
    notes = (
        (
            "An engine is for the GPU on which it was built, unless `trt_engine_hw_compatible = true`. "
            "On another GPU the EP only logs a warning."
        ),
        (
            "onnxruntime-gpu 1.31 needs TensorRT 10, CUDA 13 and cuDNN 9. Install TensorRT from NVIDIA; "
            "the extras `[cuda,cudnn]` install the others."
        ),
    )

    def number_format(self, device: Device, options: Mapping[str, str]) -> NumberFormat | None:
        if options.get("trt_fp16_enable") == "1":
            return FLOAT16
        return BFLOAT16 if options.get("trt_bf16_enable") == "1" else None

    def own_context_options(self, path: str, embed: bool) -> dict[str, str]:
        # The EP writes the engine next to the context model, unless another folder is set.
        return {
            "trt_dump_ep_context_model": "1",
            "trt_ep_context_file_path": path,
            "trt_ep_context_embed_mode": "1" if embed else "0",
            "trt_engine_cache_enable": "0" if embed else "1",
        }


PROVIDER = TensorRT()

"""NVIDIA GPUs through the TensorRT execution provider in onnxruntime-gpu."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import ProfileOptions, Provider, Tolerance
from hatch_epcontext.providers.option import Option, number, pointer, switch, text

_PROFILES = ProfileOptions(
    "trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"
)
_SHAPES = "of the profiles, as `input:1x3,...`; better in `profiles`"

_OPTIONS: Mapping[str, Option] = {
    "device_id": number("GPU by number", scope="both"),
    "has_user_compute_stream": switch("Use the stream in `user_compute_stream`", scope="load"),
    "user_compute_stream": pointer("The app's own `cudaStream_t`"),
    "trt_max_workspace_size": number("Bytes of TensorRT's workspace", "0: all of the GPU's memory"),
    "trt_max_partition_iterations": number("Rounds of partitioning", "1000", 1),
    "trt_min_subgraph_size": number("Least nodes of a partition", "1", 1),
    "trt_fp16_enable": switch("Compute in float16"),
    "trt_bf16_enable": switch("Compute in bfloat16"),
    "trt_int8_enable": switch("Compute in int8"),
    "trt_int8_calibration_table_name": text("Calibration table for int8"),
    "trt_int8_use_native_calibration_table": switch("The table is TensorRT's own"),
    "trt_dla_enable": switch("Use the Deep Learning Accelerator"),
    "trt_dla_core": number("Which accelerator", scope="both"),
    "trt_timing_cache_enable": switch("Keep the timings of kernels"),
    "trt_timing_cache_path": text("Folder of the timing cache"),
    "trt_force_timing_cache": switch("Use it though the GPU differs"),
    "trt_detailed_build_log": switch("Log the building of engines"),
    "trt_build_heuristics_enable": switch("Build faster, by heuristics"),
    "trt_sparsity_enable": switch("Allow sparse weights"),
    "trt_builder_optimization_level": number("How long to search for kernels", "3", 0, 5),
    "trt_auxiliary_streams": number("Streams beside the main one", "-1: heuristic", -1),
    "trt_tactic_sources": text("Sources of tactics, such as `-CUDNN,+CUBLAS`"),
    "trt_preview_features": text("Preview features of TensorRT, such as `ALIASED_PLUGIN_IO_10_03`"),
    "trt_extra_plugin_lib_paths": text("Libraries with plugins", scope="both"),
    "trt_layer_norm_fp32_fallback": switch("LayerNormalization in float32"),
    "trt_op_types_to_exclude": text("Operators that TensorRT is not to take"),
    "trt_engine_hw_compatible": switch("Engines for all GPUs from Ampere on"),
    "trt_force_sequential_engine_build": switch("Build engines one after the other"),
    "trt_context_memory_sharing_enable": switch("Engines share their memory", scope="both"),
    "trt_cuda_graph_enable": switch("Capture and replay CUDA graphs", scope="both"),
    "trt_dump_subgraphs": switch("Write the partitions to disk"),
    "trt_engine_decryption_enable": switch("Engines are encrypted", scope="both"),
    "trt_engine_decryption_lib_path": text("Library that decrypts them", scope="both"),
    "trt_load_user_initializer": switch("Take the app's initializers", scope="load"),
    "trt_profile_min_shapes": text(f"Least shapes {_SHAPES}"),
    "trt_profile_opt_shapes": text(f"Best shapes {_SHAPES}"),
    "trt_profile_max_shapes": text(f"Greatest shapes {_SHAPES}"),
    "trt_onnx_bytestream": pointer("The source model in memory, for engines without weights"),
    "trt_onnx_bytestream_size": pointer("Its size"),
    "trt_external_data_bytestream": pointer("Its external data in memory"),
    "trt_external_data_bytestream_size": pointer("Their size"),
}

_FIXED = "the files' places in the wheel are fixed"

_WEIGHTLESS = "an engine without weights needs the source model beside it to be opened"

_MANAGED: Mapping[str, str] = {
    "trt_dump_ep_context_model": "compiling always does it",
    "trt_ep_context_file_path": _FIXED,
    "trt_ep_context_embed_mode": "use embed = true or false",
    "trt_engine_cache_enable": "an engine beside the context model is its sidecar",
    "trt_engine_cache_path": _FIXED,
    "trt_engine_cache_prefix": _FIXED,
    "trt_onnx_model_folder_path": _FIXED,
    "trt_weight_stripped_engine_enable": _WEIGHTLESS,
}


def _own_context_options(path: str, embed: bool) -> dict[str, str]:
    # The engine goes beside the context model as long as no other folder is named for it.
    return {
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": path,
        "trt_ep_context_embed_mode": "1" if embed else "0",
        "trt_engine_cache_enable": "0" if embed else "1",
    }


PROVIDER = Provider(
    name="tensorrt",
    ep="TensorrtExecutionProvider",
    title="NVIDIA GPUs through TensorRT",
    product="context",
    flavours=("onnxruntime-gpu",),
    devices=("gpu",),
    tolerance=Tolerance(rtol=1e-2, atol=5e-2, cosine=0.99),
    needs="an NVIDIA GPU, CUDA and TensorRT",
    verified="Up to the missing libraries of TensorRT and CUDA, which are told, on Linux x86-64.",
    aliases=("trt",),
    systems=("linux", "win32"),
    options=_OPTIONS,
    managed=_MANAGED,
    profiles=_PROFILES,
    own_context_options=_own_context_options,
    sources=(
        'onnxruntime.ai, "TensorRT Execution Provider: Configurations"',
        "the option names in onnxruntime-gpu 1.31.1",
    ),
    notes=(
        (
            "The EP writes its context models itself, when a session is opened with its `trt_*` options; "
            "ONNX Runtime's ModelCompiler does not serve it."
        ),
        (
            "An engine is for the GPU on which it was built, unless `trt_engine_hw_compatible = true`. "
            "On another one the EP only warns."
        ),
        (
            "onnxruntime-gpu 1.31 wants TensorRT 10, CUDA 13 and cuDNN 9. TensorRT is NVIDIA's to "
            "install; the extras `[cuda,cudnn]` bring the others."
        ),
    ),
)

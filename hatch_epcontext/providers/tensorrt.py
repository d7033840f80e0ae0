"""NVIDIA GPUs through the TensorRT execution provider in onnxruntime-gpu."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.graph.facts import Limits
from hatch_epcontext.graph.number_format import BFLOAT16, FLOAT16, NumberFormat
from hatch_epcontext.providers.base import (
    IN_PROFILES,
    KEEPS_NO_FILES,
    NVIDIA_QUERY,
    OF_THE_APP,
    ProfileOptions,
    Provider,
    Tolerance,
)
from hatch_epcontext.providers.option import Option, choice, named
from hatch_epcontext.shipped import Device

_FIXED = "the paths of the files in the wheel are fixed"


class TensorRT(Provider):
    name = "tensorrt"
    ep = "TensorrtExecutionProvider"
    title = "NVIDIA GPUs through TensorRT"
    product = "context"
    limits = Limits()
    distributions = ("onnxruntime-gpu",)
    devices = ("gpu",)
    # Its builder measures kernels on the GPU, and two at once would disturb each other.
    exclusive_device = True
    tolerance = Tolerance(snr=20, cosine=0.99)
    needs = "an NVIDIA GPU, CUDA and TensorRT"
    device_query = NVIDIA_QUERY
    verified = "Up to the error that TensorRT and CUDA are missing."
    systems = ("linux", "win32")
    profiles = ProfileOptions("trt_profile")
    options: Mapping[str, Option] = {
        **named(
            """
            trt_fp16_enable trt_bf16_enable trt_int8_enable trt_int8_use_native_calibration_table
            trt_dla_enable trt_timing_cache_enable trt_force_timing_cache trt_detailed_build_log
            trt_build_heuristics_enable trt_sparsity_enable trt_layer_norm_fp32_fallback
            trt_engine_hw_compatible trt_force_sequential_engine_build
            """,
            "bool",
        ),
        **named("trt_max_workspace_size", "int"),
        **named("trt_max_partition_iterations trt_min_subgraph_size", "int", minimum=1),
        **named("trt_auxiliary_streams", "int", minimum=-1),
        "trt_builder_optimization_level": choice("0 1 2 3 4 5"),
        **named("trt_int8_calibration_table_name", "file"),
        **named(
            """
            trt_tactic_sources trt_preview_features trt_op_types_to_exclude
            """,
            "text",
        ),
        **named("device_id trt_dla_core", "int", "both"),
        **named(
            "trt_context_memory_sharing_enable trt_cuda_graph_enable trt_engine_decryption_enable",
            "bool",
            "both",
        ),
        "trt_extra_plugin_lib_paths": Option("file", "both", paths=r"[^;]+"),
        **named("trt_engine_decryption_lib_path", "file", "both"),
        **named("has_user_compute_stream trt_load_user_initializer", "bool", "load"),
    }
    reserved: Mapping[str, str] = {
        "trt_dump_ep_context_model": "always set when a model is compiled",
        "trt_ep_context_file_path": _FIXED,
        "trt_ep_context_embed_mode": "use embed = true or false",
        "trt_engine_cache_enable": "an engine beside the context model is its sidecar",
        "trt_engine_cache_path": _FIXED,
        "trt_engine_cache_prefix": _FIXED,
        "trt_onnx_model_folder_path": _FIXED,
        "trt_weight_stripped_engine_enable": "an engine without weights can only be opened "
        "together with the source model",
        "trt_timing_cache_path": KEEPS_NO_FILES,
        "trt_dump_subgraphs": KEEPS_NO_FILES,
        **dict.fromkeys(profiles.names, IN_PROFILES),
        "user_compute_stream": OF_THE_APP,
        "trt_onnx_bytestream": OF_THE_APP,
        "trt_onnx_bytestream_size": OF_THE_APP,
        "trt_external_data_bytestream": OF_THE_APP,
        "trt_external_data_bytestream_size": OF_THE_APP,
    }
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

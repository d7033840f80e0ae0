"""NVIDIA GPUs through the CUDA execution provider, which compiles nothing ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import NVIDIA_QUERY, OF_THE_APP, Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named


class Cuda(Provider):
    name = "cuda"
    ep = "CUDAExecutionProvider"
    title = "NVIDIA GPUs through CUDA and cuDNN"
    product = "optimized"
    genai_name = "cuda"
    genai_plain = True
    distributions = ("onnxruntime-gpu",)
    devices = ("gpu",)
    open_shapes_on = ("gpu",)
    # TF32 has ten bits of mantissa.
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "an NVIDIA GPU, CUDA and cuDNN"
    device_query = NVIDIA_QUERY
    verified = "Optimized, loaded and run. Without a GPU the CPU runs the graph."
    hardware = "Verified on an NVIDIA H200."
    systems = ("linux", "win32")
    options: Mapping[str, Option] = {
        **named(
            """
            has_user_compute_stream do_copy_in_default_stream use_ep_level_unified_stream
            cudnn_conv_use_max_workspace cudnn_conv1d_pad_to_nc1d enable_cudnn enable_cuda_graph
            enable_skip_layer_norm_strict_mode tunable_op_enable tunable_op_tuning_enable prefer_nhwc
            use_tf32 fuse_conv_bias
            """,
            "bool",
            "load",
        ),
        **named(
            """
            device_id gpu_mem_limit tunable_op_max_tuning_duration_ms sdpa_kernel
            external_data_loader_reading_threads
            """,
            "int",
            "load",
        ),
        "arena_extend_strategy": choice("kNextPowerOfTwo kSameAsRequested", "load"),
        "cudnn_conv_algo_search": choice("EXHAUSTIVE HEURISTIC DEFAULT", "load"),
    }
    reserved: Mapping[str, str] = {
        "user_compute_stream": OF_THE_APP,
        "gpu_external_alloc": OF_THE_APP,
        "gpu_external_free": OF_THE_APP,
        "gpu_external_empty_cache": OF_THE_APP,
    }
    sources = ("onnxruntime.ai", "onnxruntime-gpu 1.31.1")
    notes = (
        "onnxruntime-gpu 1.31 needs CUDA 13 and cuDNN 9. Its extras `[cuda,cudnn]` install them.",
        (
            "By default CUDA computes in TF32, with 10 bits of fraction: on an H200 (onnxruntime-gpu"
            " 1.31.1, five models) the largest error was up to 1e-2, and 1e-5 with "
            "`provider-options = { use_tf32 = 0 }`."
        ),
        (
            "There optimized graphs opened 6 to 40 % faster than their sources in a warm process (one 10 % "
            "slower), without a clear gain in a new one."
        ),
        (
            "An app without the loader calls `onnxruntime.preload_dlls()` before it opens a session. "
            "Otherwise ONNX Runtime does not find what the extras install, and the CPU runs the model."
        ),
    )


PROVIDER = Cuda()

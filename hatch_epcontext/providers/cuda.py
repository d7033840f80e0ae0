"""NVIDIA GPUs through the CUDA execution provider, which compiles nothing ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, number, pointer, switch

_OPTIONS: Mapping[str, Option] = {
    "device_id": number("Number of the GPU", scope="load"),
    "has_user_compute_stream": switch("Use the stream in `user_compute_stream`", scope="load"),
    "user_compute_stream": pointer("The app's own `cudaStream_t`"),
    "do_copy_in_default_stream": switch("Copy in the stream that computes", "1", "load"),
    "use_ep_level_unified_stream": switch("One stream for all threads", scope="load"),
    "gpu_mem_limit": number("Maximum size of the memory arena in bytes", "all", scope="load"),
    "arena_extend_strategy": choice(
        "How the memory arena grows",
        "kNextPowerOfTwo",
        "kSameAsRequested",
        default="kNextPowerOfTwo",
        scope="load",
    ),
    "gpu_external_alloc": pointer("The app's allocator: function to allocate"),
    "gpu_external_free": pointer("The app's allocator: function to free"),
    "gpu_external_empty_cache": pointer("The app's allocator: function to empty the cache"),
    "cudnn_conv_algo_search": choice(
        "How cuDNN's convolution algorithms are chosen",
        "EXHAUSTIVE",
        "HEURISTIC",
        "DEFAULT",
        default="EXHAUSTIVE",
        scope="load",
    ),
    "cudnn_conv_use_max_workspace": switch(
        "Give cuDNN as much workspace as it requests", "1", "load"
    ),
    "cudnn_conv1d_pad_to_nc1d": switch("Pad 1-D convolutions as N x C x 1 x D", scope="load"),
    "enable_cudnn": switch("Use cuDNN", "1", "load"),
    "enable_cuda_graph": switch("Capture and replay CUDA graphs", scope="load"),
    "enable_skip_layer_norm_strict_mode": switch(
        "Compute SkipLayerNormalization exactly", scope="load"
    ),
    "tunable_op_enable": switch("Use tunable operators", scope="load"),
    "tunable_op_tuning_enable": switch("Tune tunable operators", scope="load"),
    "tunable_op_max_tuning_duration_ms": number(
        "Maximum time to tune one operator, in milliseconds", scope="load"
    ),
    "external_data_loader_reading_threads": number("Threads that read weights", "4", scope="load"),
    "prefer_nhwc": switch("Prefer the layout NHWC (channels last)", scope="load"),
    "use_tf32": switch("Compute float32 matrix products in TF32", "1", "load"),
    "fuse_conv_bias": switch("Use cuDNN's fused convolution and bias", scope="load"),
    "sdpa_kernel": number("Attention kernels, as a bit mask", scope="load"),
}


class Cuda(Provider):
    name = "cuda"
    ep = "CUDAExecutionProvider"
    title = "NVIDIA GPUs through CUDA and cuDNN"
    product = "optimized"
    distributions = ("onnxruntime-gpu",)
    devices = ("gpu",)
    open_shapes_on = ("gpu",)
    # TF32 has ten bits of mantissa.
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "an NVIDIA GPU, CUDA and cuDNN"
    verified = "Optimized, loaded and run on Linux x86-64. Without a GPU the graph runs on the CPU instead."
    hardware = "Verified on an NVIDIA H200."
    systems = ("linux", "win32")
    options = _OPTIONS
    sources = ("onnxruntime.ai", "onnxruntime-gpu 1.31.1")
    notes = (
        "onnxruntime-gpu 1.31 needs CUDA 13 and cuDNN 9. Its extras `[cuda,cudnn]` install them.",
    )


PROVIDER = Cuda()

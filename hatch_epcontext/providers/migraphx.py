"""AMD GPUs through MIGraphX, which has its own cache for compiled programs."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, number, pointer, switch

_OPTIONS: Mapping[str, Option] = {
    "device_id": number("Number of the GPU", scope="load"),
    "migraphx_fp16_enable": switch("Compute in float16", scope="load"),
    "migraphx_bf16_enable": switch("Compute in bfloat16", scope="load"),
    "migraphx_fp8_enable": switch("Compute in float8", scope="load"),
    "migraphx_int8_enable": switch("Compute in int8", scope="load"),
    "migraphx_int8_calibration_table_name": Option(
        "Calibration table for int8", kind="file", scope="load"
    ),
    "migraphx_int8_use_native_calibration_table": switch(
        "The calibration table is in MIGraphX's own format", scope="load"
    ),
    "migraphx_model_cache_dir": Option("Folder for MIGraphX's compiled programs", scope="load"),
    "migraphx_exhaustive_tune": switch("Tune exhaustively, which takes longer", scope="load"),
    "migraphx_mem_limit": number("Maximum size of the memory arena in bytes", "all", scope="load"),
    "migraphx_arena_extend_strategy": choice(
        "How the memory arena grows",
        "kNextPowerOfTwo",
        "kSameAsRequested",
        default="kNextPowerOfTwo",
        scope="load",
    ),
    "migraphx_external_alloc": pointer("The app's allocator: function to allocate"),
    "migraphx_external_free": pointer("The app's allocator: function to free"),
    "migraphx_external_empty_cache": pointer("The app's allocator: function to empty the cache"),
}


class MIGraphX(Provider):
    name = "migraphx"
    ep = "MIGraphXExecutionProvider"
    title = "AMD GPUs through MIGraphX"
    product = "optimized"
    distributions = ("onnxruntime-migraphx",)
    devices = ("gpu",)
    open_shapes_on = ("gpu",)
    runtime_cache = "migraphx_model_cache_dir"
    # Its builder measures kernels on the GPU, and two at once would disturb each other.
    exclusive_device = True
    tolerance = Tolerance(snr=30, cosine=0.999)
    needs = "an AMD GPU and ROCm"
    verified = "Only the options."
    systems = ("linux",)
    platform = "manylinux_2_28_x86_64"
    options = _OPTIONS
    sources = ("onnxruntime-migraphx 1.27.1",)
    notes = (
        (
            "The EP returns no EP contexts. It has its own cache for what it compiles on the user's "
            "machine: set `migraphx_model_cache_dir` in `load-options`."
        ),
    )


PROVIDER = MIGraphX()

"""AMD GPUs through MIGraphX, which has its own cache for compiled programs."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named

_OPTIONS: Mapping[str, Option] = {
    **named("device_id migraphx_mem_limit", "int", "load"),
    **named(
        """
        migraphx_fp16_enable migraphx_bf16_enable migraphx_fp8_enable migraphx_int8_enable
        migraphx_int8_use_native_calibration_table migraphx_exhaustive_tune
        """,
        "bool",
        "load",
    ),
    **named("migraphx_int8_calibration_table_name", "file", "load"),
    **named("migraphx_model_cache_dir", "text", "load"),
    "migraphx_arena_extend_strategy": choice("kNextPowerOfTwo kSameAsRequested", "load"),
    **named(
        "migraphx_external_alloc migraphx_external_free migraphx_external_empty_cache",
        "pointer",
        "load",
    ),
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
    sources = (
        "onnxruntime.ai",
        "onnxruntime-migraphx 1.27.1",
    )
    notes = (
        (
            "The EP returns no EP contexts. It has its own cache for what it compiles on the user's "
            "machine: set `migraphx_model_cache_dir` in `load-options`."
        ),
    )


PROVIDER = MIGraphX()

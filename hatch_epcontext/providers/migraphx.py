"""AMD GPUs through MIGraphX, which keeps compiled programs in a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, number, pointer, switch, text

_OPTIONS: Mapping[str, Option] = {
    "device_id": number("GPU by number", scope="load"),
    "migraphx_fp16_enable": switch("Compute in float16", scope="load"),
    "migraphx_bf16_enable": switch("Compute in bfloat16", scope="load"),
    "migraphx_fp8_enable": switch("Compute in float8", scope="load"),
    "migraphx_int8_enable": switch("Compute in int8", scope="load"),
    "migraphx_int8_calibration_table_name": text("Calibration table for int8", scope="load"),
    "migraphx_int8_use_native_calibration_table": switch("It is MIGraphX's own", scope="load"),
    "migraphx_model_cache_dir": text("Folder of MIGraphX's compiled programs", scope="load"),
    "migraphx_exhaustive_tune": switch("Tune at length", scope="load"),
    "migraphx_mem_limit": number("Bytes that the arena may take", "all", scope="load"),
    "migraphx_arena_extend_strategy": choice(
        "How the arena grows",
        "kNextPowerOfTwo",
        "kSameAsRequested",
        default="kNextPowerOfTwo",
        scope="load",
    ),
    "migraphx_external_alloc": pointer("The app's allocator: allocate"),
    "migraphx_external_free": pointer("The app's allocator: free"),
    "migraphx_external_empty_cache": pointer("The app's allocator: empty the cache"),
}

PROVIDER = Provider(
    name="migraphx",
    ep="MIGraphXExecutionProvider",
    title="AMD GPUs through MIGraphX",
    product="optimized",
    flavours=("onnxruntime-migraphx",),
    devices=("gpu",),
    runtime_cache="migraphx_model_cache_dir",
    tolerance=Tolerance(rtol=1e-2, atol=1e-2, cosine=0.999),
    needs="an AMD GPU and ROCm",
    verified="Nothing but its options.",
    systems=("linux",),
    options=_OPTIONS,
    sources=("the option names in onnxruntime-migraphx 1.27.1",),
    notes=(
        (
            "The EP returns no EP contexts. It keeps what it compiled in a cache of its own, "
            "`migraphx_model_cache_dir`, on the user's machine: put that into `load-options`."
        ),
    ),
)

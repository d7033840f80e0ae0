"""ONNX Runtime's own CPU execution provider, which compiles nothing ahead of time."""

from __future__ import annotations

from hatch_epcontext.providers.base import Provider, Tolerance

PROVIDER = Provider(
    name="cpu",
    ep="CPUExecutionProvider",
    product="optimized",
    flavours=("onnxruntime", "onnxruntime-gpu"),
    devices=("cpu",),
    # The same kernels in the same precision: only the order of additions can differ.
    tolerance=Tolerance(rtol=1e-3, atol=1e-4, cosine=0.9999),
)

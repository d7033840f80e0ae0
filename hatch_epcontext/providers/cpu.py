"""ONNX Runtime's CPU execution provider, which compiles nothing ahead of time."""

from __future__ import annotations

from hatch_epcontext.providers.base import Provider, Tolerance


class Cpu(Provider):
    name = "cpu"
    ep = "CPUExecutionProvider"
    title = "ONNX Runtime's own CPU kernels"
    product = "optimized"
    genai_plain = True
    computes_float16 = False
    distributions = (
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-directml",
        "onnxruntime-migraphx",
        "onnxruntime-vitisai",
        "onnxruntime-windowsml",
    )
    devices = ("cpu",)
    open_shapes_on = ("cpu",)
    # The same kernels in the same precision: only the order of additions can differ.
    tolerance = Tolerance(snr=50, cosine=0.9999)
    verified = "Optimized, loaded and run."
    hardware = "Verified on x86-64."
    notes = (
        '`optimization = "extended"` or `"all"` adds operators that only the CPU can run.',
        (
            "Other EPs that compile nothing ahead of time, such as MIGraphX, run the graph too: "
            "your app opens it by its `path`."
        ),
    )


PROVIDER = Cpu()

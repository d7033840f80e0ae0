"""Apple's Neural Engine, GPUs and CPUs through Core ML, which compiles on the user's machine.

Options, operators and the key of the cache: those that onnxruntime 1.32.0's library for macOS registers.
"""

from __future__ import annotations

from collections.abc import Mapping

from hatch_epcontext.providers.base import Provider, Tolerance
from hatch_epcontext.providers.option import Option, choice, named
from hatch_epcontext.shipped import USER_CACHE, Device

_UNITS: Mapping[Device, str] = {"npu": "CPUAndNeuralEngine", "gpu": "CPUAndGPU", "cpu": "CPUOnly"}
"""The units that run a model, by the device of the target. The CPU runs what the other unit cannot."""


class CoreML(Provider):
    name = "coreml"
    ep = "CoreMLExecutionProvider"
    title = "Apple's Neural Engine, GPUs and CPUs through Core ML"
    product = "optimized"
    # Of ML Programs. Neural networks also have Flatten and LRN, and lack others.
    operators = frozenset(
        """
        Add And ArgMax AveragePool BatchNormalization Cast Ceil Clip Concat Conv ConvTranspose Cos
        DepthToSpace Div Elu Erf Exp Gather GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool
        GridSample GroupNormalization HardSigmoid Identity InstanceNormalization LayerNormalization
        LeakyRelu MatMul Max MaxPool Mul PRelu Pad Pow Reciprocal ReduceMax ReduceMean ReduceMin
        ReduceProd ReduceSum Relu Reshape Resize Round Shape Sigmoid Sin Slice Softmax Softplus
        Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where com.microsoft.FusedConv
        com.microsoft.QuickGelu
        """.split()  # noqa: SIM905
    )
    cache_key = "COREML_CACHE_KEY"
    runtime_cache = "ModelCacheDirectory"
    distributions = ("onnxruntime",)
    devices = ("npu", "gpu", "cpu")
    static_shapes = True
    # ML Programs compute in float16 where the unit prefers it.
    tolerance = Tolerance(snr=20, cosine=0.99)
    needs = "macOS on Apple silicon"
    verified = "Optimized, loaded and run. Without Core ML the CPU runs the graph."
    options: Mapping[str, Option] = {
        "ModelFormat": choice("MLProgram NeuralNetwork", "load"),
        "MLComputeUnits": choice("ALL CPUAndNeuralEngine CPUAndGPU CPUOnly", "load"),
        "SpecializationStrategy": choice("Default FastPrediction", "load"),
        **named(
            """
            RequireStaticInputShapes EnableOnSubgraphs ProfileComputePlan
            AllowLowPrecisionAccumulationOnGPU
            """,
            "bool",
            "load",
        ),
        **named("ModelCacheDirectory", "text", "load"),
    }
    sources = ("onnxruntime 1.32.0 for macOS",)
    notes = (
        (
            "Core ML compiles when a session opens, which can take minutes. It keeps the result in "
            "`ModelCacheDirectory`, by default `{user-cache}/coreml`. Without a key of its own it names it "
            "after the model's path, and so takes an older model for the present one. The shipped model has "
            "such a key, from the sha256 of its content: the result outlives a start, and an update of the "
            "app that leaves the model as it is."
        ),
        (
            "The coverage counts the operators that the EP's ML Programs have. Some limits are left out: "
            "Core ML refuses tensors of more than five dimensions, and, for example, a Conv in 3D."
        ),
    )

    def implied(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        return {
            "ModelFormat": "MLProgram",
            "MLComputeUnits": _UNITS.get(device, "ALL"),
            "RequireStaticInputShapes": "1",
            "ModelCacheDirectory": f"{USER_CACHE}/coreml",
        }

    def contradictions(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        units = options.get("MLComputeUnits", "ALL")
        if units == "ALL" or device == "any" or _UNITS[device] == units:
            return {}
        return {"MLComputeUnits": f"is {units}, and the target's device is {device}"}


PROVIDER = CoreML()

"""Qualcomm's NPU (HTP) through the plugin EP in ``onnxruntime-qnn``.

Options, their values and defaults: the page "QNN Execution Provider: Configuration Options" in the
documentation of onnxruntime-qnn 2.x. The EP accepts unknown options and impossible values without an
error, so this module lists every option.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from hatch_epcontext.graph.facts import Cost, Limits
from hatch_epcontext.graph.number_format import (
    BFLOAT16,
    FLOAT16,
    WHOLE,
    Fault,
    NumberFormat,
    RewriteName,
)
from hatch_epcontext.providers.base import (
    KEEPS_NO_FILES,
    Chip,
    MoreCoverage,
    Plugin,
    Provider,
    Tolerance,
)
from hatch_epcontext.providers.option import Option, choice, named
from hatch_epcontext.shipped import Device

_EP = "the EP"
_EXECUTORCH = (
    "[ExecuTorch](https://github.com/pytorch/executorch/blob/main/backends/qualcomm/serialization/"
    "qc_schema.py)"
)
_FLOATS, _QUANTIZED = "all", "quantized"

_CHIPS: Mapping[str, Chip] = {
    name: Chip({"soc_model": soc, "htp_arch": arch}, f"{source}: {part}", compiled)
    for name, part, soc, arch, source, compiled in (
        ("snapdragon-x-elite", "SC8380XP", "60", "73", _EP, _FLOATS),
        ("snapdragon-x2-elite", "SC8480XP", "88", "81", _EP, _FLOATS),
        ("snapdragon-8cx-gen-3", "SC8280X", "37", "68", _EP, _QUANTIZED),
        ("snapdragon-888", "SM8350", "30", "68", _EP, _FLOATS),
        ("snapdragon-8-gen-1", "SM8450", "36", "69", _EP, _FLOATS),
        ("snapdragon-8-plus-gen-1", "SM8475", "42", "69", _EP, _FLOATS),
        ("snapdragon-8-gen-2", "SM8550", "43", "73", _EP, _FLOATS),
        ("snapdragon-8-gen-3", "SM8650", "57", "75", _EP, _FLOATS),
        ("snapdragon-8s-gen-3", "SM8635", "68", "73", _EP, _QUANTIZED),
        ("snapdragon-7-plus-gen-3", "SM7675", "70", "73", _EP, _QUANTIZED),
        ("snapdragon-8-elite", "SM8750", "69", "79", _EP, _FLOATS),
        ("snapdragon-8-elite-gen-5", "SM8850", "87", "81", _EP, _FLOATS),
        ("qcm6490", "QCM6490", "93", "68", _EXECUTORCH, _QUANTIZED),
        ("qcs9100", "QCS9100", "77", "73", _EXECUTORCH, _FLOATS),
        ("sa8255", "SA8255", "52", "73", _EXECUTORCH, _FLOATS),
        ("sa8295", "SA8295", "39", "68", _EXECUTORCH, _FLOATS),
        ("sa8540", "SA8540", "62", "68", _EXECUTORCH, _FLOATS),
        ("sa8797", "SA8797", "72", "81", _EXECUTORCH, _FLOATS),
    )
}
"""If both options are set, the EP uses ``soc_model``, and only logs that ``htp_arch`` differs."""

_ARCH_OF_SOC = {chip.facts["soc_model"]: chip.facts["htp_arch"] for chip in _CHIPS.values()}

_BACKENDS: Mapping[Device, str] = {"npu": "htp", "any": "htp", "gpu": "gpu"}
"""The backend that compiles for a kind of device, whatever device the EP gets."""

_HTP = "6"
"""The number of the HTP backend in a compatibility string."""


def _implied_arch(options: Mapping[str, str]) -> dict[str, str]:
    # The EP also finds an architecture itself, but then its compatibility string does not name it.
    socs = options.get("soc_model", "").split(",")
    archs = [_ARCH_OF_SOC[soc] for soc in socs if soc in _ARCH_OF_SOC]
    return {"htp_arch": ",".join(archs)} if len(archs) == len(socs) else {}


def _chip(compatibility: str) -> dict[str, str]:
    """Read ``v2:<backend>:<sdk>:<backend api>:<htp_arch>:<soc_model>:<vtcm>:...``."""
    fields = compatibility.split(":")
    if fields[0] != "v2" or len(fields) < 6:
        return {}
    return {"soc_model": fields[5], "htp_arch": fields[4]}


def _is_set(value: str) -> bool:
    return any(chip != "0" for chip in value.split(","))


_NODE = r"Operator type: \S{1,999} Node name: (.{0,999}?) Node index: \d+\n"
_REFUSED = rf"Validation FAILED for [^\n]*\n((?:[ \t]*{_NODE.replace('(', '(?:')})+)[ \t]*REASON : ([^\n]*)"

_WORDS = (
    (
        r"^(\w+) filtered off QNN by the op_affinity",
        r"""the EP keeps it off the NPU, unless op_affinity names a file with {"op_type": {"\1": "htp"}}""",
    ),
    (r"^Operators of type", "the EP does not have this operator"),
    (r"^(QNN EP: )?Failed to (add|create) ", ""),
    (r"Cannot get shape|doesn't support dynamic shape", "one of its shapes is not fixed"),
    (
        r"configured to not take D?Q nodes",
        "the CPU quantizes the model's inputs and outputs, unless offload_graph_io_quantization is 0",
    ),
)
"""Patterns of reasons in the EP's log, and what they mean, with their groups; empty for meaningless ones. All
other reasons are shown as they are."""


def _in_words(reason: str) -> str:
    for pattern, words in _WORDS:
        if match := re.search(pattern, reason):
            return match.expand(words)
    return reason.strip().rstrip(".")


_LIMIT = 131008.0

_WIDE = (-_LIMIT, _LIMIT)

_LIMITLESS = 3e38
"""Larger than each number but infinity: that is the logarithm of 0, whose powers are right."""

_FUSING = frozenset({"Conv", "Gemm", "MatMul"})
"""Not ConvTranspose, nor any operator with a Slice, a Split, a Mul or a Max between."""

_NEAREST = "takes the nearest pixel, whatever nearest_mode is"

_TIES = "takes the other of two equally near pixels, whatever nearest_mode is"


def _powers() -> Iterator[Fault]:
    """The EP computes powers as exp(y * log|x|) in float32, with a sign that is wrong for -0.0."""
    of_negative_zero = {2.0: -4.0, 4.0: 16.0, 2.2: -_LIMIT} | dict.fromkeys(
        (0.25, 1 / 3, 0.45, 0.5, 1.0), _LIMIT
    )
    for exponent, gives in of_negative_zero.items():
        text = f"is {gives:g} for -0.0"
        rewrite: RewriteName | None = "square" if exponent in (2.0, 0.5) else None
        yield Fault("Pow", text, rewrite, 0, -3e-8, -0.0, gives, exponent)
    text = "returns arbitrary values where its result is below 2^-127 or above 2^128"
    yield Fault("Pow", text, "floor", 0, -_LIMITLESS, -88.03, -_LIMIT, logarithm=True)
    yield Fault("Pow", text, "floor", 0, 88.73, _LIMITLESS, -_LIMIT, logarithm=True)
    for exponent in (0.0, -0.25, -0.5, -1.0, -2.0, -3.0):
        yield Fault("Pow", "is 0 for 0", gives=0.0, exponent=exponent)


def _symmetric(
    operator: str,
    text: str,
    operand: int,
    low: float,
    gives: float,
    rewrite: RewriteName | None = None,
) -> Iterator[Fault]:
    """Faults of values from ``low`` on, and of their negatives, that are no single stored number."""
    yield Fault(operator, text, rewrite, operand, low, _LIMIT, gives, computed=True)
    yield Fault(operator, text, rewrite, operand, -_LIMIT, -low, -gives, computed=True)


def _of_comparisons() -> Iterator[Fault]:
    """Beyond the end of float16 a number is neither larger nor smaller than another one."""
    for operator in ("Greater", "GreaterOrEqual"):
        yield Fault(operator, "is false for x above 65504", "comparison", 0, 65505.0, _LIMIT, 0.0)
    for operator in ("Less", "LessOrEqual"):
        yield Fault(
            operator, "is false for x below -65504", "comparison", 0, -_LIMIT, -65505.0, 0.0
        )


def _of_integers() -> Iterator[Fault]:
    """The EP shifts to divide by powers of two, and computes remainders as floats of 11 bits."""
    least, largest = -(2.0**31), 2.0**31 - 1
    text = "rounds negative integers down, where the divisor is a power of two"
    yield Fault("Div", text, "truncate", 0, least, -1, whole=True)
    text = "of integers is wrong for most of those beyond 1600"
    yield Fault("Mod", text, "modulo", 0, least, largest, whole=True)
    text = "to booleans makes false of negative integers"
    yield Fault("Cast", text, "truth", 0, least, -1, whole=True)
    text = "to floats makes 1 of most bytes (uint8)"
    yield Fault("Cast", text, "bytes", 0, 0, 255, whole=True)
    text = "to floats ends at 131008, also where a result of larger integers is small"
    for low, high in ((least, -_LIMIT), (_LIMIT, largest)):
        yield Fault("Cast", text, "split-integers", 0, low, high, whole=True)
    for operator in ("GatherElements", "ScatterElements", "ScatterND"):
        text = "does not count negative indices from the end, unless they are stored"
        yield Fault(operator, text, "indices", 1, least, -1, whole=True)


_FLOAT16 = dataclasses.replace(
    FLOAT16,
    largest_of_sums=_LIMIT,
    sums=frozenset({"Add", "CumSum", "Div", "Exp", "Mul", "Pow", "ReduceSum", "Sub"}),
    seen="the simulator of onnxruntime-qnn 2.7.0",
    inexact=frozenset({"LSTM", "GRU"}),
    has_reciprocals=True,
    faults=(
        *_powers(),
        Fault("Exp", "returns arbitrary values below -88", "floor", 0, -_LIMIT, -88.03, _LIMIT),
        Fault("Exp", "returns arbitrary values above 88.7", None, 0, 88.7, _LIMIT, -_LIMIT),
        Fault("Log", "is -7.6 for 0", gives=-7.625),
        Fault("Log", "is too small by 11.8 above 65504", None, 0, 65505.0, _LIMIT, 0.0),
        *_of_comparisons(),
        Fault("Softplus", "returns arbitrary values below -88", "floor", 0, -_LIMIT, -88.03, _LIMIT),
        Fault("Softplus", "is off by up to 0.014 between -4 and 8", None, 0, -4.0, 8.0),
        Fault("Mish", "returns arbitrary values below -88", "floor", 0, -_LIMIT, -88.03, _LIMIT),
        Fault("Mish", "is off by up to 0.024 between -8 and 4", None, 0, -8.0, 4.0),
        *(
            Fault(operator, "is off by about |x| / 900, and is arbitrary beyond 1000", None, 0, *_WIDE)
            for operator in ("Sin", "Cos", "Tan")
        ),
        *(
            Fault(operator, "is off by up to 0.0002 near 0", "small-angle", 0, -(2.0**-5), 2.0**-5)
            for operator in ("Sin", "Tan")
        ),
        Fault("Atan", "is -0.0001 for 0", "small-angle", 0, -1e-4, 1e-4, -9.757e-5),
        *_symmetric("Atan", "is 131008, with x's sign, for |x| above 32768", 0, 32769.0, _LIMIT),
        *_symmetric("Reciprocal", "is 0 for |x| above 16384", 0, 16385.0, 0.0, "scaled-division"),
        *_symmetric("Div", "is 0 for divisors above 16384", 1, 16385.0, 0.0, "reciprocals"),
        Fault("Div", "is too small for divisors below 1.53e-5", None, 1, -1.526e-5, 1.526e-5),
        Fault("Mean", "is too small where the sum is above 65504", None, 0, *_WIDE),
        Fault("ReduceL2", "is at most 362, and 0 below 0.0002", "scaled-square", 0, *_WIDE),
        Fault("CumSum", "is wrong from the 2049th element on, and inexact before", None, 0, *_WIDE),
        Fault(
            "ReduceLogSumExp", "is too small by 34 where the row spans more than 88", None, 0, *_WIDE
        ),
        Fault(
            "LogSoftmax", "is too small by up to 110 where the row spans more than 200", None, 0,
            *_WIDE,
        ),
        Fault(
            "InstanceNormalization", "may be -131008 where all of a channel is the same large value",
            None, 0, *_WIDE,
        ),
        *_of_integers(),
        Fault("Clip", "does not clamp: its bounds are attributes", "clip-inputs", 0, *_WIDE, inputs=1),
        Fault(
            "Cast", "keeps the fraction that a Cast to integers before it drops, and is 1 for larger uint8",
            None, 0, *_WIDE, behind=frozenset({"Cast"}),
        ),
        Fault(
            "Pad", "writes other values beside the last axis, except after Conv, Relu and some others", None,
            0, *_WIDE, attributes=(("mode", frozenset({"edge"})),),
        ),
        *(
            Fault("Resize", text, None, 0, *_WIDE, attributes=(
                ("mode", frozenset({"nearest", ""})),
                ("nearest_mode", frozenset(modes)),
                ("coordinate_transformation_mode", frozenset(coordinates)),
            ))
            for text, modes, coordinates in (
                (_NEAREST, ("floor", "ceil"), ("half_pixel", "pytorch_half_pixel", "align_corners", "")),
                (_TIES, ("round_prefer_floor", ""), ("half_pixel", "")),
                (_TIES, ("round_prefer_ceil",), ("pytorch_half_pixel", "asymmetric")),
            )
        ),
        Fault(
            "Sigmoid", "is off by up to 0.0038, as a piecewise linear function", "unfuse-activation",
            0, *_WIDE, behind=_FUSING,
        ),
        Fault(
            "Tanh", "is off by up to 0.0075, as a piecewise linear function", "unfuse-activation",
            0, *_WIDE, behind=_FUSING,
        ),
    ),
)  # fmt: skip
"""Found with all float16 values in small graphs by `benchmarks.sweep`; its results are in
``benchmarks/faults-qnn.json``."""


class Qnn(Provider):
    name = "qnn"
    ep = "QNNExecutionProvider"
    title = "Qualcomm's NPU (HTP) and GPU"
    product = "context"
    limits = Limits(
        known=frozenset({"ai.onnx.ml.ArrayFeatureExtractor"}),
        open_shapes=False,
        # Seen with onnxruntime-qnn 2.7.0: SIGFPE.
        empty=False,
    )
    distributions = ("onnxruntime", "onnxruntime-gpu")
    devices = ("npu", "gpu")
    requirements = ("onnxruntime-qnn>=2.7",)
    python = (3, 11)
    systems = ("linux", "win32")
    # The EP is named after its registration: another name would be another EP.
    plugin = Plugin("onnxruntime_qnn", "onnxruntime-qnn", "QNNExecutionProvider")
    cross_compiles = ("npu",)
    # But the simulator refuses contexts that share weights, with QNN_COMMON_ERROR_NOT_SUPPORTED.
    shares_weights = True
    # Seen with onnxruntime-qnn 2.7.0, under Wine: 0xC0000409. Contexts inside the model load.
    needs_code_page = True
    simulator = ("libQnnSystem.so", "libQnnHtp.so")
    # Measured on one core with 36 models of 0.4 ms to 36 s: 26 take a third of that to three times as long.
    simulator_speed = Cost(nodes=4_000, multiply_adds=2 * 10**9, values=10**7)
    chips = _CHIPS
    chip_options = frozenset({"soc_model", "htp_arch", "vtcm_mb"})
    # Of Linux: "socinfo" in drivers/soc/qcom.
    driver_files = ("/sys/devices/soc0/soc_id", "/sys/devices/soc0/revision")
    options: Mapping[str, Option] = {
        # The EP writes contexts with no other backend: not with cpu, ir and saver.
        "backend_type": choice("htp gpu", "both"),
        "soc_model": choice(" ".join(("0", *sorted(_ARCH_OF_SOC, key=int)))),
        "htp_arch": choice("0 68 69 73 75 79 81"),
        "vtcm_mb": Option("int"),
        "htp_graph_finalization_optimization_mode": choice("0 1 2 3"),
        **named(
            """
            enable_htp_fp16_precision enable_htp_fp16_clamp_overflow htp_bf16_enable
            enable_htp_spill_fill_buffer enable_htp_prepare_only enable_htp_graph_splitting
            enable_htp_monolithic_lstm enable_block_quant_weight_optimization
            offload_graph_io_quantization skip_backend_op_validation
            """,
            "bool",
        ),
        **named("htp_graph_splitting_num_prepare_threads", "int", minimum=1),
        **named("num_graph_prepare_threads", "int", minimum=2),
        **named("op_affinity", "file"),
        "op_packages": Option(
            "file", "both", paths=r"(?:^|,)[^:,]+:((?:[A-Za-z]:(?=[/\\]))?[^:,]+)"
        ),
        "htp_performance_mode": choice(
            "burst balanced default high_performance high_power_saver low_balanced low_power_saver "
            "power_saver extreme_power_saver sustained_high_performance",
            "both",
        ),
        "qnn_context_priority": choice("low normal normal_high high", "both"),
        "htp_share_resource_optimization": choice("1", "both"),
        "genie_log_level": choice("error warn info verbose", "both"),
        "profiling_level": choice("off basic detailed optrace", "load"),
        **named("profiling_file_path", "text", "load"),
        **named("device_id rpc_control_latency htp_reused_io_limit_mb", "int", "both"),
        **named(
            """
            skip_qnn_version_check extended_udma enable_htp_shared_memory_allocator
            enable_vtcm_backup_buffer_sharing disable_file_mapped_weights
            """,
            "bool",
            "both",
        ),
    }
    reserved: Mapping[str, str] = {
        "backend_path": "the backend follows from device, and its library is that of the EP's package",
        **dict.fromkeys(
            """
            dump_json_qnn_graph json_qnn_graph_dir dump_qnn_ir_dlc dump_qnn_ir_dlc_dir
            dump_qnn_ep_input_graph dump_qnn_ep_input_graph_dir enable_framework_op_trace
            framework_op_trace_dir
            """.split(),  # noqa: SIM905
            KEEPS_NO_FILES,
        ),
    }
    static_shapes = True
    # Seen with onnxruntime-qnn 2.7.0: a Transpose that gives a context an int64 output writes 32 bits, and
    # each run ends with "ORT Tensor data size does not match QNN tensor data size"; it refuses one of uint8.
    # Of nodes with names x * HardSigmoid(x), in this order, is x² behind a Conv, Gemm or MatMul; integers are
    # computed wrong in any format. Sums of pools read other memory where only some borders have a padding,
    # or crash. It fuses no quantized layer of int8 with a result of uint8, and leaves its bias to the CPU.
    # Integers are summed in float32.
    rewrites: tuple[RewriteName, ...] = (
        *("transposed-outputs", "pool-padding", "quantized-signs", "long-sums"),
        *WHOLE,
    )
    example = 'chip = "snapdragon-x-elite"'
    # The NPU computes in float16, and a Sigmoid in units of 0.004. On real models right outputs have 25 dB
    # and more, wrong ones less than 20.
    tolerance = Tolerance(snr=20, cosine=0.99, unit=0.1)
    # Statically quantized models: their inputs and outputs are quantized on the CPU by default.
    more_coverage = MoreCoverage(
        frozenset(
            {
                "QuantizeLinear",
                "DequantizeLinear",
                "com.microsoft.QuantizeLinear",
                "com.microsoft.DequantizeLinear",
            }
        ),
        {"offload_graph_io_quantization": "0"},
    )
    # Large caches can exhaust the NPU.
    waived = frozenset({"com.microsoft.GroupQueryAttention"})
    genai_name = "qnn"
    several_chips = "is_multi_soc_ep_context"
    # Measured with Transpose, Cast, Mul, Relu and Add.
    lacks_dtypes = frozenset({"float64", "bfloat16", "int8", "int16", "uint16", "uint64"})
    max_rank = 5
    integer_bits = 32
    needs = "an x86-64 processor, or an Arm processor from Qualcomm"
    verified = "Compiled, loaded and run with the EP's simulator, for SoC 60 (HTP 73)."
    sources = (
        "onnxruntime.ai",
        "the documentation of onnxruntime-qnn 2.x",
        "ONNX Runtime's `ep_weight_sharing_ctx_gen`",
    )
    notes = (
        (
            "It leaves the quantization of inputs and outputs to the CPU. If a model would not be whole "
            "because of that, the build sets `offload_graph_io_quantization = 0`, and reports it."
        ),
        (
            "It compiles for chips that the machine does not have. On Linux it needs glibc 2.35 or newer and "
            "`libatomic.so.1`, which no package of PyPI contains: `libatomic1` (Debian, Ubuntu) or "
            "`libatomic` (Fedora)."
        ),
        (
            "`chip` is one of [the names](#chips), or a list for [several chips](targets.md"
            "#one-context-for-several-chips): it sets `soc_model` and `htp_arch`. The Snapdragon X Plus "
            "8-Core has the X Elite's NPU (Qualcomm's AI Hub Models). For any other chip set both options, "
            "with `allow-unknown-options = true`: [Qualcomm's list]"
            "(https://docs.qualcomm.com/bundle/publicresource/topics/80-63442-50/overview.html"
            "#supported-snapdragon-devices) has their numbers. Without a chip the context is for none in "
            "particular, and the build warns."
        ),
        (
            '`device = "gpu"` compiles for the Adreno GPU of the build machine, and needs one. (Not verified '
            "on hardware.)"
        ),
    )

    def number_format(self, device: Device, options: Mapping[str, str]) -> NumberFormat | None:
        if device not in ("npu", "any") or options.get("backend_type") not in (None, "htp"):
            return None
        if options.get("htp_bf16_enable") == "1":
            return BFLOAT16
        return None if options.get("enable_htp_fp16_precision") == "0" else _FLOAT16

    def implied(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        # Without a backend the EP cannot be created, and its error message does not name the cause.
        return {"backend_type": _BACKENDS.get(device, "htp"), **_implied_arch(options)}

    def missing_chip(self, options: Mapping[str, str]) -> str | None:
        is_named = any(_is_set(options.get(name, "0")) for name in ("soc_model", "htp_arch"))
        if is_named or options.get("backend_type") != "htp":
            return None
        return (
            "no chip is named, so the context is for none in particular; name it, such as "
            'chip = "snapdragon-x-elite"'
        )

    def contradictions(self, device: Device, options: Mapping[str, str]) -> dict[str, str]:
        backend = options.get("backend_type")
        if device != "any" and backend not in (None, _BACKENDS.get(device, backend)):
            return {
                "backend_type": f"names the backend {backend}, and the device is {device}: "
                "set only the device, and the backend follows"
            }
        soc, arch = options.get("soc_model", "0"), options.get("htp_arch", "0")
        if arch in ("0", _ARCH_OF_SOC.get(soc, arch)):
            return {}
        return {
            "htp_arch": f"soc_model {soc} has the HTP architecture {_ARCH_OF_SOC[soc]}: leave out {arch}, "
            "which the EP would ignore"
        }

    def compiled_for(self, compatibility: str) -> dict[str, str]:
        return {name: value for name, value in _chip(compatibility).items() if _is_set(value)}

    def disagreement(
        self, compatibility: str, ep_sdk_version: str, options: Mapping[str, str]
    ) -> str | None:
        backend, number = options.get("backend_type"), f"{compatibility}::".split(":")[1]
        if backend and _chip(compatibility) and (backend == "htp") != (number == _HTP):
            compiled = "htp" if number == _HTP else f"number {number}"
            return f"the backend {backend} was requested, but the EP compiled with the backend {compiled}"
        # The EP does not write architectures that it found itself.
        implied = _implied_arch(options).items()
        differences = [
            f"{name} = {options[name]} was requested, but the EP compiled for {value}"
            for name, value in _chip(compatibility).items()
            if options.get(name, "0") not in ("0", value)
            and (_is_set(value) or (name, options[name]) not in implied)
        ]
        return "; ".join(differences) or None

    def runs_on(self, system: str, machine: str) -> bool:
        # The x86-64 packages contain a simulator of the NPU. On Arm a context runs only on its own chip, and
        # a build machine may have another one.
        return system in ("linux", "win32") and machine.lower() in ("x86_64", "amd64")

    def reads(self, source: str) -> bool:
        # Other tools write "Qnn" and "QNN".
        return source.lower() in ("qnn", self.ep.lower())

    def reasons(self, log: str) -> dict[str, str]:
        """Read the results of ``LogNodeSupport``: the nodes of each refused unit, and the reason."""
        return {
            name: _in_words(reason)
            for nodes, reason in re.findall(_REFUSED, log)
            for name in re.findall(_NODE, nodes)
            if name
        }


PROVIDER = Qnn()

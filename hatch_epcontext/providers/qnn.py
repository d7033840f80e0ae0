"""Qualcomm's NPU (HTP) through the plugin EP in ``onnxruntime-qnn``.

Options, their values and defaults: the EP's own page, "QNN Execution Provider: Configuration Options",
in the documentation of onnxruntime-qnn 2.x. The EP takes unknown options and impossible values
without a word, so every one is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hatch_epcontext.providers.base import Option, Plugin, Provider, Tolerance

_PERFORMANCE_MODES = (
    "burst",
    "balanced",
    "default",
    "high_performance",
    "high_power_saver",
    "low_balanced",
    "low_power_saver",
    "power_saver",
    "extreme_power_saver",
    "sustained_high_performance",
)

_ARCH_OF_SOC = {"43": "73", "57": "75", "60": "73", "69": "79"}
"""HTP architectures of the SoC models that were seen to compile. With both options given the EP
follows ``soc_model`` and only notes a different ``htp_arch`` in its log."""


def _switch(scope: Literal["compile", "both"] = "compile") -> Option:
    return Option(kind="bool", scope=scope)


_OPTIONS: Mapping[str, Option] = {
    "backend_type": Option(choices=("htp", "gpu", "cpu", "ir", "saver"), scope="both"),
    "backend_path": Option(scope="both"),
    "soc_model": Option(kind="int", minimum=0),
    "htp_arch": Option(choices=("0", "68", "69", "73", "75", "79", "81")),
    "device_id": Option(kind="int", minimum=0, scope="both"),
    "vtcm_mb": Option(kind="int", minimum=0),
    "htp_graph_finalization_optimization_mode": Option(choices=("0", "1", "2", "3")),
    "enable_htp_fp16_precision": _switch(),
    "enable_htp_fp16_clamp_overflow": _switch(),
    "htp_bf16_enable": _switch(),
    "enable_htp_spill_fill_buffer": _switch(),
    "enable_htp_prepare_only": _switch(),
    "enable_htp_graph_splitting": _switch(),
    "htp_graph_splitting_num_prepare_threads": Option(kind="int", minimum=1),
    "enable_htp_monolithic_lstm": _switch(),
    "enable_block_quant_weight_optimization": _switch(),
    "offload_graph_io_quantization": _switch(),
    "num_graph_prepare_threads": Option(kind="int", minimum=2),
    "op_packages": Option(scope="both"),
    "op_affinity": Option(),
    "skip_backend_op_validation": _switch(),
    "skip_qnn_version_check": _switch("both"),
    "htp_performance_mode": Option(choices=_PERFORMANCE_MODES, scope="both"),
    "qnn_context_priority": Option(choices=("low", "normal", "normal_high", "high"), scope="both"),
    "rpc_control_latency": Option(kind="int", minimum=0, scope="both"),
    "extended_udma": _switch("both"),
    "enable_htp_shared_memory_allocator": _switch("both"),
    "enable_vtcm_backup_buffer_sharing": _switch("both"),
    "htp_share_resource_optimization": Option(choices=("1",), scope="both"),
    "htp_reused_io_limit_mb": Option(kind="int", minimum=0, scope="both"),
    "disable_file_mapped_weights": _switch("both"),
    "genie_log_level": Option(choices=("error", "warn", "info", "verbose"), scope="both"),
    "profiling_level": Option(choices=("off", "basic", "detailed", "optrace"), scope="both"),
    "profiling_file_path": Option(scope="both"),
    "qnn_saver_path": Option(),
    "qnn_ir_backend_path": Option(),
    "dump_json_qnn_graph": _switch(),
    "json_qnn_graph_dir": Option(),
    "dump_qnn_ir_dlc": _switch(),
    "dump_qnn_ir_dlc_dir": Option(),
    "dump_qnn_ep_input_graph": _switch(),
    "dump_qnn_ep_input_graph_dir": Option(),
    "enable_framework_op_trace": _switch(),
    "framework_op_trace_dir": Option(),
}


def _contradictions(options: Mapping[str, str]) -> dict[str, str]:
    soc, arch = options.get("soc_model", "0"), options.get("htp_arch", "0")
    known = _ARCH_OF_SOC.get(soc)
    if known and arch not in ("0", known):
        return {
            "htp_arch": f"soc_model {soc} has HTP architecture {known}; "
            f"the EP would follow soc_model and ignore htp_arch = {arch}"
        }
    return {}


def _disagreement(compatibility: str, options: Mapping[str, str]) -> str:
    """Compare with ``v2:<backend>:<sdk>:<backend api>:<htp_arch>:<soc_model>:<vtcm>:...``."""
    fields = compatibility.split(":")
    if fields[0] != "v2" or len(fields) < 6:
        return ""
    got = {"htp_arch": fields[4], "soc_model": fields[5]}
    wrong = [
        f"{name} = {options[name]} was asked for and the EP compiled for {value}"
        for name, value in got.items()
        if options.get(name, "0") not in ("0", value)
    ]
    return "; ".join(wrong)


def _runs_on(system: str, machine: str) -> bool:
    # The x86-64 packages bring a simulator of the NPU; on Arm a context runs only on the chip it
    # was compiled for, which a build machine cannot be taken to have.
    return system in ("linux", "win32") and machine.lower() in ("x86_64", "amd64")


PROVIDER = Provider(
    name="qnn",
    ep="QNNExecutionProvider",
    product="context",
    flavours=("onnxruntime",),
    devices=("npu", "gpu", "cpu"),
    requirements=("onnxruntime-qnn>=2.7",),
    python=(3, 11),
    systems=("linux", "win32"),
    # The registration name becomes the EP's name: another one would give another EP.
    plugin=Plugin("onnxruntime_qnn", "onnxruntime-qnn", "QNNExecutionProvider"),
    options=_OPTIONS,
    # Without a backend the EP cannot be created, and says so in words that nobody understands.
    defaults={"backend_type": "htp"},
    exclusive=(frozenset({"backend_type", "backend_path"}),),
    static_shapes=True,
    # Half precision. Seen on real models: 0.02 between two probabilities, with a cosine of 0.9999.
    tolerance=Tolerance(rtol=1e-2, atol=5e-2, cosine=0.99),
    contradictions=_contradictions,
    disagreement=_disagreement,
    runs_on=_runs_on,
)

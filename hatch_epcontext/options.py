"""Provider options and session options: checked, because ONNX Runtime and its EPs check neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hatch_epcontext.errors import Problem
from hatch_epcontext.providers import OptionValue, Provider, render
from hatch_epcontext.structure import at, show, suggestion

SESSION_OPTIONS = frozenset(
    """
    ep.context_node_name_prefix ep.dynamic.workload_type ep.enable_weightless
    memory.enable_memory_arena_shrinkage mlas.disable_kleidiai
    mlas.enable_gemm_fastmath_arm64_bfloat16 mlas.use_lut_gemm
    optimization.constant_folding_max_output_size_in_bytes
    optimization.disable_specified_optimizers optimization.enable_cast_chain_elimination
    optimization.enable_gelu_approximation session.allow_released_opsets_only
    session.collect_node_memory_stats_to_file session.debug_layout_transformation
    session.disable_aot_function_inlining session.disable_cpu_ep_fallback
    session.disable_double_qdq_remover session.disable_prepacking
    session.disable_qdq_constant_folding session.disable_quant_qdq session.dynamic_block_base
    session.enable_cpu_mem_arena session.enable_dq_matmulnbits_fusion
    session.enable_mem_pattern session.enable_profiling session.enable_quant_qdq_cleanup
    session.execution_mode session.fail_on_suboptimal_compiled_model
    session.force_spinning_stop session.graph_optimizations_loop_level
    session.inter_op.allow_spinning session.inter_op_num_threads
    session.intra_op.allow_spinning session.intra_op_num_threads
    session.intra_op_thread_affinities session.layer_assignment_settings session.log_id
    session.log_severity_level session.log_verbosity_level session.node_partition_config_file
    session.prepack.enable_parallel session.qdq_matmulnbits_accuracy_level
    session.qdq_matmulnbits_block_size session.resource_cuda_partitioning_settings
    session.set_denormal_as_zero session.strict_shape_type_inference
    session.use_deterministic_compute session.use_device_allocator_for_initializers
    session.use_env_allocators session.use_per_session_threads
    """.split()  # noqa: SIM905
)
"""Keys that ONNX Runtime 1.31 knows (``onnxruntime_session_options_config_keys.h``) and a user may set."""

MANAGED = {
    "ep.context_enable": "compiling always does it",
    "ep.context_embed_mode": "use embed = true or false",
    "ep.context_file_path": "the files' places in the wheel are fixed",
    "ep.share_ep_contexts": "use share-weights",
    "ep.stop_share_ep_contexts": "use share-weights",
    "ep.context_model_external_initializers_file_name": "the files' places in the wheel are fixed",
    "session.compile_only": "ONNX Runtime sets it itself",
    "session.disable_model_compile": "the loader sets it for what is precompiled",
    "session.graph_optimization_level": 'use optimization = "..."',
    "session.optimized_model_filepath": "the files' places in the wheel are fixed",
    "session.record_ep_graph_assignment_info": "validation sets it",
}


def check_options(
    key: str,
    options: Mapping[str, OptionValue],
    load_options: Mapping[str, OptionValue],
    provider: Provider,
) -> Iterator[Problem]:
    """What is wrong with the two tables of provider options below ``key``."""
    if provider.any_options:
        return
    yield from _check_values(f"{key}.provider-options", options, provider)
    yield from _check_values(f"{key}.load-options", load_options, provider)
    for name in load_options:
        if name in provider.options and provider.options[name].scope == "compile":
            yield Problem(
                f"{key}.load-options{at(name)}",
                "only counts when the model is compiled.",
                f"Move it to {key}.provider-options.",
            )
    for group in provider.exclusive:
        if len(both := sorted(group & options.keys())) > 1:
            yield Problem(
                f"{key}.provider-options",
                f"{' and '.join(both)} exclude one another.",
                "Keep one of them.",
            )


def _check_values(
    key: str, options: Mapping[str, OptionValue], provider: Provider
) -> Iterator[Problem]:
    for name, value in options.items():
        where = key + at(name)
        if name in provider.managed:
            yield Problem(where, f"is not the user's to set: {provider.managed[name]}.")
        elif name in provider.retired:
            yield Problem(
                where,
                f"is of an older release, and {provider.ep} ignores it.",
                f"Use {provider.retired[name]}.",
            )
        elif name not in provider.options:
            yield _unknown(where, name, provider)
        elif provider.options[name].kind == "pointer":
            yield Problem(
                where,
                f"must be {provider.options[name].allowed}.",
                f"The app can do so: load(..., provider_options={{{name!r}: ...}}).",
            )
        else:
            try:
                provider.options[name].render(value)
            except ValueError as allowed:
                yield Problem(where, f"must be {allowed}, and is {show(value)}.", _NEWER)


_NEWER = "If the EP is newer than that: allow-unknown-options = true in the target's table."


def _unknown(where: str, name: str, provider: Provider) -> Problem:
    what = f"is not an option of the {provider.name} provider."
    if not provider.options:
        return Problem(where, what, f"The {provider.name} provider has no options.")
    return Problem(where, what, f"{suggestion(name, sorted(provider.options))}\n{_NEWER}")


def check_session_options(key: str, options: Mapping[str, OptionValue]) -> Iterator[Problem]:
    """What is wrong with the session options below ``key``."""
    for name, value in options.items():
        if name in MANAGED:
            yield Problem(key + at(name), f"is not the user's to set: {MANAGED[name]}.")
        elif name not in SESSION_OPTIONS:
            yield Problem(
                key + at(name),
                "is not a session option of ONNX Runtime.",
                suggestion(name, sorted(SESSION_OPTIONS)).split("Allowed:")[0]
                + "ONNX Runtime would take it without a word, and do nothing.",
            )
        elif isinstance(value, Mapping):
            yield Problem(key + at(name), f"must not be a table, and is {show(value)}.")


def render_options(
    options: Mapping[str, OptionValue], provider: Provider | None = None, *, lax: bool = False
) -> dict[str, str]:
    """Options as the strings that ONNX Runtime takes.

    What `check_options` refuses is left out, or with ``lax`` taken as it is.
    """
    rendered = {}
    for name, value in options.items():
        option = provider.options.get(name) if provider else None
        try:
            rendered[name] = option.render(value) if option else render(value)
        except ValueError:
            if lax:
                rendered[name] = render(value)
    return rendered

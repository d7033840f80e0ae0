"""Checks of provider options and session options: ONNX Runtime and its EPs check neither."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hatch_epcontext.config.tables import TargetTable
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.files import is_portable
from hatch_epcontext.providers import OptionValue, Provider, render
from hatch_epcontext.shipped import USER_CACHE
from hatch_epcontext.text import listing, near_name, show, suggestion

_SESSION_OPTIONS = frozenset(
    """
    ep.context_node_name_prefix ep.dynamic.workload_type ep.enable_weightless
    memory.enable_memory_arena_shrinkage mlas.disable_kleidiai
    mlas.enable_gemm_fastmath_arm64_bfloat16 mlas.use_lut_gemm
    optimization.constant_folding_max_output_size_in_bytes
    optimization.disable_specified_optimizers optimization.enable_cast_chain_elimination
    optimization.enable_gelu_approximation session.allow_released_opsets_only
    session.disable_aot_function_inlining session.disable_cpu_ep_fallback
    session.disable_double_qdq_remover session.disable_prepacking
    session.disable_qdq_constant_folding session.disable_quant_qdq session.dynamic_block_base
    session.enable_cpu_mem_arena session.enable_dq_matmulnbits_fusion
    session.enable_mem_pattern session.enable_quant_qdq_cleanup
    session.execution_mode session.fail_on_suboptimal_compiled_model
    session.force_spinning_stop session.graph_optimizations_loop_level
    session.inter_op.allow_spinning session.inter_op_num_threads
    session.intra_op.allow_spinning session.intra_op_num_threads
    session.intra_op_thread_affinities session.layer_assignment_settings session.log_id
    session.log_severity_level session.log_verbosity_level
    session.prepack.enable_parallel session.qdq_matmulnbits_accuracy_level
    session.qdq_matmulnbits_block_size session.resource_cuda_partitioning_settings
    session.set_denormal_as_zero session.strict_shape_type_inference
    session.use_deterministic_compute session.use_device_allocator_for_initializers
    session.use_env_allocators session.use_per_session_threads
    """.split()  # noqa: SIM905
)
"""Session options that a user may set (``onnxruntime_session_options_config_keys.h``, ONNX Runtime 1.31)."""

_WRITES_A_FILE = (
    "it writes a file, and ONNX Runtime opens no package with it; the app can set it in "
    "load(..., session_options=...)"
)

_RESERVED_SESSION_OPTIONS = {
    "ep.context_enable": "compiling always sets it",
    "ep.context_embed_mode": "use embed = true or false",
    "ep.context_file_path": "the paths of files in the wheel are fixed",
    "ep.share_ep_contexts": "use share-weights",
    "ep.stop_share_ep_contexts": "use share-weights",
    "ep.context_model_external_initializers_file_name": "the paths of files in the wheel are fixed",
    "session.compile_only": "ONNX Runtime sets it itself",
    "session.disable_model_compile": "the loader sets it for compiled models",
    "session.graph_optimization_level": 'use optimization = "..."',
    "session.optimized_model_filepath": "the paths of files in the wheel are fixed",
    "session.collect_node_memory_stats_to_file": _WRITES_A_FILE,
    "session.debug_layout_transformation": _WRITES_A_FILE,
    "session.enable_profiling": _WRITES_A_FILE,
    "session.node_partition_config_file": "it names a file, and packages are opened without it; the app can "
    "set it in load(..., session_options=...)",
    "session.record_ep_graph_assignment_info": "validation sets it",
}
"""Session options that the build or the loader sets, each with the reason or the key to use."""


_ABSOLUTE = re.compile(r':\s*"((?:[/\\]|[A-Za-z]:[/\\]|{user-cache})[^"]*)"')
"""A value in JSON that is an absolute path, or one that the loader replaces where nothing else is."""


def check_options(key: Key, table: TargetTable, provider: Provider) -> Iterator[Problem]:
    """The options of the target at ``key``."""
    load_options, unchecked = table.load_options, bool(table.allow_unknown_options)
    yield from _check_session_options(key, table.session_options, unchecked=unchecked)
    for name, value in load_options.items():
        if isinstance(value, str) and USER_CACHE in value:
            first, _, below = value.partition("/")
            if first != USER_CACHE or (below and not is_portable(below)):
                option_key = key / "load-options" / name
                message = f"must be a folder in {USER_CACHE}, not {show(value)}."
                example = Setting(option_key, f"{USER_CACHE}/{name}")
                yield Problem.at(option_key, Kind.INVALID_OPTION, message, "For example:", example)
    if unchecked or provider.needs_library:
        return
    allowed = Setting(key / "allow-unknown-options", True)
    yield from _check_values(key / "provider-options", table.provider_options, provider, allowed)
    yield from _check_values(key / "load-options", load_options, provider, allowed)
    for name, value in load_options.items():
        if name in provider.options and provider.options[name].scope == "compile":
            yield Problem.at(
                key / "load-options" / name,
                Kind.NOT_APPLICABLE,
                "counts only when the model is compiled.",
                "Move it to provider-options.",
                Setting(key / "provider-options" / name, value),
            )


def _check_values(
    key: Key, options: Mapping[str, OptionValue], provider: Provider, unchecked: Setting
) -> Iterator[Problem]:
    for name, value in options.items():
        option_key = key / name
        if name in provider.reserved:
            message = f"cannot be set: {provider.reserved[name]}."
            yield Problem.at(option_key, Kind.RESERVED_OPTION, message)
            continue
        option = provider.options.get(name)
        if option is None:
            message = f"is not an option of the {provider.name} provider."
            hint = f"{suggestion(name, sorted(provider.options))}\n{_NEWER}".lstrip()
            yield Problem.at(option_key, Kind.UNKNOWN_OPTION, message, hint, unchecked)
            continue
        try:
            rendered = option.render(value)
        except ValueError as allowed:
            message = f"must be {allowed}, not {show(value)}."
            advice = _advice(option_key, value, provider, unchecked)
            yield Problem.at(option_key, Kind.INVALID_OPTION, message, *advice)
            continue
        if option.kind == "json" and (path := _ABSOLUTE.search(rendered)):
            message = f"has the path {show(path[1])}, and the app has paths of its own."
            hint = "Leave it out. The app can set it: load(..., provider_options={...})."
            yield Problem.at(option_key, Kind.INVALID_OPTION, message, hint)


def _advice(
    key: Key, value: OptionValue, provider: Provider, unchecked: Setting
) -> tuple[str, Setting]:
    """What to do about a wrong ``value`` of the option at ``key``: name the chip, if that sets it."""
    *target, _, option = key.parts
    names = {
        chip.facts[str(option)]: name
        for name, chip in provider.chips.items()
        if option in chip.facts
    }
    # An architecture is that of several chips.
    if not names or len(names) < len(provider.chips):
        return _NEWER, unchecked
    text = render(value)
    if text.isdecimal():
        nearest = sorted(names, key=lambda number: abs(int(number) - int(text)))[:3]
        shown = listing(f"{number} ({names[number]})" for number in nearest)
        return f"The nearest: {shown}.\n{_NEWER}", unchecked
    hint = f"{near_name(text, provider.chips) or ''} Name the chip, or a list of chips:".lstrip()
    return hint, Setting(Key((*target, "chip"), key.model, key.name))


_NEWER = "If the EP is newer than this package:"


def _check_session_options(
    target: Key, options: Mapping[str, OptionValue], *, unchecked: bool
) -> Iterator[Problem]:
    key = target / "session-options"
    for name, value in options.items():
        if name in _RESERVED_SESSION_OPTIONS:
            message = f"cannot be set: {_RESERVED_SESSION_OPTIONS[name]}."
            yield Problem.at(key / name, Kind.RESERVED_OPTION, message)
        elif isinstance(value, Mapping | Sequence) and not isinstance(value, str):
            message = (
                f"must not be a {'table' if isinstance(value, Mapping) else 'list'}: {show(value)}."
            )
            yield Problem.at(key / name, Kind.WRONG_TYPE, message)
        elif name not in _SESSION_OPTIONS and not unchecked:
            silent = "ONNX Runtime would accept it and silently ignore it."
            near = near_name(name, sorted(_SESSION_OPTIONS))
            yield Problem.at(
                key / name,
                Kind.UNKNOWN_OPTION,
                "is not a session option of ONNX Runtime.",
                f"{near or ''} {silent}\nIf ONNX Runtime is newer than this package:".lstrip(),
                Setting(target / "allow-unknown-options", True),
            )


def render_options(
    options: Mapping[str, OptionValue], provider: Provider | None = None, *, unchecked: bool = False
) -> dict[str, str]:
    """Options as the strings that ONNX Runtime reads.

    Options that `check_options` rejects are left out, or kept with ``unchecked``.
    """
    rendered = {}
    for name, value in options.items():
        option = provider.options.get(name) if provider else None
        try:
            rendered[name] = option.render(value) if option else render(value)
        except ValueError:
            if unchecked:
                rendered[name] = render(value)
    return rendered

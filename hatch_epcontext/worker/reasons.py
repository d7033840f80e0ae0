"""Why an EP leaves nodes to the CPU: what its log says of them, and what decides their shapes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import onnx

from hatch_epcontext.errors import BuildError
from hatch_epcontext.ipc.facts import Context, NodeFacts, TargetSpec
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.conditions import Decided, decided
from hatch_epcontext.worker.flow import Flow
from hatch_epcontext.worker.session import LEVELS, open_session, options, provider_of
from hatch_epcontext.worker.step import step

_VERBOSE = 0
"""ONNX Runtime's log severity for everything: EPs log there what they refuse."""

_MOST_TENSORS = 4
"""Tensors of a node whose types and shapes a reason names."""

_COMPUTE_NOTHING = {"session.disable_model_compile": "1"}
"""ONNX Runtime then asks the EP which nodes it takes, and compiles none."""


def with_reasons(context: Context, prepared: Path, result: Path, target: TargetSpec) -> Context:
    """``context`` of the model ``result``, compiled from ``prepared``, with reasons for uncovered nodes."""
    coverage = context.coverage
    if coverage is None or not coverage.uncovered:
        return context
    source = onnx.load(prepared, load_external_data=False).graph
    made = onnx.load(result, load_external_data=False).graph
    uncovered = explained(coverage.uncovered, ask(prepared, target), source, made)
    return replace(context, coverage=replace(coverage, uncovered=uncovered))


def explained(
    nodes: Collection[NodeFacts],
    logged: Mapping[str, str],
    source: onnx.GraphProto,
    optimized: onnx.GraphProto,
) -> tuple[NodeFacts, ...]:
    """``nodes`` with the reasons that the EP has ``logged``, and with the inputs that decide about them.

    ``source`` is the graph that the EP got; ``optimized`` has the types of the values of ``nodes``.
    """
    deciders = _deciders(source, {node.name for node in nodes if node.name})
    types = _types(optimized)
    return tuple(_with_reason(node, logged, deciders.get(node.name), types) for node in nodes)


def nothing_compiled(error: BuildError, prepared: Path, target: TargetSpec) -> BuildError:
    """``error``, that nothing of ``prepared`` was compiled, with the EP's reasons."""
    operators: dict[str, Counter[str]] = {}
    logged = ask(prepared, target)
    nodes = onnx.load(prepared, load_external_data=False).graph.node
    for node in nodes if logged else ():
        reason = logged.get(node.name) or "the EP refuses it with these types and shapes"
        if node.name in logged:
            operators.setdefault(reason, Counter())[graph.operator(node)] += 1
    parts = [f"{pairs_of(ops)} ({reason})" for reason, ops in operators.items()]
    if not parts:
        return error
    told = f"It refused {', '.join(parts[:_MOST_TENSORS])}."
    return BuildError(*(replace(each, message=f"{each.message} {told}") for each in error.problems))


def pairs_of(operators: Counter[str]) -> str:
    """How many of each operator there are: ``"2 Loop, Shape"``."""
    return ", ".join(op if number == 1 else f"{number} {op}" for op, number in operators.items())


def ask(prepared: Path, target: TargetSpec) -> Mapping[str, str]:
    """Ask the EP why it refuses nodes of ``prepared``; returns the reasons by the names of the nodes.

    A reason is empty where the EP has none. Nothing is compiled.
    """
    provider = provider_of(target)
    if provider.reasons is None:
        return {}
    step(f"asking {provider.ep} why it refuses nodes")
    settings = target.settings
    session_options = options(target, settings.provider_options, _COMPUTE_NOTHING)
    session_options.graph_optimization_level = LEVELS[settings.optimization]
    session_options.log_severity_level = _VERBOSE
    with _output() as file:
        # It always fails where there is something to compile.
        with contextlib.suppress(Exception):
            open_session(prepared, session_options)
        file.seek(0)
        return provider.reasons(file.read().decode("utf-8", "replace"))


@contextlib.contextmanager
def _output() -> Iterator[IO[bytes]]:
    """Write what this process prints into a file that is read afterwards, and not into the log."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(each) for each in (1, 2)]
        try:
            for each in (1, 2):
                os.dup2(file.fileno(), each)
            yield file
        finally:
            for each, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, each)
                os.close(copy)


def _deciders(main: onnx.GraphProto, names: Container[str]) -> dict[str, tuple[str, Decided]]:
    """The nodes of ``main`` called ``names`` that need a value which only settings decide.

    By their names, each with that value and with what decides it.
    """
    flow = Flow(main)
    found: dict[str, tuple[str, Decided]] = {}
    for node in flow.nodes:
        for name in node.input if node.name in names else ():
            if (by := decided(main, flow, name)) is not None:
                found.setdefault(node.name, (name, by))
    return found


def _with_reason(
    node: NodeFacts,
    logged: Mapping[str, str],
    decider: tuple[str, Decided] | None,
    types: Mapping[str, str],
) -> NodeFacts:
    reason = node.reason
    if not node.dynamic and node.name in logged:
        given = types.get(node.name, "these types and shapes")
        reason = logged[node.name] or f"the EP refuses it with {given}"
    if decider is None:
        return replace(node, reason=reason)
    what, by = decider
    freeze: dict[str, Any] = {
        name: values[0] if values else None for name, values in by.inputs.items()
    }
    decides = f"the input {by} decides {what!r}"
    return replace(node, reason=f"{reason}; {decides}" if reason else decides, freeze=freeze)


def _types(main: onnx.GraphProto) -> dict[str, str]:
    """The types and shapes of the inputs and outputs of each node of ``main``, by its name."""
    values = {
        value.name: f"{facts.dtype} [{facts.shape_text}]"
        for value in (*main.input, *main.value_info, *main.output)
        if (facts := graph.facts(value)).dtype != "undefined"
    }
    return {
        node.name: " -> ".join(
            ", ".join([values[name] for name in names if name in values][:_MOST_TENSORS]) or "?"
            for names in (node.input, node.output)
        )
        for node in main.node
    }

"""Why an EP leaves nodes to the CPU: the reasons in its log, and the inputs that decide their shapes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import onnx

from hatch_epcontext.config.settings import Target
from hatch_epcontext.graph import graph, inference
from hatch_epcontext.graph.facts import NodeFacts, describe_deciders, describe_nodes
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.uncompilable import deciders
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import narrow
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.session import LEVELS, open_session, options

_VERBOSE = 0
"""ONNX Runtime's log severity for everything: there EPs log the nodes that they refuse."""

_COMPUTE_NOTHING = {"session.disable_model_compile": "1"}
"""With this option ONNX Runtime queries the EP for the nodes that it can compile, and compiles none."""


def with_reasons(
    nodes: Collection[NodeFacts],
    logged: Mapping[str, str],
    source: onnx.GraphProto,
    optimized: onnx.GraphProto,
    provider: Provider,
) -> tuple[NodeFacts, ...]:
    """``nodes`` with the reasons that the EP ``logged``, and with the inputs that decide about the nodes.

    ``source`` is the graph that the EP got; ``optimized`` has the types of the values of ``nodes``.
    """
    scope, limits = Scope(source), _beyond_limits(optimized, provider)
    by_name = {node.name: node for node in scope.counted if node.name}
    reasons = {
        facts.name: facts.reason if facts.own else logged.get(facts.name) or limits.get(facts.name)
        for facts in nodes
    }
    return tuple(
        _with_deciders(replace(facts, reason=reasons[facts.name]), by_name.get(facts.name), scope)
        for facts in nodes
    )


def describe_refused(prepared: Path, target: Target) -> tuple[str, tuple[str, ...]]:
    """A sentence about the nodes of ``prepared`` that the EP refuses, or that have tensors which it does not
    take, with the reasons, and their names; both are empty if it gives none.
    """
    provider = target.provider
    logged = ask(prepared, target)
    if not logged:
        return "", ()
    onnx_model = onnx.load(prepared, load_external_data=False)
    main, typed = onnx_model.graph, inference.inferred(onnx_model)
    names = logged.keys() | _beyond_limits(typed, provider).keys()
    # Other nodes are in no file: ONNX Runtime has inserted them since.
    refused = [NodeFacts(n.name, graph.operator(n)) for n in main.node if n.name in names]
    if not refused:
        return "", ()
    explanations = with_reasons(refused, logged, main, typed, provider)
    sentence = f"It refuses {'; '.join(describe_nodes(explanations))}."
    return sentence, tuple(sorted(node.name for node in refused))


def ask(prepared: Path, target: Target) -> Mapping[str, str]:
    """Query the EP for the nodes of ``prepared`` that it refuses; returns the reasons by the nodes' names.

    A reason is empty if the EP gives none. Nothing is compiled.
    """
    provider = target.provider
    if provider.reasons("") is None:
        return {}
    announce(f"asking {provider.ep} why it refuses nodes")
    settings = target.settings
    session_options = options(target, settings.provider_options, _COMPUTE_NOTHING)
    session_options.graph_optimization_level = LEVELS[settings.optimization]
    session_options.log_severity_level = _VERBOSE
    with _output() as file:
        # It always fails if there are nodes to compile.
        with contextlib.suppress(Exception):
            open_session(prepared, session_options)
        file.seek(0)
        return provider.reasons(narrow(file.read()).decode("utf-8", "replace")) or {}


@contextlib.contextmanager
def _output() -> Iterator[IO[bytes]]:
    """Redirect this process's output from the log into a file that is read afterwards."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        copies = [os.dup(stream) for stream in (1, 2)]
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield file
        finally:
            for stream, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, stream)
                os.close(copy)


def _with_deciders(facts: NodeFacts, node: onnx.NodeProto | None, scope: Scope) -> NodeFacts:
    """``facts`` with the inputs that decide the first value that ``node`` needs of them."""
    for name in () if node is None else node.input:
        if by := deciders(scope, name):
            inputs = describe_deciders(by)
            decides = f"the input {inputs} decides {name!r}"
            if name in by:
                decides = f"it reads the input {inputs}"
            reason = "; ".join(filter(None, (facts.reason, decides)))
            return replace(facts, reason=reason, deciders=by)
    return facts


def _beyond_limits(main: onnx.GraphProto, provider: Provider) -> dict[str, str]:
    """The nodes of ``main`` with inputs or outputs that the EP does not take, by name, with what that is."""
    values = {
        value.name: graph.facts(value) for value in (*main.input, *main.value_info, *main.output)
    }
    reasons = {}
    for node in main.node:
        tensors = [values[name] for name in (*node.input, *node.output) if name in values]
        rank = max((len(tensor.sizes) for tensor in tensors), default=0)
        lacking = sorted({tensor.dtype for tensor in tensors} & provider.lacks_dtypes)
        if provider.max_rank is not None and rank > provider.max_rank:
            most = f"the EP takes at most {provider.max_rank}"
            reasons[node.name] = f"it has a tensor of rank {rank}, and {most}"
        elif lacking:
            reasons[node.name] = f"the EP does not support {' or '.join(lacking)}"
    return reasons

"""Why a source model cannot be run on the CPU: the node, the inputs that it depends on, what to set."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, Problem, Setting
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing
from hatch_epcontext.worker.configured import fix_open
from hatch_epcontext.worker.dummy.inputs import sized
from hatch_epcontext.worker.reasons import on_conditions

_FAILED = re.compile(r"running (\S+) node\. Name:'([^']*)' Status Message: ")

_NO_KERNEL = re.compile(r"find an implementation for (\w+)\(\d+\) node with name '([^']*)'")

_NOT_LOADED = " failed:"
"""What ONNX Runtime writes after "Load model from" and the file; the reason follows it."""

_UNCOMPARED = "switch off the comparison (not tried: the EP may fail at the same node)"

_OTHER_LAYOUT = "_nchwc"
"""The suffix of an output's name of a node that ONNX Runtime runs in another memory layout."""

_MAX_NAMED = 3
"""The most inputs that a message names: those nearest to the node."""


def source_failed(model: Model, fixed: onnx.ModelProto, error: Exception) -> Problem:
    """The problem of a source model for which ONNX Runtime raised ``error``.

    ``fixed``: the model after its configuration was applied.
    """
    text = str(error)
    start = "the source model itself cannot be run on the CPU"
    uncompared = Setting(model.key / "validate" / "tolerance", False)

    def problem(message: str, hint: str, *settings: Setting) -> Problem:
        return Problem.at(model.key, Kind.SOURCE_FAILED, f"{start}{message}", hint, *settings)

    if _NOT_LOADED in text:
        message = f", because ONNX Runtime cannot load it: {text.split(_NOT_LOADED, 1)[1]}"
        return problem(
            message, "Correct the model: no EP gets a model that ONNX Runtime cannot load."
        )
    if kernel := _NO_KERNEL.search(text):
        operator, name = kernel.groups()
        message = f": ONNX Runtime's CPU EP has no {operator} for the types of the node {name!r}."
        return problem(
            message, f"Use other types or another operator, or {_UNCOMPARED}.", uncompared
        )
    message = f": {text}"
    inputs = [graph.facts(value) for value in graph.inputs(fixed.graph)]
    scope = Scope(fixed.graph, nested=True)
    named: list[TensorFacts] = []
    if (node := _node(scope, text)) is not None:
        named = _inputs_of(node, scope, inputs)
        reason = text.rsplit("Status Message: ", 1)[-1].strip().rstrip(".")
        message = f": its node {node.name!r} ({graph.operator(node)}) fails: {reason}."
        if named:
            names = listing(repr(tensor.name) for tensor in named)
            message += (
                f"\nIt depends on {'the input' if len(named) == 1 else 'the inputs'} {names}."
            )
    if unsized := [tensor for tensor in sized(inputs, model) if not tensor.is_fixed]:
        names = listing(repr(tensor.name) for tensor in unsized)
        message += f"\nOpen dimensions of {names} have no size in the configuration, and get 1."
        hint, sizes = fix_open(unsized, model)
        return problem(message, hint, *sizes)
    hint, settings = (not model.constants and on_conditions(fixed.graph, model.key)) or ("", ())
    hint = (
        f"{hint}\nGive inputs, constants or sizes that the model accepts, or {_UNCOMPARED}.".strip()
    )
    samples = Setting(model.key / "validate" / "inputs", "samples.npz")
    others = (Setting(model.place(name)) for name in ("constants", "dims"))
    return problem(message, hint, *settings, samples, *others, uncompared)


def _node(scope: Scope, text: str) -> onnx.NodeProto | None:
    """The innermost node that ONNX Runtime's message names, if the model has it."""
    nodes = {(node.op_type, node.name): node for node in scope.nodes if node.name}
    # The message names outer nodes first.
    candidates = (
        nodes.get((operator, name)) or scope.maker(name.removesuffix(_OTHER_LAYOUT))
        for operator, name in reversed(_FAILED.findall(text))
    )
    return next((node for node in candidates if node is not None), None)


def _inputs_of(
    node: onnx.NodeProto, scope: Scope, inputs: Sequence[TensorFacts]
) -> list[TensorFacts]:
    """The inputs that decide whether ``node`` fails, the nearest first."""
    by_name = {tensor.name: tensor for tensor in inputs}
    deciding = operators.FAILS_ON.get(graph.operator(node), ())
    names = [name for index in deciding if (name := graph.operand(node, index))] or node.input
    return [by_name[name] for name in scope.ancestors(names) if name in by_name][:_MAX_NAMED]

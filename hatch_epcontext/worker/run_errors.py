"""Why a source model cannot be run on the CPU: the node, the inputs that it depends on, what to set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Kind, Problem, Setting
from hatch_epcontext.graph import graph, operators
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing
from hatch_epcontext.worker.advice import on_conditions
from hatch_epcontext.worker.configured import how_to_fix, place_of_sizes, sizes_to_fix
from hatch_epcontext.worker.dummy.inputs import sized

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
    if _NOT_LOADED in text:
        reason = text.split(_NOT_LOADED, 1)[1]
        return Problem.at(
            model.key,
            Kind.SOURCE_FAILED,
            "the source model itself cannot be run on the CPU, because ONNX Runtime cannot load it: "
            f"{reason}",
            "Correct the model: no EP gets a model that ONNX Runtime cannot load.",
        )
    if kernel := _NO_KERNEL.search(text):
        return Problem.at(
            model.key,
            Kind.SOURCE_FAILED,
            "the source model itself cannot be run on the CPU: ONNX Runtime's CPU EP has no "
            f"{_operation(fixed, *kernel.groups())}.",
            f"Use other types or another operator, or {_UNCOMPARED}.",
            Setting(model.key / "validate" / "tolerance", False),
        )
    message = f"the source model itself cannot be run on the CPU: {text}"
    inputs = [graph.facts(value) for value in graph.inputs(fixed.graph)]
    scope = Scope(fixed.graph, nested=True)
    node = _node(scope, text)
    named: list[TensorFacts] = []
    if node is not None:
        operator = graph.operator(node)
        named = _inputs_of(node, scope, inputs)
        reason = text.rsplit("Status Message: ", 1)[-1].strip()
        message = (
            f"the source model itself cannot be run on the CPU: its node {node.name!r} "
            f"({operator}) fails: {reason}{'' if reason.endswith('.') else '.'}"
        )
        if named:
            names = listing(repr(tensor.name) for tensor in named)
            message += (
                f"\nIt depends on {'the input' if len(named) == 1 else 'the inputs'} {names}."
            )
    if without_size := [tensor for tensor in sized(inputs, model) if not tensor.is_fixed]:
        return _without_size(model, message, without_size)
    hint, settings = (not model.constants and on_conditions(fixed.graph, model.key)) or ("", ())
    return Problem.at(
        model.key,
        Kind.SOURCE_FAILED,
        message,
        f"{hint}\n{_hint(named, model)}".strip(),
        *settings,
        *_settings(named, model),
        Setting(model.key / "validate" / "tolerance", False),
    )


def _operation(fixed: onnx.ModelProto, operator: str, name: str) -> str:
    """The ``operator`` with the types of its node ``name``, or of all such nodes if that is empty."""
    scope = Scope.of(fixed)
    types = dict.fromkeys(
        graph.dtype_name(elem_type)
        for node in scope.nodes
        if node.op_type == operator and name in ("", node.name)
        for value in (*node.input, *node.output)
        if (elem_type := scope.elem_type(value)) is not None
    )
    node = f" (node {name!r})" if name else ""
    return f"{operator}{node} of opset {graph.opset(fixed)} for its types ({', '.join(types)})"


def _without_size(model: Model, message: str, inputs: Sequence[TensorFacts]) -> Problem:
    """The problem if open dimensions of ``inputs`` without a size can be the cause."""
    names = listing(repr(tensor.name) for tensor in inputs)
    dimensions = f"of the input {names} have" if len(inputs) == 1 else f"of the inputs {names} have"
    if all(tensor.shape is None for tensor in inputs):
        dimensions = f"of {names}, whose rank is unknown, have"
    settings = [setting for tensor in inputs for setting in sizes_to_fix(tensor, model)]
    return Problem.at(
        place_of_sizes(inputs[0], model),
        Kind.SOURCE_FAILED,
        f"{message}\nOpen dimensions {dimensions} no size in the configuration, and get 1.",
        "\n".join(dict.fromkeys(map(how_to_fix, inputs))),
        *settings,
    )


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


def _is_number(facts: TensorFacts) -> bool:
    return "int" in facts.dtype and facts.is_fixed and all(size == 1 for size in facts.sizes)


def _hint(named: Sequence[TensorFacts], model: Model) -> str:
    values = "random" if model.validate.inputs == "random" else model.validate.inputs
    if not named:
        return f"Give inputs that the model accepts, or {_UNCOMPARED}."
    numbers = [tensor.name for tensor in named if _is_number(tensor)]
    whole = f"Give inputs that the model accepts instead of {values} ones"
    if numbers:
        whole += f", or a value that never changes for {listing(map(repr, numbers))}"
    sizes = ", or other sizes" if model.dims or model.shapes else ""
    return f"{whole}{sizes}, or {_UNCOMPARED}."


def _settings(named: Sequence[TensorFacts], model: Model) -> Iterator[Setting]:
    yield Setting(model.key / "validate" / "inputs", "samples.npz")
    if any(_is_number(tensor) for tensor in named):
        yield Setting(model.key / "constants")
    if model.dims:
        yield Setting(model.place("dims"))
    elif model.shapes:
        yield Setting(model.place("shapes"))

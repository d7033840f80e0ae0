"""The activation functions of LSTM, GRU and RNN, as nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, copy_of
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.rewriting import rewrites
from hatch_epcontext.graph.scope import Scope

_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
"""The functions of one direction of each layer, in lower case."""

_OPERATORS = {name.casefold(): name for name in ("Sigmoid", "Tanh", "Relu", "HardSigmoid")}


@dataclass(frozen=True)
class Activation:
    """A function by its operator, with the values of its parameters."""

    operator: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether the function hardly changes for values far from 0."""
        return self.operator in ("Sigmoid", "Tanh")

    def apply(self, value: str, builder: Builder) -> str:
        """Add the function of ``value``."""
        return builder.add(self.operator, value, **self.parameters)


def _named_activations(node: onnx.NodeProto) -> list[str]:
    """The functions that ``node`` names, in lower case."""
    names = graph.attribute(node, "activations", [])
    return [name.decode("utf-8", "replace").casefold() for name in names]


def activations(node: onnx.NodeProto, directions: int) -> list[list[Activation]] | Declined:
    """The functions of each direction of ``node``."""
    defaults = _DEFAULTS[node.op_type]
    names = _named_activations(node) or [*defaults] * directions
    if node.op_type == "RNN":
        # The default names functions for two directions; one direction uses only the first.
        names = names[:directions]
    if len(names) != directions * len(defaults):
        return Declined(f"it has {len(names)} activations, not {directions * len(defaults)}")
    if unknown := sorted({*names} - _OPERATORS.keys()):
        return Declined(f"its activation {unknown[0]!r} is not known")
    # Only a HardSigmoid takes parameters, in the order of the functions.
    alphas, betas = (
        iter(graph.attribute(node, f"activation_{name}", [])) for name in ("alpha", "beta")
    )
    functions = [
        Activation("HardSigmoid", {"alpha": next(alphas, 0.2), "beta": next(betas, 0.5)})
        if name == "hardsigmoid"
        else Activation(_OPERATORS[name])
        for name in names
    ]
    return [functions[at : at + len(defaults)] for at in range(0, len(names), len(defaults))]


@rewrites(*_DEFAULTS)
def drop_default_activations(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
    """A layer without ``activations``, if these are the defaults: EPs refuse the attribute."""
    names = _named_activations(node)
    directions = 2 if graph.text(node, "direction") == "bidirectional" else 1
    if not names:
        return None
    if names != [*_DEFAULTS[node.op_type]] * directions:
        return Declined("its activations are not the default ones")
    # The default activations have no parameters.
    unused = ("activations", "activation_alpha", "activation_beta")
    builder.append(_without_attributes(node, unused))
    return list(node.output)


def _without_attributes(node: onnx.NodeProto, names: tuple[str, ...]) -> onnx.NodeProto:
    """A copy of ``node`` without the attributes ``names``."""
    result = copy_of(node)
    del result.attribute[:]
    result.attribute.extend(
        attribute for attribute in node.attribute if attribute.name not in names
    )
    return result

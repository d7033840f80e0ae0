"""The activation functions of LSTM, GRU and RNN, as nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder
from hatch_epcontext.graph.facts import Declined

DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
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


def named_activations(node: onnx.NodeProto) -> list[str]:
    """The functions that ``node`` names, in lower case."""
    names = graph.attribute(node, "activations", [])
    return [name.decode("utf-8", "replace").casefold() for name in names]


def activations(node: onnx.NodeProto, directions: int) -> list[list[Activation]] | Declined:
    """The functions of each direction of ``node``."""
    defaults = DEFAULTS[node.op_type]
    names = named_activations(node) or [*defaults] * directions
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

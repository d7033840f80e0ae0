"""The activation functions of LSTM, GRU and RNN, as nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import helper

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder

DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
"""The functions of one direction of each layer, in lower case."""

_PLAIN = {each.casefold(): each for each in ("Sigmoid", "Tanh", "Relu", "Softplus")}

_ALPHA: dict[str, float | None] = {
    "leakyrelu": 0.01,
    "elu": 1.0,
    "hardsigmoid": 0.2,
    "thresholdedrelu": None,
    "affine": None,
    "scaledtanh": None,
}
"""The functions with a parameter alpha, with its default; None if runtimes differ in that."""

_BETA: dict[str, float | None] = {"hardsigmoid": 0.5, "affine": None, "scaledtanh": None}
_OTHERS = frozenset({"softsign"})
_WITH_ALPHA = {"leakyrelu": "LeakyRelu", "elu": "Elu"}


@dataclass(frozen=True)
class Activation:
    """A function by its name in lower case, with the values of its parameters."""

    name: str
    alpha: float = 0
    beta: float = 0

    @property
    def is_flat(self) -> bool:
        """Whether the function hardly changes for values far from 0."""
        return self.name in ("sigmoid", "tanh")

    def apply(self, value: str, builder: Builder) -> str:
        """Add the function of ``value``."""
        if self.name in _PLAIN:
            return builder.add(_PLAIN[self.name], value)
        if self.name in _WITH_ALPHA:
            return builder.add(_WITH_ALPHA[self.name], value, alpha=self.alpha)
        if self.name == "hardsigmoid":
            return builder.add("HardSigmoid", value, alpha=self.alpha, beta=self.beta)
        return self._composed(value, builder)

    def _composed(self, value: str, builder: Builder) -> str:
        """The function as several nodes: few EPs, and not all opsets, have it."""
        if self.name == "softsign":
            size = builder.add("Add", builder.add("Abs", value), builder.number(1))
            return builder.add("Div", value, size)
        if self.name == "thresholdedrelu":
            above = builder.add("Greater", value, builder.number(self.alpha))
            dtype = helper.np_dtype_to_tensor_dtype(builder.dtype)
            return builder.add("Mul", value, builder.add("Cast", above, to=dtype))
        if self.name == "affine":
            scaled = builder.scaled(value, self.alpha)
            return builder.add("Add", scaled, builder.number(self.beta))
        return builder.scaled(builder.add("Tanh", builder.scaled(value, self.beta)), self.alpha)


def named_activations(node: onnx.NodeProto) -> list[str]:
    """The functions that ``node`` names, in lower case."""
    names = graph.attribute(node, "activations", [])
    return [name.decode("utf-8", "replace").casefold() for name in names]


def activations(node: onnx.NodeProto, directions: int) -> list[list[Activation]] | None:
    """The functions of each direction of ``node``; None if they are unknown, or their number is wrong, or
    parameters are missing.
    """
    defaults = DEFAULTS[node.op_type]
    names = named_activations(node) or [*defaults] * directions
    if node.op_type == "RNN":
        # The default names functions for two directions; one direction uses only the first.
        names = names[:directions]
    known = {*_PLAIN, *_ALPHA, *_OTHERS}
    if len(names) != directions * len(defaults) or not known.issuperset(names):
        return None
    alphas = iter(graph.attribute(node, "activation_alpha", []))
    betas = iter(graph.attribute(node, "activation_beta", []))
    found: list[Activation] = []
    for name in names:
        alpha, beta = _next(name, _ALPHA, alphas), _next(name, _BETA, betas)
        if alpha is None or beta is None:
            return None
        found.append(Activation(name, alpha, beta))
    return [found[at : at + len(defaults)] for at in range(0, len(found), len(defaults))]


def _next(name: str, known: dict[str, float | None], values: Iterator[float]) -> float | None:
    """The next of ``values`` for a function with a parameter, or its default; 0 for another function."""
    return next(values, known[name]) if name in known else 0.0

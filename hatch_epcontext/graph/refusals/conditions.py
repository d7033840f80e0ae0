"""Inputs that decide a value that compiling needs, and so can be frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx

from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing, show

_MAX_VALUES = 4
"""The most values of an input that a message names."""


@dataclass(frozen=True)
class Decided:
    """A value that only settings of the model decide, such as a sample rate, and no data.

    ``inputs``: the inputs that decide it, each with the constants that it is compared with, if any.
    """

    inputs: dict[str, tuple[Any, ...]]

    def __str__(self) -> str:
        return listing(_described(name, values) for name, values in self.inputs.items())


def _described(name: str, values: tuple[Any, ...]) -> str:
    compared = " or ".join(show(value) for value in values[:_MAX_VALUES])
    return f"{name!r} (compared with {compared})" if compared else repr(name)


def decided(flow: Scope, name: str) -> Decided | None:
    """The settings that decide the value ``name``; None if data does, or if nothing is known."""
    inputs = sorted(flow.inputs_of(name))
    if not inputs or not flow.settings.issuperset(inputs):
        return None
    compared = tuple(dict.fromkeys(_compared(flow.behind(name), flow)))
    return Decided(dict.fromkeys(inputs, compared if len(inputs) == 1 else ()))


def _compared(nodes: Iterable[onnx.NodeProto], flow: Scope) -> Iterator[Any]:
    """The constants that a value is compared with for equality in ``nodes``."""
    for node in nodes:
        if node.op_type != "Equal":
            continue
        for name in node.input:
            value = flow.constant(name)
            if value is not None and getattr(value, "size", 0) == 1:
                yield value.item()


def deciding(main: onnx.GraphProto) -> tuple[Decided | None, list[str]]:
    """The inputs that decide conditions of ``main``, and the names of the If nodes that have these.

    None if no input decides any, or only data.
    """
    flow = Scope(main)
    inputs: dict[str, tuple[Any, ...]] = {}
    names = []
    for node in flow.counted:
        by = decided(flow, node.input[0]) if node.op_type == "If" else None
        if by is not None:
            names.append(node.name or node.output[0])
            for name, values in by.inputs.items():
                inputs[name] = tuple(dict.fromkeys((*inputs.get(name, ()), *values)))
    return (Decided(inputs) if inputs else None), list(dict.fromkeys(names))

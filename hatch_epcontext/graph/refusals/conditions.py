"""Inputs that decide a value that compiling needs, and so can be frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx

from hatch_epcontext.errors import Key, Setting
from hatch_epcontext.graph.dependencies import Dependencies
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

    def settings(self, model: Key) -> tuple[Setting, ...]:
        """The constants to set in the table at ``model``, with values if all are known."""
        if not all(self.inputs.values()):
            return tuple(Setting(model / "constants" / name) for name in self.inputs)
        known = {name: values[0] for name, values in self.inputs.items()}
        return (Setting(model / "constants", known),)


def _described(name: str, values: tuple[Any, ...]) -> str:
    compared = " or ".join(show(value) for value in values[:_MAX_VALUES])
    return f"{name!r} (compared with {compared})" if compared else repr(name)


def decided(flow: Dependencies, name: str) -> Decided | None:
    """The settings that decide the value ``name``; None if data does, or if nothing is known."""
    inputs = sorted(flow.origins(name))
    if not inputs or not flow.settings.issuperset(inputs):
        return None
    compared = tuple(dict.fromkeys(_compared(flow.behind(name), flow)))
    return Decided(dict.fromkeys(inputs, compared if len(inputs) == 1 else ()))


def _compared(nodes: Iterable[onnx.NodeProto], flow: Dependencies) -> Iterator[Any]:
    """The constants that a value is compared with for equality in ``nodes``."""
    for node in nodes:
        if node.op_type != "Equal":
            continue
        for name in node.input:
            value = flow.constant(name)
            if value is not None and getattr(value, "size", 0) == 1:
                yield value.item()


def undecided(main: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, Decided | None]]:
    """Yield each If of ``main`` whose condition depends on inputs, and the settings that decide it."""
    flow = Dependencies(main)
    for node in flow.counted:
        if node.op_type == "If" and flow.depends(node.input[:1]):
            yield node, decided(flow, node.input[0])


def advice(main: onnx.GraphProto, model: Key | None) -> tuple[str, tuple[Setting, ...]] | None:
    """What to freeze so that the conditions of ``main`` are known: a sentence, and the setting in the table
    at ``model``, if the model has one. None if no input decides them, or only data.
    """
    found: dict[str, tuple[Any, ...]] = {}
    names = []
    for node, reason in undecided(main):
        if reason is not None:
            names.append(node.name or node.output[0])
            for name, values in reason.inputs.items():
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
    if not found:
        return None
    whole = Decided(found)
    which = listing(map(repr, dict.fromkeys(names[:_MAX_VALUES])))
    hint = f"The input {whole} decides which branch of the If {which} runs: freeze it (not tried)."
    return hint, () if model is None else whole.settings(model)

"""What users can do about what an EP does not compile: hints, with the settings that they name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Key, Setting
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.limits import QUANTIZED_WEIGHTS
from hatch_epcontext.text import listing
from hatch_epcontext.worker.results import NodeFacts

if TYPE_CHECKING:
    # The build imports this module too, without onnx.
    import onnx

    from hatch_epcontext.graph.refusals import Findings

_MAX_NAMES = 4
"""The most nodes that a hint names."""

Advice = tuple[str, tuple[Setting, ...]]
"""What to do, in words, and what to set."""


def keep(cut: Cut, model: Key) -> Setting:
    """The setting for this cut of the model at the key ``model``."""
    ends = {"inputs": list(cut.inputs), "outputs": list(cut.outputs)}
    return Setting(model / "cut", {end: names for end, names in ends.items() if names})


def freeze(inputs: Mapping[str, tuple[Any, ...]], model: Key) -> tuple[Setting, ...]:
    """The constants to set in the table at ``model``, with the first of the values if all have some."""
    if not all(inputs.values()):
        return tuple(Setting(model / "constants" / name) for name in inputs)
    return (Setting(model / "constants", {name: values[0] for name, values in inputs.items()}),)


def on_weights(nodes: Iterable[NodeFacts], target: Target) -> Advice | None:
    """What to do about quantized weights in ``nodes``, which the EP refuses; None if none is the source's."""
    operators = sorted(QUANTIZED_WEIGHTS.intersection(node.op for node in nodes))
    if not operators or target.settings.quantize:
        return None
    if target.settings.dequantize == "all":
        hint = (
            f'dequantize = "all" does not undo {listing(operators)} here: it undoes DequantizeLinear, '
            "GatherBlockQuantized, and MatMulNBits without g_idx, where the model stores the numbers, the "
            "scales and the zero points. Change the model at these nodes."
        )
        return hint, ()
    hint = "Undo the quantization of the weights, which makes the model larger (not tried)."
    return hint, (Setting(target.place("dequantize"), "all"),)


def on_conditions(main: onnx.GraphProto, model: Key | None) -> Advice | None:
    """What to freeze so that the conditions of ``main`` are known, in the table at ``model``, if it has one.

    None if no input decides them, or only data.
    """
    from hatch_epcontext.graph.refusals import deciders_of_branches

    by, names = deciders_of_branches(main)
    if by is None:
        return None
    which = listing(map(repr, names[:_MAX_NAMES]))
    hint = f"The input {by} decides which branch of the If {which} runs: freeze it (not tried)."
    return hint, () if model is None else freeze(by.inputs, model)


def on_open_shapes(main: onnx.GraphProto) -> tuple[str, ...]:
    """Which key fixes the shapes of the inputs of ``main``, if some are open."""
    from hatch_epcontext.graph import graph

    if all(graph.facts(value).is_fixed for value in graph.inputs(main)):
        return ()
    return (
        "the shapes of inputs are open, and with them lengths: static-shapes = true fixes them",
    )


def on_refused(findings: Findings, source: onnx.ModelProto, model: Model, target: Target) -> Advice:
    """What to do about the refused nodes of ``source``, the file of ``model``: freeze what decides them, keep
    the part before or after them, or use another provider.
    """
    if by := findings.deciders:
        return f"Freeze {by}, which decides it (not tried).", freeze(by.inputs, model.key)
    if findings.is_trivial:
        hint = (
            "Nothing else is worth compiling: ship the model as it is, or let ONNX Runtime optimize it "
            'with the cpu provider (provider = "cpu"; not tried).'
        )
        return hint, ()
    where, part = "before or after them", Setting(model.key / "cut")
    if cut := findings.part(source):
        place = "before them, up to" if cut.outputs else "after them, from"
        where = f"{place} {listing(map(repr, cut.outputs or cut.inputs))}"
        part = keep(cut.within(model.cut), model.key)
    hint = (
        f"Keep only the part {where}, and compute the rest in the app; or let the CPU compute them, with a "
        "lower min-coverage (not tried)."
    )
    # Rounded down: preparation also removes nodes that can be compiled.
    share = math.floor(9 * findings.share) / 10
    return hint, (part, Setting(target.place("min-coverage"), share))

"""What users can do about what an EP does not compile: hints, with the settings that they name.

The build imports this module too, so it needs nothing that reads models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hatch_epcontext.config.settings import Target
from hatch_epcontext.errors import Key, Setting
from hatch_epcontext.graph.operators import DEQUANTIZES
from hatch_epcontext.text import listing
from hatch_epcontext.worker.results import NodeFacts

Advice = tuple[str, tuple[Setting, ...]]
"""What to do, in words, and what to set."""


def freeze(inputs: Mapping[str, tuple[Any, ...]], model: Key) -> tuple[Setting, ...]:
    """The constants to set in the table at ``model``, with the first of the values if all have some."""
    if not all(inputs.values()):
        return tuple(Setting(model / "constants" / name) for name in inputs)
    return (Setting(model / "constants", {name: values[0] for name, values in inputs.items()}),)


def on_weights(nodes: Iterable[NodeFacts], target: Target) -> Advice | None:
    """What to do about quantized weights in ``nodes``, which the EP refuses; None if none is the source's."""
    operators = sorted(DEQUANTIZES.intersection(node.op for node in nodes))
    if not operators or target.settings.quantize:
        return None
    if target.settings.dequantize == "all":
        hint = (
            f'dequantize = "all" does not undo {listing(operators)} here, where the model does not store '
            "the numbers, the scales and the zero points. Change the model at these nodes."
        )
        return hint, ()
    hint = "Undo the quantization of the weights, which makes the model larger (not tried)."
    return hint, (Setting(target.place("dequantize"), "all"),)

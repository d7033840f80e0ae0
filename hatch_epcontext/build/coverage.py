"""How much of a graph was compiled: in words, and whether it is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import BuildError, Kind, Problem, Setting
from hatch_epcontext.ipc.facts import DYNAMIC_QUANTIZATION, Coverage, NodeFacts
from hatch_epcontext.text import count

_MOST_NODES = 10
"""The number of uncovered nodes that a message names."""


def describe_coverage(coverage: Coverage | None) -> str:
    """The coverage for a summary; an optimized graph has none."""
    if coverage is None:
        return "optimized graph"
    contexts = count(coverage.partitions, "context")
    return f"{coverage.compiled}/{coverage.nodes} nodes in {contexts}"


def check_coverage(
    coverage: Coverage | None, target: Target, location: str, model: Model | None = None
) -> None:
    """Raise BuildError, at ``location``, when less of ``model`` was compiled than ``target`` requires.

    An optimized graph has no coverage.
    """
    if coverage is None or coverage.share >= target.min_coverage:
        return
    named = [_describe_node(node) for node in coverage.uncovered[:_MOST_NODES]]
    more = len(coverage.uncovered) - len(named)
    raise BuildError(
        Problem(
            Kind.LOW_COVERAGE,
            location,
            f"{target.provider.ep} compiled {coverage.compiled} of {coverage.nodes} nodes "
            f"({coverage.share:.1%}), and min-coverage is {target.min_coverage:.1%}. "
            f"Left to the CPU: {', '.join(named)}{f' and {more} more' if more else ''}.",
            f"{_hint(coverage, target)} {_choices(coverage, model)}",
            settings=(
                *_dequantize(coverage, target, model),
                *_cut(coverage, model),
                Setting(target.key / "min-coverage", math.floor(100 * coverage.share) / 100),
            ),
        )
    )


def _choices(coverage: Coverage, model: Model | None) -> str:
    if model is None or coverage.largest is None:
        return "Or accept it:"
    return "Or keep the largest part that is covered, and let the app do the rest; or accept it:"


def _cut(coverage: Coverage, model: Model | None) -> Iterator[Setting]:
    """The setting that keeps the largest part of the model that is covered, if there is one."""
    if model is None or (largest := coverage.largest) is None:
        return
    # Ends that are not named are those of the model, which is perhaps cut already.
    inputs = largest.inputs or model.cut.inputs
    outputs = largest.outputs or model.cut.outputs
    ends = {"inputs": list(inputs), "outputs": list(outputs)}
    yield Setting(model.key / "cut", {end: names for end, names in ends.items() if names})


def _dequantize(coverage: Coverage, target: Target, model: Model | None) -> Iterator[Setting]:
    """The setting that undoes dynamic quantization, if nodes of it are left to the CPU."""
    if _is_dynamic(coverage) and not target.settings.dequantize:
        yield Setting((model.key if model else target.key) / "dequantize", True)


def _is_dynamic(coverage: Coverage) -> bool:
    return any(node.op in DYNAMIC_QUANTIZATION for node in coverage.uncovered)


def _hint(coverage: Coverage, target: Target) -> str:
    if _is_dynamic(coverage) and not target.settings.dequantize:
        return (
            "The model is dynamically quantized: it measures its activations when it runs, which "
            f"{target.provider.ep} does not do. Undo that with dequantize, or change the model there."
        )
    if any(node.reason for node in coverage.uncovered):
        return (
            "An EP for fixed shapes cannot compile shapes that depend on the data: cut the model "
            "before them, or freeze more inputs with constants."
        )
    return (
        f"{target.provider.ep} does not have these operators, or only with other types or "
        "attributes: change the model there."
    )


def _describe_node(node: NodeFacts) -> str:
    reason = f" ({node.reason})" if node.reason else ""
    return f"{node.op} {node.name}".rstrip() + reason

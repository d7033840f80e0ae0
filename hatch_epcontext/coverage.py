"""How much of a graph was compiled: is it enough, what was left to the CPU, and what to do."""

from __future__ import annotations

from hatch_epcontext.config import Target
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.protocol import Coverage, NodeFacts

MOST_NODES = 10
"""How many of the nodes left to the CPU a message names."""


def check_coverage(coverage: Coverage | None, target: Target, where: str) -> None:
    """Raise BuildError, about ``where``, when less was compiled for ``target`` than it wants.

    An optimized graph has no coverage.
    """
    if coverage is None or coverage.share >= target.min_coverage:
        return
    named = [_named(node) for node in coverage.left[:MOST_NODES]]
    more = len(coverage.left) - len(named)
    raise BuildError(
        Problem(
            where,
            f"{target.provider.ep} compiled {coverage.compiled} of {coverage.nodes} nodes "
            f"({coverage.share:.1%}), and min-coverage is {target.min_coverage:.1%}. "
            f"Left to the CPU: {', '.join(named)}{f' and {more} more' if more else ''}.",
            _way_out(coverage, target),
        )
    )


def _way_out(coverage: Coverage, target: Target) -> str:
    if any(node.reason for node in coverage.left):
        return (
            "Shapes that depend on the data are not for an EP that wants fixed ones: cut the model "
            "before them, freeze more with constants, or lower min-coverage."
        )
    return (
        f"{target.provider.ep} lacks these operators, or takes them only with other types or "
        "attributes: change the model there, or lower min-coverage."
    )


def _named(node: NodeFacts) -> str:
    reason = f" ({node.reason})" if node.reason else ""
    return f"{node.op} {node.name}".rstrip() + reason

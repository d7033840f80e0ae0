"""How much of a graph was compiled: in words, and whether it is enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Key, Kind, Problem, Setting
from hatch_epcontext.graph.limits import DYNAMIC_QUANTIZATION
from hatch_epcontext.text import count, listing
from hatch_epcontext.worker.advice import Advice, keep, on_weights
from hatch_epcontext.worker.results import Coverage, NodeFacts

_MAX_NODES = 20
"""The most uncovered nodes of one operator and reason that a message names."""

_MAX_GROUPS = 20
"""The most groups that are shown as they are; with more, those that differ only in tensors are merged."""


def describe_coverage(coverage: Coverage | None) -> str:
    """The coverage for a summary; an optimized graph has none."""
    if coverage is None:
        return "optimized graph"
    contexts = count(coverage.partitions, "context")
    return f"{coverage.compiled}/{coverage.nodes} nodes in {contexts}"


def low_coverage(coverage: Coverage | None, target: Target, model: Model) -> Problem | None:
    """The problem if less of ``model`` was compiled than ``target`` requires.

    An optimized graph has no coverage.
    """
    if coverage is None or coverage.share >= target.min_coverage:
        return None
    hint, settings = _advice(coverage, target, model.key)
    return Problem(
        Kind.LOW_COVERAGE,
        "",
        f"{target.provider.ep} compiled {coverage.compiled} of {coverage.nodes} nodes "
        f"({coverage.share:.1%}), and min-coverage is {target.min_coverage:.1%}. "
        f"Left to the CPU: {'; '.join(_describe_nodes(coverage.uncovered))}.",
        f"{hint} {_choices(coverage)}",
        settings=(
            *settings,
            *_cut(coverage, model),
            Setting(target.key / "min-coverage", math.floor(100 * coverage.share) / 100),
        ),
    )


def _choices(coverage: Coverage) -> str:
    if coverage.largest is None:
        return "Or accept it:"
    return "Or keep the largest part that is compiled, and let the app do the rest (not tried); or accept it:"


def _cut(coverage: Coverage, model: Model) -> Iterator[Setting]:
    """The setting that keeps the largest covered part of the model, if there is one."""
    if (largest := coverage.largest) is None:
        return
    yield keep(largest.within(model.cut), model.key)


def _advice(coverage: Coverage, target: Target, model: Key) -> Advice:
    """What to do about the uncovered nodes."""
    nodes = coverage.uncovered
    if freeze := {name: value for node in nodes for name, value in node.freeze.items()}:
        which = "them" if all(node.freeze for node in nodes) else "some of them"
        hint = f"Freeze what decides {which}, {listing(map(repr, freeze))} (not tried)."
        if None in freeze.values():
            return hint, tuple(Setting(model / "constants" / name) for name in freeze)
        return hint, (Setting(model / "constants", freeze),)
    # With any other value the build has tried it.
    if target.settings.dequantize is False and any(n.op in DYNAMIC_QUANTIZATION for n in nodes):
        hint = (
            "The model is dynamically quantized: it measures its activations while it runs, which "
            f"{target.provider.ep} cannot do. Undo the quantization (not tried)."
        )
        return hint, (Setting(model / "dequantize", True),)
    if weights := on_weights(nodes, target, model):
        return weights
    if any(node.dynamic for node in nodes):
        hint = (
            "An EP for fixed shapes cannot compile shapes that depend on the data: cut the model "
            "before them (not tried)."
        )
        return hint, ()
    hint = "Change the model at these nodes, or cut it there (not tried)."
    if not all(node.reason for node in nodes):
        hint = (
            f"{target.provider.ep} does not support these operators, or only with other types or "
            "attributes: change the model there."
        )
    return hint, ()


def _describe_nodes(nodes: Sequence[NodeFacts]) -> Iterator[str]:
    """All nodes, in groups with the same operator and reason."""
    groups = _grouped((node, node.reason) for node in nodes)
    if len(groups) > _MAX_GROUPS:
        groups = _grouped((node, _in_general(node)) for node in nodes)
    for (op, reason), names in groups.items():
        shown = ", ".join(filter(None, names[:_MAX_NODES]))
        more = f" and {len(names) - _MAX_NODES} more" if len(names) > _MAX_NODES else ""
        number = f"{len(names)} " if len(names) > 1 else ""
        yield f"{number}{op} {shown}{more}".rstrip() + (f" ({reason})" if reason else "")


def _grouped(
    nodes: Iterable[tuple[NodeFacts, str | None]],
) -> dict[tuple[str, str | None], list[str]]:
    """The names of ``nodes``, which come with their reasons, by operator and reason."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for node, reason in nodes:
        groups.setdefault((node.op, reason), []).append(node.name)
    return groups


def _in_general(node: NodeFacts) -> str | None:
    """The reason of ``node`` in general, if only the names of tensors in it are the node's own."""
    if node.dynamic:
        return "its shapes depend on the data"
    return "the EP refuses it with different shapes" if node.guessed else node.reason

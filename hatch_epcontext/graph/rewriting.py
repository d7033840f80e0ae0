"""What a rewrite is, and how rewrites are applied to a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import onnx

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Outputs, Rule, remove_unused
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.number_format import RewriteName
from hatch_epcontext.graph.scope import Scope, Types


class Operators:
    """All operators for which ``holds`` is true: to list those of onnx takes long."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds

    def __contains__(self, operator: object) -> bool:
        return self._holds(str(operator))


Applies = Callable[[onnx.NodeProto, Scope], bool]
"""Whether a rule is for a node of a scope: others stay as they are."""


def _always(node: onnx.NodeProto, scope: Scope) -> bool:
    return True


@dataclass(frozen=True)
class Rewrite:
    """A rule for nodes of ``operators``, as `graph.operator` writes them; ``name`` is for messages.

    With ``nested`` nodes of inner graphs are replaced too. ``fault``: only for EPs with the fault that this
    other rewrite avoids; None for all. ``applies``: whether a node needs it, if not all may; in no model
    without the operators ``beside``.
    """

    name: str
    operators: Container[str]
    rule: Rule
    nested: bool = True
    fault: RewriteName | None = None
    applies: Applies = _always
    beside: frozenset[str] = frozenset()


def rewrites(*operators: str, **others: Any) -> Callable[[Rule], Rewrite]:
    """Make a rule a `Rewrite` for ``operators``, called as its function is, with ``others`` of its fields."""
    return lambda rule: Rewrite(rule.__name__, frozenset(operators), rule, **others)


def corrects(
    name: RewriteName, *operators: str, beside: Iterable[str] = (), applies: Applies = _always
) -> Callable[[Rule], Rewrite]:
    """Make a rule the `Rewrite` for accuracy called ``name``, for ``operators``; the others: its fields."""
    return lambda rule: Rewrite(
        name, frozenset(operators), rule, applies=applies, beside=frozenset(beside)
    )


class Rewritten(NamedTuple):
    """The names of the rewrites that changed a model, the number of nodes that they replaced, and why others
    left nodes as they are.
    """

    names: tuple[str, ...] = ()
    replaced: int = 0
    declined: tuple[Declined, ...] = ()


def apply(
    model: onnx.ModelProto,
    to_apply: Iterable[Rewrite],
    allowed: frozenset[str] | None,
    types: Types,
    limit: int | None = None,
    kept: Collection[str] = (),
) -> Rewritten:
    """Replace nodes of ``allowed`` operators in ``model`` by one of ``to_apply`` after the other.

    Without ``allowed`` those of all operators. Nodes with names in ``kept`` stay; what a rewrite adds, a
    later one may replace. ``types``: the known types of its values. Raises TooManyNodesError if the graph
    would get more than ``limit`` nodes.
    """
    names: list[str] = []
    declined: list[Declined] = []
    replaced = 0
    scope: Scope | None = None
    present: set[str] | None = None
    for rewrite in to_apply:
        if present is None:
            nodes = graph.nodes(model.graph)
            present = {graph.operator(node) for node in nodes if node.name not in kept}
        operators = [name for name in present if name in rewrite.operators]
        if allowed is not None:
            operators = [name for name in operators if name in allowed]
        if not operators:
            continue
        builder = Builder(model, limit)
        rules = dict.fromkeys(operators, _rule(rewrite, kept))
        scope = scope or Scope.of(model, types)
        if number := builder.replace(scope, rules, nested=rewrite.nested):
            scope = present = None
            replaced += number
            builder.write()
            for body in graph.graphs(model.graph):
                remove_unused(body)
            names.append(rewrite.name)
        declined += [replace(reason, rewrite=rewrite.name) for reason in builder.declined]
    return Rewritten(tuple(names), replaced, tuple(declined))


def _rule(rewrite: Rewrite, kept: Collection[str]) -> Rule:
    """That of ``rewrite`` for the nodes that need it, but for those with names in ``kept``."""

    def rule(node: onnx.NodeProto, scope: Scope, builder: Builder) -> Outputs:
        is_needed = rewrite.applies(node, scope) and node.name not in kept
        return rewrite.rule(node, scope, builder) if is_needed else None

    return rule

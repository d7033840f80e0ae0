"""What a rewrite is, and how rewrites are applied to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import Builder, Rule, remove_unused
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.scope import Scope, Types


@dataclass(frozen=True)
class Rewrite:
    """A rule for nodes of ``operators``, as `graph.operator` writes them; ``name`` is for messages.

    With ``nested`` nodes of inner graphs are replaced too.
    """

    name: str
    operators: frozenset[str]
    rule: Rule
    nested: bool = True


def rewrites(*operators: str, nested: bool = True) -> Callable[[Rule], Rewrite]:
    """Make a rule a `Rewrite` for ``operators``, called as its function is."""
    return lambda rule: Rewrite(rule.__name__, frozenset(operators), rule, nested)


class Rewritten(NamedTuple):
    """The names of the rewrites that changed a model, and why others left refused nodes as they are."""

    names: tuple[str, ...] = ()
    declined: tuple[Declined, ...] = ()


def apply(
    model: onnx.ModelProto,
    to_apply: Iterable[Rewrite],
    refused: frozenset[str] | None,
    types: Types,
    limit: int | None = None,
) -> Rewritten:
    """Replace nodes of ``refused`` operators in ``model``, in place, by one of ``to_apply`` after the other.

    Without ``refused`` those of all operators. ``types``: the known types of its values. Raises
    TooManyNodesError if the graph would get more than ``limit`` nodes.
    """
    names: list[str] = []
    declined: list[Declined] = []
    for rewrite in to_apply:
        operators = rewrite.operators if refused is None else rewrite.operators & refused
        if not any(graph.operator(node) in operators for node in graph.nodes(model.graph)):
            continue
        builder = Builder(model, limit)
        rules = dict.fromkeys(operators, rewrite.rule)
        if builder.replace(Scope.of(model, types), rules, nested=rewrite.nested):
            builder.write()
            for body in graph.graphs(model.graph):
                remove_unused(body)
            names.append(rewrite.name)
        declined += [replace(reason, rewrite=rewrite.name) for reason in builder.declined]
    return Rewritten(tuple(names), tuple(declined))

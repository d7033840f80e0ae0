"""What a rewrite is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph.builder import Rules, replace
from hatch_epcontext.graph.scope import Types


@dataclass(frozen=True)
class Rewrite:
    """A replacement of nodes by others that compute the same; ``name`` says in messages what it does.

    ``operators``: those that it replaces, as `graph.operator` writes them. ``apply(model, types, refused)``
    changes the model in place where a node's operator is in ``refused``, and returns how many nodes it has
    replaced; ``types`` are those of its values, as far as they are known. Nodes that it does not understand
    stay as they are.
    """

    name: str
    operators: frozenset[str]
    apply: Callable[[onnx.ModelProto, Types, frozenset[str]], int]


def by_node(name: str, rules: Rules, *, nested: bool = True) -> Rewrite:
    """A rewrite that replaces nodes one by one; with ``nested`` in the graphs inside of others too."""

    def apply(model: onnx.ModelProto, types: Types, refused: frozenset[str]) -> int:
        wanted = {operator: rule for operator, rule in rules.items() if operator in refused}
        return replace(model, wanted, types, nested=nested)

    return Rewrite(name, frozenset(rules), apply)

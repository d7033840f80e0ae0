"""The part of a graph between tensors, as a model of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from hatch_epcontext.errors import Key, Kind, ModelError, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing, suggestion


@dataclass(frozen=True)
class Part:
    """The nodes of a main graph between ``inputs`` and ``outputs``, by their indices.

    ``inputs``: first those that the cut names, then the model's own that a constant freezes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]


def part_between(
    main: onnx.GraphProto,
    cut: Cut,
    frozen: Collection[str],
    key: Key,
    optional: Collection[str] = (),
) -> Part:
    """The part of ``main`` that ``cut``, the table at ``key``, keeps.

    ``frozen``: the inputs with a configured value, which a cut need not name; ``optional``: those with a
    default value, which the app must feed if a cut names them. Raises ModelError when it keeps
    no part.
    """
    own = [value.name for value in graph.inputs(main)]
    scope = Scope(main)
    computed = list(scope.makers)
    for end, names, known in (
        ("inputs", cut.inputs, [*own, *optional, *computed]),
        ("outputs", cut.outputs, computed),
    ):
        for name in names:
            if name not in known:
                message = f"no node of the model's graph computes {name!r}."
                raise _wrong(key / end, message, suggestion(name, known))
    outputs = cut.outputs or tuple(value.name for value in main.output)
    ends = {*cut.inputs, *own}
    nodes = scope.needed_nodes(outputs, lambda name: name not in ends)
    # An output of the graph can be the cut's own input, or the graph's.
    reached = {
        output: ends.intersection(scope.needed_values([output], lambda name: name not in ends))
        for output in outputs
    }
    needed = {name for names in reached.values() for name in names}
    named = set(cut.inputs) if cut.inputs else set(own)
    if lacking := sorted(needed - named - set(frozen)):
        without = [repr(name) for name, names in reached.items() if names.intersection(lacking)]
        message = (
            f"the cut removes {listing(map(repr, lacking))}, which {listing(without)} depends on."
        )
        raise _wrong(key / "inputs", message, "Name it among the inputs too, or cut after it.")
    if undecided := [repr(name) for name, names in reached.items() if not names & named]:
        message = f"no input of the cut decides {listing(undecided)}."
        raise _wrong(key / "outputs", message, "Name outputs after the inputs.")
    if needless := [repr(name) for name in cut.inputs if name not in needed]:
        message = f"no output depends on {listing(needless)}."
        raise _wrong(key / "inputs", message, "Remove it from the inputs.")
    begin = cut.inputs or tuple(name for name in own if name in needed)
    also = tuple(name for name in own if name in needed and name in frozen and name not in begin)
    return Part((*begin, *also), outputs, tuple(sorted(nodes)))


def cut_around(scope: Scope, values: Collection[str]) -> Cut | None:
    """A cut that keeps what comes before the nodes that compute ``values``, or what comes after them.

    The larger of both parts. None if it keeps nothing, or would be at a value that is no tensor of a known
    type.
    """
    makers = {scope.makers[name] for name in values}
    above = {*scope.needed_nodes(values)}
    below, changed = set(makers), {*values}
    for index, node in enumerate(scope.nodes):
        if not changed.isdisjoint(scope.reads[index]):
            below.add(index)
            changed.update(node.output)
    ends = {value.name for value in scope.body.output}
    made = {name for i, node in enumerate(scope.nodes) if i not in below for name in node.output}
    read = {name for index in below for name in scope.reads[index]} | ends
    before = Cut(outputs=tuple(n for n in scope.makers if n in made & read and scope.varies([n])))
    rest = [index for index in range(len(scope.nodes)) if index not in above]
    results = {name for index in rest for name in scope.nodes[index].output}
    needed = {name for index in rest for name in scope.reads[index]} - results
    own = {value.name for value in graph.inputs(scope.body)}
    after = Cut(
        tuple(name for name in (*own, *scope.makers) if name in needed),
        tuple(value.name for value in scope.body.output if value.name in results),
    )
    kept = [cut for cut in (before, after) if cut.outputs and _is_valid(scope, cut)]
    sizes = {before: len(scope.nodes) - len(below), after: len(rest)}
    return max(kept, key=sizes.__getitem__, default=None)


def _is_valid(scope: Scope, cut: Cut) -> bool:
    """Whether ``cut`` is at tensors of known types, and keeps a part of the graph of ``scope``."""
    names = cut.inputs + cut.outputs
    if any(scope.dtype(name) is None or scope.sizes(name) is None for name in names):
        return False
    try:
        part_between(scope.body, cut, (), Key())
    except ModelError:
        return False
    return True


def _wrong(key: Key, message: str, hint: str | None) -> ModelError:
    return ModelError(Problem.at(key, Kind.INVALID_CUT, message, hint))


def extract(model: onnx.ModelProto, part: Part, ends: Mapping[str, onnx.ValueInfoProto]) -> None:
    """Keep only ``part`` of ``model``; ``ends`` has the types of its inputs and outputs."""
    main = model.graph
    nodes = [main.node[index] for index in part.nodes]
    used = {name for node in nodes for name in graph.read_by(node)} - set(part.inputs)
    results = {name for node in nodes for name in node.output}
    kept = onnx.GraphProto(name=main.name, doc_string=main.doc_string)
    kept.node.extend(nodes)
    kept.input.extend(ends[name] for name in part.inputs)
    # Inputs with a default value; before ONNX IR 4 each initializer had to be listed as an input too.
    kept.input.extend(value for value in main.input if value.name in used - results)
    kept.output.extend(ends[name] for name in part.outputs)
    kept.initializer.extend(tensor for tensor in main.initializer if tensor.name in used)
    kept.sparse_initializer.extend(
        tensor for tensor in main.sparse_initializer if tensor.values.name in used
    )
    inside = results - set(part.outputs)
    kept.value_info.extend(value for value in main.value_info if value.name in inside)
    model.graph.CopyFrom(kept)

"""The part of a graph between tensors, as a model of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.scope import Scope


@dataclass(frozen=True)
class Part:
    """The nodes of a main graph between ``inputs`` and ``outputs``, by their indices.

    ``inputs``: first those that the cut names, then the model's own that a constant freezes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class WrongCut:
    """Why a cut keeps no part of a graph, with the names of tensors.

    ``unknown``: its ends that no node computes; as inputs it may also have those of the graph. ``lacking``:
    its outputs, by the inputs that they need and that it removes; without any for those that need no input.
    ``needless``: its inputs on which no output depends. ``needed``: the inputs that all outputs need.
    """

    unknown: Cut = field(default_factory=Cut)
    lacking: Mapping[tuple[str, ...], Sequence[str]] = field(default_factory=dict)
    needless: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


def part_between(main: onnx.GraphProto, cut: Cut, frozen: Collection[str]) -> Part | WrongCut:
    """The part of ``main`` that ``cut`` keeps.

    ``frozen``: the inputs with a configured value, which a cut need not name.
    """
    own = [value.name for value in graph.inputs(main)]
    scope = Scope(main)
    unknown = Cut(
        tuple(name for name in cut.inputs if name not in scope.makers and name not in own),
        tuple(name for name in cut.outputs if name not in scope.makers),
    )
    if unknown:
        return WrongCut(unknown)
    outputs = cut.outputs or tuple(value.name for value in main.output)
    ends = {*cut.inputs, *own}
    nodes = scope.above(outputs, lambda each: each not in ends)
    # An output of the graph can be the cut's own input, or the graph's.
    reached = {
        name: ends.intersection(scope.ancestors([name], lambda each: each not in ends))
        for name in outputs
    }
    needed = {name for its in reached.values() for name in its}
    named = set(cut.inputs) if cut.inputs else set(own)
    # Outputs that need the same inputs are one problem.
    lacking: dict[tuple[str, ...], list[str]] = {}
    for name, its in reached.items():
        more = tuple(sorted(its - named - set(frozen)))
        if more or not its & named:
            lacking.setdefault(more, []).append(name)
    needless = tuple(name for name in cut.inputs if name not in needed)
    if lacking or needless:
        kept = [name for name in cut.inputs if name in needed]
        more = tuple(sorted({name for names in lacking for name in names}))
        return WrongCut(lacking=lacking, needless=needless, needed=(*kept, *more))
    begin = cut.inputs or tuple(name for name in own if name in needed)
    also = tuple(name for name in own if name in needed and name in frozen and name not in begin)
    return Part((*begin, *also), outputs, tuple(sorted(nodes)))


def is_possible(
    model: onnx.ModelProto, cut: Cut, frozen: Collection[str], refused: Collection[str]
) -> bool:
    """Whether ``cut`` keeps a part of ``model`` between tensors, without the nodes that make ``refused``.

    ``frozen``: the inputs with a configured value.
    """
    part = part_between(model.graph, cut, frozen)
    if isinstance(part, WrongCut):
        return False
    results = {name for index in part.nodes for name in model.graph.node[index].output}
    if not results.isdisjoint(refused):
        return False
    typed = graph.inferred(model)
    values = map(graph.facts, (*typed.input, *typed.value_info, *typed.output))
    others = {each.name for each in values if each.dtype.endswith("_type")}
    return others.isdisjoint((*part.inputs, *part.outputs))


def extract(model: onnx.ModelProto, part: Part, ends: Mapping[str, onnx.ValueInfoProto]) -> None:
    """Keep only ``part`` of ``model``, in place; ``ends`` has the types of its inputs and outputs."""
    main = model.graph
    nodes = [main.node[index] for index in part.nodes]
    used = {name for node in nodes for name in graph.read_by(node)} - set(part.inputs)
    made = {name for node in nodes for name in node.output}
    kept = onnx.GraphProto(name=main.name, doc_string=main.doc_string)
    kept.node.extend(nodes)
    kept.input.extend(ends[name] for name in part.inputs)
    # Before ONNX IR 4 an initializer had to be listed as an input too.
    if model.ir_version < 4:
        kept.input.extend(each for each in main.input if each.name in used - made)
    kept.output.extend(ends[name] for name in part.outputs)
    kept.initializer.extend(each for each in main.initializer if each.name in used)
    kept.sparse_initializer.extend(
        each for each in main.sparse_initializer if each.values.name in used
    )
    known = made - set(part.outputs)
    kept.value_info.extend(each for each in main.value_info if each.name in known)
    model.graph.CopyFrom(kept)

"""The part of a graph between tensors, as a model of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing, suggestion

_MIN_PART = 0.5
"""The share of all nodes above which a part is worth naming."""

_MAX_ENDS = 4
"""The most inputs, and outputs, of a part: the app has to compute the rest."""


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
    """Why a cut keeps no part of a graph, at its ``end``, ``"inputs"`` or ``"outputs"``; and what to do.

    ``names``: those to name there instead, if that helps.
    """

    end: str
    message: str
    hint: str | None
    names: tuple[str, ...] = ()


def part_between(main: onnx.GraphProto, cut: Cut, frozen: Collection[str]) -> Part | WrongCut:
    """The part of ``main`` that ``cut`` keeps.

    ``frozen``: the inputs with a configured value, which a cut need not name.
    """
    own = [value.name for value in graph.inputs(main)]
    scope = Scope(main)
    computed = list(scope.makers)
    for end, names, known in (
        ("inputs", cut.inputs, [*own, *computed]),
        ("outputs", cut.outputs, computed),
    ):
        for name in names:
            if name not in known:
                message = f"no node of the model's graph computes {name!r}."
                return WrongCut(end, message, suggestion(name, known))
    outputs = cut.outputs or tuple(value.name for value in main.output)
    ends = {*cut.inputs, *own}
    nodes = scope.above(outputs, lambda name: name not in ends)
    # An output of the graph can be the cut's own input, or the graph's.
    reached = {
        output: ends.intersection(scope.ancestors([output], lambda name: name not in ends))
        for output in outputs
    }
    needed = {name for names in reached.values() for name in names}
    named = set(cut.inputs) if cut.inputs else set(own)
    kept = tuple(name for name in cut.inputs if name in needed)
    if lacking := sorted(needed - named - set(frozen)):
        without = [repr(name) for name, its in reached.items() if its.intersection(lacking)]
        message = (
            f"the cut removes {listing(map(repr, lacking))}, which {listing(without)} depends on."
        )
        return WrongCut(
            "inputs", message, "Keep what is needed, or cut after it:", (*kept, *lacking)
        )
    if alone := [repr(name) for name, its in reached.items() if not its & named]:
        message = f"no input of the cut decides {listing(alone)}."
        return WrongCut("outputs", message, "Name outputs after the inputs.")
    if needless := [repr(name) for name in cut.inputs if name not in needed]:
        message = f"no output depends on {listing(needless)}."
        return WrongCut("inputs", message, "Remove it from the inputs:", kept)
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
    others = {value.name for value in values if value.dtype.endswith("_type")}
    return others.isdisjoint((*part.inputs, *part.outputs))


def extract(model: onnx.ModelProto, part: Part, ends: Mapping[str, onnx.ValueInfoProto]) -> None:
    """Keep only ``part`` of ``model``, in place; ``ends`` has the types of its inputs and outputs."""
    main = model.graph
    nodes = [main.node[index] for index in part.nodes]
    used = {name for node in nodes for name in graph.read_by(node)} - set(part.inputs)
    results = {name for node in nodes for name in node.output}
    kept = onnx.GraphProto(name=main.name, doc_string=main.doc_string)
    kept.node.extend(nodes)
    kept.input.extend(ends[name] for name in part.inputs)
    # Before ONNX IR 4 an initializer had to be listed as an input too.
    if model.ir_version < 4:
        kept.input.extend(value for value in main.input if value.name in used - results)
    kept.output.extend(ends[name] for name in part.outputs)
    kept.initializer.extend(tensor for tensor in main.initializer if tensor.name in used)
    kept.sparse_initializer.extend(
        tensor for tensor in main.sparse_initializer if tensor.values.name in used
    )
    inside = results - set(part.outputs)
    kept.value_info.extend(value for value in main.value_info if value.name in inside)
    model.graph.CopyFrom(kept)


def largest_covered(
    prepared: onnx.GraphProto,
    uncovered: Iterable[onnx.NodeProto],
    source: onnx.ModelProto,
    open_values: Collection[str] = (),
    frozen: Collection[str] = (),
) -> Cut | None:
    """Return the cut of the ``source`` that keeps the largest part that the EP covers; None if there is none.

    The part is more than half of the source, and has few ends; ends of the source itself are not named.
    ``uncovered``: the nodes that the EP left, made of those of ``prepared``, which was made of the source.
    ``open_values``: the values of ``prepared`` without a fixed shape, where a part cannot begin. ``frozen``:
    the inputs with a constant.
    """
    flow = _Flow(prepared, list(uncovered))
    inputs = {value.name for value in graph.inputs(source.graph)}
    outputs = {value.name for value in source.graph.output}
    results = {name for node in source.graph.node for name in node.output}
    begin = (inputs | results) - set(open_values)
    parts = (_within(flow, part, begin, results) for part in flow.levels())
    for part in sorted(parts, key=len, reverse=True):
        if len(part) <= _MIN_PART * len(flow.numbers):
            break
        first, last = map(tuple, flow.ends(part))
        cut = Cut(() if inputs.issuperset(first) else first, () if outputs == {*last} else last)
        if (
            cut
            and max(len(cut.inputs), len(cut.outputs)) <= _MAX_ENDS
            # More may depend on the inputs of the source than in the prepared graph.
            and is_possible(source, cut, frozen, flow.left)
        ):
            return cut
    return None


class _Flow(Scope):
    """The graph ``main``: the numbers of its nodes without constants, which of them are covered, and the
    results of the others, which are ``left``.
    """

    def __init__(self, main: onnx.GraphProto, uncovered: Collection[onnx.NodeProto]) -> None:
        """``uncovered``: nodes that are not covered, each perhaps made of several of ``main``."""
        super().__init__(main)
        results = {name for node in uncovered for name in node.output}
        read = {name for node in uncovered for name in node.input}
        left = self.above(results, lambda name: name in results or name not in read)
        self.left = {name for index in left for name in main.node[index].output}
        self.numbers = [i for i, node in enumerate(main.node) if node.op_type != "Constant"]
        self.covered = set(self.numbers) - set(left)
        self._outputs = {value.name for value in main.output}
        self._values = {value.name for value in graph.inputs(main)}
        self._values |= {name for index in self.numbers for name in main.node[index].output}

    def levels(self) -> Iterable[set[int]]:
        """The covered nodes to which the longest paths have equally many uncovered nodes.

        So no path leaves one of these sets and enters it again.
        """
        depths: dict[int, int] = {}
        levels: dict[int, set[int]] = defaultdict(set)
        for index in self.numbers:
            before = (self.makers[name] for name in self._read(index) if name in self.makers)
            deepest = max(map(depths.__getitem__, before), default=0)
            depths[index] = deepest + (index not in self.covered)
            if index in self.covered:
                levels[depths[index]].add(index)
        return levels.values()

    def _read(self, index: int) -> list[str]:
        """The values that a node reads from inputs and other nodes."""
        return [name for name in self.reads[index] if name in self._values]

    def ends(self, part: Collection[int]) -> tuple[list[str], list[str]]:
        """The values that ``part`` reads from outside, and those of its own that are read there."""
        results = [name for index in sorted(part) for name in self.nodes[index].output if name]
        read = dict.fromkeys(name for index in sorted(part) for name in self._read(index))
        first = [name for name in read if self.makers.get(name) not in part]
        inside = {name for name in results if self.readers.get(name, frozenset()) <= set(part)}
        return first, [name for name in results if name not in inside - self._outputs]


def _within(flow: _Flow, part: set[int], begin: Set[str], end: Set[str]) -> set[int]:
    """``part`` without nodes at its ends whose own ends are not among ``begin`` and ``end``."""
    part = set(part)
    while part:
        first, last = flow.ends(part)
        wrong = {flow.makers[name] for name in last if name not in end}
        wrong = wrong.union(*(flow.readers[name] & part for name in first if name not in begin))
        if not wrong:
            break
        part -= wrong
    return part

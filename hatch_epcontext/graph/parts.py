"""The part of a graph between tensors, as a model of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from hatch_epcontext.errors import Diagnosed, Key, Kind, ModelError, Problem, Setting, collect
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


def part_between(main: onnx.GraphProto, cut: Cut, frozen: Collection[str], key: Key) -> Part:
    """Return the part of ``main`` that ``cut``, which is at ``key``, keeps.

    ``frozen``: the inputs with a configured value, which a cut need not name. Raises ModelError with all
    unknown names; when an output depends on none of the inputs, or on an input that the cut removes; and
    when no output depends on an input of the cut.
    """
    part, problems = collect(_part(main, cut, frozen, key))
    if problems or part is None:
        raise ModelError(*problems)
    return part


def is_possible(
    model: onnx.ModelProto, cut: Cut, frozen: Collection[str], refused: Collection[str]
) -> bool:
    """Whether ``cut`` keeps a part of ``model`` between tensors, without the nodes that make ``refused``.

    ``frozen``: the inputs with a configured value.
    """
    try:
        part = part_between(model.graph, cut, frozen, Key())
    except ModelError:
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


def _part(
    main: onnx.GraphProto, cut: Cut, frozen: Collection[str], key: Key
) -> Diagnosed[Part | None]:
    own = [value.name for value in graph.inputs(main)]
    scope = Scope(main)
    stored = {tensor.name for tensor in main.initializer}
    wrong = [*_unknown(key / "inputs", cut.inputs, [*own, *scope.makers], stored)]
    wrong += _unknown(key / "outputs", cut.outputs, list(scope.makers), stored | set(own))
    if wrong:
        yield from wrong
        return None
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
    kept = [each for each in cut.inputs if each in needed]
    # Outputs that need the same inputs are one problem.
    lacking: dict[tuple[str, ...], list[str]] = {}
    for name, its in reached.items():
        more = tuple(sorted(its - named - set(frozen)))
        if more or not its & named:
            lacking.setdefault(more, []).append(name)
    whole = [*kept, *sorted({name for more in lacking for name in more})]
    for more, names in lacking.items():
        yield _not_computable(names, more, whole, key)
    for name in cut.inputs:
        if name not in needed:
            message = f"no output depends on {name!r}, which is one of the inputs."
            yield Problem.at(
                key / "inputs", Kind.INVALID_CUT, message, "Remove it from the inputs."
            )
    begin = cut.inputs or tuple(name for name in own if name in needed)
    also = tuple(name for name in own if name in needed and name in frozen and name not in begin)
    return Part((*begin, *also), outputs, tuple(sorted(nodes)))


def _unknown(
    key: Key, names: Sequence[str], known: Sequence[str], others: Collection[str]
) -> Iterator[Problem]:
    for name in names:
        if name in known:
            continue
        if name in others:
            message = f"{name!r} is an input or a stored tensor of the model, and not the result of a node."
            yield Problem.at(key, Kind.INVALID_CUT, message, "Name the output of a node.")
        else:
            message = f"the model's graph has no tensor {name!r}."
            yield Problem.at(key, Kind.INVALID_CUT, message, suggestion(name, list(known)))


def _not_computable(
    outputs: Sequence[str], more: Sequence[str], whole: Sequence[str], key: Key
) -> Problem:
    """The problem of ``outputs`` that also need the inputs ``more``, or that need none at all.

    ``whole``: the inputs that all outputs need.
    """
    one = len(outputs) == 1
    named = f"the output{'' if one else 's'} {listing([repr(each) for each in outputs])}"
    if more:
        also = f"the input{'s' if len(more) > 1 else ''} {listing([repr(each) for each in more])}"
        return Problem.at(
            key / "inputs",
            Kind.INVALID_CUT,
            f"{named} also need{'s' if one else ''} {also} of the model, which the cut removes.",
            "Keep what is needed, or cut after it:",
            Setting(key / "inputs", whole),
        )
    message = f"{named} {'does' if one else 'do'} not depend on any input."
    hint = "Name outputs after the inputs."
    return Problem.at(key / "outputs", Kind.INVALID_CUT, message, hint, Setting(key / "outputs"))

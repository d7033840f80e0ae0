"""Facts of graphs as data, which need no onnx.

Shapes are lists of sizes; an open dimension is its name, or None if it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from hatch_epcontext.errors import Advice, Key, Setting
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import listing, show

Size = int | str | None

PROTOBUF_LIMIT = 2**31 - 1
"""Bytes that a protobuf file can have, and so an ONNX file without its external data."""


@dataclass(frozen=True)
class Cost:
    """About what a run of a graph computes: its ``nodes``, of which a recurrent layer counts as several for
    each time step; the ``multiply_adds``; and the ``values`` of the results of all nodes.
    """

    nodes: int = 0
    multiply_adds: int = 0
    values: int = 0

    def seconds_at(self, speed: Cost) -> float:
        """How long it takes if ``speed`` is done in a second; what that has none of takes no time."""
        pairs = (
            (self.nodes, speed.nodes),
            (self.multiply_adds, speed.multiply_adds),
            (self.values, speed.values),
        )
        return sum(number / in_a_second for number, in_a_second in pairs if in_a_second)


@dataclass(frozen=True)
class TensorFacts:
    """An input or output: ``dtype`` is NumPy's name (``"float32"``), or ONNX's where NumPy has none.

    ``shape`` is None if the rank is unknown: it has any number of open dimensions.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...] | None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of ``shape`` fits: an open dimension accepts any size."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            not isinstance(size, int) or size == length
            for length, size in zip(shape, self.shape, strict=True)
        )

    @property
    def is_fixed(self) -> bool:
        """Whether no dimension is open."""
        return self.shape is not None and all(isinstance(size, int) for size in self.shape)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The shape for those who only read its sizes: none if the rank is unknown."""
        return self.shape or ()

    @property
    def shape_text(self) -> str:
        """The shape for a message, such as ``"batch x 3 x ?"``."""
        if self.shape is None:
            return "any rank"
        return " x ".join("?" if size is None else str(size) for size in self.shape)


@dataclass(frozen=True)
class Far:
    """Values that the type and the graph allow, and that ordinary samples do not have.

    Integers from ``low`` to ``high``, both included, of all magnitudes; where ``low`` is above 0 numbers near
    ``high``, of which others are compared only up to ``low``; or numbers around ``centers``, which have the
    ``shape`` of a constant, with the standard deviations ``spreads``, as multiples of ``unit`` if that is not
    0. Each number is around any of several ``centers`` without a shape. ``is_offset``: whether the center is
    an offset of which only the size beside the spread counts; such numbers are between ``low`` and ``high``,
    unless both are 0. ``is_counted``: whether what the numbers count repeats, as the hours of days do.
    """

    low: float = 0.0
    high: float = 0.0
    centers: tuple[float, ...] = ()
    spreads: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    unit: float = 0.0
    is_offset: bool = False
    is_counted: bool = False

    @property
    def is_larger(self) -> bool:
        """Whether these are only numbers of a larger size than ordinary ones."""
        return not self.centers and self.low > 0


@dataclass(frozen=True)
class InFloats:
    """How integers become floats: times ``factor``, plus ``offset``, perhaps as the sum of ``several``.

    ``wide``: whether they have all sizes, as what has a logarithm.
    """

    factor: float = 1.0
    offset: float = 0.0
    several: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Range:
    """The values that an input accepts, from ``low`` to ``high``, both included.

    ``known``: whether the graph shows them; otherwise nothing bounds the input, and the range is a guess.
    ``usual``: the value in normal use, such as 1 in a mask or the whole length; None if any value is as good.
    ``whole``: whether the graph uses the values as integers, whatever their dtype.
    ``far``: other values that it may have. ``sound``: whether these are floats along one long axis;
    ``picture``: whether they are an image's.
    ``floats``: how integers become floats, if they do. ``loose``: whether other values are also accepted,
    although these are known. ``reach``: how large a graph with such constants expects values to be; 0 if
    nothing shows it. ``thresholds``: numbers with which floats are compared, in order; ``constants``: those
    with which any values are compared, or which are subtracted from them. ``signed``: whether numbers that
    nothing bounds may be negative. ``gain``: the largest factor of integers. ``least``: the level below which
    such floats are lost in the arithmetic, relative to their usual one.
    ``shifted``: the factor by which values are multiplied of which only differences count; 0 for others.
    ``squared``: whether differences of their squares count. ``standardized``: the means and deviations by
    which a graph standardizes floats that nothing bounds: then the range is that of what it makes of them.
    """

    low: float
    high: float
    known: bool
    usual: float | None = None
    whole: bool = False
    far: tuple[Far, ...] = ()
    sound: bool = False
    floats: InFloats | None = None
    loose: bool = False
    reach: float = 0.0
    thresholds: tuple[float, ...] = ()
    constants: tuple[float, ...] = ()
    signed: bool = True
    gain: float = 1.0
    least: float = 0.0
    shifted: float = 0.0
    squared: bool = False
    picture: bool = False
    standardized: Far | None = None

    @property
    def is_firm(self) -> bool:
        """Whether no other value is accepted, or of interest."""
        return self.known and (not self.loose or self.low == self.high)

    @property
    def is_open(self) -> bool:
        """Whether these are floats that nothing bounds: values have a normal distribution."""
        return not (self.known or self.whole) and self.low < 0


@dataclass(frozen=True)
class Cut:
    """The part of a graph that is kept, by the names of tensors; without names, up to the graph's own end.

    With ``lengths`` it also begins at the lengths of the cache, which all attention nodes have in common.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    lengths: bool = False

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


@dataclass(frozen=True)
class Declined:
    """Why ``rewrite`` leaves a ``node`` of ``operator`` as it is: a ``reason`` such as "it has two axes".

    ``nodes``: how many the graph would get, if a limit on these is the reason; else 0.
    """

    reason: str
    rewrite: str = ""
    operator: str = ""
    node: str = ""
    nodes: int = 0


@dataclass(frozen=True)
class Limits:
    """Nodes that an EP for neural networks leaves to the CPU whatever its options and its version are.

    That is any node of ``ai.onnx.ml`` but for the operators ``known``, which have that domain in their names,
    and of values that are no tensors of numbers. ``open_shapes``: whether it compiles nodes whose output
    shape, or whose number of iterations, depends on the data. ``empty``: whether it compiles tensors with a
    size of 0.
    """

    known: frozenset[str] = frozenset()
    open_shapes: bool = True
    empty: bool = True


Deciders = Mapping[str, tuple[Any, ...]]
"""Inputs that decide a value that compiling needs, each with the constants that it is compared with, if any.

They are settings of the model, such as a sample rate, and no data. Empty if data decides, or nothing that is
known.
"""

_MAX_VALUES = 4
"""The most values of an input that a message names."""


@dataclass(frozen=True)
class NodeFacts:
    """A node that an EP leaves to the CPU, and the reason, if it is known.

    ``own``: whether the reason names a value of the node, such as one whose shape depends on the data.
    ``waived``: whether the EP leaves it to the CPU on purpose.
    ``deciders``: the inputs that decide whether the EP compiles it.
    """

    name: str
    op: str
    reason: str | None = None
    own: bool = False
    deciders: Deciders = field(default_factory=dict)
    waived: bool = False


INSIDE = "/inside"
"""What follows the name of a node that is left to the CPU, in those of nodes in and behind the Loop with its
copy, which has its name.
"""

_MAX_NAME = 40
"""The longest name of a node in a sentence."""

_MAX_NODES = 20
"""The most nodes of a group that a message names."""


def short_name(name: str) -> str:
    """The name of a node for a message: of a long one the end, if possible from a slash on."""
    if len(name) <= _MAX_NAME:
        return name
    end = name[3 - _MAX_NAME :]
    return f"...{end[max(end.find('/'), 0) :]}"


def describe_nodes(nodes: Iterable[NodeFacts]) -> Iterator[str]:
    """All ``nodes``, in groups with the same operator and reason, or with reasons of their own."""
    groups: dict[tuple[str, str | None], list[NodeFacts]] = {}
    for node in nodes:
        groups.setdefault((node.op, None if node.own else node.reason), []).append(node)
    for (op, common), members in groups.items():
        shown = ", ".join(node.name for node in members[:_MAX_NODES] if node.name)
        more = f" and {len(members) - _MAX_NODES} more" if len(members) > _MAX_NODES else ""
        number = f"{len(members)} " if len(members) > 1 else ""
        reason = common or members[0].reason
        if common is None and reason and number:
            reason = f"for example {reason}"
        yield f"{number}{op} {shown}{more}".rstrip() + (f" ({reason})" if reason else "")


def describe_deciders(inputs: Deciders) -> str:
    """The names of the inputs, and of what they are compared with."""
    return listing(_described(name, values) for name, values in inputs.items())


def _described(name: str, values: tuple[Any, ...]) -> str:
    compared = " or ".join(show(value) for value in values[:_MAX_VALUES])
    return f"{name!r} (compared with {compared})" if compared else repr(name)


def freeze(several: Iterable[Deciders], what: str, model: Key | None) -> Advice | None:
    """To freeze all inputs of ``several``, which decide ``what``, in the table at ``model``, if it has one.

    Each gets the first value that it is compared with, if all have some. None if there are no inputs.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    for deciders in several:
        for name, values in deciders.items():
            inputs[name] = tuple(dict.fromkeys((*inputs.get(name, ()), *values)))
    if not inputs:
        return None
    verb = "decides" if len(inputs) == 1 else "decide"
    hint = f"Freeze {describe_deciders(inputs)}, which {verb} {what} (not tried)."
    if model is None:
        return hint, ()
    if not all(inputs.values()):
        return hint, tuple(Setting(model / "constants" / name) for name in inputs)
    constants = {name: values[0] for name, values in inputs.items()}
    return hint, (Setting(model / "constants", constants),)

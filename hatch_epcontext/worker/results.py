"""The results of workers, which replies carry and builds keep: facts of models.

Paths are absolute. Shapes are lists of sizes; an open dimension is its name, or None if it has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Literal

from hatch_epcontext.errors import Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Cost, NodeFacts, TensorFacts

Simplifier = Literal["onnxruntime", "onnxslim", "none"]


@dataclass(frozen=True)
class ModelFacts:
    """Facts of an ONNX file: inputs and outputs with what the configuration fixes, and the files that
    hold its external data, relative to its folder, with forward slashes.

    ``own_inputs`` and ``own_outputs`` are those of the file itself. ``license`` is that of the file's
    metadata; ``dynamic``: whether it is dynamically quantized; ``optional``: its inputs with a default value;
    ``ignored``: the frozen inputs for which the samples have other values.
    """

    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    external_data: tuple[str, ...]
    own_inputs: tuple[TensorFacts, ...] = ()
    license: str | None = None
    dynamic: bool = False
    own_outputs: tuple[TensorFacts, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared: the simplifier, the nodes before and after.

    ``control_flow``: operators that choose or repeat inner graphs.
    ``precision``: how its numbers were changed, in words.
    ``rewrites``: what was rewritten; ``replaced``: how many nodes these replaced.
    ``options``: those with which the EP compiles more nodes.
    ``cost``: about what a run of the source computes; nothing if it was not compared.
    """

    simplifier: Simplifier
    nodes_before: int
    nodes: int
    control_flow: tuple[str, ...] = ()
    precision: str | None = None
    rewrites: tuple[str, ...] = ()
    replaced: int = 0
    options: tuple[str, ...] = ()
    cost: Cost = Cost()


@dataclass(frozen=True)
class Coverage:
    """How many of the prepared graph's ``nodes`` are inside the ``partitions`` EPContext nodes; or, with 0
    ``partitions``, how many nodes of an optimized graph the EP takes.

    ``waived``: nodes that the EP leaves to the CPU on purpose, for which no share is missing.
    """

    nodes: int
    compiled: int
    partitions: int
    uncovered: tuple[NodeFacts, ...] = ()
    waived: int = 0

    @property
    def share(self) -> float:
        """The part of the nodes that is compiled, from 0 to 1."""
        return (self.compiled + self.waived) / self.nodes if self.nodes else 0.0


@dataclass(frozen=True)
class Context:
    """One model of an artifact. ``coverage`` is None for an optimized graph whose EP takes any."""

    model: str
    model_file: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    coverage: Coverage | None = None
    compatibility: str = ""
    ep_sdk_version: str = ""


@dataclass(frozen=True)
class Slice:
    """One slice of an output of this ``rank`` across ``axis``, at ``index``."""

    axis: int
    index: int
    rank: int

    @property
    def text(self) -> str:
        """The slice as NumPy writes it, such as ``"[:, 4]"``."""
        axes = (str(self.index) if axis == self.axis else ":" for axis in range(self.rank))
        return f"[{', '.join(axes)}]"


FEW_SAMPLES = 8
"""The number of samples for models whose runs are expensive."""

GAIN = 6.0
"""Decibels of half of the error: what a change must gain to be worth its cost, and what rounding may cost."""

NOTHING = -1000.0
"""Decibels of outputs that are entirely wrong: JSON has no infinity."""

SENSITIVE = 10.0
"""A run or emulation with a smaller margin in decibels shows that other inputs may exceed the limit: float16
errors differ by as much between inputs."""


@dataclass(frozen=True)
class Nearness:
    """How near results are to the CPU's: ``margin`` in decibels above the limits, negative beyond them.

    ``gap``: the decibels by which a run is worse than its emulation. ``sample``: the name of the one in which
    the target is worst, if that is known. ``unusual``: for how many samples that an app may never have they
    differ.
    """

    margin: float = math.inf
    gap: float = 0.0
    sample: str = ""
    unusual: int = 0

    def is_worth(self, other: Nearness) -> bool:
        """Whether it is so much nearer than ``other`` that changes pay."""
        is_closer = self.margin >= other.margin and self.gap < other.gap - GAIN
        return is_closer or self.margin >= other.margin + GAIN


class AgreementStatus(Enum):
    """The result of comparing one output with the CPU EP's."""

    AGREES = "agrees"
    """It is within the limits."""
    SENSITIVE = "sensitive"
    """It is within the limits for the inputs that were run, but may not be for others."""
    INCONCLUSIVE = "inconclusive"
    """The reference has no finite values, or is the same constant for all inputs."""
    RANDOM = "random"
    """It is random, and was not compared."""
    DIFFERS = "differs"
    """It is beyond a limit."""
    NOT_FINITE = "not-finite"
    """It has NaN or Inf where the reference has none."""
    OTHER_SHAPE = "other-shape"
    """It has another shape than the reference."""


_DIFFERENCES = (AgreementStatus.DIFFERS, AgreementStatus.NOT_FINITE, AgreementStatus.OTHER_SHAPE)


@dataclass(frozen=True)
class Excess:
    """What is beyond a limit, in words: ``"signal to noise"``, ``"9.5 dB"`` and ``"at least 20 dB"``."""

    measure: str
    value: str
    limit: str


@dataclass(frozen=True)
class Agreement:
    """How near one output is to the CPU EP's.

    ``max_abs``: the largest absolute difference.
    ``cosine``: the cosine similarity; None for an output that is nearly zero.
    ``snr``: the signal-to-noise ratio in decibels; ``worst_snr``: that of the ``worst`` slice. They are None
    for equal outputs, and so is ``margin``.
    ``reason``: why the status is not ``AGREES``, and which inputs to give; of a difference from what, where.
    ``excesses``: the limits that a difference is beyond.
    ``margin``: the decibels by which the ratios are above their limits, negative if one is below.
    ``gap``: the decibels by which a run was worse than the emulation of the same sample; None if there is
    none, or if that is equal to the source.
    """

    output: str
    max_abs: float
    cosine: float | None
    snr: float | None = None
    worst: Slice | None = None
    worst_snr: float | None = None
    status: AgreementStatus = AgreementStatus.AGREES
    reason: str | None = None
    margin: float | None = None
    gap: float | None = None
    excesses: tuple[Excess, ...] = ()

    @property
    def excess(self) -> str:
        """The `excesses` in one line."""
        return "; ".join(f"{e.measure} {e.value} ({e.limit})" for e in self.excesses)

    @property
    def differs(self) -> bool:
        """Whether the output is wrong, or beyond a limit."""
        return self.status in _DIFFERENCES

    @property
    def above(self) -> float:
        """``margin``; infinite for equal outputs, and `NOTHING` for those that cannot be compared."""
        if self.status in (AgreementStatus.NOT_FINITE, AgreementStatus.OTHER_SHAPE):
            return NOTHING
        return math.inf if self.margin is None else self.margin

    def within(self, limit: float) -> float:
        """The largest limit in decibels that it keeps; ``limit``: the one that ``margin`` is above."""
        # Of values that are equal or not, half of the limit counts.
        return min(limit + self.above, math.inf if self.snr is None else self.snr)


@dataclass(frozen=True)
class Answer:
    """How near a compiled language model's answer to ``prompt`` tokens is to the CPU's.

    ``kind``: what the prompt is. ``snr``: of the logits, in decibels. ``others``: tokens for which another is
    most likely, although the CPU's is ahead by more than errors of this size explain.
    """

    kind: str
    prompt: int
    snr: float
    others: int


@dataclass(frozen=True)
class Emulation:
    """The effect of an EP's number ``format`` on a model, emulated on the CPU for ``samples`` inputs; 0 if
    that was not possible. For samples that the target ran, its results count.

    ``seen``: where the format was measured, empty if nowhere. ``nearest``: the agreement of the output
    nearest to the limits for the worst sample, with a margin that is larger
    for samples that an app may never have.
    ``reason``: why the model is sensitive to the format, and the node; None if it is not. ``inexact``: the
    operators whose kernels are less exact than the format. ``in_format``: whether the format itself makes the
    model sensitive, and not only the target's results.
    """

    format: str
    seen: str
    samples: int = 0
    nearest: Agreement | None = None
    reason: str | None = None
    inexact: tuple[str, ...] = ()
    in_format: bool = False


@dataclass(frozen=True)
class InputValues:
    """What is known of the values of an input: those from ``low`` to ``high`` were compared, and agree.

    ``whole``: whether they are integers. Of those the EP declares where its arithmetic ends: at ``least`` and
    ``most``, because it computes them in ``bits``, or because they, or sums of ``several`` inputs, end at
    ``in_floats`` in floats. All are 0 if no value of the input is beyond. ``expected``: whether the graph
    shows that values beyond are usual.
    """

    name: str
    low: float
    high: float
    whole: bool = False
    least: float = 0.0
    most: float = 0.0
    bits: int = 0
    in_floats: float = 0.0
    several: bool = False
    expected: bool = False


class ValidationStatus(Enum):
    """How a context was validated."""

    RAN = "ran"
    """It was loaded and run on its EP."""
    RAN_ON_CPU = "ran-on-cpu"
    """It is an optimized graph, and was run on the CPU EP instead of its own."""
    RAN_ALONE = "ran-alone"
    """It shares weights or is for several chips: its files were checked, and the same model, compiled alone
    for each chip, was run."""
    STRUCTURE = "structure"
    """Only its files were checked."""
    NOT_VALIDATED = "not-validated"
    """Validation is switched off."""


_CONCLUSIVE = (AgreementStatus.AGREES, AgreementStatus.SENSITIVE)
"""Those of outputs that were compared, and do not differ."""

_HARDLY = -0.1
"""The margin in decibels of an output that is beyond another limit."""

_MIN_GIVEN = 4
"""The number of given inputs from which they are representative."""


@dataclass(frozen=True)
class Validation:
    """How a context was validated; ``agreements`` is empty unless outputs were compared.

    ``reason``: why it was not run as the app will run it, or was not compared.
    ``samples``: the names of the inputs that were compared; ``synthetic`` if they were generated.
    ``problems``: those of the outputs that differ; ``warnings``: disagreements for inputs that the app may
    never have.
    ``emulation``: what the EP's number format makes of the model; None if an output differs.
    ``integers``: how near the integers of the source on the CPU are to its float form, if the comparison
    was with that.
    ``simulated``: whether a simulator of the device ran it. ``failures``: why it could not be opened or run.
    ``inputs``: their values that were compared.
    ``culprit``: the first node that makes outputs differ, which the number format cannot represent.
    """

    status: ValidationStatus
    agreements: tuple[Agreement, ...] = ()
    reason: str | None = None
    samples: tuple[str, ...] = ()
    synthetic: bool = True
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    emulation: Emulation | None = None
    integers: Agreement | None = None
    simulated: bool = False
    failures: tuple[Problem, ...] = ()
    inputs: tuple[InputValues, ...] = ()
    culprit: NodeFacts | None = None

    @property
    def few(self) -> bool:
        """Whether too few inputs were given to represent others: only the given ones are run and emulated."""
        return not self.synthetic and len(self.samples) < _MIN_GIVEN

    @property
    def compared(self) -> tuple[Agreement, ...]:
        """The agreements of the outputs whose comparison is conclusive."""
        return tuple(a for a in self.agreements if a.status in _CONCLUSIVE)

    @property
    def sensitive(self) -> bool:
        """Whether other inputs may disagree."""
        return any(a.status is AgreementStatus.SENSITIVE for a in self.agreements)

    @property
    def differs(self) -> bool:
        """Whether an output differs, or there is none."""
        return bool(self.failures) or any(agreement.differs for agreement in self.agreements)

    @property
    def margin(self) -> float:
        """The smallest number of decibels by which an output, run or emulated, is above its limit.

        Negative if one differs: a limit that is not in decibels counts as slightly exceeded.
        """
        if self.failures:
            return NOTHING
        if differing := [agreement for agreement in self.agreements if agreement.differs]:
            return min(min(agreement.margin or 0.0, _HARDLY) for agreement in differing)
        margins = [a.margin for a in self.agreements if a.status in _CONCLUSIVE]
        emulation = self.emulation
        if emulation is not None and emulation.seen and emulation.nearest is not None:
            margins.append(emulation.nearest.margin)
        return min((margin for margin in margins if margin is not None), default=math.inf)

    @property
    def inconclusive(self) -> tuple[Agreement, ...]:
        """The agreements of the outputs whose comparison is inconclusive."""
        return tuple(a for a in self.agreements if a.status is AgreementStatus.INCONCLUSIVE)

    @property
    def cosine(self) -> float | None:
        """The smallest of the outputs' cosine similarities, if there is one."""
        return min((a.cosine for a in self.compared if a.cosine is not None), default=None)

    @property
    def snr(self) -> float | None:
        """The smallest signal-to-noise ratio of an output, in decibels; None if all are equal."""
        return min((a.snr for a in self.compared if a.snr is not None), default=None)


@dataclass(frozen=True)
class Validated:
    """A ``validation``, and what else the build that ran it learnt.

    ``batch``: the axis of the batch, by ``"inputs"`` or ``"outputs"`` and the name, if the graph proves that
    rows are independent, and the CPU's run of two samples at once equals two runs; else empty.
    ``load``: the seconds that it took to open a session on the file, after the EP's libraries were loaded;
    None if none was opened. ``day``: the day of that, such as ``"2026-11-23"``, else empty.
    ``is_accident``: whether another build may run it, although this one could not. ``runs``: how often the
    target ran it. ``beaten``: whether it ended early, because another recipe is as near. ``unusual``: the
    number of samples that an app may never have that differ, or would differ in the EP's number format.
    ``worst``: the name of the usual sample that agrees in which the target is worst; empty if none does.
    """

    validation: Validation
    batch: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    load: float | None = None
    day: str = ""
    is_accident: bool = False
    runs: int = 0
    beaten: bool = False
    unusual: int = 0
    worst: str = ""

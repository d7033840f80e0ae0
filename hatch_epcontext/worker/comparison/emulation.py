"""A model in an EP's number format, emulated on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from hatch_epcontext.graph import graph
from hatch_epcontext.graph.external import read_data
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.graph.number_format import NumberFormat
from hatch_epcontext.graph.rounding import emulate as round_values
from hatch_epcontext.graph.rounding import hidden_faults, widen
from hatch_epcontext.graph.scope import Scope, Types
from hatch_epcontext.graph.selections import with_reads
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.comparison.levels import Level, Levels
from hatch_epcontext.worker.comparison.runs import Reference
from hatch_epcontext.worker.ort_values import value_types
from hatch_epcontext.worker.session import open_unoptimized


@dataclass(frozen=True)
class FormattedModel:
    """A ``prepared`` model, whose values have the ``types``, that an EP computes in ``format``.

    ``skipped``: the names of nodes that run on the CPU.
    """

    prepared: onnx.ModelProto
    types: Types
    format: NumberFormat
    skipped: Set[str]

    @staticmethod
    def load(
        path: Path, format_: NumberFormat, skipped: Set[str] = frozenset()
    ) -> FormattedModel | None:
        """The model in the file ``path``; None if it does not fit into memory twice, or has open shapes."""
        prepared = onnx.load(path, load_external_data=False)
        sizes = (math.prod(tensor.dims) * 4 for tensor in graph.stored_tensors(prepared.graph))
        is_fixed = all(graph.facts(value).is_fixed for value in graph.inputs(prepared.graph))
        if sum(sizes) >= PROTOBUF_LIMIT // 2 or not is_fixed:
            return None
        read_data(prepared, path.parent)
        widen(prepared)
        graph.name_nodes(prepared.graph)
        return FormattedModel(prepared, value_types(prepared, path), format_, skipped)

    @cached_property
    def scope(self) -> Scope:
        """The values of the prepared model."""
        return Scope.of(self.prepared, self.types)

    @cached_property
    def optimistic(self) -> str | None:
        """A node that the EP computes less exactly than its format, which the emulation cannot show."""
        for node in self.computed:
            if node.op_type in self.format.inexact:
                return f"{named(node)}, whose kernel is less exact than {self.format.name}"
            if fault := next(hidden_faults(self.format, node, self.scope), None):
                return f"{named(node)}, which {fault.text}"
        return None

    @property
    def computed(self) -> list[onnx.NodeProto]:
        """The nodes that the EP computes."""
        return [node for node in self.scope.nodes if node.name not in self.skipped]

    def rounding(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of ``model`` that rounds to the format where the EP computes it."""
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        round_values(copy, self.types, self.format, self.skipped)
        return copy


def emulate(model: FormattedModel, reference: Reference, limits: Tolerance) -> Levels:
    """Compute ``model`` in its format on all samples of the ``reference``."""
    facts = reference.facts
    emulated = with_reads(model.rounding(model.prepared), facts.selections.rest)
    session = open_unoptimized(emulated.SerializeToString())
    return Levels(
        Level.of(run, itertools.chain(*reference.compare_run(session, run, limits)), facts, limits)
        for run in reference.runs
    )


def named(node: onnx.NodeProto) -> str:
    """The operator and the name of ``node``, for messages."""
    return f"{node.op_type} {node.name or node.output[0]}"

"""Change a prepared model where an EP refuses it, or computes it wrong; compare the result with the source.

Nodes are rewritten, unrolled, corrected, or left to the CPU.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import BuildError, EpcontextError
from hatch_epcontext.files import put_files
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.builder import TooManyNodesError
from hatch_epcontext.graph.facts import Declined
from hatch_epcontext.graph.repairs import name_nodes
from hatch_epcontext.graph.rewrites import REWRITES, UNROLLS, unrolls
from hatch_epcontext.graph.rewrites.loops import leave_to_cpu
from hatch_epcontext.graph.rewrites.precise import PRECISE, applicable
from hatch_epcontext.graph.rewriting import Rewrite, apply
from hatch_epcontext.graph.scope import Types
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.worker.advice import SIMPLIFIED, Subject, explain, refuse
from hatch_epcontext.worker.comparison.compare import compare_runs
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    ReferenceRun,
    for_other_numbers,
    read_reference,
)
from hatch_epcontext.worker.noise import open_rounded, with_jitter, within_noise
from hatch_epcontext.worker.optimizing import load_named, optimize
from hatch_epcontext.worker.ort_values import value_types
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import Prepared, RewriteRequest
from hatch_epcontext.worker.results import GAIN, NOTHING
from hatch_epcontext.worker.session import LEVELS, cpu_options, open_session
from hatch_epcontext.worker.source import data_of

_CORRECTED = Tolerance(snr=60, cosine=0.999)
"""Decibels that a rewrite for more accuracy in a short number format keeps in float32."""

_EXACT, _ROUNDED = 80.0, 50.0
"""Decibels that a model keeps if the last bits of its weights change, unless it is sensitive to rounding; and
those that a rewrite must then keep.
"""

_MOST_NODES = 50_000
"""The most nodes of a graph up to which they are counted: EPs take hours for more."""

_MAX_ROUNDS = 8
"""How often an unrolled model is simplified and unrolled again."""


def handle(request: RewriteRequest) -> Prepared:
    """Write the request's model into its folder, with nodes rewritten, unrolled, or left to the CPU.

    A change after which the model cannot be run, or gives other results than the source, is left out.
    """
    announce("changing what the EP does not compile, or computes wrong")
    rewriting = _Rewriting.begin(request)
    candidates = rewriting.candidates()
    best, applied = replace(request.before, changed=False), tuple[Rewrite, ...]()
    declined, dropped = dict[Declined, None](), list[str]()
    # All at once, or else one after the other: those that change results are left out.
    with contextlib.suppress(Exception):
        return rewriting.rewrite(candidates)
    for rewrite in candidates:
        try:
            result = rewriting.rewrite((*applied, rewrite))
        except TooManyNodesError as error:
            declined |= dict.fromkeys(rewriting.too_many(rewrite, error))
            continue
        except Exception as error:
            dropped.append(_dropped(rewrite.name, error))
            continue
        declined |= dict.fromkeys(result.declined)
        earlier = len(request.before.preparation.rewrites)
        if rewrite.name in result.preparation.rewrites[earlier:]:
            best, applied = result, (*applied, rewrite)
    return replace(best, declined=tuple(declined), dropped=tuple(dropped))


def _dropped(name: str, error: Exception) -> str:
    """Why the change ``name`` was left out; ONNX Runtime raises many types for graphs that it cannot open."""
    message = error.problems[0].message if isinstance(error, EpcontextError) else str(error)
    return f"{name}: {' '.join(message.splitlines())}"


@dataclass(frozen=True)
class _Rewriting:
    """What the rewrites of one request have in common.

    ``operators``: those to rewrite, None for all; ``kept``: the names of their nodes that stay.
    ``expected``: the source's results, if they are compared. ``types``: of the prepared model's values.
    """

    request: RewriteRequest
    operators: frozenset[str] | None
    kept: frozenset[str]
    expected: Reference | None
    types: Types

    @staticmethod
    def begin(request: RewriteRequest) -> _Rewriting:
        model = onnx.load(request.before.path, load_external_data=False)
        operators, kept = None, frozenset[str]()
        if not request.corrections:
            nodes = [*graph.nodes(model.graph)]
            if request.nodes is not None:
                kept = frozenset(node.name for node in nodes).difference(request.nodes)
            operators = frozenset(graph.operator(node) for node in nodes if node.name not in kept)
        reference = request.before.reference
        expected = None if reference is None else read_reference(reference)
        types = value_types(model, Path(request.before.path))
        return _Rewriting(request, operators, kept, expected, types)

    def candidates(self) -> tuple[Rewrite, ...]:
        """The rewrites that may change the model."""
        if corrections := self.request.corrections:
            return tuple(rewrite for name, rewrite in PRECISE.items() if name in corrections)
        if self.request.leaves:
            return (leave_to_cpu,)
        if self.request.unroll_limit is not None:
            return UNROLLS
        faults = (None, *self.request.faults)
        return tuple(rewrite for rewrite in REWRITES if rewrite.fault in faults)

    def rewrite(self, rewrites: tuple[Rewrite, ...]) -> Prepared:
        """The model after ``rewrites``; raises an exception if it cannot be run, or its results changed."""
        before, limit = self.request.before, self.request.unroll_limit
        path, session, names = Path(before.path), None, dict[str, None]()
        replaced = before.preparation.replaced
        # The length of a loop may be constant only after another one, whose result it is, was unrolled.
        for _ in range(_MAX_ROUNDS if limit is not None and self.request.simplify else 1):
            model = onnx.load(path, load_external_data=False)
            new, number, declined = apply(
                model, rewrites, self.operators, self.types, limit, self.kept
            )
            if not new:
                break
            replaced += number
            names |= dict.fromkeys(new)
            path, session = self.write(model, path.parent)
        if session is None:
            return replace(before, changed=False, declined=declined, dropped=())
        self.compare(session, path)
        rewritten = load_named(path)
        preparation = replace(
            before.preparation,
            replaced=replaced,
            nodes=len(graph.compute_nodes(rewritten.graph)),
            control_flow=graph.control_flow(rewritten.graph),
            rewrites=(*before.preparation.rewrites, *names),
        )
        return replace(
            before,
            preparation=preparation,
            path=str(path),
            applicable=applicable(rewritten, value_types(rewritten, path)),
            unrolls=unrolls(rewritten),
            changed=True,
            dropped=(),
            declined=declined,
        )

    def too_many(self, rewrite: Rewrite, error: TooManyNodesError) -> Iterator[Declined]:
        """The nodes that ``rewrite`` leaves as they are because of a limit."""
        model = onnx.load(self.request.before.path, load_external_data=False)
        reason = f"{error} (unroll-limit)"
        if number := self._count_after(rewrite):
            reason = f"the graph would get {number:,} nodes, more than unroll-limit"
        for node in graph.nodes(model.graph):
            operator = graph.operator(node)
            is_asked = self.operators is None or operator in self.operators
            if is_asked and operator in rewrite.operators and node.name not in self.kept:
                yield Declined(reason, rewrite.name, operator, node.name, number)

    def _count_after(self, rewrite: Rewrite) -> int:
        """The nodes that the graph has after ``rewrite``; 0 if that fails, or they are too many to count."""
        model = onnx.load(self.request.before.path, load_external_data=False)
        with contextlib.suppress(Exception):
            apply(model, [rewrite], self.operators, self.types, _MOST_NODES, self.kept)
            return len(graph.compute_nodes(model.graph))
        return 0

    def write(self, model: onnx.ModelProto, source: Path) -> tuple[Path, ort.InferenceSession]:
        """Write ``model``, whose external data is in ``source``, simplified if allowed.

        Returns its path, and a session that runs it.
        """
        name = self.request.model.name
        folder = Path(tempfile.mkdtemp(prefix="rewritten-", dir=self.request.folder))
        written = self._save(model, folder / f"{name}.rewritten.onnx", source)
        if not self.request.simplify:
            return written, open_session(written, cpu_options())
        result = folder / "simplified" / f"{name}.onnx"
        result.parent.mkdir()
        return result, optimize(written, result, "basic")()

    def compare(self, session: ort.InferenceSession, path: Path) -> None:
        """Raise BuildError if ``session``, which has the file ``path`` open, gives other results than the
        source; does nothing without a reference.
        """
        expected, tolerance = self.expected, self.request.tolerance
        if expected is None:
            return
        if tolerance is not None:
            self._check(session, for_other_numbers(expected), tolerance)
        elif self.request.corrections:
            try:
                self._check(session, expected, _CORRECTED, expected.runs)
            except BuildError:
                if (inexact := self._as_inexact(expected, path.parent)) is None:
                    raise
                self._check(session, expected, inexact, expected.runs)
        else:
            try:
                self._check(session, expected, SIMPLIFIED)
            except BuildError:
                # Fused operators of deep quantized models round differently.
                noisy = with_jitter(Path(self.request.before.path), expected)
                self._check(session, expected, within_noise(SIMPLIFIED, noisy.facts))

    def _as_inexact(self, expected: Reference, folder: Path) -> Tolerance | None:
        """The tolerance of a correction if rounding errors of its own weights change the model too; None if
        they do not.

        Differences of nearly equal values and logarithms of values near zero are mostly rounding.
        """
        options = cpu_options()
        if self.request.simplify:
            # As `optimize` runs the rewritten model: fused operators round differently.
            options.graph_optimization_level = LEVELS["basic"]
        rounded = open_rounded(Path(self.request.before.path), folder, options)
        anything = Tolerance(snr=NOTHING, cosine=-1)
        # The margin is above NOTHING decibels: their sum is the decibels themselves.
        snr = self._check(rounded, expected, anything, expected.runs) + NOTHING
        if snr > _EXACT:
            return None
        return replace(_CORRECTED, snr=max(min(snr - GAIN, _ROUNDED), SIMPLIFIED.snr))

    def _check(
        self,
        session: ort.InferenceSession,
        expected: Reference,
        tolerance: Tolerance,
        runs: Sequence[ReferenceRun] | None = None,
    ) -> float:
        """The smallest margin of an output in decibels; raises BuildError if one differs."""
        what = "the rewritten model on the CPU"
        subject = Subject(self.request.model, what, "the source model's")
        announce(f"running {what}")
        compared = compare_runs(session, expected, tolerance, runs)
        if difference := compared.difference:
            refuse(explain(difference, tolerance, subject, expected.facts))
        margins = (a.margin for a in compared.agreements if a.margin is not None)
        return min(margins, default=math.inf)

    def _save(self, model: onnx.ModelProto, path: Path, source: Path) -> Path:
        """Write ``model`` to ``path``, beside links to its external data, which is in ``source``."""
        names = data_of(model, source / path.name, self.request.model.key)
        put_files(names, source, path.parent)
        name_nodes(model.graph)
        onnx.save(model, path)
        return path

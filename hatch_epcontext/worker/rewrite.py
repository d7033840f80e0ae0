"""Rewrite a prepared model where an EP refuses it, and compare the result with the source."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.errors import EpcontextError
from hatch_epcontext.files import link_or_copy
from hatch_epcontext.ipc.protocol import RewriteReply, RewriteRequest
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.external import external_data
from hatch_epcontext.worker.inputs import dummy_inputs
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.prepare import SIMPLIFIED
from hatch_epcontext.worker.reference import (
    check_outputs,
    read_reference,
    reference,
    run_model,
)
from hatch_epcontext.worker.rewrites import REWRITES, rewrite
from hatch_epcontext.worker.rewrites.base import Rewrite
from hatch_epcontext.worker.rewrites.branches import BRANCHES, assignments, removed, with_inputs
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.step import step
from hatch_epcontext.worker.tensors import Arrays


def handle(request: RewriteRequest) -> RewriteReply:
    """Write the request's model, rewritten, into its folder.

    A rewrite after which the model cannot be run, or gives other results than the source, is dropped.
    Raises ModelError when the source model cannot be run on the CPU.
    """
    step("rewriting what the EP refuses")
    work = _Work.begin(request)
    wanted = work.wanted()
    if not wanted:
        return RewriteReply(None)
    try:
        return work.write(wanted)
    except Exception as error:
        # ONNX Runtime raises many things, for graphs that it cannot open.
        if len(wanted) == 1:
            return RewriteReply(None, dropped=(_dropped(wanted[0], error),))
    return _without_faults(work, wanted)


def _without_faults(work: _Work, wanted: tuple[Rewrite, ...]) -> RewriteReply:
    """The result of those of ``wanted`` that change nothing, each after those before it."""
    best = RewriteReply(None)
    kept: tuple[Rewrite, ...] = ()
    dropped: list[str] = []
    for each in wanted:
        try:
            best = work.write((*kept, each))
        except Exception as error:
            dropped.append(_dropped(each, error))
        else:
            kept = (*kept, each)
    return replace(best, dropped=tuple(dropped))


def _dropped(each: Rewrite, error: Exception) -> str:
    message = error.problems[0].message if isinstance(error, EpcontextError) else str(error)
    return f"{each.name}: {message}"


@dataclass(frozen=True)
class _Work:
    """``refused``: the operators to rewrite. ``feeds`` and ``expected`` are empty without a comparison."""

    request: RewriteRequest
    refused: frozenset[str]
    feeds: Arrays
    expected: Arrays

    @staticmethod
    def begin(request: RewriteRequest) -> _Work:
        model = onnx.load(request.prepared, load_external_data=False)
        refused = request.refused
        if refused is None:
            refused = tuple(map(graph.operator, graph.nodes(model.graph)))
        feeds: Arrays = {}
        expected: Arrays = {}
        if request.compare:
            inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
            feeds = dummy_inputs(inputs, request.model, request.bounds)
            expected = (
                reference(request.model, feeds)
                if request.reference is None
                else read_reference(request.reference)
            )
        return _Work(request, frozenset(refused), feeds, expected)

    def read(self) -> onnx.ModelProto:
        return onnx.load(self.request.prepared, load_external_data=False)

    def wanted(self) -> tuple[Rewrite, ...]:
        """The rewrites that do something."""
        # Only a comparison shows that both branches give what they should.
        all_ = REWRITES if self.request.compare else tuple(r for r in REWRITES if r is not BRANCHES)
        names = rewrite(self.read(), self.refused, all_)
        return tuple(each for each in all_ if each.name in names)

    def write(self, rewrites: tuple[Rewrite, ...]) -> RewriteReply:
        """Write the model after ``rewrites``; raises an exception if it is not what it was."""
        request = self.request
        folder = Path(tempfile.mkdtemp(prefix="rewritten-", dir=request.folder))
        model = self.read()
        names = rewrite(model, self.refused, rewrites)
        written = self._save(model, folder / f"{request.model.name}.rewritten.onnx")
        if request.simplify:
            result = folder / "simplified" / f"{request.model.name}.onnx"
            result.parent.mkdir()
            session = optimize(written, result, "basic")
        else:
            result, session = written, open_session(written, cpu_options())
        if request.compare:
            self._compare(session)
            if conditions := removed(self.read(), model):
                self._compare_branches(model, conditions, folder)
        model = onnx.load(result, load_external_data=False)
        nodes = len(graph.compute_nodes(model.graph))
        return RewriteReply(str(result), nodes, graph.control_flow(model.graph), names)

    def _compare(self, session: ort.InferenceSession) -> None:
        spec = self.request.model
        outputs = run_model(session, self.feeds, spec, "the rewritten model on the CPU")
        check_outputs(outputs, self.expected, SIMPLIFIED, spec, "the source model's")

    def _compare_branches(
        self, model: onnx.ModelProto, conditions: tuple[str, ...], folder: Path
    ) -> None:
        """Compare ``model`` with the prepared one where ``conditions`` are true, and where they are not."""
        spec = self.request.model
        before, after = (
            open_session(
                self._save(with_inputs(each, conditions), folder / f"{name}.onnx"), cpu_options()
            )
            for name, each in (("branches-before", self.read()), ("branches-after", model))
        )
        for fed in assignments(before, conditions):
            feeds = {**self.feeds, **fed}
            expected = run_model(before, feeds, spec, "a branch of the model on the CPU")
            outputs = run_model(after, feeds, spec, "the rewritten branch on the CPU")
            check_outputs(outputs, expected, SIMPLIFIED, spec, "the branch's")

    def _save(self, model: onnx.ModelProto, path: Path) -> Path:
        """Write ``model`` to ``path``, beside links to its external data."""
        prepared = Path(self.request.prepared)
        for name in external_data(model, prepared.parent, self.request.model.key):
            (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
            if not (path.parent / name).exists():
                link_or_copy(prepared.parent / name, path.parent / name)
        onnx.save(model, path)
        return path

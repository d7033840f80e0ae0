"""Explain why ONNX Runtime or an EP does not compile a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import onnx

from hatch_epcontext.errors import (
    BuildError,
    EpcontextError,
    Key,
    Kind,
    LibraryError,
    ModelError,
    Problem,
    RefusedError,
    Setting,
    UnavailableError,
)
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.providers import Provider, missing
from hatch_epcontext.worker.source import on_conditions

DescribeRefused: TypeAlias = Callable[[], tuple[str, tuple[str, ...]]]
"""Says in a sentence which nodes an EP refuses, and gives their names; both are empty if it is unknown."""

CHANGE = "Change the model there, or keep only the part before or after it with cut (not tried)."


@dataclass(frozen=True)
class Explainer:
    """Explains why the EP of ``provider`` does not compile a model.

    ``graph_of`` reads the graph that is compiled, and ``key`` is that of its model, if it has one.
    ``describe_refused`` says which nodes the EP refuses, in a sentence and by their names.
    """

    provider: Provider
    graph_of: Callable[[], onnx.GraphProto]
    key: Key | None = None
    describe_refused: DescribeRefused = lambda: ("", ())

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise BuildError with an explanation instead of an error of ONNX Runtime or the EP.

        An error without a known explanation stays as it is.
        """
        try:
            yield
        except EpcontextError:
            raise
        except Exception as error:
            explanation = self._explanation(str(error))
            if explanation is None:
                raise
            raise explanation from error

    def _explanation(self, message: str) -> BuildError | None:
        """The meaning of an error of ONNX Runtime or the EP; None if it is unknown."""
        if "Unable to compile any nodes" in message:
            return self.nothing_compiled()
        if "NULL EPContext node" in message:
            message = (
                f"{self.provider.ep} compiled the model, but returns no EP contexts: it cannot compile "
                "ahead of time."
            )
            hint = (
                "Ship the source model, or its optimized graph with the cpu provider (not tried). This EP "
                "then compiles it on the user's machine."
            )
            return RefusedError(Problem(Kind.NOTHING_COMPILED, "", message, hint))
        if "unsupported with shared EP context" in message:
            message = f"{self.provider.ep} does not compile contexts for several chips that share weights."
            hint = "Give each chip a target of its own, or remove share-weights (not tried)."
            return ModelError(Problem(Kind.NOT_SHARED, "", message, hint))
        if library := missing(message):
            message = f"{self.provider.ep} cannot compile, because {library} is missing."
            return UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, library.advice))
        return self._of_refused_graph(message)

    def _of_refused_graph(self, message: str) -> LibraryError | None:
        """The error of a graph that ONNX Runtime or the EP's compiler refuses, if a node is known."""
        settings: tuple[Setting, ...] = ()
        if words := self.provider.error_in_words(message):
            hint = CHANGE
            if decides := on_conditions(self.graph_of(), self.key):
                # The node may be in a branch that never runs.
                hint, settings = f"{decides[0]} Or: {hint[0].lower()}{hint[1:]}", decides[1]
            return LibraryError(Problem(Kind.COMPILE_FAILED, "", words, hint, settings=settings))
        sentence, nodes = self.describe_refused()
        if sentence:
            # The nodes that it leaves to the CPU may cause the failure: by a type that they pass on.
            reason = message.rsplit(" : ", 1)[-1].strip().rstrip(".")
            words = f"{self.provider.ep} failed: {reason}. {sentence}"
            return LibraryError(Problem(Kind.COMPILE_FAILED, "", words, CHANGE, nodes=nodes))
        return None

    def nothing_compiled(self) -> RefusedError:
        """The error of a model of which no node was compiled."""
        source = self.graph_of()
        message = f"{self.provider.ep} compiled no node of the model."
        hint = (
            "Check that the target names a chip that the EP supports, and that the EP has the model's "
            "operators."
        )
        settings: tuple[Setting, ...] = ()
        if not Scope(source).counted:
            message += (
                " None of them depends on an input: ONNX Runtime computes them all beforehand."
            )
            hint = "Ship their results: the provider cpu stores them in its model (not tried)."
        elif control := graph.control_flow(source):
            message += f" It has {' and '.join(control)}, which few EPs compile."
            advice = on_conditions(source, self.key)
            hint, settings = advice or ("Remove them from the model (not tried).", ())
        sentence, nodes = self.describe_refused()
        if sentence:
            message += f" {sentence}"
            if not settings:
                # If the EP gives reasons for its nodes, the chip is not the cause.
                hint = "Change the model at these nodes (not tried)."
        return RefusedError(
            Problem(Kind.NOTHING_COMPILED, "", message, hint, settings=settings, nodes=nodes)
        )

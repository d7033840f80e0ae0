"""Models that are made to harm end in one sentence, which names the tensor, the node or the file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, EpcontextError, Key, Kind, ModelError
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.tools.inspecting import verify_model
from hatch_epcontext.worker.actions import check, inspect
from hatch_epcontext.worker.requests import (
    CheckRequest,
    InspectReply,
    InspectRequest,
    PrepareRequest,
)
from tests.hostile import CONTEXTS, HOSTILE, HOSTILE_TO_RUN, endless
from tests.models import save

KEY = Key(("models", 0))
RUNNING = "running the source model on the CPU"


def message(error: EpcontextError) -> str:
    """The message of the only problem."""
    (problem,) = error.problems
    assert "\n" not in problem.message.strip()
    return problem.message


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, words = HOSTILE[name]
    make(tmp_path)
    spec = Model("a", tmp_path / "a.onnx", KEY)
    with pytest.raises(ModelError) as raised:
        check.handle(CheckRequest((spec,)))
    assert words in message(raised.value)
    # Inspecting shows what can be shown, and refuses the rest with an error of the same kind.
    with contextlib.suppress(ModelError):
        assert isinstance(inspect.handle(InspectRequest(str(spec.path))), InspectReply)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_hostile_context_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, words = CONTEXTS[name]
    make(tmp_path)
    path = tmp_path / "a.onnx"
    with pytest.raises(EpcontextError) as raised:
        verify_model(path, inspect.handle(InspectRequest(str(path))))
    assert words in message(raised.value)


def test_a_model_that_only_a_session_refuses_leaves_no_traceback(tmp_path: Path) -> None:
    with Workers(60) as workers:
        for index, make in enumerate(HOSTILE_TO_RUN.values()):
            folder = tmp_path / str(index)
            (folder / "out").mkdir(parents=True)
            make(folder)
            spec = Model("a", folder / "a.onnx", KEY)
            request = PrepareRequest(spec, "onnxruntime", str(folder / "out"), True)
            with pytest.raises(ModelError) as raised:
                workers.call(request, folder / "prepare", location="a")
            assert "the source model itself" in raised.value.problems[0].message
            log = (folder / "prepare" / "worker.log").read_text(encoding="utf-8")
            assert "Traceback" not in log


def test_a_loop_that_does_not_end_is_stopped_with_what_it_did(tmp_path: Path) -> None:
    spec = Model("a", save(endless(), tmp_path / "a.onnx"), KEY)
    (tmp_path / "out").mkdir()
    request = PrepareRequest(spec, "onnxruntime", str(tmp_path / "out"), True)
    with pytest.raises(BuildError) as raised:
        Workers(1).call(request, tmp_path / "prepare", location="a")
    (problem,) = raised.value.problems
    assert problem.kind is Kind.WORKER_TIMEOUT
    # A slow machine may not even have begun.
    activity = tmp_path / "prepare" / "activity"
    done = activity.read_text(encoding="utf-8") if activity.exists() else ""
    assert done in ("", "reading the model", "opening the source model on the CPU", RUNNING)
    assert not done or f"after 1 seconds while {done} (for " in problem.message

"""What the local executor adds to errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.executors.local import _with_static_shapes
from hatch_epcontext.jobs.plan import plan
from tests.models import network, save
from tests.results import configured


@pytest.mark.parametrize(
    ("toml", "kind", "hinted"),
    [
        ("dims = { batch = 1 }", Kind.COMPILE_FAILED, True),
        ("dims = { batch = 1 }", Kind.WORKER_TIMEOUT, False),
        ("dims = { batch = 1 }, static-shapes = true", Kind.COMPILE_FAILED, False),
        ("name = 'a'", Kind.COMPILE_FAILED, False),
    ],
)
def test_sizes_that_are_known_can_be_fixed(
    project: Path, toml: str, kind: Kind, hinted: bool
) -> None:
    save(network(), project / "models" / "a.onnx")
    models = f'models = [{{ path = "models/a.onnx", {toml} }}]'
    (job,) = plan(configured(project, f'provider = "openvino"\n{models}\n')).jobs
    error = BuildError(Problem(kind, "a -> openvino", "it failed.", "Try it."))
    (problem,) = _with_static_shapes(error, job).problems
    assert [str(each) for each in problem.settings] == (
        ["tool.epcontext.static-shapes = true"] if hinted else []
    )
    assert (problem.hint == "Try it.") is not hinted

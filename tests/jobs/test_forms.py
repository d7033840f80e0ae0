"""Other forms in which a model is prepared, with real workers."""

from __future__ import annotations

from pathlib import Path

from onnx import helper

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.jobs.artifact import Recipe, Refused
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.preparation import Preparations
from hatch_epcontext.jobs.processes.process import Workers
from tests.models import network, save, weights

TOML = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


def test_without_what_is_folded_into_convolutions_a_model_keeps_its_nodes(
    project: Path, tmp_path: Path
) -> None:
    scaled = network(1)
    scaled.graph.initializer.append(weights("scale", 4, 1, 1))
    scaled.graph.node[0].output[0] = "plain"
    scaled.graph.node.insert(1, helper.make_node("Mul", ["plain", "scale"], ["c"], "scaled"))
    save(scaled, project / "models" / "a.onnx")
    save(network(1), project / "models" / "b.onnx")
    toml = TOML.replace('"models/a.onnx"', '"models/a.onnx", "models/b.onnx"')
    folded, other = plan(load(project, parse(toml), {}, {})).jobs
    with Workers(60) as started:
        preparations = Preparations(started, tmp_path / "prepared", [folded, other])
        plain, unfused = Recipe("onnxruntime"), Recipe("onnxruntime", fuse=False)
        (before,) = preparations.get(folded, plain, started)
        (after,) = preparations.get(folded, unfused, started)
        assert after.preparation.nodes == before.preparation.nodes + 1
        assert after.preparation.rewrites == ("nothing folded into convolutions",)
        assert [each.changed for each in preparations.get(folded, unfused, started)] == [True]
        assert [each.changed for each in preparations.get(other, unfused, started)] == [False]
        executor = LocalExecutor(started, tmp_path, 1, {}, preparations)
        assert executor.compile(other, unfused, tmp_path / "out") == Refused("change")

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from hatch_epcontext.worker.actions import trials
from hatch_epcontext.worker.requests import TRIAL_DIMS, TRIALS, TrialsReply, TrialsRequest


@pytest.fixture
def made(tmp_path: Path) -> TrialsReply:
    request = TrialsRequest(tuple(TRIALS), str(tmp_path))
    reply = trials.handle(request)
    assert request.misfit(reply) is None
    return reply


def test_each_graph_runs_and_depends_on_its_input(made: TrialsReply) -> None:
    rng = np.random.default_rng(0)
    for name, path in made.paths.items():
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        sizes = TRIAL_DIMS.get(name, {})
        shape = [sizes[size] if isinstance(size, str) else size for size in given.shape]
        first, second = (
            session.run(None, {"x": rng.standard_normal(shape).astype(np.float32)})[0]
            for _ in range(2)
        )
        assert np.ptp(first - second) > 0.01, name


def test_old_eps_can_read_the_graphs(made: TrialsReply) -> None:
    for path in made.paths.values():
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert (model.ir_version, model.opset_import[0].version) == (8, 17)


def test_they_have_what_they_are_called_after(made: TrialsReply) -> None:
    operators = {
        name: {node.op_type for node in onnx.load(path).graph.node}
        for name, path in made.paths.items()
    }
    assert {"gemm": "Gemm", "conv": "Conv", "lstm": "LSTM", "qdq": "QuantizeLinear"}.items() <= {
        (name, op) for name, ops in operators.items() for op in ops
    }
    assert {"MatMul", "Softmax", "LayerNormalization", "Erf"} <= operators["attention"]


def test_the_same_request_makes_the_same_files(made: TrialsReply, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    again = trials.handle(TrialsRequest(tuple(TRIALS), str(tmp_path / "again")))
    for name, path in made.paths.items():
        assert Path(path).read_bytes() == Path(again.paths[name]).read_bytes()

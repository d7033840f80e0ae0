from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.errors import Key
from hatch_epcontext.graph.facts import Range, TensorFacts
from hatch_epcontext.jobs.processes.reply import InvalidReplyError, read_refusal, read_reply
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.worker.requests import (
    CheckReply,
    CheckRequest,
    CompileReply,
    CompileRequest,
    PrepareReply,
    PrepareRequest,
    Refusal,
    WorkerRequest,
)
from hatch_epcontext.worker.results import Context, Coverage, ModelFacts, NodeFacts
from tests.fuzzing.mutations import VALUES, mutated

X = TensorFacts("x", "float32", ("batch", 4))
SPEC = Model("a", Path("/models/a.onnx"), Key())


def requests(folder: Path) -> list[tuple[WorkerRequest[Any], Any]]:
    """Requests with a right reply to each; ``folder`` has the files that they name."""
    coverage = Coverage(4, 3, 1, (NodeFacts("n", "Loop", "a reason"),))
    context = Context("a", "a_ctx.onnx", (X,), (X,), coverage, "1:60", "2.1")
    target = Target(
        "npu", CompileSettings(provider="qnn", ep="QNNExecutionProvider", device="npu"), None
    )
    prepared = str(folder / "a_ctx.onnx")
    return [
        (CheckRequest((SPEC,)), CheckReply((ModelFacts((X,), (X,), ("a.data",)),))),
        (
            PrepareRequest(SPEC, "none", str(folder), True),
            PrepareReply(prepared, 5, 4, ("If",), {"x": Range(0, 7, known=True)}, prepared),
        ),
        (
            CompileRequest((SPEC,), (prepared,), target, str(folder)),
            CompileReply("context", (context,), 1.5),
        ),
    ]


@given(st.data())
def test_any_reply_is_the_answer_or_an_error_in_words(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "a_ctx.onnx").touch()
    request, reply = data.draw(st.sampled_from(requests(tmp_path)))
    found = data.draw(st.one_of(VALUES, mutated(to_plain(reply))))
    try:
        answer = read_reply(json.dumps(found).encode(), request)
    except InvalidReplyError as error:
        reason = str(error)
    else:
        reason = "none"
        assert isinstance(answer, type(reply))
        assert request.misfit(answer) is None
    assert reason


@given(st.binary(max_size=40), st.integers(0, 200), st.integers(0, 40))
def test_any_bytes_are_a_refusal_or_an_error_in_words(
    inserted: bytes, place: int, removed: int
) -> None:
    problem = {"kind": "EPC201", "location": "a", "message": "m"}
    written = json.dumps({"problems": [problem]}).encode()
    try:
        refusal = read_refusal(written[:place] + inserted + written[place + removed :])
    except InvalidReplyError as error:
        reason = str(error)
    else:
        reason = "none"
        assert isinstance(refusal, Refusal)
    assert reason

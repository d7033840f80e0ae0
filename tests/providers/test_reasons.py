"""What EPs say of nodes that they refuse."""

from __future__ import annotations

from hatch_epcontext.providers import PROVIDERS, is_benign

_FAILED = "2026-01-01 [V:onnxruntime:, qnn_execution_provider.cc:1713 LogNodeSupport] Validation FAILED for"
_PASSED = _FAILED.replace("FAILED", "PASSED")

QNN = f"""
{_FAILED} 1 nodes in OrtNodeUnit (LSTM) :
\tOperator type: LSTM Node name: lstm 4 Node index: 13
\tREASON : QNN EP doesn't support non-default activations for LSTM.
{_PASSED} 1 nodes in OrtNodeUnit (Conv) :
\tOperator type: Conv Node name: conv Node index: 14
{_FAILED} 2 nodes in QDQ group :
\tOperator type: DequantizeLinear Node name: dq Node index: 15
\tOperator type: Cast Node name: /Cast Node index: 16
\tREASON : Failed to create Cast node.
{_FAILED} 1 nodes in OrtNodeUnit (Mod) :
\tOperator type: Mod Node name: mod Node index: 17
\tREASON : QNN Mod Op doesn't support fmod.
{_FAILED} 1 nodes in OrtNodeUnit (GroupQueryAttention) :
\tOperator type: GroupQueryAttention Node name: gqa Node index: 18
\tREASON : GroupQueryAttention filtered off QNN by the op_affinity provider option.
{_FAILED} 1 nodes in OrtNodeUnit (Mod) :
\tOperator type: Relu Node name:  Node index: 18
\tREASON : Any.
"""

OPENVINO = """[ONNXRuntimeError] : 11 : EP_FAIL : Check 'false' failed at unconverted_ops_report.cpp:151:
FrontEnd API failed with OpConversionFailure:
Model wasn't fully converted. Failed operations detailed log:
-- If-13 with a message:
While validating ONNX node '<Node(If): 53>': Check 'if_condition_rank.compatible(1)' failed at if.cpp:95:
While validating node 'opset8::If If_61 () -> ()' with friendly_name 'If_61':
Rank of If condition input must be equal to 0 or 1

Summary:
-- Conversion is failed for: If-13
"""


def test_qnn_logs_why_it_refuses_nodes() -> None:
    reasons = PROVIDERS["qnn"].reasons
    assert reasons is not None
    assert reasons(QNN) == {
        "lstm 4": "QNN EP doesn't support non-default activations for LSTM",
        "dq": "",
        "/Cast": "",
        "mod": "QNN Mod Op doesn't support fmod",
        "gqa": "the EP keeps it off the NPU, unless op_affinity names a file with "
        '{"op_type": {"GroupQueryAttention": "htp"}}',
    }
    assert reasons("") == {}


def test_openvino_says_which_node_it_cannot_convert() -> None:
    words = PROVIDERS["openvino"].error_in_words
    assert words(OPENVINO) == (
        "OpenVINO cannot convert the node If that makes '53': Rank of If condition input must be equal to "
        "0 or 1."
    )
    assert words("Something else") is None


def test_an_error_is_no_standing_line() -> None:
    assert not is_benign("[E:onnxruntime:, a.cc:1 f] Unknown error")
    assert not is_benign("")

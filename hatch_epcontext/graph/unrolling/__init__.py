"""Unroll nodes that repeat a known number of times: Loop, LSTM, GRU and RNN.

The number must be constant, and the needed shapes known. ONNX Runtime's basic optimization folds constants in
the result; then more may be unrolled.
"""

from __future__ import annotations

from hatch_epcontext.graph.rewriting import Rewrite
from hatch_epcontext.graph.unrolling.loops import unroll_loop
from hatch_epcontext.graph.unrolling.recurrent import unroll_recurrent

UNROLLS: tuple[Rewrite, ...] = (unroll_recurrent, unroll_loop)
"""All of them, in the order in which they are applied."""

"""Turn a source model into a graph that an EP can compile: inputs fixed, constants computed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.config.settings import Model
from hatch_epcontext.config.tables import Dequantize
from hatch_epcontext.files import link_or_copy
from hatch_epcontext.graph import external, graph, reading
from hatch_epcontext.graph.dequantize import dequantize
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.text import count
from hatch_epcontext.worker.comparison.check import SIMPLIFIED, check_runs
from hatch_epcontext.worker.comparison.reference import reference
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    for_other_numbers,
    read_reference,
    write_reference,
)
from hatch_epcontext.worker.configured import fix_inputs, ranges_for
from hatch_epcontext.worker.facts import Simplifier
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.requests import PrepareReply, PrepareRequest
from hatch_epcontext.worker.session import cpu_options, open_session


def handle(request: PrepareRequest) -> PrepareReply:
    """Write the request's model, fixed and simplified, into its folder; the source is only read.

    Raises ModelError when the model does not fit its configuration or cannot be run on the CPU, and
    BuildError when the result differs from the source: a simplifier must not change a model.
    """
    model, folder = request.model, Path(request.folder)
    step("reading the model")
    fixed = _write_fixed(model, folder, request.simplifier)
    onnx_model = onnx.load(fixed, load_external_data=False)
    nodes_before = len(graph.compute_nodes(onnx_model.graph))
    ranges = ranges_for(onnx_model, model)
    # Before the simplifier, which is not to blame for a source that cannot be run.
    expected = _reference(request, onnx_model)
    outputs_path = write_reference(expected, folder / "reference.bin") if expected else None
    # In a folder of its own: beside the fixed model are links to the source's own data.
    own = Path(tempfile.mkdtemp(prefix="simplified-", dir=folder))
    done = None
    if request.precision is not None and request.precision.dequantize:
        floats = own / f"{model.name}.floats.onnx"
        done = _write_dequantized(fixed, floats, request.precision.dequantize)
        fixed = floats if done else fixed
    result = own / f"{model.name}.onnx"
    step(f"simplifying the model ({request.simplifier})")
    if (simplified := _simplify(fixed, result, request)) is None:
        result = fixed
    if request.precision is not None and request.precision.quantize is not None:
        # Few builds need it, and importing it takes long.
        from hatch_epcontext.worker.quantization.quantize import write_quantized

        quantized = own / f"{model.name}.quantized.onnx"
        done = write_quantized(result, quantized, model, request.precision)
        result, simplified = quantized, None
    if expected is not None and (simplified is not None or done is not None):
        _compare(simplified, result, expected, request, done)
    onnx_model = onnx.load(result, load_external_data=False)
    nodes = len(graph.compute_nodes(onnx_model.graph))
    return PrepareReply(
        str(result),
        nodes_before,
        nodes,
        graph.control_flow(onnx_model.graph),
        ranges,
        outputs_path,
        done,
    )


def _compare(
    simplified: ort.InferenceSession | None,
    result: Path,
    expected: Reference,
    request: PrepareRequest,
    done: str | None,
) -> None:
    """Compare ``result``, which ``simplified`` has open if it is not None, with the source.

    ``done``: how its numbers were changed. Raises BuildError if they differ more than that explains.
    """
    model, tolerance = request.model, SIMPLIFIED
    if done is not None and request.precision is not None:
        tolerance = request.precision.tolerance or SIMPLIFIED
        expected = for_other_numbers(expected)
    # The session that has written it: opening it once more takes as long as simplifying it.
    session = simplified or open_session(result, cpu_options())
    name = "the source model's" + (f" before it was {done}" if done else "")
    check_runs(session, expected, tolerance, model, "the prepared model on the CPU", name)


def _reference(request: PrepareRequest, onnx_model: onnx.ModelProto) -> Reference | None:
    if not request.compare:
        return None
    if request.reference is not None:
        return read_reference(request.reference)
    return reference(request.model, onnx_model)


def _simplify(fixed: Path, result: Path, request: PrepareRequest) -> ort.InferenceSession | None:
    """Write the simplified model to ``result``; returns a session that runs it, None for ``"none"``."""
    if request.simplifier == "none":
        return None
    source = fixed
    if request.simplifier == "onnxslim":
        import onnxslim

        source = result.with_suffix(".slim")
        slim = onnxslim.slim(onnx.load(fixed))
        large = slim.ByteSize() > PROTOBUF_LIMIT
        onnx.save(slim, source, save_as_external_data=large, location=f"{source.name}.data")
    return optimize(source, result, "basic", fuse=request.fuse)


def _write_fixed(model: Model, folder: Path, simplifier: Simplifier) -> Path:
    source = Path(model.path)
    onnx_model = reading.read(source, model.key)
    data = external.external_data(onnx_model, source.parent, model.key)
    # onnx itself, which onnxslim uses, refuses external data that is a link, hard or symbolic.
    copy = shutil.copyfile if simplifier == "onnxslim" else link_or_copy
    for name in data:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy((source.parent / name).resolve(), target)
    fix_inputs(onnx_model, model)
    name = f"{model.name}.fixed.onnx"
    while name in data:
        name = f"_{name}"
    onnx.save(onnx_model, folder / name)
    return folder / name


def _write_dequantized(source: Path, result: Path, how: Dequantize) -> str | None:
    """Write the model at ``source`` without its quantization to ``result``.

    Returns what was done in words; None if there was nothing to undo, and then nothing is written.
    """
    step("undoing the quantization of the model")
    onnx_model = onnx.load(source)
    undone = dequantize(onnx_model, static=how == "all")
    if not undone:
        return None
    large = onnx_model.ByteSize() > PROTOBUF_LIMIT
    onnx.save(onnx_model, result, save_as_external_data=large, location=f"{result.name}.data")
    return f"dequantized ({count(undone, 'operator')})"

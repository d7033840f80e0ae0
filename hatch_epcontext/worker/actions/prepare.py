"""Turn a source model into a graph that an EP can compile: inputs fixed, constants computed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort

from hatch_epcontext.files import link_or_copy, put_files
from hatch_epcontext.graph import external, graph, inference
from hatch_epcontext.graph.bodies import move_weights
from hatch_epcontext.graph.constants import fold_constants, has_constants
from hatch_epcontext.graph.dequantize import static_format
from hatch_epcontext.graph.facts import Cost
from hatch_epcontext.graph.repairs import name_nodes, separate_outputs
from hatch_epcontext.graph.rewrites import unrolls
from hatch_epcontext.graph.rewrites.precise import applicable
from hatch_epcontext.graph.versions import usual_versions
from hatch_epcontext.text import count
from hatch_epcontext.worker.advice import Subject, check_runs, simplified_tolerance
from hatch_epcontext.worker.comparison.compare import compare_runs
from hatch_epcontext.worker.comparison.runs import (
    Reference,
    for_other_numbers,
    read_reference,
    write_reference,
)
from hatch_epcontext.worker.comparison.selections import open_with_reads
from hatch_epcontext.worker.noise import with_jitter, within_noise
from hatch_epcontext.worker.optimizing import load_named, optimize
from hatch_epcontext.worker.ort_values import types_of_runtime
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.reference import source_reference, write_float_form
from hatch_epcontext.worker.requests import Prepared, PrepareRequest
from hatch_epcontext.worker.results import Preparation
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.source import (
    check_ranges,
    data_of,
    fix_inputs,
    ranges_for,
    read_source,
    typed_graph,
)

_Opening = Callable[[], ort.InferenceSession]


def handle(request: PrepareRequest) -> Prepared:
    """Write the request's model, fixed and simplified, into its folder; the source is only read.

    Raises ModelError when the model does not fit its configuration or cannot be run on the CPU, and
    BuildError when the result differs from the source: a simplifier must not change a model.
    """
    model, folder = request.model, Path(request.folder)
    announce("reading the model")
    onnx_model, integers = _write_fixed(request, folder)
    nodes_before = len(graph.compute_nodes(onnx_model.graph))
    # A folder of its own, because beside the fixed model are links to the source's data.
    own = Path(tempfile.mkdtemp(prefix="simplified-", dir=folder))
    form, fixed, undone = _dequantize(integers, own, request)
    done = None if fixed == form else "dequantized"
    try:
        result, simplified = _simplify(fixed, own, request)
    except Exception:
        # The simplifier is not the cause if the source itself cannot be run.
        _reference(request, onnx_model, integers, form, None)
        raise
    # Integers show what they saturate at.
    shown = onnx_model if done else onnx.load(result, load_external_data=False)
    folded = typed_graph(shown, model)
    if simplified is not None and done is None and has_constants(folded):
        result, simplified, folded = _folded_constants(result, simplified, folded, request)
    del shown
    # The result is compared with the form before its static quantization is undone.
    expected = _reference(request, onnx_model, integers, form, folded)
    outputs_path = write_reference(expected, folder / "reference.bin") if expected else None
    precision = f"dequantized ({count(undone, 'operator')})" if undone else None
    if request.quantize is not None:
        result, precision = _quantize(result, own, request)
        done, simplified = precision, None
    if expected is not None and (simplified is not None or done is not None):
        _compare(simplified, result, expected, request, done, form)
    prepared = load_named(result)
    types = {value.name: value.type for value in (*folded.value_info, *folded.output)}
    preparation = Preparation(
        request.simplifier,
        nodes_before,
        len(graph.compute_nodes(prepared.graph)),
        graph.control_flow(prepared.graph),
        precision,
        cost=expected.facts.cost if expected else Cost(),
    )
    return Prepared(
        preparation,
        path=str(result),
        ranges=expected.facts.ranges
        if expected
        else ranges_for(folded, graph.input_facts(onnx_model.graph), model),
        reference=outputs_path,
        applicable=applicable(prepared, types),
        unrolls=unrolls(prepared),
        quantized=static_format(prepared),
    )


def _quantize(path: Path, own: Path, request: PrepareRequest) -> tuple[Path, str]:
    """``path`` with integers, in the folder ``own``, and how it is quantized."""
    # Imported here: few builds need it, and importing it takes long.
    from hatch_epcontext.worker.quantize import write_quantized

    quantized = own / f"{request.model.name}.quantized.onnx"
    return quantized, write_quantized(path, quantized, request)


def _dequantize(integers: Path, own: Path, request: PrepareRequest) -> tuple[Path, Path, int]:
    """The float form of ``integers``, the model without its static quantization too, and how many operators
    were undone; each is the file before it if nothing is to be undone.
    """
    form = static = integers
    undone = 0
    if request.dequantize:
        floats = own / f"{request.model.name}.floats.onnx"
        if undone := write_float_form(integers, floats):
            form = static = floats
    if request.dequantize == "all":
        floats = own / f"{request.model.name}.without-qdq.onnx"
        if more := write_float_form(form, floats, static=True):
            static, undone = floats, undone + more
    return form, static, undone


def _compare(
    simplified: _Opening | None,
    result: Path,
    expected: Reference,
    request: PrepareRequest,
    done: str | None,
    form: Path,
) -> None:
    """Compare ``result``, which ``simplified`` opens if it is not None, with the source.

    ``done``: how its numbers were changed; ``form``: the file of the source in the form of ``expected``.
    Raises BuildError if they differ more than that explains, and than ONNX Runtime's fusions do.
    """
    model, tolerance = request.model, simplified_tolerance(request.model)
    if done is not None:
        tolerance = request.tolerance or tolerance
        expected = for_other_numbers(expected)
    rest = expected.facts.selections.rest
    # The session that wrote it, if possible: opening the file again takes as long as simplifying it.
    if rest is not None:
        session = open_with_reads(result, rest, cpu_options())
    else:
        session = simplified() if simplified else open_session(result, cpu_options())
    name = "the source model's" if expected.facts.integers is None else "its float form's"
    name += f" before it was {done}" if done else ""
    subject = Subject(model, "the prepared model on the CPU", name)
    announce(f"running {subject.what}")
    if compare_runs(session, expected, tolerance).difference is not None:
        if done is None:
            tolerance = within_noise(tolerance, with_jitter(form, expected).facts)
        check_runs(session, expected, tolerance, subject)


def _reference(
    request: PrepareRequest,
    onnx_model: onnx.ModelProto,
    integers: Path,
    form: Path,
    folded: onnx.GraphProto | None,
) -> Reference | None:
    """The reference. ``form``: the float form of ``integers`` if that was dequantized, else the same."""
    if not request.compare:
        return None
    if request.reference is not None:
        return read_reference(request.reference)
    floats = None if form == integers else form
    return source_reference(
        request.model, onnx_model, integers, floats, folded, emulated=request.emulated
    )


def _simplify(fixed: Path, own: Path, request: PrepareRequest) -> tuple[Path, _Opening | None]:
    """The simplified model, in the folder ``own``, with what opens it; or ``fixed`` without that."""
    if request.simplifier == "none":
        return fixed, None
    announce(f"simplifying the model ({request.simplifier})")
    source, result = fixed, own / f"{request.model.name}.onnx"
    if request.simplifier == "onnxslim":
        import onnxslim

        source = result.with_suffix(".slim")
        external.save_whole(onnxslim.slim(external.load_whole(fixed)), source)
    return result, optimize(source, result, "basic", fuse=request.fuse)


def _folded_constants(
    path: Path, opening: _Opening, folded: onnx.GraphProto, request: PrepareRequest
) -> tuple[Path, _Opening, onnx.GraphProto]:
    """The simplified model at ``path`` without values that have no numbers: some EPs crash at them."""
    model = onnx.load(path, load_external_data=False)
    if not fold_constants(model):
        return path, opening, folded
    changed, result = path.with_suffix(".filled"), path.with_name(f"{path.stem}.filled.onnx")
    onnx.save(model, changed)
    opening = optimize(changed, result, "basic", fuse=request.fuse)
    model = onnx.load(result, load_external_data=False)
    return result, opening, typed_graph(model, request.model)


def _write_fixed(request: PrepareRequest, folder: Path) -> tuple[onnx.ModelProto, Path]:
    """The source as configured, and its new file in ``folder``."""
    model, source = request.model, Path(request.model.path)
    onnx_model = usual_versions(read_source(source, model.key))
    data = data_of(onnx_model, source, model.key)
    # In bodies ONNX Runtime rejects external data with several hard links, also when it opens the source, and
    # writes it wrong.
    moves = bool(data) and move_weights(onnx_model)
    # onnx, with which the quantizer reads the model, rejects external data with several hard links.
    copy = shutil.copyfile if request.quantize is not None or moves else link_or_copy
    put_files(data, source.parent, folder, copy)
    check_ranges(graph.input_facts(onnx_model.graph), model)
    fix_inputs(onnx_model, model)
    inference.infer_anew(onnx_model, lambda model, names: types_of_runtime(model, source, names))
    separate_outputs(onnx_model)
    # An EP reports the nodes that it refuses by their names.
    name_nodes(onnx_model.graph)
    name = f"{model.name}.fixed.onnx"
    while name in data:
        name = f"_{name}"
    onnx.save(onnx_model, folder / name)
    return onnx_model, folder / name

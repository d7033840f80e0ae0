"""Source model -> a graph that an EP can compile: shapes fixed, constants frozen and folded away."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from hatch_epcontext.artifact import link_or_copy
from hatch_epcontext.errors import ModelError, Problem
from hatch_epcontext.protocol import (
    PROTOBUF_LIMIT,
    Folding,
    InspectReply,
    InspectRequest,
    ModelFacts,
    ModelProfiles,
    ModelSpec,
    PrepareReply,
    PrepareRequest,
    TensorFacts,
)
from hatch_epcontext.providers import Tolerance
from hatch_epcontext.structure import at, suggestion
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.inputs import constant, dummy_inputs
from hatch_epcontext.worker.optimize import optimize
from hatch_epcontext.worker.reference import check_outputs, reference
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.tensors import Array, run


def inspect(request: InspectRequest) -> InspectReply:
    """What the models' files say; raises ModelError with all that is wrong with any of them."""
    found = []
    problems: list[Problem] = []
    for spec in request.models:
        try:
            facts = _inspect(spec, request.static.get(spec.name, ""))
        except ModelError as error:
            problems += error.problems
            continue
        found.append(facts)
        for given in request.profiles:
            if given.model == spec.name:
                problems += _check_profiles(given, facts.inputs)
    if problems:
        raise ModelError(*problems)
    return InspectReply(tuple(found))


def _inspect(spec: ModelSpec, static_for: str) -> ModelFacts:
    path = Path(spec.path)
    model = graph.read(path, spec.key)
    data = graph.external_data(model, path.parent, spec.key)
    fix(model, spec)
    inputs = tuple(map(graph.facts, graph.inputs(model.graph)))
    problems = list(_unusable(inputs, spec, static_for))
    if problems:
        raise ModelError(*problems)
    # Those that do not fit are to be told before anything is compiled.
    feeds_for(model, spec)
    return ModelFacts(inputs, tuple(map(graph.facts, model.graph.output)), data)


def _unusable(
    inputs: tuple[TensorFacts, ...], spec: ModelSpec, static_for: str
) -> Iterator[Problem]:
    for each in inputs:
        if each.dtype.endswith("_type") or each.dtype in ("unknown", "undefined"):
            yield Problem(spec.key, f"the input {each.name!r} is not a tensor: {each.dtype}.")
        opened = [size for size in each.shape if not isinstance(size, int)]
        if not (static_for and opened):
            continue
        if None in opened:
            sizes = ", ".join(str(size) if isinstance(size, int) else "1" for size in each.shape)
            fix_ = f"shapes = {{ {at(each.name)[1:]} = [{sizes}] }}"
        else:
            names = (at(str(name))[1:] for name in dict.fromkeys(opened))
            fix_ = f"dims = {{ {', '.join(f'{name} = 1' for name in names)} }}"
        yield Problem(
            spec.key,
            f"the input {each.name!r} has an open dimension ({each.words}), and {static_for} "
            "compiles only what has fixed shapes.",
            f"Fix it in the model's table, such as: {fix_}",
        )


def _check_profiles(given: ModelProfiles, inputs: tuple[TensorFacts, ...]) -> Iterator[Problem]:
    by_name = {facts.name: facts for facts in inputs}
    opened = {
        facts.name for facts in inputs if not all(isinstance(size, int) for size in facts.shape)
    }
    for index, profile in enumerate(given.profiles):
        where = f"{given.key}[{index}]"
        for name in profile.keys() - by_name.keys():
            yield _unknown(where + at(name), name, "input", list(by_name))
        for name in sorted(opened - profile.keys()):
            yield Problem(
                where,
                f"does not name the input {name!r}, which has open dimensions "
                f"({by_name[name].words}).",
                "A profile has to give shapes to all inputs with open dimensions.",
            )
        for name in profile.keys() & by_name.keys():
            for bound, shape in profile[name].items():
                if not by_name[name].takes(tuple(shape)):
                    yield Problem(
                        where + at(name),
                        f"{bound} is {list(shape)}, and the input has {by_name[name].words}.",
                    )


def feeds_for(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, Array]:
    """Dummy inputs for a model whose shapes are fixed, indices within what they index."""
    inputs = [graph.facts(value) for value in graph.inputs(model.graph)]
    return dummy_inputs(inputs, spec, graph.index_bounds(model.graph))


def fix(model: onnx.ModelProto, spec: ModelSpec) -> None:
    """Freeze the constants, shapes and dims of ``spec`` in ``model``, in place.

    Raises ModelError with everything that does not fit the model's inputs.
    """
    problems = [
        *_freeze(model.graph, spec),
        *_set_shapes(model.graph, spec),
    ]
    if problems:
        raise ModelError(*problems)


def _unknown(key: str, name: str, what: str, known: list[str]) -> Problem:
    fix_ = suggestion(name, known) if known else f"It has no {what}."
    return Problem(key, f"the model has no {what} {name!r}.", fix_)


def _freeze(main: onnx.GraphProto, spec: ModelSpec) -> Iterator[Problem]:
    by_name = {value.name: value for value in graph.inputs(main)}
    for name in spec.constants:
        key = f"{spec.key}.constants{at(name)}"
        if name not in by_name:
            yield _unknown(key, name, "input", list(by_name))
            continue
        facts = graph.facts(by_name[name])
        try:
            array = constant(spec, by_name[name])
        except (TypeError, ValueError, OverflowError) as error:
            yield Problem(key, f"does not fit the input, which is {facts.dtype}: {error}.")
            continue
        if not facts.takes(array.shape):
            yield Problem(
                key, f"has the shape {list(array.shape)}, and the input has {facts.words}."
            )
            continue
        main.initializer.append(onnx.numpy_helper.from_array(array, name))
        main.input.remove(by_name[name])


def _set_shapes(main: onnx.GraphProto, spec: ModelSpec) -> Iterator[Problem]:
    by_name = {value.name: value for value in graph.inputs(main)}
    known_dims = list(
        dict.fromkeys(
            size
            for value in by_name.values()
            for size in graph.facts(value).shape
            if isinstance(size, str)
        )
    )
    for name in spec.dims.keys() - known_dims:
        yield _unknown(f"{spec.key}.dims{at(name)}", name, "open dimension", known_dims)
    dims = dict(spec.dims)
    for name, shape in spec.shapes.items():
        key = f"{spec.key}.shapes{at(name)}"
        if name not in by_name:
            yield _unknown(key, name, "input", list(by_name))
            continue
        facts = graph.facts(by_name[name])
        if not facts.takes(shape):
            yield Problem(key, f"is {list(shape)}, and the input has {facts.words}.")
            continue
        for given, size in zip(shape, facts.shape, strict=True):
            # A named dimension is the same everywhere it appears.
            if isinstance(size, str) and dims.setdefault(size, given) != given:
                yield Problem(key, f"makes {size!r} {given}, and elsewhere it is {dims[size]}.")
        for dim, given in zip(by_name[name].type.tensor_type.shape.dim, shape, strict=True):
            dim.dim_value = given
    for each in graph.graphs(main):
        for value in [*each.input, *each.output, *each.value_info]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in dims:
                    dim.dim_value = dims[dim.dim_param]


def prepare(request: PrepareRequest) -> PrepareReply:
    """Write the request's model, fixed and folded, into its folder; the source is only read.

    Raises ModelError when the model does not fit its configuration or cannot be run on the CPU, and
    BuildError when what came out does not agree with the source: folding must not change a model.
    """
    spec, folder = request.model, Path(request.folder)
    fixed = _fixed(spec, folder, request.folding)
    model = onnx.load(fixed, load_external_data=False)
    before = len(graph.compute_nodes(model.graph))
    bounds = graph.index_bounds(model.graph)
    feeds = feeds_for(model, spec)
    # First, for a source that cannot be run is no fault of the folding.
    expected = reference(spec, feeds) if request.compare else {}
    # In a folder that nobody else has: beside the fixed model lie links to the source's own data.
    own = Path(tempfile.mkdtemp(prefix="folded-", dir=folder))
    result = _folded(fixed, own / f"{spec.name}.onnx", request.folding)
    if result != fixed and request.compare:
        outputs = run(open_session(result, cpu_options()), feeds)
        check_outputs(outputs, expected, _SAME, spec, "the source model's")
    model = onnx.load(result, load_external_data=False)
    nodes = len(graph.compute_nodes(model.graph))
    return PrepareReply(str(result), before, nodes, graph.control_flow(model.graph), bounds)


_SAME = Tolerance(rtol=1e-2, atol=1e-3, cosine=0.999)
"""Folding may change the order of additions, and nothing else."""


def _folded(fixed: Path, result: Path, folding: Folding) -> Path:
    if folding == "none":
        return fixed
    source = fixed
    if folding == "onnxslim":
        import onnxslim

        source = result.with_suffix(".slim")
        slim = onnxslim.slim(onnx.load(fixed))
        large = slim.ByteSize() > PROTOBUF_LIMIT
        onnx.save(slim, source, save_as_external_data=large, location=f"{source.name}.data")
    optimize(source, result, "basic")
    return result


def _fixed(spec: ModelSpec, folder: Path, folding: Folding) -> Path:
    source = Path(spec.path)
    model = graph.read(source, spec.key)
    data = graph.external_data(model, source.parent, spec.key)
    # onnx itself, on which onnxslim relies, refuses external data that is a link, hard or symbolic.
    place = shutil.copyfile if folding == "onnxslim" else link_or_copy
    for name in data:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        place((source.parent / name).resolve(), target)
    fix(model, spec)
    name = f"{spec.name}.fixed.onnx"
    while name in data:
        name = f"_{name}"
    onnx.save(model, folder / name)
    return folder / name

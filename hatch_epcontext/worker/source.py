"""Source models: read, with constants, shapes and dims fixed as configured; and why one cannot be run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import (
    Advice,
    Diagnosed,
    Key,
    Kind,
    ModelError,
    Problem,
    Setting,
    collect,
)
from hatch_epcontext.files import is_lfs_pointer
from hatch_epcontext.graph import external, graph, inference, reading
from hatch_epcontext.graph.bodies import fix_states
from hatch_epcontext.graph.dtypes import dtype_bounds
from hatch_epcontext.graph.facts import Range, TensorFacts, freeze
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.graph.uncompilable import deciders
from hatch_epcontext.graph.values.conventions import is_batch
from hatch_epcontext.graph.values.offsets import with_offsets
from hatch_epcontext.graph.values.ranges import input_ranges
from hatch_epcontext.text import listing, suggestion
from hatch_epcontext.worker.inputs import constant, sized
from hatch_epcontext.worker.raised import is_of_onnx_runtime

_OLDEST = 7
"""The first opset whose operators ONNX Runtime promises to have."""

_MAX_NAMED = 3
"""The most nodes that a message names."""


def read_source(path: Path, key: Key | None) -> onnx.ModelProto:
    """Read the source model at ``path``, at ``key`` if it has one, without its external data.

    Raises ModelError when the file is not a source model, or is damaged.
    """
    with _at_key(key, f"{path.name} "):
        if is_lfs_pointer(path):
            raise _invalid("is a Git LFS pointer, not the model itself.", "Run: git lfs pull")
        if not path.stat().st_size:
            raise _invalid("is empty.")
        model = reading.load(path)
        if not model.graph.output:
            what = "output" if model.graph.node else "node"
            raise _invalid(f"is not an ONNX model: its graph has no {what}.")
        if not model.graph.node:
            raise _invalid("has nothing to compile: its outputs are inputs or stored values.")
        nodes = (node for body in graph.bodies(model) for node in graph.nodes(body))
        if any(node.op_type == graph.CONTEXT_OP for node in nodes):
            hint = "Name the source model instead."
            raise ModelError(Problem(Kind.COMPILED_MODEL, "", "is a context model already.", hint))
        return model


def data_of(model: onnx.ModelProto, path: Path, key: Key) -> tuple[str, ...]:
    """The files of the external data of ``model``; problems of `external_data` get the ``key``."""
    with _at_key(key):
        return external.external_data(model, path)


def typed_graph(onnx_model: onnx.ModelProto, model: Model) -> onnx.GraphProto:
    """Return the graph of a model after `fix_inputs`, with the types that onnx infers.

    It has the sizes of the dummy inputs, and no large tensors.
    """
    if not model.static_shapes:
        open_model, onnx_model = onnx_model, onnx.ModelProto()
        onnx_model.CopyFrom(open_model)
        fix_shapes(onnx_model, model)
    return inference.inferred(onnx_model)


def ranges_for(
    main: onnx.GraphProto, inputs: Sequence[TensorFacts], model: Model
) -> dict[str, Range]:
    """Return the ranges of ``inputs`` as their `typed_graph` shows them, or as ``model`` has them.

    Empty if none are needed.
    """
    if model.validate.inputs != "random":
        return {}
    tensors = [*sized(inputs, model)]
    return with_offsets(ranges_of_app(input_ranges(main, tensors), model), tensors)


def ranges_of_app(ranges: Mapping[str, Range], model: Model) -> dict[str, Range]:
    """Return ``ranges`` with those that the app keeps, as ``model`` has them."""
    return {
        name: _of_app(range_, *ends) if (ends := model.validate.ranges.get(name)) else range_
        for name, range_ in ranges.items()
    }


def _of_app(known: Range, low: float, high: float) -> Range:
    usual = known.usual if known.usual is not None and low <= known.usual <= high else None
    return Range(
        *(low, high, True, usual, known.whole),
        constants=known.constants,
        shifted=known.shifted,
        squared=known.squared,
        picture=known.picture,
    )


def check_ranges(inputs: Iterable[TensorFacts], model: Model) -> None:
    """Raise ModelError if the ranges of ``model`` are not for its ``inputs``, or not of their dtypes."""
    by_name = {facts.name: facts for facts in inputs}
    problems = []
    for name, ends in model.validate.ranges.items():
        key = model.key / "validate" / "ranges" / name
        if name not in by_name:
            problems.append(unknown_name(key, name, "input", list(by_name)))
        elif "int" in (dtype := by_name[name].dtype):
            low, high = dtype_bounds(by_name[name])
            if not all(low <= end <= high and end == int(end) for end in ends):
                message = f"these are no values of the input, which has the dtype {dtype}."
                problems.append(Problem.at(key, Kind.VALUE_MISMATCH, message))
    ModelError.check(problems)


def fix_inputs(onnx_model: onnx.ModelProto, model: Model) -> None:
    """Fix the constants and defaults of ``model`` in ``onnx_model``, and with static shapes its
    shapes and dims.

    Raises ModelError with everything that does not fit the model's inputs.
    """
    fix_constants(onnx_model, model)
    fix_defaults(onnx_model)
    if model.static_shapes:
        fix_shapes(onnx_model, model)


def fix_constants(onnx_model: onnx.ModelProto, model: Model) -> None:
    """Fix the constants of ``model`` in ``onnx_model``, and check its shapes and dims.

    Raises ModelError with everything that does not fit the model's inputs.
    """
    main, optional = onnx_model.graph, graph.optional_inputs(onnx_model)
    if replaced := model.constants.keys() & {value.name for value in optional}:
        others = [tensor for tensor in main.initializer if tensor.name not in replaced]
        sparse = [one for one in main.sparse_initializer if one.values.name not in replaced]
        del main.initializer[:], main.sparse_initializer[:]
        main.initializer.extend(others)
        main.sparse_initializer.extend(sparse)
    wrong = [*_fix_constants(main, model)]
    ModelError.check([*wrong, *collect(_sizes(main, model))[1]])


def fix_defaults(onnx_model: onnx.ModelProto) -> None:
    """Make initializers that are inputs too constants."""
    needed = graph.inputs(onnx_model.graph)
    if len(needed) < len(onnx_model.graph.input):
        del onnx_model.graph.input[:]
        onnx_model.graph.input.extend(needed)
        # In older IR versions every initializer had to be an input.
        onnx_model.ir_version = max(onnx_model.ir_version, 4)


def fix_shapes(onnx_model: onnx.ModelProto, model: Model) -> None:
    """Fix the shapes and dims of ``model``, which fit, in all graphs of ``onnx_model``."""
    dims, _ = collect(_sizes(onnx_model.graph, model))
    for value in graph.inputs(onnx_model.graph):
        if value.name in model.shapes:
            elem_type = value.type.tensor_type.elem_type
            fixed = onnx.helper.make_tensor_type_proto(elem_type, model.shapes[value.name])
            value.type.CopyFrom(fixed)
    for inner in graph.graphs(onnx_model.graph):
        for value in [*inner.input, *inner.output, *inner.value_info]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in dims:
                    dim.dim_value = dims[dim.dim_param]
    fix_states(onnx_model)


def unknown_name(key: Key, name: str, noun: str, known: list[str]) -> Problem:
    """The problem of a key with a ``name`` that is no ``noun`` of the model."""
    hint = suggestion(name, known) if known else f"It has no {noun}."
    return Problem.at(key, Kind.UNKNOWN_INPUT, f"the model has no {noun} {name!r}.", hint)


def _fix_constants(main: onnx.GraphProto, model: Model) -> Iterator[Problem]:
    by_name = {value.name: value for value in graph.inputs(main)}
    for name in model.constants:
        key = model.key / "constants" / name
        if name not in by_name:
            yield unknown_name(key, name, "input", list(by_name))
            continue
        facts = graph.facts(by_name[name])
        try:
            array = constant(model, facts)
        except (TypeError, ValueError, OverflowError) as error:
            message = (
                f"the value does not fit the input, which has the dtype {facts.dtype}: {error}."
            )
            yield Problem.at(key, Kind.VALUE_MISMATCH, message)
            continue
        if not facts.takes(array.shape):
            message = (
                f"the value has the shape {list(array.shape)}, but the input has the shape "
                f"{facts.shape_text}."
            )
            yield Problem.at(key, Kind.VALUE_MISMATCH, message)
            continue
        main.initializer.append(onnx.numpy_helper.from_array(array, name))
        main.input.remove(by_name[name])


def _sizes(main: onnx.GraphProto, model: Model) -> Diagnosed[dict[str, int]]:
    """Return the sizes of all named dimensions that dims and shapes fix, and yield what does not fit."""
    by_name = {tensor.name: tensor for tensor in graph.input_facts(main)}
    sizes = (size for tensor in by_name.values() for size in tensor.sizes)
    known_dims = [*dict.fromkeys(size for size in sizes if isinstance(size, str))]
    for name in model.dims.keys() - known_dims:
        yield unknown_name(model.key_of("dims") / name, name, "open dimension", known_dims)
    dims = dict(model.dims)
    for name, shape in model.shapes.items():
        key = model.key_of("shapes") / name
        if name not in by_name:
            yield unknown_name(key, name, "input", list(by_name))
            continue
        facts = by_name[name]
        if not facts.takes(shape):
            message = (
                f"the shape {list(shape)} does not fit the input, which has the shape "
                f"{facts.shape_text}."
            )
            hint = "Only open dimensions (with a name or ?) can get a size: correct it, or leave it out."
            yield Problem.at(key, Kind.VALUE_MISMATCH, message, hint)
            continue
        for configured, size in zip(shape, facts.sizes, strict=False):
            # A named dimension has one size in the whole model.
            if isinstance(size, str) and dims.setdefault(size, configured) != configured:
                message = f"the dimension {size!r} is {configured} in this shape, but {dims[size]} elsewhere."
                yield Problem.at(key, Kind.VALUE_MISMATCH, message)
    return dims


def open_dimension_message(tensors: Iterable[TensorFacts], ep: str) -> str:
    """The message about inputs with open dimensions, for an EP that needs fixed shapes."""
    named = listing(f"{tensor.name!r} ({tensor.shape_text})" for tensor in tensors)
    return f"{ep} compiles only fixed shapes, and dimensions of inputs are open: {named}."


def fix_open(tensors: Iterable[TensorFacts], model: Model) -> Advice:
    """What fixes the open dimensions of ``tensors``: 1 for a batch, and else what only users know."""
    dims: dict[str, int | None] = {}
    shapes = []
    for tensor in tensors:
        if tensor.shape is None or None in tensor.shape:
            shapes.append(Setting(model.key_of("shapes") / tensor.name))
            continue
        for axis, size in enumerate(tensor.sizes):
            if isinstance(size, str):
                dims.setdefault(size, 1 if is_batch(tensor, axis) else None)
    dims_key = model.key_of("dims")
    sizes = [Setting(dims_key / name, size) for name, size in dims.items()]
    if dims and None not in dims.values():
        sizes = [Setting(dims_key, dims)]
    hint = (
        "Fix them with the sizes that the app feeds, such as how wide images or how long texts are."
    )
    return hint, (*sizes, *shapes)


def on_conditions(main: onnx.GraphProto, model: Key | None) -> Advice | None:
    """What to freeze so that the conditions of ``main`` are known, in the table at ``model``, if it has one.

    None if no input decides them, or only data.
    """
    scope = Scope(main)
    decided = [
        (node.name or node.output[0], by)
        for node in scope.counted
        if node.op_type == "If" and (by := deciders(scope, node.input[0]))
    ]
    if not decided:
        return None
    which = listing(dict.fromkeys(repr(name) for name, _ in decided), _MAX_NAMED)
    return freeze((by for _, by in decided), f"which branch of the If {which} runs", model)


@contextlib.contextmanager
def running_source(model: Model, fixed: onnx.ModelProto) -> Iterator[None]:
    """Raise ModelError if ONNX Runtime cannot run the source model; other errors stay as they are.

    ``fixed``: the model after its configuration was applied.
    """
    try:
        yield
    except Exception as error:
        if not is_of_onnx_runtime(error):
            raise
        raise ModelError(_source_failed(model, fixed, error)) from error


def _source_failed(model: Model, fixed: onnx.ModelProto, error: Exception) -> Problem:
    message = f"the source model itself cannot be run on the CPU: {str(error).strip()}"
    if shapes := inference.contradiction(fixed):
        message += f"\nIts shapes contradict each other: {shapes}."
    if "Load model from" in message:
        hint = "Correct the model: no EP gets a model that ONNX Runtime cannot load."
        return Problem.at(model.key, Kind.SOURCE_FAILED, message, hint)
    if "NOT_IMPLEMENTED" in message and (opset := graph.opset(fixed)) < _OLDEST:
        hint = (
            f"The model has opset {opset}, and ONNX Runtime has all operators from opset {_OLDEST} on. "
            "Export it anew, or convert it with onnx.version_converter (not tried)."
        )
        return Problem.at(model.key, Kind.SOURCE_FAILED, message, hint)
    inputs = graph.input_facts(fixed.graph)
    if unsized := [tensor for tensor in sized(inputs, model) if not tensor.is_fixed]:
        names = listing(repr(tensor.name) for tensor in unsized)
        message += f"\nOpen dimensions of {names} have no size in the configuration, and get 1."
        hint, settings = fix_open(unsized, model)
        return Problem.at(model.key, Kind.SOURCE_FAILED, message, hint, *settings)
    hint, settings = (not model.constants and on_conditions(fixed.graph, model.key)) or ("", ())
    configured = [name for name in ("constants", "dims", "shapes") if getattr(model, name)]
    hint += (
        f"\nGive {listing(['inputs', *configured])} that the model accepts, or switch off the comparison "
        "(not tried: the EP may fail at the same node)."
    )
    validate = model.key / "validate"
    others = (
        Setting(validate / "inputs", "samples.npz"),
        *(Setting(model.key_of(name)) for name in configured),
        Setting(validate / "tolerance", False),
    )
    return Problem.at(model.key, Kind.SOURCE_FAILED, message, hint.strip(), *settings, *others)


@contextlib.contextmanager
def _at_key(key: Key | None, start: str = "") -> Iterator[None]:
    """Give problems the ``key``, and their messages this ``start``."""
    try:
        yield
    except ModelError as error:
        location = str(key or "")
        raise error.changed(
            lambda p: replace(p, location=location, key=key, message=f"{start}{p.message}")
        ) from None


def _invalid(message: str, hint: str | None = None) -> ModelError:
    return ModelError(Problem(Kind.INVALID_MODEL, "", message, hint))

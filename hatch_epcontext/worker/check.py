"""Check that the source models fit their configuration, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from hatch_epcontext.errors import Kind, ModelError, Problem, Setting
from hatch_epcontext.ipc.facts import ModelFacts, ModelSpec, TensorFacts
from hatch_epcontext.ipc.protocol import CheckReply, CheckRequest, ModelProfiles
from hatch_epcontext.worker import external, graph, reading, refusals
from hatch_epcontext.worker.fix import feeds_for, fix_constants, fix_shapes, unknown_name
from hatch_epcontext.worker.inputs import sized
from hatch_epcontext.worker.step import step


def handle(request: CheckRequest) -> CheckReply:
    """Return the facts of all models; raises ModelError with all problems of all models."""
    models = []
    problems: list[Problem] = []
    for spec in request.models:
        try:
            models.append(_check_model(spec, request))
        except ModelError as error:
            problems += error.problems
    if problems:
        # The shapes of one model have the same problems.
        raise ModelError(*{str(problem): problem for problem in problems}.values())
    return CheckReply(tuple(models))


def _check_model(spec: ModelSpec, request: CheckRequest) -> ModelFacts:
    path = Path(spec.path)
    step(f"reading {path.name}")
    model = reading.read(path, spec.key)
    data = external.external_data(model, path.parent, spec.key)
    own_inputs = _inputs(model)
    fix_constants(model, spec)
    open_inputs = _inputs(model)
    if spec.static_shapes:
        fix_shapes(model, spec)
    inputs = _inputs(model)
    problems = [
        *_check_types(inputs, spec),
        *check_fixed(inputs, spec, request.static.get(spec.name)),
        *_check_left_open(open_inputs, spec, request.left_open.get(spec.name)),
    ]
    for given in request.profiles:
        if given.model == spec.name:
            problems += _check_profiles(given, inputs if given.static_shapes else open_inputs)
    targets = [each for each in request.contexts if each.model == spec.name]
    problems += refusals.problems(model, spec, targets)
    if problems:
        raise ModelError(*problems)
    # Dummy inputs that do not fit are an error before anything is compiled.
    feeds_for(model, spec)
    outputs = tuple(map(graph.facts, model.graph.output))
    # `fix_constants` made them initializers.
    constants = tuple(
        TensorFacts(facts.name, facts.dtype, tuple(value.dims))
        for facts in own_inputs
        for value in model.graph.initializer
        if value.name == facts.name and facts.name in spec.constants
    )
    return ModelFacts(inputs, outputs, data, own_inputs, constants)


def _inputs(model: onnx.ModelProto) -> tuple[TensorFacts, ...]:
    return tuple(map(graph.facts, graph.inputs(model.graph)))


def _check_types(inputs: tuple[TensorFacts, ...], spec: ModelSpec) -> Iterator[Problem]:
    for each in inputs:
        if each.dtype.endswith("_type") or each.dtype in ("unknown", "undefined"):
            yield Problem.at(
                spec.key,
                Kind.UNSUPPORTED_INPUT,
                f"the input {each.name!r} is not a tensor: {each.dtype}.",
            )


def check_fixed(
    inputs: tuple[TensorFacts, ...], spec: ModelSpec, ep: str | None
) -> Iterator[Problem]:
    """The inputs for ``ep``, which takes only fixed shapes; None where no EP needs them."""
    for each in inputs if ep else ():
        if each.is_fixed:
            continue
        assert ep is not None
        yield Problem.at(
            spec.key,
            Kind.OPEN_DIMENSION,
            open_dimension_message(each, ep),
            "Fix it, for example with size 1.",
            _size_one(each, spec),
        )


def _check_left_open(
    inputs: tuple[TensorFacts, ...], spec: ModelSpec, ep: str | None
) -> Iterator[Problem]:
    """The inputs for ``ep``, which takes only fixed shapes, although its target leaves them open."""
    for each, fixed in zip(inputs, sized(inputs, spec), strict=True) if ep else ():
        if each.is_fixed:
            continue
        assert ep is not None
        yield Problem.at(
            spec.key,
            Kind.OPEN_DIMENSION,
            f"{open_dimension_message(each, ep)} It is left open because static-shapes is false.",
            "Remove static-shapes = false"
            + ("." if fixed.is_fixed else ", and fix it, for example with size 1."),
            *([] if fixed.is_fixed else [_size_one(fixed, spec)]),
        )


def _size_one(tensor: TensorFacts, spec: ModelSpec) -> Setting:
    """The setting that gives the open dimensions of ``tensor`` the size 1."""
    if None in tensor.shape:
        shape = [size if isinstance(size, int) else 1 for size in tensor.shape]
        return Setting(spec.place("shapes"), {tensor.name: shape})
    names = [size for size in tensor.shape if isinstance(size, str)]
    return Setting(spec.place("dims"), dict.fromkeys(names, 1))


def open_dimension_message(tensor: TensorFacts, ep: str) -> str:
    """The message about an input with open dimensions, for an EP that needs fixed shapes."""
    return (
        f"the input {tensor.name!r} has an open dimension ({tensor.shape_text}), and {ep} compiles "
        "only fixed shapes."
    )


def _check_profiles(given: ModelProfiles, inputs: tuple[TensorFacts, ...]) -> Iterator[Problem]:
    by_name = {facts.name: facts for facts in inputs}
    open_inputs = {facts.name for facts in inputs if not facts.is_fixed}
    for index, profile in enumerate(given.profiles):
        key = given.key / index
        for name in profile.keys() - by_name.keys():
            yield unknown_name(key / name, name, "input", list(by_name))
        for name in sorted(open_inputs - profile.keys()):
            yield Problem.at(
                key,
                Kind.INVALID_PROFILE,
                f"the profile has no shapes for the input {name!r}, which has open dimensions "
                f"({by_name[name].shape_text}).",
                "A profile needs shapes for all inputs with open dimensions.",
            )
        for name in profile.keys() & by_name.keys():
            for bound, shape in profile[name].items():
                if not by_name[name].takes(tuple(shape)):
                    yield Problem.at(
                        key / name,
                        Kind.INVALID_PROFILE,
                        f"{bound} is {list(shape)}, but the input has the shape "
                        f"{by_name[name].shape_text}.",
                    )

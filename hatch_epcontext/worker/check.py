"""Check that the source models fit their configuration, before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hatch_epcontext.errors import Kind, ModelError, Problem, Setting
from hatch_epcontext.ipc.protocol import (
    CheckReply,
    CheckRequest,
    ModelFacts,
    ModelProfiles,
    ModelSpec,
    TensorFacts,
)
from hatch_epcontext.worker import graph
from hatch_epcontext.worker.fix import feeds_for, fix_inputs, unknown_name


def handle(request: CheckRequest) -> CheckReply:
    """Return the facts of all models; raises ModelError with all problems of all models."""
    models = []
    problems: list[Problem] = []
    for spec in request.models:
        try:
            facts = _check_model(spec, request.static.get(spec.name))
        except ModelError as error:
            problems += error.problems
            continue
        models.append(facts)
        for given in request.profiles:
            if given.model == spec.name:
                problems += _check_profiles(given, facts.inputs)
    if problems:
        raise ModelError(*problems)
    return CheckReply(tuple(models))


def _check_model(spec: ModelSpec, static_for: str | None) -> ModelFacts:
    path = Path(spec.path)
    model = graph.read(path, spec.key)
    data = graph.external_data(model, path.parent, spec.key)
    fix_inputs(model, spec)
    inputs = tuple(map(graph.facts, graph.inputs(model.graph)))
    problems = list(_check_inputs(inputs, spec, static_for))
    if problems:
        raise ModelError(*problems)
    # Dummy inputs that do not fit are an error before anything is compiled.
    feeds_for(model, spec)
    return ModelFacts(inputs, tuple(map(graph.facts, model.graph.output)), data)


def _check_inputs(
    inputs: tuple[TensorFacts, ...], spec: ModelSpec, static_for: str | None
) -> Iterator[Problem]:
    for each in inputs:
        if each.dtype.endswith("_type") or each.dtype in ("unknown", "undefined"):
            yield Problem.at(
                spec.key,
                Kind.UNSUPPORTED_INPUT,
                f"the input {each.name!r} is not a tensor: {each.dtype}.",
            )
        open_sizes = [size for size in each.shape if not isinstance(size, int)]
        if not (static_for and open_sizes):
            continue
        if None in open_sizes:
            shape = [size if isinstance(size, int) else 1 for size in each.shape]
            setting = Setting(spec.key / "shapes", {each.name: shape})
        else:
            setting = Setting(spec.key / "dims", {str(name): 1 for name in open_sizes})
        yield Problem.at(
            spec.key,
            Kind.OPEN_DIMENSION,
            open_dimension_message(each, static_for),
            "Fix it, for example with size 1.",
            setting,
        )


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

"""Check that the source models fit their configuration, before anything is compiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import onnx

from hatch_epcontext.config.genai import check_caches, with_cache_sizes
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Advice, Kind, ModelError, Problem, Setting, merged
from hatch_epcontext.graph import graph, uncompilable
from hatch_epcontext.graph.dequantize import is_dynamic
from hatch_epcontext.graph.facts import Cut, TensorFacts, describe_nodes, freeze
from hatch_epcontext.graph.parts import cut_around
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.text import listing
from hatch_epcontext.worker import source
from hatch_epcontext.worker.inputs import check_inputs, ignored_inputs, sized
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import CheckRequest
from hatch_epcontext.worker.results import ModelFacts
from hatch_epcontext.worker.states import state_pairs


def handle(request: CheckRequest) -> tuple[ModelFacts, ...]:
    """Return the facts of all models; raises ModelError with all problems of all models."""
    models = []
    problems: list[Problem] = []
    for model in request.models:
        try:
            models.append(_check_model(model))
        except ModelError as error:
            problems += error.problems
    # All shapes of one model have the same problems.
    ModelError.check(merged(problems))
    return tuple(models)


def _check_model(model: Model) -> ModelFacts:
    announce(f"reading {model.path.name}")
    onnx_model = source.read_source(model.path, model.key)
    data = source.data_of(onnx_model, model.path, model.key)
    own_inputs = graph.input_facts(onnx_model.graph)
    own_outputs = graph.output_facts(onnx_model.graph)
    ModelError.check(check_caches(model, own_inputs))
    model = with_cache_sizes(model, own_inputs)
    source.fix_constants(onnx_model, model)
    optional = tuple(value.name for value in graph.optional_inputs(onnx_model))
    source.fix_defaults(onnx_model)
    open_inputs = graph.input_facts(onnx_model.graph)
    if model.static_shapes:
        source.fix_shapes(onnx_model, model)
    inputs = graph.input_facts(onnx_model.graph)
    outputs = graph.output_facts(onnx_model.graph)
    no_tensors = [tensor.name for tensor in outputs if tensor.dtype.endswith("_type")]
    cut = cut_around(Scope.of(onnx_model), no_tensors) if no_tensors else None
    outputs_problems = [*_check_types(outputs, "output", model, _cut_settings(cut, model))]
    # The EPs for fixed shapes, and those of a library without profiles, by whether their targets fix them.
    eps = {
        target.settings.static_shapes: target.settings.ep
        for target in model.targets
        if target.provider.static_shapes or (target.provider.by_library and not target.profiles)
    }
    problems = [
        *_check_types(inputs, "input", model),
        *check_fixed(inputs, model, eps.get(True)),
        *check_fixed(open_inputs, model, eps.get(False), left_open=True),
    ]
    for target in model.targets:
        problems += _check_target(onnx_model.graph, inputs, model, target)
        problems += _check_profiles(
            target, inputs if target.settings.static_shapes else open_inputs
        )
    of_nodes = list(not_compilable(onnx_model, model, model.targets))
    # If nothing can be compiled, other outputs do not help. The node of a wrong output is one of these too.
    hopeless = [problem for problem in of_nodes if not problem.settings]
    problems += hopeless or outputs_problems or of_nodes
    ModelError.check(problems)
    source.check_ranges(graph.input_facts(onnx_model.graph), model)
    state_pairs(onnx_model, model.validate.states, model.key / "validate" / "states")
    # Before anything is compiled.
    check_inputs(inputs, model, open_inputs)
    return ModelFacts(
        inputs,
        outputs,
        data,
        own_inputs,
        graph.license_of(onnx_model),
        is_dynamic(onnx_model),
        own_outputs,
        optional,
        tuple(ignored_inputs(onnx_model.graph, model)),
    )


def _check_target(
    main: onnx.GraphProto, inputs: tuple[TensorFacts, ...], model: Model, target: Target
) -> Iterator[Problem]:
    """What the EP contexts of ``target`` cannot have: inputs without values, and an output listed twice."""
    provider = target.provider
    if provider.limits is not None and not provider.limits.empty:
        for tensor in inputs:
            if 0 in tensor.sizes:
                yield Problem.at(
                    model.key_of("shapes") if tensor.name in model.shapes else model.key,
                    Kind.NOT_COMPILABLE,
                    f"the input {tensor.name!r} has no values ({tensor.shape_text}), and {provider.ep} "
                    "compiles only tensors that have some.",
                    "Give it other sizes, or leave out the target for this model.",
                )
    if provider.product == "context":
        names = Counter(value.name for value in main.output)
        if twice := [name for name, number in names.items() if number > 1]:
            yield Problem.at(
                model.key,
                Kind.UNSUPPORTED_OUTPUT,
                f"the model lists the output {listing(map(repr, twice))} more than once, and an EP context "
                "can have it only once.",
                "Keep each output once.",
                Setting(model.key / "cut", {"outputs": list(names)}),
            )


def not_compilable(
    onnx_model: onnx.ModelProto, model: Model, targets: Iterable[Target]
) -> Iterator[Problem]:
    """Yield a problem for each of ``targets`` for which the model, with its constants, cannot become whole.

    Only if its coverage stays below the target's ``min_coverage``, whatever preparation does.
    """
    for target in targets:
        provider = target.provider
        if provider.limits is None or provider.product != "context" or target.from_cache:
            continue
        findings = uncompilable.find(onnx_model, provider.limits)
        if findings.share < target.min_coverage:
            message = (
                f"{provider.ep} cannot compile {len(findings.nodes)} of the {findings.counted} nodes: "
                f"{'; '.join(describe_nodes(findings.nodes))}."
            )
            hint, settings = _advise(findings, model, target)
            problem = Problem.at(model.key, Kind.NOT_COMPILABLE, message, hint, *settings)
            yield replace(problem, targets=(target.name,))


def _advise(findings: uncompilable.Findings, model: Model, target: Target) -> Advice:
    """What to do about these nodes of ``model``: freeze what decides them, cut the model there, or use
    another provider.
    """
    deciders = [node.deciders for node in findings.nodes]
    if all(deciders) and (advice := freeze(deciders, "it", model.key)):
        return advice
    if findings.is_trivial:
        hint = (
            "Nothing else is worth compiling: ship the model as it is, or let ONNX Runtime optimize it "
            'with the cpu provider (provider = "cpu"; not tried).'
        )
        return hint, ()
    # Rounded down: preparation also removes nodes that can be compiled.
    share = Setting(target.key_of("min-coverage"), math.floor(9 * findings.share) / 10)
    hint = "Let the CPU compute them, with a lower min-coverage (not tried)."
    if not (settings := _cut_settings(findings.cut, model)):
        return hint, (share,)
    part = "after" if findings.cut and findings.cut.inputs else "before"
    first = f"Keep only the part {part} them, and compute the rest in the app"
    return f"{first}; or let{hint[3:]}", (*settings, share)


def _cut_settings(cut: Cut | None, model: Model) -> tuple[Setting, ...]:
    """The setting that cuts ``model`` so, unless it is cut already: there may be no such tensors then."""
    if cut is None or model.cut:
        return ()
    ends = {"inputs": [*cut.inputs], "outputs": [*cut.outputs]}
    return (Setting(model.key / "cut", {end: names for end, names in ends.items() if names}),)


def _check_types(
    tensors: Iterable[TensorFacts], noun: str, model: Model, cut: tuple[Setting, ...] = ()
) -> Iterator[Problem]:
    """Problems of inputs and outputs that are no tensors, or of a type that ONNX Runtime does not run.

    ``cut``: what leaves out those that are no tensors, if that is possible.
    """
    kind = Kind.UNSUPPORTED_INPUT if noun == "input" else Kind.UNSUPPORTED_OUTPUT
    for tensor in tensors:
        if tensor.dtype.endswith("_type") or (noun == "input" and tensor.dtype == "unknown"):
            message = f"the {noun} {tensor.name!r} is not a tensor: {tensor.dtype}."
            hint = "Change the model there (not tried)."
            if cut:
                hint = "Keep the tensors that it is made of, or change the model there (not tried)."
            yield Problem.at(model.key, kind, message, hint, *cut)
        elif tensor.dtype.startswith("complex"):
            message = f"the {noun} {tensor.name!r} is {tensor.dtype}, and ONNX Runtime has no such tensors."
            hint = "Change its type in the model, such as to float32 with a last dimension of 2."
            yield Problem.at(model.key, kind, message, hint)


def check_fixed(
    inputs: tuple[TensorFacts, ...], model: Model, ep: str | None, *, left_open: bool = False
) -> Iterator[Problem]:
    """The problem of open inputs, if ``ep`` compiles only fixed shapes; ``ep`` is None if none does.

    ``left_open``: whether its target leaves them open although the model may have sizes for them.
    """
    tensors = [tensor for tensor in inputs if not tensor.is_fixed]
    if ep is None or not tensors:
        return
    message, key, hint = source.open_dimension_message(tensors, ep), model.key, ""
    settings: tuple[Setting, ...] = ()
    if unsized := [tensor for tensor in sized(inputs, model) if not tensor.is_fixed]:
        hint, settings = source.fix_open(unsized, model)
        key = settings[0].key
    if left_open:
        message += " They are left open because static-shapes is false."
        key, hint = model.key, f"Remove static-shapes = false. {hint}".strip()
    yield Problem.at(key, Kind.OPEN_DIMENSION, message, hint, *settings)


def _check_profiles(target: Target, inputs: tuple[TensorFacts, ...]) -> Iterator[Problem]:
    by_name = {facts.name: facts for facts in inputs}
    open_inputs = {facts.name for facts in inputs if not facts.is_fixed}
    for index, profile in enumerate(target.profiles):
        key = target.key_of("profiles") / index
        for name in profile.keys() - by_name.keys():
            yield source.unknown_name(key / name, name, "input", list(by_name))
        for name in sorted(open_inputs - profile.keys()):
            message = (
                f"the profile has no shapes for the input {name!r}, which has open dimensions "
                f"({by_name[name].shape_text})."
            )
            hint = "A profile needs shapes for all inputs with open dimensions."
            yield Problem.at(key, Kind.INVALID_PROFILE, message, hint)
        for name in profile.keys() & by_name.keys():
            for bound, shape in profile[name].items():
                if not by_name[name].takes(tuple(shape)):
                    message = (
                        f"{bound} is {list(shape)}, but the input has the shape "
                        f"{by_name[name].shape_text}."
                    )
                    yield Problem.at(key / name, Kind.INVALID_PROFILE, message)

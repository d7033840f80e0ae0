"""What onnxruntime-genai changes in the folder of a language model to run what was compiled of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hatch_epcontext.config.genai import read_config
from hatch_epcontext.config.settings import Model
from hatch_epcontext.jobs.artifact import Built, Result, Source
from hatch_epcontext.shipped import SOURCE

_WINDOW = {"alignment": "left", "slide_inputs": True, "slide_key_value_cache": False}
"""How the chunks of a prompt are filled: at their end."""


def overlays(result: Result) -> dict[str, dict[str, Any]]:
    """What each target changes in the configuration of each language model, by its folder in the package."""
    changes = {
        f"{source.model.name}/{SOURCE}": _limits(source.model)
        for source in result.sources
        if source.model.genai is not None and not source.model.genai.stage
    }
    sources = {source.model.name: source for source in result.sources}
    return changes | {place: overlay(own, sources) for place, own in by_target(result).items()}


def by_target(result: Result) -> dict[str, list[Built]]:
    """What was compiled of language models, all stages for a target, by its folder in the package."""
    targets: dict[str, list[Built]] = {}
    for built in result.built:
        model = built.job.models[0]
        if model.genai is not None:
            place = f"{model.configured_name}/{built.job.target.name}"
            targets.setdefault(place, []).append(built)
    return targets


def _limits(model: Model) -> dict[str, Any]:
    """The length of conversations, which also decides how large the cache is."""
    length = model.genai.context_length if model.genai else None
    if length is None:
        return {"model": {}}
    return {"model": {"context_length": length}, "search": {"max_length": length}}


def overlay(results: Sequence[Built], sources: Mapping[str, Source]) -> dict[str, Any]:
    """What genai needs to run the ``results`` of one target: one model, or the stages of a pipeline."""
    stages = {
        context.model: f"{built.job.folder.partition('/')[2]}/{context.model_file}"
        for built in results
        for context in built.artifact.record.contexts
    }
    job = results[0].job
    model, target = job.models[0], job.target
    prefix = f"{model.configured_name}."
    assert model.genai is not None, "only a language model has an overlay"
    folder = sources[model.configured_name].model.path.parent
    config, name = read_config(folder), target.provider.genai_name
    # The module for apps knows the folders of the others.
    own = {key: value for key, value in target.load_options.items() if "{" not in value}
    options = {**config.providers.get(name, {}), **own}
    shared = {"ep.share_ep_contexts": "1"} if job.group is not None else {}
    session = {
        **target.settings.session_options,
        **shared,
        "session.disable_model_compile": "1",
        "provider_options": [{name: options}],
    }
    result, decoder = _limits(model), dict[str, Any]()
    pipeline = config.content["decoder"].get("pipeline") or ()
    named = {name: dict(stage) for entry in pipeline for name, stage in entry.items()}
    if model.genai.stage and not named:
        result["model"]["type"] = "decoder-pipeline"
        result["search"]["past_present_share_buffer"] = True
        facts = sources[model.name].facts
        past, total = (value.name for value in facts.inputs if value.dtype == "int32")
        decoder["inputs"] = {"past_sequence_length": past, "total_sequence_length": total}
        window = {"window_size": model.genai.chunk, "pad_value": config.content["pad_token_id"]}
        decoder["sliding_window"] = {**window, **_WINDOW}
        tensors = {kind: [v.name for v in getattr(facts, kind)] for kind in ("inputs", "outputs")}
        first, *_, last = *stages, *stages
        for name in stages:
            runs = {"run_on_prompt": name == first, "run_on_token_gen": name == last}
            named[name.removeprefix(prefix)] = {**tensors, **runs}
    for name, file in stages.items():
        part = named[name.removeprefix(prefix)] if model.genai.stage else decoder
        part |= {"filename": file, "session_options": session}
    if named:
        decoder["pipeline"] = [{name: stage} for name, stage in named.items()]
    result["model"]["decoder"] = decoder
    return result

"""What onnxruntime-genai changes in the folder of a language model to run what was compiled of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hatch_epcontext.config.settings import GENAI_CONFIG, Model
from hatch_epcontext.jobs.artifact import Built, Result, Source
from hatch_epcontext.shipped import SOURCE


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
    assert model.genai is not None, "only a language model has an overlay"
    file = sources[model.configured_name].model.path.parent / GENAI_CONFIG
    config = json.loads(file.read_bytes())["model"]
    name, options = target.provider.genai_name, dict[str, str]()
    for entry in config["decoder"].get("session_options", {}).get("provider_options", []):
        options |= entry.get(name, {})
    # The module for apps knows the folders of the others.
    options |= {key: value for key, value in target.load_options.items() if "{" not in value}
    session: dict[str, Any] = {
        **target.settings.session_options,
        "session.disable_model_compile": "1",
    }
    if job.group is not None:
        session["ep.share_ep_contexts"] = "1"
    session["provider_options"] = [{name: options}]
    result = _limits(model)
    if not model.genai.stage:
        decoder: dict[str, Any] = {"filename": stages[model.name], "session_options": session}
    elif pipeline := config["decoder"].get("pipeline"):
        named = {name: dict(stage) for entry in pipeline for name, stage in entry.items()}
        for member, stage in stages.items():
            own = named[member.removeprefix(f"{model.configured_name}.")]
            own |= {"filename": stage, "session_options": session}
        decoder = {"pipeline": [{name: stage} for name, stage in named.items()]}
    else:
        result["model"]["type"] = "decoder-pipeline"
        result["search"]["past_present_share_buffer"] = True
        decoder = _pipeline(config, session, stages, sources, model.genai.chunk)
    result["model"]["decoder"] = decoder
    return result


def _pipeline(
    config: Any, session: Any, files: Mapping[str, str], sources: Mapping[str, Source], chunk: int
) -> dict[str, Any]:
    """A decoder whose stages are the whole model: for a chunk of a prompt, and for one token."""
    first, *_, last = *files, *files
    facts = sources[first].facts
    lengths = [value.name for value in facts.inputs if value.dtype == "int32"]
    common = {
        "inputs": [value.name for value in facts.inputs],
        "outputs": [value.name for value in facts.outputs],
        "session_options": session,
    }
    stages = []
    for name, (model, file) in zip(("context", "iterator"), files.items(), strict=False):
        runs = {"run_on_prompt": model == first, "run_on_token_gen": model == last}
        stages.append({name: {**common, **runs, "filename": file}})
    window = {"window_size": chunk, "pad_value": config["pad_token_id"], "alignment": "left"}
    window |= {"slide_inputs": True, "slide_key_value_cache": False}
    inputs = {"past_sequence_length": lengths[0], "total_sequence_length": lengths[1]}
    return {"inputs": inputs, "sliding_window": window, "pipeline": stages}

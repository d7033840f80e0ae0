"""What onnxruntime-genai needs beside the folder of a language model to run what was compiled of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatch_epcontext.config.settings import GENAI_CONFIG, Model
from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Built, Result, Source
from hatch_epcontext.shipped import SOURCE

OVERLAY = "overlay.json"
"""The file in a target's folder with what it changes of ``genai_config.json``."""


def write_overlays(result: Result, folder: Path) -> dict[str, FileRecord]:
    """Write the overlay of each target into the package in ``folder``; returns their records."""
    overlays, targets = dict[str, dict[str, Any]](), dict[str, list[Built]]()
    for source in result.sources:
        if source.model.genai is not None and not source.model.genai.stage:
            overlays[f"{source.model.name}/{SOURCE}"] = _limits(source.model)
    for built in result.built:
        model = built.job.models[0]
        if model.genai is not None:
            place = f"{model.configured_name}/{built.job.target.name}"
            targets.setdefault(place, []).append(built)
    sources = {source.model.name: source for source in result.sources}
    overlays |= {place: _overlay(own, sources) for place, own in targets.items()}
    files = {}
    for place, overlay in overlays.items():
        name = f"{place}/{OVERLAY}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            f"{json.dumps(overlay, indent=2)}\n", encoding="utf-8", newline="\n"
        )
        files[name] = record_file(folder / name)
    return files


def _limits(model: Model) -> dict[str, Any]:
    """The length of conversations, which also decides how large the cache is."""
    length = model.genai.context_length if model.genai else None
    if length is None:
        return {"model": {}}
    return {"model": {"context_length": length}, "search": {"max_length": length}}


def _overlay(results: Sequence[Built], sources: Mapping[str, Source]) -> dict[str, Any]:
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
    overlay = _limits(model)
    if not model.genai.stage:
        decoder: dict[str, Any] = {"filename": stages[model.name], "session_options": session}
    elif pipeline := config["decoder"].get("pipeline"):
        named = {name: dict(stage) for entry in pipeline for name, stage in entry.items()}
        for member, stage in stages.items():
            own = named[member.removeprefix(f"{model.configured_name}.")]
            own |= {"filename": stage, "session_options": session}
        decoder = {"pipeline": [{name: stage} for name, stage in named.items()]}
    else:
        overlay["model"]["type"] = "decoder-pipeline"
        overlay["search"]["past_present_share_buffer"] = True
        decoder = _pipeline(config, session, stages, sources, model.genai.chunk)
    overlay["model"]["decoder"] = decoder
    return overlay


def _pipeline(
    config: Any, session: Any, files: Mapping[str, str], sources: Mapping[str, Source], chunk: int
) -> dict[str, Any]:
    """A decoder whose stages are the whole model: for a chunk of a prompt, and for one token."""
    first, *_, last = *files, *files
    facts = sources[first].facts
    lengths = [value.name for value in facts.inputs if value.dtype == "int32"]
    stage = {
        "inputs": [value.name for value in facts.inputs],
        "outputs": [value.name for value in facts.outputs],
        "session_options": session,
    }
    return {
        "inputs": {"past_sequence_length": lengths[0], "total_sequence_length": lengths[1]},
        "sliding_window": {
            "window_size": chunk,
            "pad_value": config["pad_token_id"],
            "alignment": "left",
            "slide_inputs": True,
            "slide_key_value_cache": False,
        },
        "pipeline": [
            {
                name: {
                    **stage,
                    "filename": file,
                    "run_on_prompt": model == first,
                    "run_on_token_gen": model == last,
                }
            }
            for name, (model, file) in zip(("context", "iterator"), files.items(), strict=False)
        ],
    }

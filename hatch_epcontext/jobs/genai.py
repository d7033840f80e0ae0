"""A folder of onnxruntime-genai with what was compiled of it: how genai finds that, and whether it answers as
on the CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hatch_epcontext.config.genai import read_config
from hatch_epcontext.config.settings import GENAI_CONFIG, Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import link_or_copy, symlink_or_copy
from hatch_epcontext.jobs.artifact import Built, FailureReport, Result, Source
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import FORMAT
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.jobs.steps import Build
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.system import writing
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import Answer, ValidationStatus

_WINDOW = {"alignment": "left", "slide_inputs": True, "slide_key_value_cache": False}
"""How the chunks of a prompt are filled: at their end."""

_RUN = (ValidationStatus.RAN, ValidationStatus.RAN_ALONE)

_MAX_SIMULATED = 200 * 10**6
"""The most bytes of a model that a simulator answers with in minutes."""

_PACKAGE = "onnxruntime-genai"


def overlays(result: Result) -> dict[str, dict[str, Any]]:
    """What each target changes in the configuration of each language model, by its folder in the package."""
    changes = {
        f"{source.model.name}/{SOURCE}": _limits(source.model)
        for source in result.sources
        if source.model.genai is not None and not source.model.genai.stage
    }
    sources = {source.model.name: source for source in result.sources}
    return changes | {place: _overlay(own, sources) for place, own in _by_target(result).items()}


def _by_target(result: Result) -> dict[str, list[Built]]:
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


def _overlay(results: Sequence[Built], sources: Mapping[str, Source]) -> dict[str, Any]:
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


def compare_answers(build: Build, result: Result, log: Callable[[str], None]) -> Result:
    """``result``, in which language models that answer otherwise than the CPU are failures.

    ``log`` gets a line for each that was compared.
    """
    failures, failed = list[FailureReport](), list[Built]()
    for place, own in _by_target(result).items():
        job, where = own[0].job, place.replace("/", " -> ")
        limit = job.models[0].tolerance_for(job.target)
        try:
            if limit is not None and (answers := _answers(build, result, place, own)):
                _check(answers, limit.snr)
                snr = min(answer.snr for answer in answers)
                what = f"{count(len(answers), 'prompt')} as on the CPU ({snr:.0f} dB)"
                log(f"{where}: onnxruntime-genai answers {what}")
        except BuildError as error:
            problems = error.located(where, step="validation").problems
            failures.append(FailureReport.of(job, problems))
            failed += own
            log(f"{where} ({job.target.provider.name}): FAILED")
    kept = tuple(built for built in result.built if built not in failed)
    return replace(result, built=kept, failures=tuple(failures))


def _answers(build: Build, result: Result, place: str, own: Sequence[Built]) -> Sequence[Answer]:
    """The answers with what was compiled into ``own``; none if this machine cannot run it, or need not."""
    from hatch_epcontext.worker.requests import ConverseRequest

    sources = {source.model.name: source for source in result.sources}
    target, stage = own[0].job.target, own[0].job.models[0]
    source, plugin = sources[stage.configured_name], target.plugin
    was_run = all(v.status in _RUN for built in own for v in built.validations.values())
    # Without a simulator it is a GPU's, which needs another distribution of onnxruntime-genai.
    is_fast = bool(target.provider.simulator) and source.size < _MAX_SIMULATED
    if not (was_run and is_fast and plugin and stage.genai):
        return ()
    texts = overlays(result)
    changes = texts[f"{stage.configured_name}/{SOURCE}"]
    records = [source.records, *(built.artifact.record.files for built in own)]
    files = [{name: file.sha256 for name, file in record.items()} for record in records]
    key = value_sha256([FORMAT, changes, texts[place], files, installed(_PACKAGE)])
    stored = build.cache.get("facts", key, tuple[Answer, ...])
    if stored or target.from_cache or installed(_PACKAGE) is None:
        return stored or ()
    # Only a device opens contexts that share weights: another process would crash.
    jobs = [job for job in build.jobs if job.folder in {built.job.folder for built in own}]
    results = [run_job(build, alone) for job in jobs for alone in job.alone] or own
    scratch = build.scratch("converse")
    moved = scratch.with_name(f"{scratch.name}-moved")
    with writing("a copy to validate", moved):
        for name, file in zip(source.records, source.files, strict=True):
            (moved / name).parent.mkdir(parents=True, exist_ok=True)
            symlink_or_copy(file.resolve(), moved / name)
        for built in results:
            inside = moved / built.job.folder.partition("/")[2]
            shutil.copytree(built.artifact.folder, inside, copy_function=link_or_copy)
    compiled = json.dumps(_overlay(results, sources))
    request = ConverseRequest(str(moved), json.dumps(changes), compiled, plugin, stage.genai.chunk)
    with build.device(target):
        answers = build.workers.call(request, scratch, location=place, step="validation")
    shutil.rmtree(moved)
    build.cache.put("facts", key, answers)
    return answers


def _check(answers: Sequence[Answer], limit: float) -> None:
    lines = [
        f"  {answer.snr:.1f} dB of the logits (at least {limit:g} dB), and clearly another token in "
        f"{count(answer.others, 'step')}, after {count(answer.prompt, 'token')}"
        for answer in answers
        if answer.snr < limit or answer.others
    ]
    if lines:
        message = "onnxruntime-genai answers otherwise with what was compiled than on the CPU:"
        hint = (
            f"Check {GENAI_CONFIG}: pad_token_id must be a token that no prompt contains, and each stage of "
            "a pipeline must run on what it was made for."
        )
        raise BuildError(Problem(Kind.OUTPUT_DIFFERS, "", "\n".join((message, *lines)), hint))

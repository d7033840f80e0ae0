"""A folder of onnxruntime-genai with what was compiled of it: how genai finds that, and whether it answers as
on the CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hatch_epcontext.config.genai_config import GENAI_CONFIG, Genai
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import BuildError, Kind, Problem, Setting, UnavailableError
from hatch_epcontext.files import link_or_copy, symlink_or_copy
from hatch_epcontext.jobs.artifact import Built, Result, Source
from hatch_epcontext.jobs.plan import CACHE_FORMAT, Job
from hatch_epcontext.jobs.requirements import genai_installed
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.system import writing
from hatch_epcontext.text import count, listing, show
from hatch_epcontext.worker.results import Answer, ModelFacts, ValidationStatus

if TYPE_CHECKING:
    from hatch_epcontext.jobs.steps import Build

_WINDOW = {"alignment": "left", "slide_inputs": True, "slide_key_value_cache": False}
"""How the chunks of a prompt are filled: at their end."""

_RUN = (ValidationStatus.RAN, ValidationStatus.RAN_ALONE)

_MAX_SIMULATED = 200 * 10**6
"""The most bytes of a model that a simulator answers with in minutes."""

_PACKAGE = "onnxruntime-genai"


def overlays(result: Result) -> dict[str, dict[str, Any]]:
    """What each target changes in the configuration of each language model, by their names: ``"llm/npu"``."""
    sources = {source.model.name: source for source in result.sources}
    changes: dict[str, dict[str, Any]] = {}
    for name, source in sources.items():
        model = source.model
        if model.genai and not model.is_stage and model.fallback != "none":
            changes[f"{name}/{SOURCE}"] = model.genai.plain_overlay
        for target in model.plain_targets:
            changes[f"{name}/{target.name}"] = _plain_overlay(model, target)
    # All stages for a target have one.
    by_target: dict[str, list[Built]] = {}
    for built in result.built:
        if (model := built.job.models[0]).genai:
            path = f"{model.configured_name}/{built.job.target.name}"
            by_target.setdefault(path, []).append(built)
    return changes | {path: overlay(results, sources) for path, results in by_target.items()}


def _plain_overlay(model: Model, target: Target) -> dict[str, Any]:
    """What genai needs to run the folder of ``model`` itself on the EP of ``target``."""
    assert model.genai is not None, "only a language model has an overlay"
    options = {"provider_options": [_provider_options(model.genai, target)]}
    overlay = model.genai.plain_overlay
    overlay["model"]["decoder"] = {"session_options": options}
    return overlay


def _provider_options(genai: Genai, target: Target) -> dict[str, dict[str, str]]:
    """The EP of ``target`` by genai's name, with the options of the folder and of the target."""
    name = target.provider.genai_name
    # The module for apps knows the folders of the others.
    own = {key: value for key, value in target.load_options.items() if "{" not in value}
    folders = {n.lower(): options for n, options in genai.config.providers.items()}
    return {name: {**folders.get(name.lower(), {}), **own}}


def overlay(results: Sequence[Built], sources: Mapping[str, Source]) -> dict[str, Any]:
    """What genai needs to run the ``results`` of one target: one model, or the stages of a pipeline."""
    job = results[0].job
    model, target = job.models[0], job.target
    assert model.genai is not None, "only a language model has an overlay"
    config = model.genai.config
    shared = {"ep.share_ep_contexts": "1"} if job.group is not None else {}
    session = {
        **target.settings.session_options,
        **shared,
        "session.disable_model_compile": "1",
        "provider_options": [_provider_options(model.genai, target)],
    }
    files = {
        context.model.removeprefix(f"{model.configured_name}."): (
            f"{built.job.folder.partition('/')[2]}/{context.model_file}"
        )
        for built in results
        for context in built.record.contexts
    }
    result, decoder = model.genai.limits, dict[str, Any]()
    entries = config.content["decoder"].get("pipeline") or ()
    pipeline = {name: dict(stage) for entry in entries for name, stage in entry.items()}
    if model.genai.stage and not pipeline:
        result["model"]["type"] = "decoder-pipeline"
        result["search"]["past_present_share_buffer"] = True
        decoder, pipeline = _of_cut_model(model.genai, sources[model.name].facts, [*files])
    for name, file in files.items():
        part = pipeline[name] if model.genai.stage else decoder
        part |= {"filename": file, "session_options": session}
    if pipeline:
        decoder["pipeline"] = [{name: stage} for name, stage in pipeline.items()]
    result["model"]["decoder"] = decoder
    return result


def _of_cut_model(
    genai: Genai, facts: ModelFacts, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The decoder of a whole model with the stages ``names``, for chunks and for tokens; and its pipeline."""
    past, total = (value.name for value in facts.inputs if value.dtype == "int32")
    decoder = {
        "inputs": {"past_sequence_length": past, "total_sequence_length": total},
        "sliding_window": {"window_size": genai.chunk, **_WINDOW},
    }
    tensors = {kind: [v.name for v in getattr(facts, kind)] for kind in ("inputs", "outputs")}
    return decoder, {
        name: {
            **tensors,
            "run_on_prompt": name == names[0],
            "run_on_token_gen": name == names[-1],
        }
        for name in names
    }


def open_folders(build: Build, *, only_known: bool) -> Iterator[str]:
    """Let onnxruntime-genai open the folder of each language model that is to be run, once for each content.

    Yields a line for what was not opened, and for what is shipped and not compiled. Raises ModelError for
    folders that are damaged or do not run on the CPU. With ``only_known`` it opens none.
    """
    for source in build.sources.values():
        model, genai = source.model, source.model.genai
        if genai is None or model.is_stage:
            continue
        yield from _not_compiled(build, model)
        if only_known or model.validate.mode not in ("auto", "require"):
            continue
        files = {name: file.sha256 for name, file in source.records.items()}
        key = value_sha256(["opened", CACHE_FORMAT, genai.plain_overlay, files, model.fallback])
        line = build.cache.get("facts", key, str)
        if line is None:
            # Imported here: a build that finds everything in the cache makes no requests.
            from hatch_epcontext.worker.requests import OpenFolderRequest

            folder, scratch = str(model.path.parent), build.scratch("open")
            runs = model.fallback != "none"
            request = OpenFolderRequest(folder, tuple(files), genai, model.key, runs)
            line = build.workers.call(request, scratch, location=f"{model.name}: opening")
            if genai_installed() is not None:
                build.cache.put("facts", key, line)
        if line:
            yield f"{model.name}: {line}"


def _not_compiled(build: Build, model: Model) -> Iterator[str]:
    """What ``model`` has that nothing compiled of it has."""
    assert model.genai is not None, "only a language model has a folder"
    jobs = (job for job in build.jobs if job.models[0].configured_name == model.name)
    if not (names := dict.fromkeys(job.target.name for job in jobs)):
        return
    targets = listing(names)
    if "draft" in model.genai.config.content:
        yield f"{model.name}: the draft model (model.draft) is not compiled for {targets}"
    if adapters := [name for name in model.genai.beside if name.endswith(".onnx_adapter")]:
        files = listing(map(show, adapters))
        yield f"{model.name}: apps cannot use {files} on {targets}, only on the CPU"


def is_due(build: Build, built: Built) -> bool:
    """Whether onnxruntime-genai is to answer with ``built``, which was run here, in minutes."""
    if not built.job.may_answer:
        return False
    was_run = all(v.status in _RUN for v in built.validations.values())
    return was_run and build.sources[built.job.models[0].configured_name].size < _MAX_SIMULATED


def answers_key(build: Build, built: Built) -> str:
    """What identifies the answers with ``built``: the files, and the overlays with which genai opens them."""
    model = built.job.models[0]
    assert model.genai is not None, "only a language model answers"
    source = build.sources[model.configured_name]
    records = (source.records, built.record.files)
    files = [{name: file.sha256 for name, file in record.items()} for record in records]
    return value_sha256(
        [CACHE_FORMAT, model.genai.plain_overlay, overlay([built], build.sources), files]
    )


def compare_answers(
    build: Build, built: Built, results_to_run: Callable[[], Sequence[Built]]
) -> tuple[Answer, ...]:
    """What onnxruntime-genai answers with ``built``; none if that is not due, or cannot be run here.

    ``results_to_run`` gives what is run instead of ``built``. Raises BuildError if it answers otherwise than
    on the CPU.
    """
    job = built.job
    limit = job.models[0].tolerance_for(job.target)
    if limit is None or not is_due(build, built):
        return ()
    where, key = f"{job.models[0].configured_name} -> {job.target.name}", answers_key(build, built)
    try:
        answers = build.cache.get("facts", key, tuple[Answer, ...]) or ()
        if not answers and not job.target.from_cache and can_answer(job):
            answers = _converse(build, job, where, results_to_run())
            build.cache.put("facts", key, answers)
        _check(answers, limit.snr)
    except BuildError as error:
        raise error.located(where, step="validate") from error
    return answers


def can_answer(job: Job) -> bool:
    """Whether this Python has onnxruntime-genai; raises UnavailableError if it is required."""
    if genai_installed() is not None:
        return True
    if required := [model for model in job.models if model.validate.mode == "require"]:
        message = f'{_PACKAGE} is not installed, which answers prompts, and validate is "require".'
        setting = Setting(required[0].key / "validate", "auto")
        hint = "Install it, or check only what this environment can:"
        raise UnavailableError(Problem(Kind.NOT_RUN, "", message, hint, settings=(setting,)))
    return False


def _converse(build: Build, job: Job, where: str, results: Sequence[Built]) -> tuple[Answer, ...]:
    """The answers with what was compiled into ``results``, in a copy of the folder."""
    from hatch_epcontext.worker.requests import ConverseRequest

    stage, target = job.models[0], job.target
    assert stage.genai is not None, "only a language model answers"
    assert target.plugin is not None, "an EP with a simulator is one"
    source, scratch = build.sources[stage.configured_name], build.scratch("converse")
    moved = scratch.with_name(f"{scratch.name}-moved")
    with writing("a copy to validate", moved):
        for name, file in zip(source.records, source.files, strict=True):
            (moved / name).parent.mkdir(parents=True, exist_ok=True)
            symlink_or_copy(file.resolve(), moved / name)
        for built in results:
            inside = moved / built.job.folder.partition("/")[2]
            shutil.copytree(built.folder, inside, copy_function=link_or_copy)
    changes = json.dumps(overlay(results, build.sources))
    request = ConverseRequest(str(moved), stage.genai, changes, target.plugin)
    with build.device_lock(target):
        answers = build.workers.call(request, scratch, location=where, step="validate")
    shutil.rmtree(moved)
    return answers


def _check(answers: Sequence[Answer], limit: float) -> None:
    lines = [
        f"  {answer.snr:.1f} dB of the logits (at least {limit:g} dB), and clearly another token at "
        f"{count(answer.others, 'position')}, after {answer.kind} of {count(answer.prompt, 'token')}"
        for answer in answers
        if answer.snr < limit or answer.others
    ]
    if lines:
        message = "onnxruntime-genai answers otherwise with what was compiled than on the CPU:"
        hint = (
            f"Check {GENAI_CONFIG}: each stage of a pipeline must run on what it was made for, and "
            "pad_token_id must be a token that no prompt contains."
        )
        raise BuildError(Problem(Kind.OUTPUT_DIFFERS, "", "\n".join((message, *lines)), hint))

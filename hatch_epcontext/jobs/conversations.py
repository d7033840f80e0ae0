"""Compares what language models answer in onnxruntime-genai: on the CPU, and with what was compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

from hatch_epcontext.config.settings import GENAI_CONFIG
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import link_or_copy, symlink_or_copy
from hatch_epcontext.jobs.artifact import Built, FailureReport, Result
from hatch_epcontext.jobs.genai import by_target, overlay, overlays
from hatch_epcontext.jobs.job import run_job
from hatch_epcontext.jobs.plan import FORMAT
from hatch_epcontext.jobs.requirements import installed
from hatch_epcontext.jobs.steps import Build
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.system import writing
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import Answer, ValidationStatus

_RUN = (ValidationStatus.RAN, ValidationStatus.RAN_ALONE)

_MAX_SIMULATED = 200 * 10**6
"""The most bytes of a model that a simulator answers with in minutes."""

_PACKAGE = "onnxruntime-genai"


def compare_answers(build: Build, result: Result, log: Callable[[str], None]) -> Result:
    """``result``, in which language models that answer otherwise than the CPU are failures.

    ``log`` gets a line for each that was compared.
    """
    failures, failed = list[FailureReport](), list[Built]()
    for place, own in by_target(result).items():
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
    compiled = json.dumps(overlay(results, sources))
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

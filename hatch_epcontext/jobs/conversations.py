"""Compares what language models answer in onnxruntime-genai: on the CPU, and with what was compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hatch_epcontext.config.settings import GENAI_CONFIG, Model
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
from hatch_epcontext.text import aligned, count
from hatch_epcontext.worker.results import Answer, ValidationStatus

_RUN = (ValidationStatus.RAN, ValidationStatus.RAN_ALONE)

_MAX_SIMULATED = 200 * 10**6
"""The most bytes of a model that a simulator answers with in minutes."""

_PACKAGE = "onnxruntime-genai"

_ROOM = 8
"""The tokens that prompts leave for answers."""

_STRIDE = 7919
"""The distance of tokens in a prompt: a prime number."""


def compare_answers(build: Build, result: Result, log: Callable[[str], None]) -> Result:
    """``result``, in which language models that answer otherwise than the CPU are failures.

    ``log`` gets a line for each that was compared.
    """
    failures, failed = [*result.failures], list[Built]()
    for place, own in by_target(result).items():
        job, where = own[0].job, place.replace("/", " -> ")
        try:
            answers = _answers(build, result, place, own)
            if answers:
                _check(job.models[0], own, answers)
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
    source = sources[stage.configured_name]
    names = {
        model.name
        for job in build.jobs
        for model in job.models
        if job.target.name == target.name and model.configured_name == stage.configured_name
    }
    is_whole = names == {
        context.model for built in own for context in built.artifact.record.contexts
    }
    was_run = all(v.status in _RUN for built in own for v in built.validations.values())
    plugin = target.plugin
    # Without a simulator it is a GPU's, which needs another distribution of onnxruntime-genai.
    is_fast = bool(target.provider.simulator) and source.size < _MAX_SIMULATED
    if not (is_whole and was_run and is_fast and plugin and stage.is_compared):
        return ()
    texts = overlays(result)
    changes = texts[f"{stage.configured_name}/{SOURCE}"]
    files = [{name: f.sha256 for name, f in b.artifact.record.files.items()} for b in own]
    key = value_sha256([FORMAT, source.sha256, changes, texts[place], files, installed(_PACKAGE)])
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
    content = json.loads((moved / GENAI_CONFIG).read_bytes())["model"]
    content |= changes["model"]
    request = ConverseRequest(
        str(moved),
        json.dumps(changes),
        json.dumps(overlay(results, sources)),
        plugin,
        tuple(_prompts(moved, content, stage.genai.chunk if stage.genai else 1)),
    )
    with build.device(target):
        answers = build.workers.call(request, scratch, location=place, step="validation")
    shutil.rmtree(moved)
    build.cache.put("facts", key, answers)
    return answers


def _prompts(folder: Path, content: Any, chunk: int) -> Iterator[tuple[int, ...]]:
    """Prompts of ordinary tokens, shorter and longer than what an NPU takes at once."""
    begin, fill = (content.get(f"{name}_token_id", -1) for name in ("bos", "pad"))
    chunk = content["decoder"].get("sliding_window", {}).get("window_size", chunk)
    tokenizer, special = folder / "tokenizer.json", {fill}
    if tokenizer.exists():
        added = json.loads(tokenizer.read_bytes()).get("added_tokens", ())
        special = {token["id"] for token in added if token.get("special")}
    ordinary = [token for token in range(content["vocab_size"]) if token not in special]
    # What fills a chunk must be no token of a prompt.
    first = [token for token in (begin, fill) if token == begin >= 0 or token in ordinary]
    for length in (max(chunk // 2, 4), chunk + chunk // 2):
        # A prompt is filled to whole chunks.
        if -(-length // chunk) * chunk + _ROOM <= content["context_length"]:
            rest = (ordinary[_STRIDE * n % len(ordinary)] for n in range(len(first), length))
            yield (*first, *rest)


def _check(model: Model, own: Sequence[Built], answers: Sequence[Answer]) -> None:
    tolerance = model.tolerance_for(own[0].job.target)
    assert tolerance is not None, "it is compared"
    wrong = [answer for answer in answers if answer.snr < tolerance.snr or answer.others]
    if not wrong:
        return
    rows = [
        (
            f"  after {count(answer.prompt, 'token')}",
            f"{answer.snr:.1f} dB of the logits (at least {tolerance.snr:g} dB)",
            f"clearly another token in {answer.others} of {answer.steps} steps",
        )
        for answer in wrong
    ]
    message = "onnxruntime-genai answers otherwise with what was compiled than on the CPU:"
    hint = (
        f"Check {GENAI_CONFIG}: pad_token_id must be a token that no prompt contains, and each stage of a "
        "pipeline must run on what it was made for."
    )
    raise BuildError(Problem(Kind.OUTPUT_DIFFERS, "", "\n".join((message, *aligned(rows))), hint))

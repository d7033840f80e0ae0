"""Let onnxruntime-genai answer prompts with a language model on the CPU, and with what was compiled of it."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.config.genai_config import GENAI_CONFIG
from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import ConverseRequest
from hatch_epcontext.worker.results import NOTHING, Answer
from hatch_epcontext.worker.session import library_of

_TOKENS = 4
"""The tokens after each prompt."""

_SECONDS = 120.0
"""Seconds after which no other prompt begins: a simulator may be slow."""

Rows = NDArray[np.float64]


def handle(request: ConverseRequest) -> tuple[Answer, ...]:
    """Compare the logits after each prompt, with the same tokens forced: free ones would diverge for good at
    the first near tie.

    Raises ModelError if the folder itself does not run, and what onnxruntime-genai raises for the rest.
    """
    genai: Any = importlib.import_module("onnxruntime_genai")
    announce("answering prompts on the CPU")
    try:
        expected = _expected(genai, request)
    except Exception as error:
        message = f"onnxruntime-genai cannot answer with it on the CPU: {error}"
        hint = f"Check {GENAI_CONFIG}, or write the folder again."
        raise ModelError(Problem(Kind.INVALID_FOLDER, "", message, hint)) from error
    announce("answering prompts with what was compiled")
    plugin = request.plugin
    genai.register_execution_provider_library(plugin.registration_name, library_of(plugin))
    model, answers = _open(genai, request.folder, request.overlay), list[Answer]()
    start = time.monotonic()
    for prompt, reference, tokens in expected:
        if not answers or time.monotonic() < start + _SECONDS:
            rows, _ = _rows(genai, model, prompt, tokens)
            answers.append(_answer(len(prompt), reference, rows))
    return tuple(answers)


def _expected(genai: Any, request: ConverseRequest) -> list[tuple[list[int], Rows, list[int]]]:
    """For each prompt the logits and the tokens after it on the CPU."""
    content, limits = request.genai.config.content, request.genai.limits
    stops = np.atleast_1d(content.get("eos_token_id", [])).tolist()
    # A cache for the longest conversation can be too large; that of a pipeline has a fixed size.
    grows = "pipeline" not in content["decoder"]
    model = _open(genai, request.folder, json.dumps(limits))
    prompts = _prompts(Path(request.folder), {**content, **limits["model"]}, request.genai.chunk)
    return [(prompt, *_rows(genai, model, prompt, stops=stops, grows=grows)) for prompt in prompts]


def _prompts(folder: Path, content: Any, chunk: int) -> Iterator[list[int]]:
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
        if -(-length // chunk) * chunk + 2 * _TOKENS <= content["context_length"]:
            # With a prime number as the distance, tokens do not repeat soon.
            rest = (ordinary[7919 * n % len(ordinary)] for n in range(len(first), length))
            yield [*first, *rest]


def _open(genai: Any, folder: str, overlay: str) -> Any:
    config = genai.Config(folder)
    config.overlay(overlay)
    # Those of the folder are for other machines; what was compiled names its own.
    config.clear_providers()
    return genai.Model(config)


def _rows(
    genai: Any,
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int] | None = None,
    *,
    stops: Sequence[int] = (),
    grows: bool = False,
) -> tuple[Rows, list[int]]:
    """The logits of the tokens after ``prompt``, and these: ``tokens``, or the likeliest ones but ``stops``.

    ``grows``: whether the cache may be as small as the prompt needs.
    """
    parameters = genai.GeneratorParams(model)
    limit = {"max_length": len(prompt) + _TOKENS} if grows else {}
    parameters.set_search_options(do_sample=False, min_length=0, **limit)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    rows, forced = [], list[int]()
    for number in range(_TOKENS):
        logits = np.asarray(generator.get_logits())
        row = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float64)
        rows.append(row)
        allowed = row.copy()
        allowed[list(stops)] = -np.inf
        token = int(allowed.argmax()) if tokens is None else tokens[number]
        forced.append(token)
        only = np.full((1, 1, row.size), -1e9, np.float32)
        only[0, 0, token] = 0
        generator.set_logits(only)
        generator.generate_next_token()
    return np.stack(rows), forced


def _answer(prompt: int, reference: Rows, rows: Rows) -> Answer:
    """How near ``rows`` of logits are to the ``reference``, after a prompt of that many tokens."""
    error = np.abs(rows - reference)
    if not np.isfinite(error).all():
        return Answer(prompt, NOTHING, len(rows))
    noise, signal = np.square(error).sum(), np.square(reference).sum()
    second, first = np.sort(reference, axis=1)[:, -2:].T
    others = (rows.argmax(1) != reference.argmax(1)) & (first - second > error.max(1))
    snr = 10 * np.log10(max(signal, 1e-30) / max(noise, 1e-30))
    return Answer(prompt, float(snr), int(others.sum()))

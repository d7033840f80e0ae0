"""Let onnxruntime-genai answer prompts with a language model on the CPU, and with what was compiled of it."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.config.genai_config import GENAI_CONFIG, Genai, special_ids
from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.worker.libraries import library_of
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import ConverseRequest
from hatch_epcontext.worker.results import NOTHING, Answer

_TOKENS = 4
"""The tokens after each prompt."""

_TURNS = (("user", "Hello, who are you?"), ("assistant", "A model."), ("user", "What is 2 + 2?"))

_TEXT = 'The quick brown fox jumps over the lazy dog, and 12 models answer: "Voilà, it works!" '

_SECONDS = 120.0
"""Seconds after which no other prompt begins: a simulator may be slow."""

_CLEAR = 6.0
"""How far the likeliest token is ahead where another one is no near tie, in the usual error of a logit.

The difference of two errors is above that once in 50,000 times.
"""

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
    for example in expected:
        if not answers or time.monotonic() < start + _SECONDS:
            rows, _ = _rows(genai, model, example.prompt, example.tokens)
            answers.append(_answer(example, rows))
    return tuple(answers)


def answer_on_cpu(genai: Any, folder: str, about: Genai, prompt: Sequence[int]) -> None:
    """Let the folder itself answer ``prompt``; raises RuntimeError if it does not."""
    model = _open(genai, folder, json.dumps(about.plain_overlay))
    _rows(genai, model, prompt, slots=_slots(about, prompt))


@dataclass(frozen=True)
class _Expected:
    """A ``prompt`` of a ``kind``, and the ``tokens`` after it on the CPU, with their logits in ``rows``."""

    kind: str
    prompt: list[int]
    rows: Rows
    tokens: list[int]


def _expected(genai: Any, request: ConverseRequest) -> list[_Expected]:
    """What the folder itself answers on the CPU."""
    overlay = request.genai.plain_overlay
    stops = special_ids(request.genai.config.content, "eos")
    model = _open(genai, request.folder, json.dumps(overlay))
    result = []
    for kind, prompt in _prompts(genai, model, request.genai):
        slots = _slots(request.genai, prompt)
        rows, tokens = _rows(genai, model, prompt, stops=stops, slots=slots)
        result.append(_Expected(kind, prompt, rows, tokens))
    return result


def _slots(about: Genai, prompt: Sequence[int]) -> int | None:
    """The slots of a cache for ``prompt``: that for the longest conversation can be too large.

    None for a pipeline, whose cache has a fixed size.
    """
    return None if about.config.cached else max(len(prompt) + _TOKENS, about.config.window)


def _prompts(genai: Any, model: Any, about: Genai) -> Iterator[tuple[str, list[int]]]:
    """Prompts that fill a chunk of an NPU and its cache in different ways, the most telling one first."""
    chunk = about.config.chunk or about.chunk
    # What fills the last chunk takes slots too.
    most = min(about.length - _TOKENS, (about.slots - _TOKENS) // chunk * chunk)
    content = about.config.content
    text = [*range(content["vocab_size"])]
    if about.has_tokenizer:
        tokenizer = genai.Tokenizer(model)
        text = [*tokenizer.encode(_TEXT).tolist(), *special_ids(content, "eos")]
        if len(chat := _chat(tokenizer, content)) <= most:
            yield "a chat", chat
    text = [token for token in text if token != about.filler]
    begin = [token for token in special_ids(content, "bos") if token != about.filler][:1]
    kinds = {"a prompt": chunk + 1, "a prompt of whole chunks": chunk, "the longest prompt": most}
    for kind, length in kinds.items():
        if 0 < length <= most:
            yield kind, [*begin, *itertools.islice(itertools.cycle(text), length - len(begin))]


def _chat(tokenizer: Any, content: Mapping[str, Any]) -> list[int]:
    """Three turns by the chat template; without one that the tokenizer takes, ended as answers are."""
    messages = [{"role": role, "content": text} for role, text in _TURNS]
    try:
        text = tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True)
        return [int(token) for token in tokenizer.encode(text)]
    except RuntimeError:
        turns = [[int(token) for token in tokenizer.encode(text)] for _, text in _TURNS]
        end = special_ids(content, "eos")[:1]
        return [*special_ids(content, "bos")[:1], *turns[0], *end, *turns[1], *end, *turns[2]]


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
    slots: int | None = None,
) -> tuple[Rows, list[int]]:
    """The logits of the tokens after ``prompt``, and these: ``tokens``, or the likeliest ones but ``stops``.

    ``slots``: those of the cache, if not as many as in the model's configuration.
    """
    parameters = genai.GeneratorParams(model)
    limit = {} if slots is None else {"max_length": slots}
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


def _answer(example: _Expected, rows: Rows) -> Answer:
    """How near ``rows`` of logits are to those of ``example``."""
    error, length = np.abs(rows - example.rows), len(example.prompt)
    if not np.isfinite(error).all():
        return Answer(example.kind, length, NOTHING, len(rows))
    noise, signal = np.square(error).sum(), np.square(example.rows).sum()
    second, first = np.sort(example.rows, axis=1)[:, -2:].T
    is_clear = first - second > _CLEAR * np.sqrt(np.square(error).mean(1))
    others = (rows.argmax(1) != example.rows.argmax(1)) & is_clear
    snr = 10 * np.log10(max(signal, 1e-30) / max(noise, 1e-30))
    return Answer(example.kind, length, float(snr), int(others.sum()))

"""Open the folder of a language model, as apps do on the CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import Kind, ModelError, Problem
from hatch_epcontext.worker.actions.converse import answer_on_cpu
from hatch_epcontext.worker.protocol import announce
from hatch_epcontext.worker.requests import OpenFolderRequest

_TEXT = "Hello, world"

_NO_FALLBACK = ' If it is for a GPU only, set fallback = "none".'


def handle(request: OpenFolderRequest) -> str:
    """See the request; raises ModelError with the name of the file that is not what it says."""
    announce("opening the folder")
    for name in request.files:
        if name.endswith(".json"):
            try:
                json.loads((Path(request.folder) / name).read_bytes())
            except (OSError, RecursionError, ValueError) as error:
                raise _error(request, f"{name} is no JSON: {error}") from error
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return "not opened, because onnxruntime-genai is not installed"
    genai: Any = importlib.import_module("onnxruntime_genai")
    tokens, lack = [0], "has no tokenizer (tokenizer.json), so that apps need their own"
    if request.genai.has_tokenizer:
        tokens, lack = _check_tokenizer(genai, request)
    if request.runs:
        try:
            answer_on_cpu(genai, request.folder, request.genai, tokens)
        except RuntimeError as error:
            message = f"onnxruntime-genai cannot answer with it on the CPU: {error}"
            raise _error(request, message, _NO_FALLBACK) from error
    return lack


def _check_tokenizer(genai: Any, request: OpenFolderRequest) -> tuple[list[int], str]:
    """The tokens of a text, and what the tokenizer lacks; raises ModelError if it does not give the text
    again, or does not fit the model.
    """
    try:
        tokenizer = genai.Tokenizer(genai.Config(request.folder))
        tokens = [int(token) for token in tokenizer.encode(_TEXT)]
        text = tokenizer.decode(tokenizer.encode(_TEXT))
    except RuntimeError as error:
        raise _error(request, f"onnxruntime-genai cannot read its tokenizer: {error}") from error
    if not text.strip():
        message = f"its tokenizer encodes {_TEXT!r} as {tokens} and decodes that as {text!r}."
        raise _error(request, message)
    size = request.genai.config.content["vocab_size"]
    if tokens and max(tokens) >= size:
        raise _error(
            request, f"its tokenizer has the token {max(tokens)}, and vocab_size is {size}."
        )
    try:
        message = json.dumps([{"role": "user", "content": _TEXT}])
        tokenizer.apply_chat_template(message, add_generation_prompt=True)
    except RuntimeError as error:
        # The template is in what follows.
        reason = str(error).partition("\n")[0]
        return tokens, f"onnxruntime-genai cannot apply its chat template: {reason}"
    return tokens, ""


def _error(request: OpenFolderRequest, message: str, more: str = "") -> ModelError:
    hint = (
        f"Fetch the folder again, or write it again with onnxruntime-genai's model builder.{more}"
    )
    return ModelError(Problem.at(request.key / "path", Kind.INVALID_FOLDER, message, hint))

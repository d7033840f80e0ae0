"""The tokens of a language model that no prompt has: one of them fills what a prompt leaves of a chunk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hatch_epcontext.config.genai_config import special_ids
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import show

_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that no UTF-8 text has (RFC 3629, section 1)."""

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The tokens that a chat template writes by their names in tokenizer_config.json."""


@dataclass(frozen=True)
class Filler:
    """The ``token`` that fills chunks, or None, and why the folder's own pad_token_id cannot: the end of a
    sentence, empty if it can.
    """

    token: int | None
    reason: str = ""


@dataclass(frozen=True)
class _Tokenizer:
    """The ``ordinary`` tokens, which some text gives, and the ``special`` ones, each with its text by its id.

    ``written``: what chat templates and the tokenizer add to a text. ``has_template``: whether there is one.
    """

    ordinary: Mapping[int, str]
    special: Mapping[int, str]
    written: str
    has_template: bool

    def is_written(self, token: int) -> bool:
        """Whether chat templates or the tokenizer add ``token`` to a text."""
        text = self.special.get(token, "")
        return bool(text) and text in self.written


def choose_filler(folder: Path, content: Mapping[str, Any]) -> Filler:
    """A token that no prompt has, for ``content``, the model of a genai_config.json in ``folder``.

    That is the ``pad_token_id`` if no text gives it, or else an id that no text gives, or else a special
    token that is only in texts that name it. Without a tokenizer.json nothing is known but the ids in
    ``content``. Raises ValueError with the name of a file that cannot be read.
    """
    home = folder / (content.get("tokenizer_dir") or ".")
    tokenizer = _read(home) if (home / "tokenizer.json").is_file() else None
    pad, begins = content.get("pad_token_id"), special_ids(content, "bos")
    reason = _reason(pad, content, begins)
    if tokenizer is None:
        return Filler(None if reason else pad, reason)
    known = {*tokenizer.ordinary, *tokenizer.special, *begins, *special_ids(content, "eos")}
    ids = (*([] if reason else [pad]), *reversed(range(content["vocab_size"])))
    if (token := next((token for token in ids if token not in known), None)) is not None:
        return Filler(token)
    if not reason and isinstance(pad, int):
        if pad in tokenizer.ordinary:
            reason = "which text contains"
        elif tokenizer.is_written(pad):
            reason = "which the chat template writes"
    # Some models have a token for the begin that no prompt has.
    is_free = pad in begins and tokenizer.has_template and not tokenizer.is_written(pad)
    is_right = not reason or (is_free and not _reason(pad, content, []))
    return Filler(pad if is_right else None, reason)


def _reason(pad: Any, content: Mapping[str, Any], begins: list[int]) -> str:
    """Why prompts have the token ``pad``, as far as its id tells; empty if they do not."""
    if type(pad) is not int or not 0 <= pad < content["vocab_size"]:
        return f"which is none of the {content['vocab_size']} tokens (vocab_size)"
    if pad in begins:
        return f"and prompts begin with {show(content['bos_token_id'])} (bos_token_id)"
    ends = special_ids(content, "eos")
    if pad in ends:
        return f"and each turn of a conversation ends with {show(content['eos_token_id'])} (eos_token_id)"
    return "" if ends else "which onnxruntime-genai takes for the missing eos_token_id"


def _read(folder: Path) -> _Tokenizer:
    """The tokenizer in ``folder``; raises ValueError with the name of a file that cannot be read."""
    content, about = _json(folder / "tokenizer.json"), _json(folder / "tokenizer_config.json")
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            texts = {token: text for text, token in vocabulary.items()}
        else:
            texts = {token: text for token, (text, *_) in enumerate(vocabulary)}
        added = {entry["id"]: entry for entry in content.get("added_tokens") or ()}
        added |= {int(i): entry for i, entry in (about.get("added_tokens_decoder") or {}).items()}
        special = {i: entry["content"] for i, entry in added.items() if entry.get("special")}
        plain = {i: entry["content"] for i, entry in added.items() if i not in special}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tokenizer.json has no vocabulary: {error!r}") from error
    # Of these bytes ByteLevel writes the letter with the same number.
    is_byte_level = "ByteLevel" in json.dumps(
        [content.get("normalizer"), content.get("pre_tokenizer")]
    )
    never = {*map(chr, _NEVER)} if is_byte_level else set[str]()
    if content["model"].get("byte_fallback"):
        never |= {f"<0x{byte:02X}>" for byte in _NEVER}
    ordinary = {
        token: text
        for token, text in (texts | plain).items()
        if token not in special and text not in never
    }
    if not never:
        # What has no token becomes this one.
        unknown = content["model"].get("unk_token")
        ordinary |= {token: text for token, text in special.items() if text == unknown}
    templates = [*_templates(folder, about)]
    written = "".join((*templates, json.dumps(content.get("post_processor"), ensure_ascii=False)))
    for name in _NAMED:
        token = about.get(name) or ""
        if any(name in template for template in templates) or about.get(f"add_{name}"):
            written += token.get("content", "") if isinstance(token, dict) else token
    return _Tokenizer(ordinary, special, written, bool(templates))


def _templates(folder: Path, about: Mapping[str, Any]) -> Iterator[str]:
    """The chat templates in tokenizer_config.json, or in a file beside it."""
    template = about.get("chat_template") or ()
    for entry in [template] if isinstance(template, str) else template:
        yield entry if isinstance(entry, str) else str(entry.get("template", ""))
    if (file := folder / "chat_template.jinja").is_file():
        yield file.read_text("utf-8", errors="replace")


def _json(file: Path) -> dict[str, Any]:
    """The object in ``file``, empty if that is missing; raises ValueError with its name."""
    try:
        return dict(json.loads(file.read_bytes())) if file.is_file() else {}
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error

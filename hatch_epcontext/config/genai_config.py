"""What the genai_config.json in a folder of onnxruntime-genai says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hatch_epcontext.config.tables import ProfileTable
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import show

GENAI_CONFIG = "genai_config.json"
"""The file that makes a folder one of onnxruntime-genai."""

_TOKENS, _PAST = 4, 8
"""The tokens of dummy inputs: new ones, and those in the cache before."""

_TOKENIZER = ("added_tokens", "chat_template", "merges", "special_tokens", "tokenizer", "vocab")
"""How the names of a tokenizer's files begin."""

_MAX = 2**24
"""The most layers, tokens and so on: more is a mistake, and would exhaust the memory."""

_TYPICAL = 1024
"""The most tokens that a profile is optimized for, as in onnxruntime-genai's own."""

UNREADABLE = (AttributeError, OSError, RecursionError, TypeError, ValueError)
"""What `read_config` and its parts raise for a file that is none."""


@dataclass(frozen=True)
class GenaiConfig:
    """What a ``genai_config.json`` says of the decoder.

    ``document``: all that it says.
    ``files``: the model by its name in the folder, or those of the stages of its pipeline by stage.
    ``cached``: the stages that have a cache, which are those worth compiling; none without a pipeline.
    ``providers``: the options of EPs, by genai's names.
    ``past_names``: those of the inputs with the cache, with ``%d`` instead of the number of one of the
    ``layers``, of the shape batch x ``heads`` x tokens x ``head_size``.
    """

    document: Mapping[str, Any]
    files: Mapping[str, str]
    cached: tuple[str, ...]
    providers: Mapping[str, Mapping[str, str]]
    inputs: Mapping[str, str]
    past_names: tuple[str, ...]
    layers: int
    context_length: int
    heads: int
    head_size: int

    @property
    def state_names(self) -> tuple[str, ...]:
        """``past_names``, and those of the inputs with other states of layers, such as of a convolution."""
        return tuple(name for name in self.inputs.values() if "%d" in name)

    @property
    def past(self) -> tuple[str, ...]:
        """The names of the inputs with the cache, by layer."""
        layers = range(self.layers)
        return tuple(n.replace("%d", str(layer)) for layer in layers for n in self.past_names)

    def shapes(self, tokens: int, slots: int, mask: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, for so many new ``tokens`` and a cache with so many ``slots``."""
        known = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
        named = {self.inputs[name]: (1, n) for name, n in known.items() if name in self.inputs}
        return named | dict.fromkeys(self.past, (1, self.heads, slots, self.head_size))

    @property
    def content(self) -> Mapping[str, Any]:
        """All that it says of the model."""
        model: Mapping[str, Any] = self.document["model"]
        return model

    @property
    def chunk(self) -> int:
        """The tokens of a prompt that the folder's own pipeline gets at once; 0 for all."""
        window = self._window
        return window["window_size"] if window.get("slide_inputs", True) and window else 0

    @property
    def window(self) -> int:
        """The tokens that layers with a cache of their own size look back; 0 without such layers."""
        return 0 if self.chunk else self._window.get("window_size", 0)

    @property
    def _window(self) -> Mapping[str, Any]:
        window: Mapping[str, Any] = self.content["decoder"].get("sliding_window") or {}
        return window

    @property
    def dummy_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes that fit each other; a pipeline, whose stages are fixed, has none."""
        return {} if self.cached else self.shapes(_TOKENS, _PAST, _PAST + _TOKENS)

    def profile(self, length: int) -> dict[str, ProfileTable]:
        """The optimization profile that onnxruntime-genai gives an EP for conversations of that length."""
        usual = max(1, min(length // 2, _TYPICAL))
        bounds = (1, 0, 1), (1, usual, usual), (length, length, length)
        low, best, high = (self.shapes(*sizes) for sizes in bounds)
        return {n: ProfileTable(min=low[n], opt=best[n], max=high[n]) for n in low}


@dataclass(frozen=True)
class Genai:
    """That a model is of a folder of onnxruntime-genai, which is shipped as a whole.

    ``config``: what the folder says of it. ``beside``: the other files of the folder, by their paths in it.
    ``context_length``: the most tokens of a prompt and its answer; None for the folder's own. ``chunk``: the
    most tokens of a prompt at once, for EPs with fixed sizes. ``filler``: the token that fills the rest of a
    chunk, None where nothing has chunks. ``shares``: whether stages share weights. ``app_name``: the name
    for apps, if the model has several folders, each for some targets. ``stage``: the name of the stage of
    genai's pipeline, if the model is no more than that.
    """

    config: GenaiConfig
    beside: tuple[str, ...]
    context_length: int | None = None
    chunk: int = 64
    filler: int | None = None
    shares: bool = True
    app_name: str = ""
    stage: str = ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer: some apps have their own."""
        return bool(tokenizer_files(self.beside))

    @property
    def tokenizer_dir(self) -> str:
        """The folder of the tokenizer, from that of the model."""
        return self.config.content.get("tokenizer_dir") or "."

    @property
    def length(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.context_length or self.config.context_length

    @property
    def slots(self) -> int:
        """The slots of the cache in stages of fixed sizes, which what fills the last chunk also takes."""
        if self.config.cached:
            return self.length
        return min(self.length + self.chunk, self.config.context_length)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages that are compiled for EPs with fixed sizes.

        They are those with a cache of the folder's own pipeline; or two of the whole model, for a chunk of a
        prompt and for one token.
        """
        return self.config.cached or (str(self.chunk), "1")

    def shared(self, name: str) -> str | None:
        """The name of the group of the stages of the model ``name``, if they share weights."""
        return f"{name}.shared" if self.shares and len(self.stages) > 1 else None

    @property
    def plain_overlay(self) -> dict[str, dict[str, Any]]:
        """What the folder itself needs on the CPU."""
        # onnxruntime-genai rejects a cache below the attention's window.
        most = min(max(self.length, self.config.window), self.config.context_length)
        return self._limits(most)

    @property
    def limits(self) -> dict[str, dict[str, Any]]:
        """What the EP needs besides the names of files: the length also decides how large the cache is."""
        return self._limits(self.slots if self.stage else self.length)

    def _limits(self, most: int) -> dict[str, dict[str, Any]]:
        """An overlay for conversations of at most so many tokens, if the configuration has a length."""
        overlay: dict[str, dict[str, Any]] = {"model": {}}
        if self.context_length is not None:
            overlay = {"model": {"context_length": most}, "search": {"max_length": most}}
        if self.filler is not None:
            # Also where nothing has chunks: onnxruntime-genai drops this token from the end of prompts.
            overlay["model"]["pad_token_id"] = self.filler
        return overlay


def special_ids(content: Mapping[str, Any], name: str) -> list[int]:
    """The ids of the special token ``name``, such as ``"eos"``, in ``content``, a configuration's model."""
    value = content.get(f"{name}_token_id")
    return [
        token for token in (value if isinstance(value, list) else [value]) if type(token) is int
    ]


def tokenizer_files(files: Iterable[str]) -> list[str]:
    """Those of ``files``, with paths in a folder, that are of a tokenizer, by their names."""
    return [file for file in files if file.rpartition("/")[2].startswith(_TOKENIZER)]


def read_config(folder: Path) -> GenaiConfig:
    """What the folder says; raises one of `UNREADABLE`."""
    return config_of(read_document(folder))


def read_document(folder: Path) -> Any:
    """The JSON of the folder's file."""
    text = (folder / GENAI_CONFIG).read_bytes()
    return json.loads(text, object_pairs_hook=_unique)


def config_of(content: Any) -> GenaiConfig:
    """What ``content``, a whole document, says."""
    decoder = value_at(content, "model.decoder", dict)
    pipeline = value_at(content, "model.decoder.pipeline", list, [])
    stages = {name: stage for entry in pipeline for name, stage in dict(entry).items()}
    if stages:
        files = {name: value_at(stage, "filename", str) for name, stage in stages.items()}
    else:
        files = {"": value_at(content, "model.decoder.filename", str)}
    providers = value_at(decoder, "session_options.provider_options", list, [])
    inputs = value_at(decoder, "inputs", dict).items()
    names = [value_at(decoder, f"inputs.past_{kind}_names", str) for kind in ("key", "value")]
    layers = value_at(decoder, "num_hidden_layers", int)
    past = {name.replace("%d", str(layer)) for layer in range(layers) for name in names}
    value_at(content, "model.vocab_size", int)
    if value_at(decoder, "sliding_window", dict, {}):
        value_at(decoder, "sliding_window.window_size", int)
    return GenaiConfig(
        content,
        files,
        tuple(name for name, stage in stages.items() if past.intersection(stage.get("inputs", ()))),
        {name: dict(options) for entry in providers for name, options in entry.items()},
        {"input_ids": "input_ids", **{n: text for n, text in inputs if isinstance(text, str)}},
        tuple(names),
        layers,
        value_at(content, "model.context_length", int),
        value_at(decoder, "num_key_value_heads", int),
        value_at(decoder, "head_size", int),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError for a key that it has twice: genai merges the values."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def value_at(table: Any, path: str, type_: type, default: Any = None) -> Any:
    """The value at the dotted ``path``; raises ValueError for another type, or a number out of range."""
    value = table
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    value = default if value is None else value
    if type(value) is not type_:
        raise ValueError(f"{path} must be of the type {type_.__name__}, not {show(value)}")
    if isinstance(value, int) and not 0 < value <= _MAX:
        raise ValueError(f"{path} must be from 1 to {_MAX}, not {value}")
    return value

"""A folder of onnxruntime-genai as a model: what its genai_config.json says, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hatch_epcontext.config.settings import GENAI_CONFIG, Genai, Model, ShapeSet
from hatch_epcontext.config.tables import (
    FallbackTable,
    ModelTable,
    ProfileTable,
    TargetTable,
)
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem
from hatch_epcontext.files import is_portable, is_regular
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Cut, TensorFacts
from hatch_epcontext.shipped import SOURCE
from hatch_epcontext.text import show, toml_key

_REFUSED = ("dims", "shapes", "constants", "cut", "fallback", "share_weights")
"""Keys of a model that the folder decides."""

_TOKENS, _PAST = 4, 8
"""The tokens of dummy inputs: new ones, and those in the cache before."""

_MAX = 2**24
"""The most layers, tokens and so on: more is a mistake, and would exhaust the memory."""

_TYPICAL = 1024
"""The most tokens that a profile is optimized for, as in onnxruntime-genai's own."""


@dataclass(frozen=True)
class GenaiConfig:
    """What a ``genai_config.json`` says of the decoder.

    ``content``: all that it says of the model.
    ``files``: the model by its name in the folder, or those of the stages of its pipeline by stage.
    ``cached``: the stages that have a cache, which are those worth compiling; none without a pipeline.
    ``providers``: the options of EPs, by genai's names.
    ``past``: the names of the inputs with the cache, of the shape batch x ``heads`` x tokens x ``head_size``.
    """

    content: Mapping[str, Any]
    files: Mapping[str, str]
    cached: tuple[str, ...]
    providers: Mapping[str, Mapping[str, str]]
    inputs: Mapping[str, str]
    past: tuple[str, ...]
    context_length: int
    heads: int
    head_size: int

    def shapes(self, tokens: int, slots: int, mask: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, for so many new ``tokens`` and a cache with so many ``slots``."""
        known = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
        named = {self.inputs[name]: (1, n) for name, n in known.items() if name in self.inputs}
        return named | dict.fromkeys(self.past, (1, self.heads, slots, self.head_size))

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


def read_folder(
    key: Key, table: ModelTable, folder: Path, targets: Mapping[str, NamedTarget | None]
) -> Diagnosed[tuple[Path, ModelTable, Genai | None]]:
    """The language model in ``folder``: its first file, and the ``table`` with what its targets need.

    ``targets``: those of the configuration, by name.
    """
    for name in _REFUSED:
        if getattr(table, name) and not isinstance(getattr(table, name), FallbackTable):
            message = "is for a single model, and this one is a folder of onnxruntime-genai."
            yield Problem.at(key / toml_key(name), Kind.NOT_APPLICABLE, message, "Remove it.")
    try:
        config = read_config(folder)
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        message = f"{GENAI_CONFIG} cannot be read: {error}."
        hint = "Write the folder again, for example with onnxruntime-genai's model builder."
        yield Problem.at(key / "path", Kind.INVALID_FOLDER, message, hint)
        return folder / "model.onnx", table, None
    changed = yield from _changed(key, table, config, targets)
    beside = _files(folder)
    faults = [*_faults(table, folder, config, changed, beside)]
    for name, message, hint in faults:
        text = f"{GENAI_CONFIG} {message}" if name == "path" else message
        yield Problem.at(key / name, Kind.INVALID_FOLDER, text, hint)
    if faults:
        return folder / "model.onnx", table, None
    main, *_ = config.files.values()
    others = tuple(name for name in beside if name != main)
    genai = Genai(others, table.context_length, table.chunk)
    return folder / main, dataclasses.replace(table, targets=changed), genai


def _faults(
    table: ModelTable,
    folder: Path,
    config: GenaiConfig,
    changed: Mapping[str, Any],
    beside: list[str],
) -> Iterator[tuple[str, str, str]]:
    """For each fault the key of the model's table, what is wrong, and what to do."""
    for name in (*config.files.values(), *config.cached):
        if not is_portable(name) or "/" in name:
            message = f"names {show(name)}, which cannot be a file in the folder itself."
            yield "path", message, "Rename it: onnxruntime-genai refuses '..'."
        elif name not in config.cached and not is_regular(folder / name):
            yield "path", f"names the file {show(name)}, which is missing.", "Fetch it."
    root = folder.resolve()
    links = [name for name in beside if not (folder / name).resolve().is_relative_to(root)]
    for name in dict.fromkeys([*(name for name in beside if not is_portable(name)), *links]):
        what = "a link out of the folder" if name in links else "no name of a file on every system"
        yield "path", f"is beside {show(name)}, which is {what}.", "Replace it: apps get all files."
    for name in re.findall(r'"([^"]+\.(?:dll|dylib|so))"', json.dumps(config.content)):
        message = f"names the library {show(name)}, which is for one system."
        yield "path", message, 'Remove it. For QNN, "backend_type": "htp" is right on every system.'
    for name in sorted({*changed, SOURCE}.intersection(file.partition("/")[0] for file in beside)):
        message = f"is beside a folder {show(name)}, the place of that target in the package."
        yield "path", message, "Rename one of them."
    length = table.context_length or config.context_length
    if length > config.context_length:
        message = (
            f"is {length}, and model.context_length in {GENAI_CONFIG} {config.context_length}."
        )
        yield "context-length", message, "Lower it."
    fixed = any(own.static_shapes for own in changed.values() if own)
    pad, bos = (config.content.get(f"{name}_token_id") for name in ("pad", "bos"))
    is_filler = type(pad) is int and pad not in (bos if isinstance(bos, list) else [bos])
    if (fixed or config.cached) and not is_filler:
        message = (
            f"has the pad_token_id {show(pad)}, and prompts begin with {show(bos)} (bos_token_id)."
        )
        yield "path", message, "Set it to the number of a token that no prompt has."
    if fixed and not config.cached:
        if "position_ids" in config.inputs:
            message = "has an input position_ids, which no stage of fixed sizes gets."
            yield "path", message, "Build the folder for another EP: -e cpu."
        if table.context_length is None:
            message = "is required for targets with fixed sizes: the cache has as many slots."
            yield "context-length", message, "For example 2048."
        elif table.chunk > length:
            yield "chunk", f"is {table.chunk}, and context-length is {length}.", "Lower it."


def stages(model: Model) -> tuple[Model, ...]:
    """``model``, and the stages of a pipeline for the targets with fixed sizes.

    These are the stages with a cache of the folder's own pipeline; or the whole model for a chunk of a
    prompt, and for one token, with the lengths of the cache as inputs.
    """
    assert model.genai is not None, "other models have no stages"
    genai, folder = model.genai, model.path.parent
    config = read_config(folder)
    fixed = tuple(target for target in model.targets if target.settings.static_shapes)
    still_open = tuple(target for target in model.targets if not target.settings.static_shapes)
    shapes = config.dummy_shapes
    plain = dataclasses.replace(model, targets=still_open, static_shapes=False, shapes=shapes)
    if not fixed:
        return (plain,)
    modules, in_fixed = model.companion_modules, {target.name for target in fixed}
    in_stages = {name: module for name, module in modules.items() if name in in_fixed}
    rest = {name: module for name, module in modules.items() if name not in in_fixed}
    plain = dataclasses.replace(plain, companion_modules=rest)
    names = config.cached or (str(genai.chunk), "1")
    members = tuple(f"{model.name}.{name}" for name in names)
    common: dict[str, Any] = {
        "targets": fixed,
        "companion_modules": in_stages,
        "fallback": "none",
        "shape_set": ShapeSet(model.name, members, tuple(target.name for target in model.targets)),
        "share_weights": f"{model.name}.shared" if len(names) > 1 else None,
    }
    models = []
    for name, member in zip(names, members, strict=True):
        own: dict[str, Any] = {"genai": dataclasses.replace(genai, stage=name)}
        if config.cached:
            own["path"] = folder / config.files[name]
        else:
            inputs = (config.inputs["input_ids"], *config.past)
            length = genai.context_length or config.context_length
            shapes = config.shapes(int(name), length, 0)
            own |= {"cut": Cut(inputs, lengths=True), "shapes": {n: shapes[n] for n in inputs}}
        models.append(dataclasses.replace(model, name=member, **common, **own))
    # Apps try the targets in the order of the models.
    return (*models, plain) if model.targets[0] in fixed else (plain, *models)


def check_slots(model: Model, inputs: Iterable[TensorFacts]) -> Iterator[Problem]:
    """A conversation that is longer than the cache of a stage with these ``inputs``: some give no error."""
    if model.genai is None or not model.genai.stage or model.cut:
        return
    config = read_config(model.path.parent)
    length = model.genai.context_length or config.context_length
    for value in inputs:
        slots = value.sizes[2] if value.name in config.past and len(value.sizes) > 2 else None
        if isinstance(slots, int) and slots < length:
            message = f"is {length}, and {model.path.name} has a cache of {slots} slots."
            hint, place = "Set it to that.", model.key / "context-length"
            yield Problem.at(place, Kind.INVALID_FOLDER, message, hint)
            return


def read_config(folder: Path) -> GenaiConfig:
    """The ``genai_config.json`` in ``folder``; raises OSError, and ValueError for what it lacks."""
    content = json.loads((folder / GENAI_CONFIG).read_bytes())
    decoder = _value(content, "model.decoder", dict)
    pipeline = _value(content, "model.decoder.pipeline", list, [])
    stages = {name: stage for entry in pipeline for name, stage in dict(entry).items()}
    if stages:
        files = {name: _value(stage, "filename", str) for name, stage in stages.items()}
    else:
        files = {"": _value(content, "model.decoder.filename", str)}
    providers = _value(decoder, "session_options.provider_options", list, [])
    inputs = _value(decoder, "inputs", dict).items()
    names = [_value(decoder, f"inputs.past_{kind}_names", str) for kind in ("key", "value")]
    layers = range(_value(decoder, "num_hidden_layers", int))
    past = tuple(name.replace("%d", str(layer)) for layer in layers for name in names)
    _value(content, "model.vocab_size", int)
    return GenaiConfig(
        content["model"],
        files,
        tuple(name for name, stage in stages.items() if {*past} & {*stage.get("inputs", ())}),
        {name: dict(options) for entry in providers for name, options in entry.items()},
        {"input_ids": "input_ids", **{n: text for n, text in inputs if isinstance(text, str)}},
        past,
        _value(content, "model.context_length", int),
        _value(decoder, "num_key_value_heads", int),
        _value(decoder, "head_size", int),
    )


def _value(table: Any, path: str, type_: type, default: Any = None) -> Any:
    """The value at the dotted ``path``."""
    value = table
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    value = default if value is None else value
    if type(value) is not type_:
        raise ValueError(f"{path} must be of the type {type_.__name__}, not {show(value)}")
    if isinstance(value, int) and not 0 < value <= _MAX:
        raise ValueError(f"{path} must be from 1 to {_MAX}, not {value}")
    return value


def _changed(
    key: Key, table: ModelTable, config: GenaiConfig, targets: Mapping[str, NamedTarget | None]
) -> Diagnosed[dict[str, Any]]:
    """The model's targets with its own changes of them, and with what the folder needs."""
    changes: dict[str, Any] = dict.fromkeys(targets)
    if isinstance(table.targets, tuple):
        changes = dict.fromkeys(targets, False) | dict.fromkeys(table.targets)
    elif table.targets is not None:
        changes |= table.targets
    for name, change in changes.items():
        # Names of unknown targets are another check.
        if change is False or (target := targets.get(name)) is None:
            continue
        provider, needed = target.provider, dict[str, Any](static_shapes=False)
        if provider.genai_name and provider.profiles and not config.cached:
            needed["profiles"] = (config.profile(table.context_length or config.context_length),)
        elif provider.genai_name and not provider.profiles:
            needed["static_shapes"] = True
        elif provider.product == "context":
            what = "a pipeline" if config.cached else "a folder"
            message = f"names {name}, and {what} of onnxruntime-genai is not compiled for its EP."
            hint = f"Set targets = {{ {name} = false }} in the model's table."
            yield Problem.at(key / "targets", Kind.NOT_APPLICABLE, message, hint)
        changes[name] = dataclasses.replace(change or TargetTable(), **needed)
    return changes


def _files(folder: Path) -> list[str]:
    """The files of the folder but hidden ones, by their paths in it, sorted."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sorted(file.as_posix() for file in files if not any(p[0] == "." for p in file.parts))

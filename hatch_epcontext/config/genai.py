"""A folder of onnxruntime-genai as a model: what its genai_config.json says, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatch_epcontext.config.genai_config import (
    GENAI_CONFIG,
    UNREADABLE,
    Genai,
    GenaiConfig,
    config_of,
    read_document,
    tokenizer_files,
    value_at,
)
from hatch_epcontext.config.genai_tokenizer import choose_filler
from hatch_epcontext.config.settings import Model, ShapeSet
from hatch_epcontext.config.tables import ModelTable, TargetTable
from hatch_epcontext.config.targets import NamedTarget
from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem, Setting
from hatch_epcontext.files import is_lfs_pointer, is_portable, is_regular, unreadable
from hatch_epcontext.graph.facts import Cut, TensorFacts
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.shipped import CPU_EP, SOURCE
from hatch_epcontext.text import count, listing, show, toml_key

_OF_FOLDER = ("dims", "shapes", "constants", "cut", "share_weights")
"""Keys of a model that the folder decides."""

_TEXT_TYPES = frozenset(
    """
    chatglm decoder decoder-pipeline ernie4_5 gemma gemma2 gemma3_text gemma3_vl_text gemma4_text gpt2 gptoss
    granite granitemoehybrid hunyuandensev1 internlm2 lfm2 lfm2_audio_text lfm2_moe lfm2_vl_text llama mistral
    mistral3_text nemotron olmo phi phi3 phi3small phimoe qwen2 qwen2_5_vl_text qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_vl_text smollm3
    """.split()  # noqa: SIM905
)
"""The values of ``model.type`` with which onnxruntime-genai 0.18 answers text with text."""

_LIBRARY = r"(?i)\.(dll|dylib|so|pyd|exe)(?!\w)"
"""In a text that names a library, also with a version, in a list of paths, or with what Windows ignores."""

_LOADED = "(?i)backend_path|lib_path|librar|op_packages"
"""In a key whose value is loaded as a library, whatever its name."""

_CACHE = ("batch", "heads", "slots", "head size")
"""The axes of a cache."""

_SHOWN = 3
"""The most files that a message names."""


def read_folder(
    key: Key, table: ModelTable, folder: Path, targets: Mapping[str, NamedTarget | None]
) -> Diagnosed[tuple[Path, ModelTable, Genai | None]]:
    """The language model in ``folder``: its first file, and the ``table`` with what its targets need.

    ``targets``: those of the configuration, by name.
    """
    for name in _OF_FOLDER:
        if getattr(table, name):
            message = "is for a single model, and this one is a folder of onnxruntime-genai."
            yield Problem.at(key / toml_key(name), Kind.NOT_APPLICABLE, message, "Remove it.")
    files, config, changed = _files(folder), None, dict[str, Any]()
    faults = [*_unusable_files(folder, files)]
    if not faults:
        config, faults = _read_text_model(folder)
    if config is not None:
        changed = yield from _changed(key, table, config, targets)
        faults += _faults(table, folder, config, changed, files)
    for name, message, hint in faults:
        yield Problem.at(key / name, Kind.INVALID_FOLDER, message, hint)
    if faults or config is None:
        return folder / "model.onnx", table, None
    filler = None
    if config.cached or _has_fixed(changed):
        filler = yield from _filler(key, folder, config)
    main, *_ = config.files.values()
    beside = tuple(name for name in files if name != main)
    genai = Genai(
        config, beside, table.context_length, table.chunk, filler, table.share_weights is None
    )
    return folder / main, dataclasses.replace(table, targets=changed), genai


def _has_fixed(changed: Mapping[str, Any]) -> bool:
    """Whether one of the ``changed`` targets needs fixed sizes."""
    return any(target.static_shapes for target in changed.values() if target)


def _filler(key: Key, folder: Path, config: GenaiConfig) -> Diagnosed[int | None]:
    """The token that fills what a prompt leaves of a chunk."""
    try:
        filler = choose_filler(folder, config.content)
    except ValueError as error:
        message, hint = f"{error}.", "Fetch it again from where the model comes from."
        yield Problem.at(key / "path", Kind.INVALID_FOLDER, message, hint)
        return None
    if filler.token is None:
        message = (
            f"{GENAI_CONFIG} has the pad_token_id {show(config.content.get('pad_token_id'))}, "
            f"{filler.reason}. It fills chunks of prompts, and no other token is known that no text gives."
        )
        hint = "Set it to a token that no prompt has, and eos_token_id to the end of an answer."
        yield Problem.at(key / "path", Kind.INVALID_FOLDER, message, hint)
    return filler.token


_Fault = tuple[str, str, str]
"""The key of a model's table, what is wrong, and what to do."""


def _unusable_files(folder: Path, files: list[str]) -> Iterator[_Fault]:
    """What is wrong with the ``files`` of the folder, whatever they contain: apps get all of them."""
    root, paths = os.path.realpath(folder), {name: folder / name for name in files}
    real = {name: Path(os.path.realpath(path)) for name, path in paths.items()}
    if links := [n for n in files if paths[n].is_symlink() and not is_regular(paths[n])]:
        message = f"has links to no file: {_names(links)}."
        yield "path", message, _hint_for_links(real[links[0]])
    if links := [n for n in files if n not in links and not real[n].is_relative_to(root)]:
        message = f"has links out of the folder: {_names(links)}."
        yield "path", message, _hint_for_links(real[links[0]])
    regular = [name for name in files if is_regular(paths[name])]
    for name in regular:
        if rejection := unreadable(paths[name]):
            yield "path", f"has the file {show(name)}, which {rejection.message}", rejection.hint
            return
    if pointers := [name for name in regular if is_lfs_pointer(paths[name])]:
        message = f"has pointers of Git LFS instead of files: {_names(pointers)}."
        yield "path", message, "Run: git lfs pull"
    for name in files:
        if not is_portable(name):
            message = f"has the file {show(name)}, which is no name of a file on every system."
            yield "path", message, "Rename it: apps get all files."


def _names(files: Sequence[str]) -> str:
    """The first of the ``files``, of which a hub's snapshot has many."""
    return listing(map(show, files), _SHOWN)


def _hint_for_links(target: Path) -> str:
    """What to do about links, of which one leads to ``target``."""
    if target.parent.name != "blobs":
        return "Copy the files into the folder: apps get all files of the folder."
    kind, *parts = target.parent.parent.name.split("--")
    repository = "/".join(parts) if kind == "models" and parts else "REPOSITORY"
    return (
        "It is a snapshot in a cache of the Hugging Face Hub. Download the files themselves, and name their "
        f"folder: hf download {repository} --local-dir FOLDER"
    )


def _read_text_model(folder: Path) -> tuple[GenaiConfig | None, list[_Fault]]:
    """What ``folder`` says of its text model; None, and why, if it has none that can be read."""
    try:
        document = read_document(folder)
        type_ = value_at(document, "model.type", str)
        if type_ in _TEXT_TYPES:
            return config_of(document), []
    except UNREADABLE as error:
        hint = "Write the folder again, for example with onnxruntime-genai's model builder."
        return None, [("path", f"{GENAI_CONFIG} cannot be read: {error}.", hint)]
    none = "and onnxruntime-genai has no text model of that type"
    message = f"{GENAI_CONFIG} has the type {show(type_)}, {none}."
    return None, [("path", message, "List the ONNX files of other models one by one.")]


def _faults(
    table: ModelTable,
    folder: Path,
    config: GenaiConfig,
    changed: Mapping[str, Any],
    files: list[str],
) -> Iterator[_Fault]:
    for name in (*config.files.values(), *config.cached):
        if not is_portable(name) or "/" in name:
            message = (
                f"{GENAI_CONFIG} names {show(name)}, which cannot be a file in the folder itself."
            )
            yield "path", message, "Rename it: onnxruntime-genai rejects '..'."
        elif name not in config.cached and not is_regular(folder / name):
            message = f"{GENAI_CONFIG} names the file {show(name)}, which is missing."
            yield "path", message, "Fetch it."
    yield from _faults_of_tokenizer(config, files)
    for dotted, library in dict.fromkeys(_libraries(config.document)):
        message = f"{GENAI_CONFIG} names the library {show(library)}, which is for one system."
        hint = f'Remove {dotted}. For QNN, "backend_type": "htp" is right on every system.'
        yield "path", message, hint
    for name in sorted({*changed, SOURCE}.intersection(file.partition("/")[0] for file in files)):
        message = f"has a folder {show(name)}, where the package has that target."
        yield "path", message, "Rename one of them."
    length = table.context_length or config.context_length
    if length > config.context_length:
        message = (
            f"is {length}, and model.context_length in {GENAI_CONFIG} {config.context_length}."
        )
        yield "context-length", message, "Lower it."
    if _has_fixed(changed) and not config.cached:
        if table.context_length is None:
            message = "is required for targets with fixed sizes: the cache has as many slots."
            yield "context-length", message, "For example 2048."
        elif table.chunk > length:
            yield "chunk", f"is {table.chunk}, and context-length is {length}.", "Lower it."


def _faults_of_tokenizer(config: GenaiConfig, files: list[str]) -> Iterator[_Fault]:
    folder = config.content.get("tokenizer_dir") or "."
    inside = folder.rstrip("/") if isinstance(folder, str) else ""
    if inside != "." and not is_portable(inside):
        message = (
            f"{GENAI_CONFIG} has the tokenizer_dir {show(folder)}, which is not in the folder."
        )
        yield "path", message, "Put the tokenizer into the folder: apps get only that."
        return
    if inside == "." and not tokenizer_files(files):
        return
    prefix = "" if inside == "." else f"{inside}/"
    needed = [f"{prefix}{name}" for name in ("tokenizer.json", "tokenizer_config.json")]
    if f"{prefix}tokenizer_module.json" not in files and not {*needed} <= {*files}:
        missing = listing(show(name) for name in needed if name not in files)
        message = f"has no tokenizer for onnxruntime-genai: {missing} is missing."
        yield "path", message, "Fetch it from where the model comes from."


def _libraries(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of libraries in genai's configuration, with the dotted keys at which they are."""
    # Each value with its key, and whether a key says that it is a library; a recursion could be too deep.
    values: list[tuple[Any, str, bool]] = [(document, "", False)]
    while values:
        value, dotted, is_loaded = values.pop()
        if isinstance(value, dict):
            keys = {name: f"{dotted}.{name}".lstrip(".") for name in value}
            yield from ((key, name) for name, key in keys.items() if re.search(_LIBRARY, name))
            values += (
                (inner, keys[name], is_loaded or bool(re.search(_LOADED, name)))
                for name, inner in value.items()
            )
        elif isinstance(value, list):
            values += ((inner, dotted, is_loaded) for inner in value)
        elif isinstance(value, str) and (re.search(_LIBRARY, value) or (is_loaded and value)):
            yield dotted, value


def stages(model: Model) -> tuple[Model, ...]:
    """``model``, and its `Genai.stages` for the targets with fixed sizes.

    Those of a whole model have the lengths of the cache as inputs.
    """
    assert model.genai is not None, "other models have no stages"
    genai, config = model.genai, model.genai.config
    fixed = tuple(target for target in model.targets if target.settings.static_shapes)
    still_open = tuple(target for target in model.targets if not target.settings.static_shapes)
    modules, in_fixed = model.companion_modules, {target.name for target in fixed}
    in_stages = {name: module for name, module in modules.items() if name in in_fixed}
    plain = dataclasses.replace(
        model,
        targets=still_open,
        static_shapes=False,
        shapes=config.dummy_shapes,
        companion_modules={n: module for n, module in modules.items() if n not in in_fixed},
    )
    if not fixed:
        return (plain,)
    common: dict[str, Any] = {
        "targets": fixed,
        "companion_modules": in_stages,
        "fallback": "none",
        "shape_set": ShapeSet(model.name, (), tuple(target.name for target in model.targets)),
        "share_weights": genai.shared(model.name),
    }
    models = []
    for name in genai.stages:
        own: dict[str, Any] = {"genai": dataclasses.replace(genai, stage=name)}
        if config.cached:
            own["path"] = model.path.parent / config.files[name]
        else:
            inputs = (config.inputs["input_ids"], *config.past)
            shapes = config.shapes(int(name), genai.slots, 0)
            own |= {"cut": Cut(inputs, lengths=True), "shapes": {n: shapes[n] for n in inputs}}
        models.append(dataclasses.replace(model, name=f"{model.name}.{name}", **common, **own))
    # Apps try the targets in the order of the models.
    return (*models, plain) if model.targets[0] in fixed else (plain, *models)


def check_targets(model: Model) -> Iterator[Problem]:
    """What the targets of a language model contradict: it is one folder, whose stages share weights."""
    if model.genai is None:
        return
    needed = model.compiled_targets + model.plain_targets
    where = {target.companion for target in needed}
    if model.fallback != "none" or not where:
        where.add(model.companion)
    if len(where) > 1:
        message = "is one folder, and all its targets have to be in the wheel with the folder."
        hint = "Name one companion in them and in fallback = { companion = ... }, or none."
        yield Problem.at(model.key, Kind.INVALID_COMPANION, message, hint)
    fixed = [target for target in model.compiled_targets if target.settings.static_shapes]
    for target in fixed if model.genai.shared(model.name) else ():
        if len(target.provider.per_chip(target.settings.provider_options)) > 1:
            message = (
                "names several chips, and the stages of a language model share weights, which "
                f"{target.settings.ep} compiles for one chip."
            )
            hint = "Give each chip a target of its own."
            yield Problem.at(target.key_of("chip"), Kind.NOT_APPLICABLE, message, hint)


def check_part(key: Key, path: Path) -> Iterator[Problem]:
    """The model at ``path`` that is the decoder of a folder of onnxruntime-genai, for which that is right."""
    config, _ = _read_text_model(path.parent)
    if config is not None and config.files == {"": path.name}:
        folder = show(path.parent.name)
        message = (
            f"is a part of the folder {folder} of onnxruntime-genai, which opens the whole folder."
        )
        hint = (
            "Name the folder instead of the file. If your app runs the model without onnxruntime-genai, "
            "move it out of the folder."
        )
        yield Problem.at(key, Kind.INVALID_FOLDER, message, hint)


def with_cache_sizes(model: Model, inputs: Iterable[TensorFacts]) -> Model:
    """``model`` with the caches that its ``inputs`` have, and with the heads and head sizes that they fix.

    genai_config.json has one of each, and in some models layers differ, or have none.
    """
    if model.genai is None:
        return model
    caches, own = {*model.genai.config.past}, {value.name: value.sizes for value in inputs}
    shapes = {n: shape for n, shape in model.shapes.items() if n in own or n not in caches}
    for name in caches & shapes.keys():
        if len(own[name]) == len(_CACHE):
            sizes = zip(_CACHE, own[name], shapes[name], strict=True)
            shapes[name] = tuple(
                size if isinstance(size, int) and axis.startswith("head") else number
                for axis, size, number in sizes
            )
    return model if shapes == model.shapes else dataclasses.replace(model, shapes=shapes)


def check_caches(model: Model, inputs: Iterable[TensorFacts]) -> Iterator[Problem]:
    """Where genai's configuration of ``model`` contradicts its ``inputs``: some such models give no error."""
    if model.genai is None or model.cut:
        return
    inputs = [*inputs]
    sizes, length = {value.name: value.sizes for value in inputs}, model.genai.length
    fitting = with_cache_sizes(model, inputs).shapes
    profiled = [target.name for target in model.targets if target.profiles]
    others = [name for name in fitting if profiled and fitting[name] != model.shapes[name]]
    if others:
        config, (_, heads, _, size) = model.genai.config, fitting[others[0]]
        message = (
            f"{GENAI_CONFIG} has one head_size, {config.head_size} for {count(config.heads, 'head')}, and "
            f"{others[0]} of {model.path.name} is for {count(heads, 'head')} of {size}: the profile for "
            f"{listing(profiled)} would be wrong."
        )
        setting = Setting(model.key / "targets", dict.fromkeys(profiled, False))
        hint = "Leave that target out."
        yield Problem.at(model.key / "path", Kind.INVALID_FOLDER, message, hint, setting)
    yield from check_layers(model, sizes)
    for name in model.genai.config.past if model.genai.stage else ():
        slots = sizes[name][2] if len(sizes.get(name, ())) > 2 else None
        if isinstance(slots, int) and slots < length:
            message = f"is {length}, and {model.path.name} has a cache of {slots} slots."
            hint, key = "Set it to that.", model.key / "context-length"
            yield Problem.at(key, Kind.INVALID_FOLDER, message, hint)
            return


def check_layers(model: Model, inputs: Iterable[str]) -> Iterator[Problem]:
    """Another number of layers in genai's configuration than ``inputs`` of ``model`` are caches of."""
    if model.genai is None:
        return
    config = model.genai.config
    names = config.state_names
    cache = "|".join(re.escape(name).replace("%d", r"(\d+)") for name in names)
    matches = filter(None, (re.fullmatch(cache, name) for name in inputs))
    present = {int(number) for match in matches for number in match.groups() if number}
    number = max(present, default=-1) + 1
    # Some models have layers without a cache, and stages have a part of the layers.
    is_whole = "" in config.files and present == {*range(number)}
    if number > config.layers or (is_whole and number < config.layers):
        message = (
            f"num_hidden_layers in {GENAI_CONFIG} is {config.layers}, and {model.path.name} has caches of "
            f"{count(number, 'layer')} ({' and '.join(names)})."
        )
        hint = f"Set it to {number}." if number else "Correct the names."
        yield Problem.at(model.key / "path", Kind.INVALID_FOLDER, message, hint)


def _changed(
    key: Key, table: ModelTable, config: GenaiConfig, targets: Mapping[str, NamedTarget | None]
) -> Diagnosed[dict[str, Any]]:
    """The model's targets with its own changes of them, and with what the folder needs."""
    changes: dict[str, Any] = dict.fromkeys(targets)
    if isinstance(table.targets, tuple):
        changes = dict.fromkeys(targets, False) | dict.fromkeys(table.targets)
    elif table.targets is not None:
        changes |= table.targets
    unfit = list[str]()
    for name, change in changes.items():
        # Names of unknown targets are another check.
        if change is False or (target := targets.get(name)) is None:
            continue
        provider, needed = target.provider, dict[str, Any](static_shapes=False)
        if not _runs(provider, config):
            unfit.append(name)
        elif provider.profiles:
            needed["profiles"] = (config.profile(table.context_length or config.context_length),)
        elif not provider.genai_plain:
            needed["static_shapes"] = True
        changes[name] = dataclasses.replace(change or TargetTable(), **needed)
    if unfit:
        what = "a pipeline" if config.cached else "a folder"
        if others := [name for name in config.state_names if name not in config.past_names]:
            what = f"a folder with the inputs {listing(others)}"
        message = (
            f"names {listing(unfit)}, and {what} of onnxruntime-genai is not compiled for its EP."
        )
        able = (name for name, provider in PROVIDERS.items() if _runs(provider, config))
        setting = Setting(key / "targets", dict.fromkeys(unfit, False))
        hint = f"Providers that can: {', '.join(able)}."
        yield Problem.at(key / "targets", Kind.NOT_APPLICABLE, message, hint, setting)
    return changes


def _runs(provider: Provider, config: GenaiConfig) -> bool:
    """Whether onnxruntime-genai runs the folder on the CPU, or what is compiled of it for ``provider``."""
    # The sizes of a pipeline are those of an NPU.
    not_for_npus = provider.profiles or (provider.genai_plain and provider.ep != CPU_EP)
    is_known = bool(provider.genai_name) or provider.ep == CPU_EP
    # Only the whole folder has states other than attention's.
    is_able = provider.genai_plain or {*config.state_names} <= {*config.past_names}
    return is_known and is_able and not (not_for_npus and config.cached)


def _files(folder: Path) -> list[str]:
    """The files of the folder but hidden ones, by their paths in it, sorted."""
    entries = (file for file in folder.rglob("*") if file.is_symlink() or file.is_file())
    files = (file.relative_to(folder) for file in entries)
    return sorted(file.as_posix() for file in files if not any(p[0] == "." for p in file.parts))

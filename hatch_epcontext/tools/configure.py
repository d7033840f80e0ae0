"""Plain Python values -> `Config`, for models without a project.

The values become the tables of ``[tool.epcontext]``, and pass the same checks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from hatch_epcontext.config.environ import PREFIX, VARIABLES
from hatch_epcontext.config.load import load
from hatch_epcontext.config.settings import Config, Target
from hatch_epcontext.config.tables import BuildTable, ModelTable, TargetTable
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.text import file_name, show, suggestion, toml_key

_VARIABLES = frozenset(
    {"CACHE_DIR", "NO_CACHE", "REPORT", *(n for n, v in VARIABLES.items() if v.table == "build")}
)
"""The variables that are not about the targets and models of a project."""

_OF_PROJECTS = frozenset(
    {
        *("provider", "platforms", "requirements", "path", "url", "sha256", "data", "license"),
        *("name", "targets", "companion"),
    }
)
"""The keys of targets and models that arguments set, or that only a project has."""

_OF_TARGETS = {toml_key(key.name) for key in dataclasses.fields(TargetTable)} - _OF_PROJECTS
_OF_MODELS = {toml_key(key.name) for key in dataclasses.fields(ModelTable)} - _OF_PROJECTS
_OF_BUILD = {toml_key(key.name) for key in dataclasses.fields(BuildTable)}

SHARED = "shared-weights"
"""The name of the group of models that share weights."""

MODEL_TABLES = ("dims", "shapes", "constants")
"""Tables of models whose keys can have a model's name before them: ``"decoder:length"``."""


def nested(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings``, whose keys can be dotted, as tables. Tables are merged; else the last value counts."""
    tables: dict[str, Any] = {}
    for dotted, value in (item for mapping in settings for item in mapping.items()):
        key, *inside = dotted.split(".")
        table = _plain(value)
        for name in reversed(inside):
            table = {name: table}
        if key == "validate" and not isinstance(table, dict):
            table = {"mode": table}
        tables[key] = _merged(tables.get(key), table)
    return tables


def _merged(first: Any, second: Any) -> Any:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return {**first, **{key: _merged(first.get(key), value) for key, value in second.items()}}


def is_file(output: Path, models: Sized) -> bool:
    """Whether ``output`` is a file and not a folder; raises ConfigError for a file and several ``models``."""
    if output.suffix != ".onnx" or output.is_dir():
        return False
    if len(models) > 1:
        message = "is a file, and several models need a folder."
        raise ConfigError(Problem(Kind.INVALID_VALUE, str(output), message))
    return True


def name_models(models: Sequence[Path], output: Path | None = None) -> dict[str, Path]:
    """Models by name: the stem of each one's file, or of ``output`` if that `is_file` for a single model.

    Raises ConfigError when two models get the same name, and as `is_file`.
    """
    if output is not None and is_file(output, models):
        return {file_name(output.stem.removesuffix("_ctx"), "_"): path for path in models}
    names: dict[str, Path] = {}
    for path in models:
        name = file_name(path.name if path.is_dir() else path.stem, "_")
        if name in names:
            message = (
                f"{names[name]} and {path} both have the name {name}, and so would their results."
            )
            hint = "Compile them one at a time."
            raise ConfigError(Problem(Kind.DUPLICATE_NAME, str(path), message, hint))
        names[name] = path
    return names


def configure(models: Mapping[str, Path], provider: str, settings: Mapping[str, Any]) -> Config:
    """The configuration for ``models`` by name and one target; raises ConfigError as `load` does.

    ``settings``: keys of a target, a model or the build, dotted or as tables; and ``from-memory``, with which
    the compiler reads and writes memory only, and the blob is inside the context model. A key of
    `MODEL_TABLES` applies to all models, or, with a model's name before it, to that model. The environment
    variables of `BuildTable`, of the cache and of the report count, unless ``settings`` have the same.
    """
    tables = nested(settings)
    target, of_models = split(tables, "build", "from-memory")
    if not isinstance(from_memory := tables.get("from-memory", False), bool):
        message = f"must be true or false, not {show(from_memory)}."
        raise ConfigError(Problem.at(Key() / "from-memory", Kind.WRONG_TYPE, message))
    root: dict[str, Any] = {
        "targets": {provider: {**target, "provider": provider}},
        "models": [
            {**for_model(name, models, of_models), "name": name, "path": str(path.absolute())}
            for name, path in models.items()
        ],
        "build": tables.get("build", {}),
    }
    config = load(Path.cwd(), root, {}, _environ(tables.get("build")), confined=False)
    return _from_memory(config, tables.get("embed")) if from_memory else config


def split(tables: Mapping[str, Any], *others: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a target, and those of models, in `nested` settings.

    Raises ConfigError for keys that are neither, nor one of ``others``.
    """
    settable = _OF_TARGETS | _OF_MODELS | {*others}
    problems = [
        Problem.at(
            Key() / name,
            Kind.UNKNOWN_KEY,
            f"{show(name)} is not a key that can be set.",
            f"It is a key of build: build.{name}."
            if "build" in settable and name in _OF_BUILD
            else suggestion(name, sorted(settable)),
        )
        for name in tables
        if name not in settable
    ]
    ConfigError.check(problems)
    target = {key: value for key, value in tables.items() if key in _OF_TARGETS}
    of_models = {key: value for key, value in tables.items() if key in _OF_MODELS - _OF_TARGETS}
    return target, of_models


def _from_memory(config: Config, embed: object) -> Config:
    """``config``, whose targets compile from memory to memory; ``embed``: the key, if it is set."""
    key, replace = Key() / "from-memory", dataclasses.replace
    for target in config.targets:
        provider = target.provider
        writes_files = provider.by_library or provider.own_context_options("", embed=True)
        if writes_files or provider.product != "context":
            message = f"what compiles for the {provider.name} provider reads and writes files."
            raise ConfigError(Problem.at(key, Kind.NOT_APPLICABLE, message, "Leave it out."))
        other = "embed = false" if embed is False else "external-initializers = true"
        if embed is False or target.settings.external_initializers:
            message = f"makes one context model with everything inside, and there is {other}."
            raise ConfigError(Problem.at(key, Kind.CONFLICTING_KEYS, message, "Keep one of them."))

    def in_memory(target: Target) -> Target:
        return replace(target, settings=replace(target.settings, from_memory=True, embed=True))

    models = (replace(m, targets=tuple(map(in_memory, m.targets))) for m in config.models)
    return replace(config, models=tuple(models))


def _environ(build: object) -> Mapping[str, str]:
    """The variables that apply, without those that the table ``build`` overrides."""
    keys = build if isinstance(build, Mapping) else ()
    explicit = {key.upper().replace("-", "_") for key in keys}
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) in _VARIABLES - explicit
    }


def for_model(model: str, models: Collection[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``settings`` for ``model``: all but those with the name of another of ``models``."""
    own = dict(settings)
    for table in MODEL_TABLES:
        # Several shapes are a list.
        if isinstance(values := settings.get(table), Mapping):
            own[table] = {}
            for key, value in values.items():
                head, colon, rest = key.partition(":")
                is_of_a_model = colon and head in models
                if not is_of_a_model or head == model:
                    own[table][rest if is_of_a_model else key] = value
    return own


def _plain(value: Any) -> Any:
    """``value`` as TOML has it: dictionaries, lists, and strings for paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value

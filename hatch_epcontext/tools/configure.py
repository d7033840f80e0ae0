"""Plain Python values -> `Config`, for models without a project.

The values become the tables of ``[tool.epcontext]``, and pass the same checks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatch_epcontext.config.environ import PREFIX, VARIABLES
from hatch_epcontext.config.load import load
from hatch_epcontext.config.settings import Config, Target
from hatch_epcontext.config.tables import BuildTable, Fallback, ModelTable, TargetTable
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem
from hatch_epcontext.text import file_name, show, suggestion, toml_key

_GROUP = "shared-weights"
"""The name of the group of models that share weights."""

_Tables = dict[str, Any]

_VARIABLES = frozenset(
    {"CACHE_DIR", "NO_CACHE", "REPORT", *(n for n, v in VARIABLES.items() if v.table == "build")}
)
"""The variables that are not about the targets and models of a project."""

_OF_PROJECTS = frozenset(
    {
        *("provider", "platforms", "requirements", "path", "url", "sha256", "data", "license"),
        *("sdist", "name", "targets", "share-weights", "fallback"),
    }
)
"""The keys of targets and models that flags and arguments set, or that only a project has."""

_OF_TARGETS = {toml_key(key.name) for key in dataclasses.fields(TargetTable)} - _OF_PROJECTS
_OF_MODELS = {toml_key(key.name) for key in dataclasses.fields(ModelTable)} - _OF_PROJECTS
_OF_BUILDS = {f"build.{toml_key(key.name)}" for key in dataclasses.fields(BuildTable)}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How models are compiled and validated.

    The fields are keys of ``[tool.epcontext]``. A key of ``dims``, ``shapes`` or ``constants`` applies to
    all models, or, with a model's name before it (``"decoder:length"``), to that model. ``fallback`` applies
    only to a model package. ``validate`` is the mode or the table. With ``from_memory`` the compiler reads
    and writes memory only, and the blob is inside the context model. ``settings``: other keys, dotted.
    """

    provider_options: Mapping[str, Any] = field(default_factory=dict)
    session_options: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    optimization: str | None = None
    embed: bool | None = None
    share_weights: bool = False
    from_memory: bool = False
    fallback: Fallback | None = None
    dims: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    validate: Any = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None


def name_models(models: Sequence[Path], file: Path | None = None) -> dict[str, Path]:
    """Models by name: the stem of each model's file, or for a single model that of its result ``file``.

    Raises ConfigError when two models get the same name.
    """
    if file is not None and len(models) == 1:
        return {file_name(file.stem.removesuffix("_ctx"), "_"): models[0]}
    names: dict[str, Path] = {}
    for path in models:
        name = file_name(path.stem, "_")
        if name in names:
            message = (
                f"{names[name]} and {path} both have the name {name}, and so would their results."
            )
            hint = "Compile them one at a time."
            raise ConfigError(Problem(Kind.DUPLICATE_NAME, str(path), message, hint))
        names[name] = path
    return names


def configure(models: Mapping[str, Path], provider: str, job_settings: JobSettings) -> Config:
    """The configuration for ``models`` by name and one target; raises ConfigError as `load` does.

    The environment variables of `BuildTable`, of the cache and of the report count, unless
    ``job_settings`` sets the same.
    """
    tables = [_model_table(name, models, job_settings) for name in models]
    target: _Tables = {
        "provider": provider,
        "provider-options": _plain(job_settings.provider_options),
        "session-options": _plain(job_settings.session_options),
    }
    for key in ("device", "optimization", "embed"):
        if (value := getattr(job_settings, key)) is not None:
            target[key] = value
    build: _Tables = {}
    _check_settable(job_settings.settings)
    for dotted, value in job_settings.settings.items():
        key, _, inside = dotted.partition(".")
        if key == "build":
            _assign(build, inside, value)
            continue
        for table in [target] if key in _OF_TARGETS else tables:
            if dotted == "validate":
                table[key] = {**table[key], **_validate_table(value)}
            else:
                _assign(table, dotted, value)
    root: _Tables = {"targets": {provider: target}, "models": tables, "build": build}
    if job_settings.fallback is not None:
        root["fallback"] = job_settings.fallback
    config = load(Path.cwd(), root, {}, _environ(build, job_settings), confined=False)
    return _from_memory(config, target.get("embed")) if job_settings.from_memory else config


def _from_memory(config: Config, embed: object) -> Config:
    """``config``, whose targets compile from memory to memory; ``embed``: the key, if it is set."""
    key, replace = Key() / "from-memory", dataclasses.replace
    for target in config.targets:
        provider = target.provider
        if (
            provider.product != "context"
            or provider.own_context_options("", embed=True)
            or provider.by_library
        ):
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


def _environ(build: _Tables, job_settings: JobSettings) -> Mapping[str, str]:
    """The variables that apply, without those that ``build`` or ``job_settings`` override."""
    explicit = {key.upper().replace("-", "_") for key in build}
    environ = {
        name: text
        for name, text in os.environ.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) in _VARIABLES - explicit
    }
    folder = job_settings.cache_dir
    return environ if folder is None else {**environ, f"{PREFIX}CACHE_DIR": str(folder)}


def _model_table(name: str, models: Mapping[str, Path], job_settings: JobSettings) -> _Tables:
    table: _Tables = {
        "name": name,
        "path": str(models[name].absolute()),
        "dims": for_model(name, models, job_settings.dims),
        "shapes": for_model(name, models, job_settings.shapes),
        "constants": for_model(name, models, job_settings.constants),
        "validate": _validate_table(job_settings.validate),
    }
    return {**table, "share-weights": _GROUP} if job_settings.share_weights else table


def for_model(
    model: str, models: Mapping[str, Path], values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The ``values`` for ``model``: all but those with the name of another model."""
    result = {}
    for key, value in values.items():
        head, colon, rest = key.partition(":")
        if not (colon and head in models):
            result[key] = _plain(value)
        elif head == model:
            result[rest] = _plain(value)
    return result


def _validate_table(value: Any) -> _Tables:
    table: _Tables = _plain(value) if isinstance(value, Mapping) else {"mode": value}
    return table


def _check_settable(settings: Mapping[str, Any]) -> None:
    # What is inside of a target's or model's key is checked with its table.
    settable = _OF_TARGETS | _OF_MODELS | _OF_BUILDS
    problems = [
        Problem.at(
            Key(tuple(name.split("."))),
            Kind.UNKNOWN_KEY,
            f"{show(name)} is not a key that can be set.",
            suggestion(name, sorted(settable)),
        )
        for name in settings
        if not {name, name.split(".")[0]} & settable
    ]
    if problems:
        raise ConfigError(*problems)


def _assign(table: _Tables, dotted: str, value: Any) -> None:
    """Set the dotted key in ``table``; a value in its path is replaced by a table."""
    *outer, last = dotted.split(".")
    for name in outer:
        if not isinstance(table.get(name), dict):
            table[name] = {}
        table = table[name]
    table[last] = _plain(value)


def _plain(value: Any) -> Any:
    """``value`` as TOML has it: dictionaries, lists, and strings for paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value

"""Flags -> the tables of ``[tool.epcontext]``, which so pass the same checks."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.checks import as_name
from hatch_epcontext.cli.flags import Flags
from hatch_epcontext.config import Config, load
from hatch_epcontext.environment import PREFIX
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import show, suggestion, toml_key
from hatch_epcontext.tables import (
    MADE_UP,
    ModelTable,
    NarrowableTable,
    RootTable,
    TargetTable,
)

Tables = dict[str, Any]

GROUP = "shared-weights"
"""What models are called together that share weights."""

_ENVIRONMENT = ("CACHE_DIR", "NO_CACHE", "JOBS", "TIMEOUT", "REPORT")
"""Those variables that do not speak of a project's targets and models."""

_OWN = frozenset({"provider", "models", "targets", "name", "path", "share_weights"})
_OF_WHEELS = frozenset(
    {
        "default_targets",
        "editable",
        "fallback",
        "max_size",
        "output",
        "platforms",
        "requirements",
        "wheel_tag",
    }
)


def _settable() -> dict[str, bool]:
    """Keys that ``--set`` takes, and whether each is a model's."""
    of_models = {f.name for f in dataclasses.fields(ModelTable)} - {
        f.name for f in dataclasses.fields(NarrowableTable)
    }
    of_targets = {
        f.name for f in (*dataclasses.fields(RootTable), *dataclasses.fields(TargetTable))
    }
    names = sorted((of_models | of_targets) - _OWN - _OF_WHEELS)
    return {toml_key(name): name in of_models for name in names}


SETTABLE = _settable()


def configuration(
    models: Mapping[str, Path],
    flags: Flags,
    *,
    embed: bool | None = None,
    share_weights: bool = False,
    validate: bool = True,
) -> Config:
    """The configuration that the flags come to, for models by name; raises ConfigError as `load` does."""
    tables = []
    for name, path in models.items():
        table: Tables = {
            "name": name,
            "path": str(path.absolute()),
            "dims": _of(name, models, flags.dims, _whole),
            "shapes": _of(name, models, flags.shapes, _sizes),
            "constants": _of(name, models, flags.constants, value),
        }
        if flags.inputs is not None:
            made_up = flags.inputs in MADE_UP
            table["inputs"] = flags.inputs if made_up else str(Path(flags.inputs).absolute())
        if share_weights:
            table["share-weights"] = GROUP
        if not validate:
            table["validate"] = False
        tables.append(table)
    root: Tables = {
        "provider": flags.provider,
        "provider-options": dict(flags.options),
        "session-options": dict(flags.configs),
        "models": tables,
    }
    for key, given in (
        ("device", flags.device),
        ("optimization", flags.optimization),
        ("embed", embed),
    ):
        if given is not None:
            root[key] = given
    for key, text in flags.settings.items():
        if key not in SETTABLE:
            what = f"{show(key)} is not a key that can be set."
            raise click.BadParameter(
                f"{what} {suggestion(key, list(SETTABLE))}", param_hint="--set"
            )
        for each in tables if SETTABLE[key] else [root]:
            each[key] = value(text)
    environ = {
        name: text
        for name, text in os.environ.items()
        if name.removeprefix(PREFIX) in _ENVIRONMENT and name.startswith(PREFIX)
    }
    return load(Path.cwd(), root, {}, environ, confined=False)


def _of(
    model: str,
    models: Mapping[str, Path],
    pairs: Sequence[tuple[str, str]],
    read: Callable[[str], Any],
) -> dict[str, Any]:
    """Those of ``pairs`` that are for ``model``: all but those that begin with another one's name."""
    found = {}
    for key, text in pairs:
        head, colon, rest = key.partition(":")
        if colon and head in models:
            if head != model:
                continue
            key = rest  # noqa: PLW2901
        found[key] = read(text)
    return found


def _whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sizes(text: str) -> Any:
    return [_whole(size.strip()) for size in text.split(",")] if text.strip() else []


def value(text: str) -> Any:
    """``text`` as TOML, or as itself where it is none."""
    try:
        values = parse(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text


def names_of(models: Sequence[Path], out: Path | None = None) -> dict[str, Path]:
    """Models by name: each file's stem, or for a single one what ``out`` calls its context model."""
    if out is not None:
        (path,) = models
        return {as_name(out.stem.removesuffix("_ctx"), "_"): path}
    names: dict[str, Path] = {}
    for path in models:
        name = as_name(path.stem, "_")
        if name in names:
            raise click.UsageError(
                f"{names[name]} and {path} are both called {name}, and so would be what is made of them."
            )
        names[name] = path
    return names

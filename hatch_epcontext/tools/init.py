"""``pyproject.toml`` and the facts of models -> ``pyproject.toml`` with tables for the models.

New tables are appended as text, with comments. tomlkit edits existing lists, and keeps everything else
as its author wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name
from tomlkit.items import AoT, Array

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import HOOK, ROOT, ConfigError, Kind, Problem
from hatch_epcontext.ipc.facts import TensorFacts
from hatch_epcontext.ipc.protocol import InspectReply
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import file_name, quoted_key, show, to_toml

_PACKAGE = "hatch-epcontext"
_BACKEND = "hatchling.build"


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, and the facts of its file."""

    path: str
    facts: InspectReply


def add_models(
    root: Path, text: str, models: Sequence[NewModel], providers: Sequence[Provider]
) -> str:
    """``text``, the ``pyproject.toml`` of the project in ``root``, with all that ``models`` need.

    If it is configured already, the models that it does not list are added, and ``providers`` must be
    empty. Raises ConfigError when that is impossible; the result is always a valid configuration.
    """
    try:
        document = tomlkit.parse(text)
        before = parse(text)
    except ValueError as error:
        raise ConfigError(
            Problem(Kind.INVALID_PYPROJECT, "pyproject.toml", f"is not TOML: {error}.")
        ) from error
    tool = before.get("tool", {})
    table = tool.get("epcontext")
    if table is not None and providers:
        raise ConfigError(
            Problem(
                Kind.INVALID_PYPROJECT,
                f"[{ROOT}]",
                "exists already, and providers can only be chosen for a new configuration.",
                "Add the target to it by hand.",
            )
        )
    static = table is not None or any(provider.static_shapes for provider in providers)
    listed = set(_listed(table))
    new = [model for model in models if model.path not in listed]
    appended = [*_build_system(document, before)]
    if not _has_hook(tool):
        appended.append(f"[{HOOK}]  # switches the hook on\n")
    if table is None:
        appended += _head(providers)
    tables = [_model(model, name, static=static) for model, name in _named(new, listed)]
    existing = document.get("tool", {}).get("epcontext", {}).get("models")
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for model_table in tables:
            existing.append(_inline(model_table))
        tables = []
    result = tomlkit.dumps(document)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    _check(root, result)
    return result


def _build_system(document: tomlkit.TOMLDocument, before: Mapping[str, Any]) -> Iterator[str]:
    """Add this package to the build requirements; yield the whole table if there is none."""
    system = before.get("build-system")
    if system is None:
        yield f'[build-system]\nrequires = ["hatchling", "{_PACKAGE}"]\nbuild-backend = "{_BACKEND}"\n'
        return
    if system.get("build-backend") != _BACKEND:
        raise ConfigError(
            Problem(
                Kind.INVALID_PYPROJECT,
                "build-system.build-backend",
                f"is {show(system.get('build-backend'))}, and the hook needs Hatch's build backend.",
                f'Change the project to build-backend = "{_BACKEND}".',
            )
        )
    names = [re.split(r"[^A-Za-z0-9._-]", each)[0] for each in system.get("requires", ())]
    if _PACKAGE not in {str(canonicalize_name(name)) for name in names}:
        document["build-system"]["requires"].append(_PACKAGE)


def _has_hook(tool: Mapping[str, Any]) -> bool:
    build = tool.get("hatch", {}).get("build", {})
    wheel = build.get("targets", {}).get("wheel", {})
    return "epcontext" in build.get("hooks", {}) or "epcontext" in wheel.get("hooks", {})


def _listed(table: Mapping[str, Any] | None) -> Iterator[str]:
    for model in (table or {}).get("models", ()):
        path = model.get("path") if isinstance(model, dict) else model
        if isinstance(path, str):
            yield PurePosixPath(path).as_posix()


def _head(providers: Iterable[Provider]) -> Iterator[str]:
    yield (f'[{ROOT}]\n# fallback = "none"  # do not ship the source models\n')
    for provider in providers:
        lines = [
            f"[{ROOT}.targets.{quoted_key(provider.name)}]",
            f"provider = {to_toml(provider.name)}",
        ]
        if provider.example:
            lines.append(provider.example)
        if provider.product == "context":
            lines.append("# min-coverage = 0.9  # accept partly compiled models")
        lines.append('# platforms = ["win_arm64"]  # the wheels that it is for; default: all')
        yield "\n".join(lines) + "\n"


def _named(
    models: Iterable[NewModel], listed: Iterable[str]
) -> Iterator[tuple[NewModel, str | None]]:
    """Each model with the name that it needs, or None where the name of its file is valid and free."""
    taken = {PurePosixPath(path).stem.casefold() for path in listed}
    for model in models:
        stem = PurePosixPath(model.path).stem
        name = plain = file_name(stem, "-")
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.casefold())
        yield model, name if name != stem else None


def _model(model: NewModel, name: str | None, *, static: bool) -> str:
    lines = [f"[[{ROOT}.models]]"]
    for heading, tensors in (("in", model.facts.inputs), ("out", model.facts.outputs)):
        lines += [f"# {heading}: {_comment(tensor)}" for tensor in tensors]
    if name is not None:
        lines.append(f"name = {to_toml(name)}")
    lines.append(f"path = {tomlkit.item(model.path).as_string()}")
    off = "" if static else "# "
    if dims := {
        size: 1 for tensor in model.facts.inputs for size in tensor.shape if isinstance(size, str)
    }:
        lines.append(f"{off}dims = {to_toml(dims)}  # open dimensions; 1 is a guess")
    if shapes := {
        tensor.name: [size if isinstance(size, int) else 1 for size in tensor.shape]
        for tensor in model.facts.inputs
        if None in tensor.shape
    }:
        lines.append(f"{off}shapes = {to_toml(shapes)}  # dimensions without a name; 1 is a guess")
    for tensor in model.facts.inputs:
        if tensor.shape in ((), (1,)) and "int" in tensor.dtype:
            constant = to_toml({tensor.name: 0})
            lines.append(f"# constants = {constant}  # for an input that never changes")
    return "\n".join(lines) + "\n"


def _comment(tensor: TensorFacts) -> str:
    # A name can have any characters, and a comment is one line.
    text = f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}"
    return re.sub(r"\s+", " ", text)


def _inline(table: str) -> Any:
    """A model's table as an item of a list, which cannot have comments."""
    values = parse(table)["tool"]["epcontext"]["models"][0]
    if values.keys() == {"path"}:
        return values["path"]
    inline = tomlkit.inline_table()
    inline.update(values)
    return inline


def _check(root: Path, text: str) -> None:
    try:
        table = parse(text)["tool"]["epcontext"]
    except ValueError as error:
        raise ConfigError(
            Problem(
                Kind.INVALID_PYPROJECT,
                "pyproject.toml",
                f"has inline tables, to which nothing can be added: {error}.",
                f"Write [tool] and [tool.hatch] as tables of their own, or add [{HOOK}] and [{ROOT}] by "
                "hand.",
            )
        ) from error
    load(root, table, {}, {})

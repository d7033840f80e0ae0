"""``pyproject.toml`` and what models say of themselves -> ``pyproject.toml`` with tables for them.

New tables are appended as text, with comments; tomlkit edits the lists that are there already, and keeps
everything else as its author wrote it.
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

from hatch_epcontext.checks import as_name
from hatch_epcontext.config import load
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.protocol import DescribeReply, TensorFacts
from hatch_epcontext.providers import Provider
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import at
from hatch_epcontext.tables import KEY

PACKAGE = "hatch-epcontext"
BACKEND = "hatchling.build"
HOOK = "tool.hatch.build.targets.wheel.hooks.epcontext"


@dataclass(frozen=True)
class NewModel:
    """A model to be listed: its path in the project, with forward slashes, and what its file says."""

    path: str
    facts: DescribeReply


def scaffold(
    root: Path, text: str, models: Sequence[NewModel], providers: Sequence[Provider]
) -> str:
    """``text``, the ``pyproject.toml`` of the project in ``root``, with all that ``models`` need.

    Where there is a configuration already, models that it does not list are added, and ``providers`` have
    to be empty. Raises ConfigError when that cannot be done; the result is always right.
    """
    try:
        document = tomlkit.parse(text)
        before = parse(text)
    except ValueError as error:
        raise ConfigError(Problem("pyproject.toml", f"is not TOML: {error}.")) from error
    tool = before.get("tool", {})
    there = tool.get("epcontext")
    if there is not None and providers:
        raise ConfigError(
            Problem("--provider", f"[{KEY}] is there already.", "Add the target there by hand.")
        )
    static = there is not None or any(provider.static_shapes for provider in providers)
    listed = set(_listed(there))
    new = [model for model in models if model.path not in listed]
    appended = [*_build_system(document, before)]
    if not _has_hook(tool):
        appended.append(f"[{HOOK}]  # switches the hook on\n")
    if there is None:
        appended += _head(providers)
    tables = [_model(model, names, static=static) for model, names in _named(new, listed)]
    existing = document.get("tool", {}).get("epcontext", {}).get("models")
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for table in tables:
            existing.append(_inline(table))
        tables = []
    result = tomlkit.dumps(document)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    _check(root, result)
    return result


def _build_system(document: tomlkit.TOMLDocument, before: Mapping[str, Any]) -> Iterator[str]:
    """Add this package to what the project is built with; yields the table if there is none."""
    system = before.get("build-system")
    if system is None:
        yield f'[build-system]\nrequires = ["hatchling", "{PACKAGE}"]\nbuild-backend = "{BACKEND}"\n'
        return
    if system.get("build-backend") != BACKEND:
        raise ConfigError(
            Problem(
                "build-system.build-backend",
                f"is {system.get('build-backend')!r}, and this is a hook of Hatch's build backend.",
                f'Move the project to build-backend = "{BACKEND}".',
            )
        )
    names = [re.split(r"[^A-Za-z0-9._-]", each)[0] for each in system.get("requires", ())]
    if PACKAGE not in {str(canonicalize_name(name)) for name in names}:
        document["build-system"]["requires"].append(PACKAGE)


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
    yield (
        f"[{KEY}]\n"
        '# fallback = "none"  # do not ship the source models too\n'
        "# min-coverage = 0.9  # let less than all of a model be compiled\n"
    )
    for provider in providers:
        lines = [f"[{KEY}.targets{at(provider.name)}]", f"provider = {_toml(provider.name)}"]
        if provider.example:
            lines.append(provider.example)
        lines.append(
            '# platforms = ["win_arm64"]  # which wheels this target is for; all if left out'
        )
        yield "\n".join(lines) + "\n"


def _named(models: Iterable[NewModel], listed: Iterable[str]) -> Iterator[tuple[NewModel, str]]:
    """Each model with the name that it has to be given, or "" where its file's will do."""
    taken = {PurePosixPath(path).stem.casefold() for path in listed}
    for model in models:
        stem = PurePosixPath(model.path).stem
        name = plain = as_name(stem, "-")
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.casefold())
        yield model, name if name != stem else ""


def _model(model: NewModel, name: str, *, static: bool) -> str:
    lines = [f"[[{KEY}.models]]"]
    for heading, tensors in (("in", model.facts.inputs), ("out", model.facts.outputs)):
        lines += [f"# {heading}: {_comment(tensor)}" for tensor in tensors]
    if name:
        lines.append(f"name = {_toml(name)}")
    lines.append(f"path = {_toml(model.path)}")
    named = dict.fromkeys(
        size for tensor in model.facts.inputs for size in tensor.shape if isinstance(size, str)
    )
    off = "" if static else "# "
    if named:
        dims = ", ".join(f"{at(size)[1:]} = 1" for size in named)
        lines.append(f"{off}dims = {{ {dims} }}  # open dimensions; 1 is a guess")
    shapes = [
        f"{at(tensor.name)[1:]} = [{', '.join(str(s) if isinstance(s, int) else '1' for s in tensor.shape)}]"
        for tensor in model.facts.inputs
        if None in tensor.shape
    ]
    if shapes:
        lines.append(
            f"{off}shapes = {{ {', '.join(shapes)} }}  # dimensions without a name; 1 is a guess"
        )
    for tensor in model.facts.inputs:
        if tensor.shape in ((), (1,)) and "int" in tensor.dtype:
            lines.append(
                f"# constants = {{ {at(tensor.name)[1:]} = 0 }}  # if it never changes: it is folded away"
            )
    return "\n".join(lines) + "\n"


def _comment(tensor: TensorFacts) -> str:
    # A name may be anything, and a comment is one line.
    name = re.sub(r"\s+", " ", tensor.name)
    return f"{name}: {tensor.dtype}, {tensor.words or 'scalar'}".replace("\n", " ")


def _toml(value: str) -> str:
    return tomlkit.item(value).as_string()


def _inline(table: str) -> Any:
    """A model's table as an item of a list, which has no room for comments."""
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
                "pyproject.toml",
                f"has tables that cannot be added to: {error}.",
                f"Write [tool.hatch] and [tool] as tables of their own, or add [{HOOK}] and [{KEY}] by hand.",
            )
        ) from error
    load(root, table, {}, {})

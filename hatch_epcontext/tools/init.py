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

from hatch_epcontext.config.build_hooks import NAME, hooks_for_command, hooks_table
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import HOOK, ROOT, ConfigError, Kind, Problem
from hatch_epcontext.ipc.facts import TensorFacts
from hatch_epcontext.ipc.protocol import InspectReply, OpenSize, SuggestReply
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import file_name, quoted_key, show, to_toml

_PACKAGE = "hatch-epcontext"
_BACKEND = "hatchling.build"


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, the facts of its file, and what to
    suggest for it. An open dimension that ``suggested`` does not have gets a question.
    """

    path: str
    facts: InspectReply
    suggested: SuggestReply = SuggestReply()

    @property
    def questions(self) -> tuple[str, ...]:
        """What the user has to say about open dimensions, as it stands in the comments."""
        return tuple(dict.fromkeys(_questions(self).values()))


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
        appended += _hook_tables(tool)
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


def _hook_tables(tool: Mapping[str, Any]) -> tuple[str, ...]:
    """The tables that switch the hook on, for wheels and sdists, behind the project's other hooks."""
    build = tool.get("hatch", {}).get("build", {})
    if not build.get("targets", {}).get("wheel", {}).get("hooks"):
        return (f"[{HOOK}]  # switches the hook on\n",)
    # Hooks for all targets run before those for wheels.
    return (
        f"[{hooks_table('wheel')}.{NAME}]  # switches the hook on, after the other ones\n",
        f"[{hooks_table('sdist')}.{NAME}]  # checks that sdists have the models\n",
    )


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
    lines += [line if line.startswith("# ") else off + line for line in _sizes(model)]
    lines += _constants(model, static=static)
    return "\n".join(lines) + "\n"


_Place = tuple[str, int]
"""The name of an input, and an axis of it."""


def _open_sizes(model: NewModel) -> dict[_Place, OpenSize]:
    """What is suggested for each open dimension."""
    suggested = {(each.input, each.axis): each for each in model.suggested.sizes}
    return {
        (tensor.name, axis): suggested.get(
            (tensor.name, axis), OpenSize(tensor.name, axis, None, "which size?")
        )
        for tensor in model.facts.inputs
        for axis, size in enumerate(tensor.shape)
        if not isinstance(size, int)
    }


def _questions(model: NewModel) -> dict[_Place, str]:
    shapes = {tensor.name: tensor.shape for tensor in model.facts.inputs}
    found = {}
    for place, each in _open_sizes(model).items():
        if each.size is None:
            name, axis = place
            size = shapes[name][axis]
            what = size if isinstance(size, str) else f"axis {axis} of {name}"
            found[place] = _one_line(f"{what}: {each.note}")
    return found


def _sizes(model: NewModel) -> Iterator[str]:
    """The lines with the sizes of open dimensions; those with a question are comments."""
    sizes = _open_sizes(model)
    dims: dict[str, int | None] = {}
    of_dims: list[_Place] = []
    shapes: dict[str, list[int | None]] = {}
    of_shapes: list[_Place] = []
    for tensor in model.facts.inputs:
        places = [(tensor.name, axis) for axis in range(len(tensor.shape))]
        found = [sizes[place].size if place in sizes else None for place in places]
        if None in tensor.shape:
            fixed = (size if isinstance(size, int) else None for size in tensor.shape)
            shapes[tensor.name] = [
                a if a is not None else b for a, b in zip(fixed, found, strict=True)
            ]
            of_shapes += [place for place in places if place in sizes]
        for place, size, suggested in zip(places, tensor.shape, found, strict=True):
            if isinstance(size, str) and size not in dims:
                dims[size] = suggested
                of_dims.append(place)
    asked = _questions(model)
    if dims:
        yield _line("dims", dims, [(sizes[place], asked.get(place)) for place in of_dims])
    if shapes:
        yield _line("shapes", shapes, [(sizes[place], asked.get(place)) for place in of_shapes])


def _line(key: str, table: object, found: Sequence[tuple[OpenSize, str | None]]) -> str:
    notes = dict.fromkeys(question or _one_line(each.note) for each, question in found)
    line = f"{key} = {_written(table)}  # {'; '.join(notes)}"
    return f"# {line}" if any(question for _, question in found) else line


def _written(value: object) -> str:
    """``value`` in TOML, but with question marks for what is unknown."""
    if isinstance(value, Mapping):
        items = (f"{quoted_key(name)} = {_written(each)}" for name, each in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return "?" if value is None else to_toml(value)


def _constants(model: NewModel, *, static: bool) -> Iterator[str]:
    """The lines with inputs that can be constants: comments, but for what an EP cannot do without."""
    needed = [
        each
        for each in model.suggested.constants
        if static and each.needed and each.value is not None
    ]
    values = {each.input: each.value for each in needed}
    if needed:
        notes = dict.fromkeys(_one_line(each.note) for each in needed)
        yield f"constants = {_written(values)}  # {'; '.join(notes)}"
    others = [each for each in model.suggested.constants if each not in needed]
    if others:
        # A table has one such line: the values that are needed belong to it too.
        values |= {each.input: each.value for each in others}
        notes = dict.fromkeys(_one_line(each.note) for each in others)
        yield f"# constants = {_written(values)}  # {'; '.join(notes)}"


def _comment(tensor: TensorFacts) -> str:
    # A name can have any characters, and a comment is one line.
    return _one_line(f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}")


def _one_line(text: str) -> str:
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
    # What another build hook makes need not be there.
    hooks = hooks_for_command(root)
    load(root, table, {}, {}, hooks=hooks, pending=bool(hooks))

"""``pyproject.toml`` and the facts of models -> ``pyproject.toml`` with tables for the models.

New tables are appended as text, with comments. tomlkit adds to the lists ``requires`` and ``models``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name
from tomlkit.items import AoT, Array

from hatch_epcontext.config.build_hooks import NAME, hooks_of_project, hooks_table
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import file_of
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import HOOK, ROOT, BuildError, ConfigError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.tools.inspecting import inspect_model
from hatch_epcontext.tools.pinning import Table
from hatch_epcontext.tools.project import HATCHLING, Project, requirements
from hatch_epcontext.worker.requests import InspectReply, OpenSize, SuggestReply, SuggestRequest

_PACKAGE = "hatch-epcontext"
_BACKEND = "hatchling.build"

_TABLES = (
    *("build-system", "project", "project.optional-dependencies"),
    *("tool", ROOT, "tool.hatch", "tool.hatch.build", "tool.hatch.build.hooks"),
    *("tool.hatch.build.targets", "tool.hatch.build.targets.wheel", hooks_table("wheel")),
)
"""The tables that are read, each after the one that contains it."""


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, the facts of its file, and suggestions.
    ``pinned``: the keys of a model from elsewhere; ``path`` is then its location. ``name``: the one that the
    user chose.
    """

    path: str
    facts: InspectReply
    suggested: SuggestReply = SuggestReply()
    pinned: Table | None = None
    name: str | None = None

    @property
    def open_keys(self) -> tuple[str, ...]:
        """The lines of the model's table that need an answer, with a question mark for each unknown size."""
        return tuple(line for line, is_open, _ in _size_lines(self) if is_open)


def new_model(root: Path, path: str, workers: Workers) -> NewModel:
    """The model at ``path`` in the project at ``root``, or anywhere, with what its graph and its file imply.

    Raises InspectionError if it cannot be read, and ConfigError if it is compiled already.
    """
    facts = inspect_model(root / path, workers)
    if facts.contexts:
        message, hint = "is a context model already.", "Name its source model."
        raise ConfigError(Problem(Kind.COMPILED_MODEL, path, message, hint))
    if any(not t.is_fixed or ("int" in t.dtype and t.shape in ((), (1,))) for t in facts.inputs):
        request = SuggestRequest(str((root / path).resolve()))
        with contextlib.suppress(BuildError), temp_dir() as folder:
            suggested = workers.call(request, folder / "suggest", location=path)
            return NewModel(path, facts, suggested)
    return NewModel(path, facts)


def add_models(
    root: Path, text: str, models: Sequence[NewModel], providers: Sequence[Provider]
) -> str:
    """``text``, the ``pyproject.toml`` of the project in ``root``, with all that ``models`` need.

    If it is configured already, the models that it does not list are added, and ``providers`` must be empty.
    Projects of hatchling, and those without a build backend, also get the build requirement and the hook.
    Raises ConfigError when that is impossible; the result is always a valid configuration.
    """
    try:
        document, values = tomlkit.parse(text), parse(text)
    except ValueError as error:
        raise _error("pyproject.toml", f"is not TOML: {error}.") from error
    project = Project(root, values)
    for name in _TABLES:
        *outer, key = name.split(".")
        if not isinstance(project.table(*outer).get(key, {}), dict):
            raise _error(f"pyproject.toml: {name}", "is not a table.", "Make it one.")
    table = values.get("tool", {}).get("epcontext")
    if table is not None and providers:
        message = "exists already, and providers can only be chosen for a new configuration."
        raise _error(f"[{ROOT}]", message, "Add the target to it by hand.")
    listed = listed_models(root, table)
    new = [model for model in models if model.path not in listed]
    appended: list[str] = []
    if project.backend == HATCHLING:
        appended += [*_build_system(document, values), *_hook_tables(project)]
    if table is None:
        appended += _head(providers)
    static = table is not None or any(provider.static_shapes for provider in providers)
    tables = [_model(model, name, static=static) for model, name in _named(new, listed.values())]
    existing = document.get("tool", {}).get("epcontext", {}).get("models")
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for model_table in map(parse, tables):
            (model,) = model_table["tool"]["epcontext"]["models"]
            is_path = model.keys() == {"path"}
            existing.append(model["path"] if is_path else tomlkit.item(model, _parent=existing))
        tables = []
    result = tomlkit.dumps(document)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    try:
        _load(root, parse(result)["tool"]["epcontext"])
    except ValueError as error:
        raise _error(
            "pyproject.toml",
            f"has inline tables, to which nothing can be added: {error}.",
            f"Write [tool] and [tool.hatch] as tables of their own, or add [{HOOK}] and [{ROOT}] by hand.",
        ) from error
    return result


def listed_models(root: Path, table: Any) -> dict[str, str]:
    """The names of all models in ``table``, `[tool.epcontext]`, by their paths or locations.

    Raises ConfigError as `load` does.
    """
    has_none = table is None or (isinstance(table, dict) and not table.get("models"))
    models = () if has_none else _load(root, table).models
    return {
        model.download.url if model.download else model.path.relative_to(root).as_posix(): (
            model.configured_name
        )
        for model in models
    }


def _load(root: Path, table: Any) -> Config:
    # Files that another build hook makes need not exist.
    return load(root, table, {}, {}, pending=bool(hooks_of_project(root)))


def _error(location: str, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Problem(Kind.INVALID_PYPROJECT, location, message, hint))


def _build_system(document: tomlkit.TOMLDocument, values: Mapping[str, Any]) -> Iterator[str]:
    """Add this package to the build requirements; yield the whole table if there is none."""
    if "build-system" not in values:
        yield f'[build-system]\nrequires = ["hatchling", "{_PACKAGE}"]\nbuild-backend = "{_BACKEND}"\n'
        return
    table: Any = document["build-system"]
    if not isinstance(requires := table.setdefault("requires", ["hatchling"]), list):
        raise _error("pyproject.toml: build-system.requires", "is not a list.", "Make it one.")
    if _PACKAGE not in {canonicalize_name(listed.name) for listed in requirements(requires)}:
        requires.append(_PACKAGE)
    # Without one front ends take setuptools.
    table.setdefault("build-backend", _BACKEND)


def _hook_tables(project: Project) -> Iterator[str]:
    """The tables that switch the hook on, for wheels and sdists, after the project's other hooks."""
    everywhere = project.table("tool", "hatch", "build", "hooks")
    of_wheels = project.table(*hooks_table("wheel").split("."))
    if NAME in everywhere or NAME in of_wheels:
        return
    if not of_wheels:
        yield f"[{HOOK}]  # switches the hook on\n"
        return
    # Hooks for all targets run before those for wheels.
    yield f"[{hooks_table('wheel')}.{NAME}]  # switches the hook on, after the other ones\n"
    yield f"[{hooks_table('sdist')}.{NAME}]  # checks that sdists contain the models\n"


def _head(providers: Sequence[Provider]) -> Iterator[str]:
    # Models for the CPU replace the source models.
    has_sources = all(provider.name != "cpu" for provider in providers)
    fallback = '# fallback = "none"  # do not ship the source models\n' if has_sources else ""
    yield f"[{ROOT}]\n{fallback}"
    for provider in providers:
        lines = [
            f"[{ROOT}.targets.{quoted_key(provider.name)}]",
            f"provider = {to_toml(provider.name)}",
        ]
        if provider.example:
            lines.append(provider.example)
        if provider.product == "context":
            lines.append("# min-coverage = 0.9  # accept partly compiled models")
        if provider.name != "cpu":
            lines.append(
                f'# platforms = ["{provider.platform}"]  # the wheels that it is for; default: all'
            )
        yield "\n".join(lines) + "\n"


def _named(
    models: Iterable[NewModel], names: Iterable[str]
) -> Iterator[tuple[NewModel, str | None]]:
    """Each model with the name that it needs, or None if its file's name is valid and not in ``names``."""
    taken = {name.casefold() for name in names}
    for model in models:
        stem = PurePosixPath(file_of(model.path) if model.pinned else model.path).stem
        name = plain = model.name or file_name(stem, "-")
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.casefold())
        yield model, name if name != stem else None


def _model(model: NewModel, name: str | None, *, static: bool) -> str:
    lines = [f"[[{ROOT}.models]]"]
    for heading, tensors in (("in", model.facts.inputs), ("out", model.facts.outputs)):
        for tensor in tensors:
            facts = f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}"
            lines.append(f"# {heading}: {_one_line(facts)}")
    if name is not None:
        lines.append(f"name = {to_toml(name)}")
    if model.pinned is None:
        lines.append(f"path = {tomlkit.item(model.path).as_string()}")
    else:
        lines += [f"{key} = {to_toml(value)}" for key, value in model.pinned.items()]
    for line, is_open, ones in _size_lines(model):
        # Dummy inputs have the size 1 anyway.
        lines.append(f"# {line}" if is_open or (ones and not static) else line)
    lines += _constants(model, static=static)
    return "\n".join(lines) + "\n"


def _size_lines(model: NewModel) -> Iterator[tuple[str, bool, bool]]:
    """Each line with sizes of open dimensions, whether some are unknown, and whether all are 1."""
    suggested = {(size.input, size.axis): size for size in model.suggested.sizes}
    dims: dict[str, int | None] = {}
    shapes: dict[str, list[int | None] | None] = {}
    sizes: dict[str, list[tuple[int | None, str]]] = {"dims": [], "shapes": []}
    for tensor in model.facts.inputs:
        if tensor.shape is None:
            shapes[tensor.name] = None
            sizes["shapes"].append((None, f"{tensor.name}: which shape, such as [1, 3]?"))
            continue
        key = "shapes" if None in tensor.shape else "dims"
        row: list[int | None] = []
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, int):
                row.append(size)
                continue
            default = OpenSize(tensor.name, axis, None, "which size?")
            open_size = suggested.get((tensor.name, axis), default)
            row.append(open_size.size)
            if key == "dims":
                if size in dims:
                    continue
                dims[str(size)] = open_size.size
            what = "" if open_size.size else f"{size or f'axis {axis} of {tensor.name}'}: "
            sizes[key].append((open_size.size, what + open_size.note))
        if key == "shapes":
            shapes[tensor.name] = row
    for key, table in (("dims", dims), ("shapes", shapes)):
        if sizes[key]:
            values = {size for size, _ in sizes[key]}
            notes = dict.fromkeys(_one_line(note) for _, note in sizes[key])
            yield f"{key} = {_written(table)}  # {'; '.join(notes)}", None in values, values == {1}


def _written(value: object) -> str:
    """``value`` in TOML, with question marks for unknown values."""
    if isinstance(value, Mapping):
        items = (f"{quoted_key(name)} = {_written(item)}" for name, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return "?" if value is None else to_toml(value)


def _constants(model: NewModel, *, static: bool) -> Iterator[str]:
    """The lines with inputs that can be constants: comments, unless an EP needs the constants."""
    constants = model.suggested.constants
    needed = [constant for constant in constants if static and constant.needed]
    # A table has only one such line: the needed ones belong in the comment too.
    for start, chosen in (("", needed), ("# ", [] if len(needed) == len(constants) else constants)):
        if chosen:
            values = {constant.input: constant.value for constant in chosen}
            notes = dict.fromkeys(_one_line(constant.note) for constant in chosen)
            yield f"{start}constants = {_written(values)}  # {'; '.join(notes)}"


def _one_line(text: str) -> str:
    # A name can contain any characters, but a comment is one line.
    return re.sub(r"\s+", " ", text)

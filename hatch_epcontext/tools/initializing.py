"""``pyproject.toml`` and the facts of models -> ``pyproject.toml`` with tables for the models.

New tables are appended as text, with comments. tomlkit edits existing lists, and keeps everything else
unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name
from tomlkit.items import AoT, Array

from hatch_epcontext.config.build_hooks import NAME, hooks_of_project, hooks_table
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import check_url, file_of
from hatch_epcontext.config.pyproject import parse, try_parse
from hatch_epcontext.errors import HOOK, ROOT, BuildError, ConfigError, Kind, Problem
from hatch_epcontext.files import is_inside, temp_dir
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.package.wheel import (
    FOLDER,
    check_collisions,
    import_packages,
    output_folder,
)
from hatch_epcontext.providers import Provider
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.tools.pinning import Pinned, table_of
from hatch_epcontext.tools.project import HATCHLING, Project, requirements
from hatch_epcontext.worker.requests import InspectReply, OpenSize, SuggestReply, SuggestRequest

_PACKAGE = "hatch-epcontext"
_BACKEND = "hatchling.build"
_WHEEL = "tool.hatch.build.targets.wheel"


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, the facts of its file, and suggestions.
    ``inputs``: the path in the project of inputs that fit it, if there are any. ``pinned``: where a model
    comes from that is not in the project; ``path`` is then its location.
    """

    path: str
    facts: InspectReply
    suggested: SuggestReply = SuggestReply()
    inputs: str | None = None
    pinned: Pinned | None = None

    @property
    def file_path(self) -> PurePosixPath:
        """Its path, or that of a location without the host."""
        return PurePosixPath(file_of(self.path) if self.pinned else self.path)

    @property
    def files(self) -> list[str]:
        """The model's file and those of its external data, as paths in the project."""
        if self.pinned:
            return []
        folder = PurePosixPath(self.path).parent
        return [self.path, *(str(folder / name) for name in self.facts.external_data)]

    @property
    def questions(self) -> tuple[str, ...]:
        """Questions for the user: one for each open dimension without a suggested size."""
        unranked = {tensor.name for tensor in self.facts.inputs if tensor.shape is None}
        asked = _questions(self).items()
        return tuple(dict.fromkeys(text for (name, _), text in asked if name not in unranked))

    @property
    def open_keys(self) -> tuple[str, ...]:
        """The omitted lines of the model's table, with a question mark for each unknown size."""
        return tuple(line for line, is_open, _ in _size_lines(self) if is_open)

    def answered(self, answers: Mapping[str, int]) -> NewModel:
        """The model with sizes for some of its ``questions``."""
        asked = _questions(self)
        sizes = (
            replace(each, size=answers[asked[place]], note="")
            if asked.get(place) in answers
            else each
            for place, each in _open_sizes(self).items()
        )
        return replace(self, suggested=replace(self.suggested, sizes=tuple(sizes)))


def add_models(
    root: Path, text: str, models: Sequence[NewModel], providers: Sequence[Provider]
) -> str:
    """``text``, the ``pyproject.toml`` of the project in ``root``, with all that ``models`` need.

    If it is configured already, the models that it does not list are added, and ``providers`` must be empty.
    Projects of hatchling, and those without a build backend, also get the build requirement and the hook;
    their wheels leave out the plain files of the new models, or, if the hook is new, of all models. Raises
    ConfigError when that is impossible; the result is always a valid configuration, and keeps all of
    ``text``.
    """
    try:
        document = tomlkit.parse(text)
        before = parse(text)
    except ValueError as error:
        raise ConfigError(
            Problem(Kind.INVALID_PYPROJECT, "pyproject.toml", f"is not TOML: {error}.")
        ) from error
    table = before.get("tool", {}).get("epcontext")
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
    listed = listed_models(root, before)
    new = [model for model in models if model.path not in listed]
    project = Project(root, before)
    appended: list[str] = []
    wheel: dict[str, list[str]] = {}
    output = None
    if project.backend == HATCHLING:
        appended += _build_system(document, before)
        # A project that has just moved to hatchling already lists its models.
        packed = new if _has_hook(project) or _keeps_plain_files(table) else models
        packed = [each for each in packed if not each.pinned]
        wheel, output = _in_the_wheel(project, packed, table)
        # Before the hook's table, which is inside it.
        appended += _extend_wheel(document, project, wheel)
        if not _has_hook(project):
            appended += _hook_tables(project)
    if table is None:
        appended += _head(providers, output)
    tables = [_model(model, name, static=static) for model, name in _named(new, listed.values())]
    existing = document.get("tool", {}).get("epcontext", {}).get("models")
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for model_table in tables:
            _append(existing, model_table)
        tables = []
    result = _with_keys(tomlkit.dumps(document), wheel)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    _check(root, before, result)
    return result


def _hook_tables(project: Project) -> tuple[str, ...]:
    """The tables that switch the hook on, for wheels and sdists, after the project's other hooks."""
    if not project.hatch_wheel.get("hooks"):
        return (f"[{HOOK}]  # switches the hook on\n",)
    # Hooks for all targets run before those for wheels.
    return (
        f"[{hooks_table('wheel')}.{NAME}]  # switches the hook on, after the other ones\n",
        f"[{hooks_table('sdist')}.{NAME}]  # checks that sdists contain the models\n",
    )


def _build_system(document: tomlkit.TOMLDocument, before: Mapping[str, Any]) -> Iterator[str]:
    """Add this package to the build requirements; yield the whole table if there is none."""
    if "build-system" not in before:
        yield f'[build-system]\nrequires = ["hatchling", "{_PACKAGE}"]\nbuild-backend = "{_BACKEND}"\n'
        return
    requires = _list(document, "build-system", "requires", default=["hatchling"])
    names = {canonicalize_name(each.name) for each in requirements(requires)}
    if _PACKAGE not in names:
        requires.append(_PACKAGE)
    # Without one front ends take setuptools.
    document["build-system"].setdefault("build-backend", _BACKEND)


def _list(document: tomlkit.TOMLDocument, *names: str, default: Sequence[str] = ()) -> Any:
    """The list at ``names`` in ``document``, with ``default`` if it is missing.

    Raises ConfigError when something else is there.
    """
    *tables, key = names
    place: Any = document
    for name in tables:
        place = place.get(name)
    if isinstance(place, dict) and isinstance(items := place.setdefault(key, list(default)), list):
        return items
    raise ConfigError(
        Problem(Kind.INVALID_PYPROJECT, ".".join(names), "is not a list.", "Make it one.")
    )


def _in_the_wheel(
    project: Project, models: Sequence[NewModel], table: Mapping[str, Any] | None
) -> tuple[dict[str, list[str]], str | None]:
    """The keys of Hatch's wheel target to extend, and ``output``, if the hook cannot infer it.

    The plain files of ``models`` are excluded; ``packages`` is set if Hatch finds none by the project's
    name.
    """
    tree = project.hatch_tree()
    if tree is None:
        packages = project.packages()
        places = [PurePosixPath(model.path) for model in models]
        folder = project.choose((each.folder for each in packages), places)
        if folder is None or _is_selected(project):
            return {}, None
        inside = [path for path in map(str, places) if PurePosixPath(path).is_relative_to(folder)]
        wheel = {"packages": [str(folder)], "exclude": inside}
        return {key: paths for key, paths in wheel.items() if paths}, None
    root = project.root.resolve()
    files = {path.resolve(): name for name, path in tree.items()}
    wanted = [each for model in models for each in model.files]
    packed = [each for each in wanted if (root / each).resolve() in files]
    kept = (table or {}).get("fallback") == "none"
    wheel = {"exclude": packed} if packed and not kept else {}
    names = [files[(root / each).resolve()] for each in packed]
    return wheel, _output(project, tree, [PurePosixPath(each) for each in names])


def _is_selected(project: Project) -> bool:
    """Whether the project itself selects the files of Hatch's wheel."""
    keys = ("packages", "only-include", "include")
    return any(key in each for each in (project.hatch_build, project.hatch_wheel) for key in keys)


def _output(
    project: Project, tree: Mapping[str, Path], models: Sequence[PurePosixPath]
) -> str | None:
    """``output``, if the hook cannot infer it from the files in the wheel."""
    try:
        found = output_folder(None, tree)
        check_collisions(found, tree, frozenset())
    except ConfigError:
        package = project.choose(sorted(import_packages(tree)), models)
        if package is None:
            return f"{project.name.replace('-', '_').replace('.', '_')}_{FOLDER}"
        taken = {
            PurePosixPath(path).parts[len(package.parts)]
            for path in tree
            if PurePosixPath(path).is_relative_to(package)
        }
        free = next(name for name in _FOLDERS if name not in taken and f"{name}.py" not in taken)
        return str(package / free)
    return None


_FOLDERS = (FOLDER, f"{FOLDER}_models", *(f"{FOLDER}_models{number}" for number in range(2, 100)))


def _extend_wheel(
    document: tomlkit.TOMLDocument, project: Project, wheel: dict[str, list[str]]
) -> Iterator[str]:
    """Move items of ``wheel`` into existing lists; yield the whole table if there is none.

    What stays in ``wheel`` belongs in the existing table.
    """
    build = project.hatch_build
    for key in [key for key in wheel if key in project.hatch_wheel]:
        existing = _list(document, *_WHEEL.split("."), key)
        new = [path for path in wheel.pop(key) if path not in existing]
        existing.extend(new)
    for key in [key for key in wheel if key in build]:
        # A target's own list replaces that of all targets.
        wheel[key] = [*build[key], *wheel[key]]
    if wheel and _header(tomlkit.dumps(document)) is None:
        yield f"[{_WHEEL}]\n" + "".join(_keys(wheel))
        wheel.clear()


def _keys(wheel: Mapping[str, list[str]]) -> Iterator[str]:
    for key, paths in wheel.items():
        note = "  # the app opens these models with load()" if key == "exclude" else ""
        if len(paths) == 1:
            yield f"{key} = {to_toml(paths)}{note}\n"
        else:
            lines = "".join(f"    {to_toml(path)},\n" for path in paths)
            yield f"{key} = [{note}\n{lines}]\n"


def _header(text: str) -> int | None:
    """The index of the line with the header of Hatch's wheel target."""
    lines = text.split("\n")
    pattern = re.compile(rf"\s*\[\s*{re.escape(_WHEEL)}\s*\]\s*(#.*)?")
    return next((index for index, line in enumerate(lines) if pattern.fullmatch(line)), None)


def _with_keys(text: str, wheel: Mapping[str, list[str]]) -> str:
    """``text`` with the keys of ``wheel`` at the end of the table of Hatch's wheel target."""
    header = _header(text)
    if not wheel or header is None:
        return text
    lines = text.split("\n")
    end = header + 1
    # A line of a list may also begin with a bracket.
    while end < len(lines) and not (
        lines[end].lstrip()[:1] == "[" and try_parse("\n".join(lines[:end])) is not None
    ):
        end += 1
    while not lines[end - 1].strip() or lines[end - 1].lstrip()[:1] == "#":
        end -= 1
    added = "".join(_keys(wheel)).rstrip("\n").split("\n")
    return "\n".join([*lines[:end], *added, *lines[end:]])


def _has_hook(project: Project) -> bool:
    tables = (project.hatch_build, project.hatch_wheel)
    return any(NAME in each.get("hooks", {}) for each in tables)


def _keeps_plain_files(table: Mapping[str, Any] | None) -> bool:
    """Whether some models have their own ``fallback``, as if the app opens their plain files."""
    models = (table or {}).get("models", ())
    return any(isinstance(each, dict) and "fallback" in each for each in models)


def listed_models(root: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """The names of all models that ``values``, a ``pyproject.toml``, configure, by their paths."""
    return dict(_listed(root, values.get("tool", {}).get("epcontext", {})))


def _listed(root: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for model in table.get("models", ()):
        path, name = model, None
        if isinstance(model, dict):
            path, name = model.get("path"), model.get("name")
            if isinstance(url := model.get("url"), str) and check_url(url) is None:
                given = PurePosixPath(file_of(url)).stem
                yield url, name if isinstance(name, str) else given
        if isinstance(path, str):
            is_glob = any(each in path for each in "*?[") and is_inside(path)
            found = root.glob(path) if is_glob else ()
            for each in [file.relative_to(root).as_posix() for file in found] or [path]:
                pure = PurePosixPath(each)
                yield pure.as_posix(), name if isinstance(name, str) else pure.stem


def _head(providers: Sequence[Provider], output: str | None) -> Iterator[str]:
    place = "" if output is None else f"output = {to_toml(output)}  # the folder in the wheel\n"
    # Models for the CPU replace the source models.
    has_sources = all(provider.name != "cpu" for provider in providers)
    fallback = '# fallback = "none"  # do not ship the source models\n' if has_sources else ""
    yield f"[{ROOT}]\n{place}{fallback}"
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
        stem = model.file_path.stem
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
    lines += _place(model)
    lines += _sizes(model, static=static)
    lines += _constants(model, static=static)
    if model.inputs is not None:
        lines.append(
            f"validate = {to_toml({'inputs': model.inputs})}  # samples that fit the model"
        )
    return "\n".join(lines) + "\n"


def _place(model: NewModel) -> Iterator[str]:
    if model.pinned is None:
        yield f"path = {tomlkit.item(model.path).as_string()}"
        return
    for key, value in table_of(model.pinned).items():
        yield f"{key} = {to_toml(value)}"


_Place = tuple[str, int]
"""The name of an input, and an axis of it."""


def _open_sizes(model: NewModel) -> dict[_Place, OpenSize]:
    """The suggestion for each open dimension."""
    suggested = {(each.input, each.axis): each for each in model.suggested.sizes}
    return {
        (tensor.name, axis): suggested.get(
            (tensor.name, axis), OpenSize(tensor.name, axis, None, "which size?")
        )
        for tensor in model.facts.inputs
        for axis, size in enumerate([None] if tensor.shape is None else tensor.shape)
        if not isinstance(size, int)
    }


def _questions(model: NewModel) -> dict[_Place, str]:
    tensors = {tensor.name: tensor for tensor in model.facts.inputs}
    found = {}
    for place, each in _open_sizes(model).items():
        if each.size is None:
            name, axis = place
            if tensors[name].shape is None:
                found[place] = _one_line(f"{name}: which shape, such as [1, 3]?")
                continue
            size = tensors[name].sizes[axis]
            what = size if isinstance(size, str) else f"axis {axis} of {name}"
            found[place] = _one_line(f"{what}: {each.note}")
    return found


def _sizes(model: NewModel, *, static: bool) -> Iterator[str]:
    """The lines with the sizes of open dimensions, without lines with unknown sizes.

    Without ``static``, lines with only 1 are comments: dummy inputs have that size anyway.
    """
    for line, is_open, ones in _size_lines(model):
        if not is_open:
            yield f"# {line}" if ones and not static else line


def _size_lines(model: NewModel) -> Iterator[tuple[str, bool, bool]]:
    """Each line with sizes of open dimensions, whether some are unknown, and whether all are 1."""
    sizes = _open_sizes(model)
    dims: dict[str, int | None] = {}
    of_dims: list[_Place] = []
    shapes: dict[str, list[int | None] | None] = {}
    of_shapes: list[_Place] = []
    for tensor in model.facts.inputs:
        if tensor.shape is None:
            shapes[tensor.name] = None
            of_shapes.append((tensor.name, 0))
            continue
        places = [(tensor.name, axis) for axis in range(len(tensor.shape))]
        found = [sizes[place].size if place in sizes else None for place in places]
        if None in tensor.shape:
            fixed = (size if isinstance(size, int) else None for size in tensor.shape)
            shapes[tensor.name] = [
                a if a is not None else b for a, b in zip(fixed, found, strict=True)
            ]
            of_shapes += [place for place in places if place in sizes]
            continue
        for place, size, suggested in zip(places, tensor.shape, found, strict=True):
            if isinstance(size, str) and size not in dims:
                dims[size] = suggested
                of_dims.append(place)
    asked = _questions(model)
    for key, table, places in (("dims", dims, of_dims), ("shapes", shapes, of_shapes)):
        if places:
            notes = dict.fromkeys(asked.get(each) or _one_line(sizes[each].note) for each in places)
            note = f"  # {'; '.join(filter(None, notes))}" if any(notes) else ""
            ones = all(sizes[each].size == 1 for each in places)
            yield f"{key} = {_written(table)}{note}", not asked.keys().isdisjoint(places), ones


def _written(value: object) -> str:
    """``value`` in TOML, with question marks for unknown values."""
    if isinstance(value, Mapping):
        items = (f"{quoted_key(name)} = {_written(each)}" for name, each in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return "?" if value is None else to_toml(value)


def _constants(model: NewModel, *, static: bool) -> Iterator[str]:
    """The lines with inputs that can be constants: comments, unless an EP needs the constants."""
    needed = [each for each in model.suggested.constants if static and each.needed]
    values = {each.input: each.value for each in needed}
    if needed:
        notes = dict.fromkeys(_one_line(each.note) for each in needed)
        yield f"constants = {_written(values)}  # {'; '.join(notes)}"
    others = [each for each in model.suggested.constants if each not in needed]
    if others:
        # A table has only one such line: needed values belong in it too.
        values |= {each.input: each.value for each in others}
        notes = dict.fromkeys(_one_line(each.note) for each in others)
        yield f"# constants = {_written(values)}  # {'; '.join(notes)}"


def _comment(tensor: TensorFacts) -> str:
    # A name can contain any characters, but a comment is one line.
    return _one_line(f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}")


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _append(existing: Array, table: str) -> None:
    """Add a model's table to a list."""
    values = parse(table)["tool"]["epcontext"]["models"][0]
    item: Any = values.get("path")
    if values.keys() != {"path"}:
        item = tomlkit.inline_table()
        item.update(values)
    existing.append(item)


def _check(root: Path, before: Mapping[str, Any], text: str) -> None:
    values: dict[str, Any] = {}
    try:
        values = parse(text)
        reason = "a key would change"
    except ValueError as error:
        reason = str(error)
    if not values or not _has_all(values, before):
        raise ConfigError(
            Problem(
                Kind.INVALID_PYPROJECT,
                "pyproject.toml",
                f"has inline tables, to which nothing can be added: {reason}.",
                f"Write [tool] and [tool.hatch] as tables of their own, or add [{HOOK}] and [{ROOT}] by "
                "hand.",
            )
        )
    # Files that another build hook makes need not exist.
    load(root, values["tool"]["epcontext"], {}, {}, pending=bool(hooks_of_project(root)))


def _has_all(after: Any, before: Any) -> bool:
    """Whether ``after`` has everything in ``before``; lists may be longer."""
    if isinstance(before, dict):
        return isinstance(after, dict) and all(
            key in after and _has_all(after[key], value) for key, value in before.items()
        )
    if isinstance(before, list):
        return isinstance(after, list) and after[: len(before)] == before
    return bool(after == before)


def new_model(
    root: Path, path: str, facts: InspectReply, samples: Sequence[Path], workers: Workers
) -> NewModel:
    """The model at ``path`` in the project at ``root``, with what its graph, its file and ``samples`` imply.

    ``facts``: of its file. ``samples``: files and folders in the project that may contain its inputs; unknown
    sizes come from them.
    """
    suggested = _suggest(root / path, facts, samples, workers)
    sizes = {(each.input, each.axis): each for each in suggested.sizes}
    fitting = {Path(name): s for name, s in suggested.samples.items() if _fit(s, sizes)}
    place = _chosen_samples(root, PurePosixPath(path), fitting, samples)
    if place is None:
        return NewModel(path, facts, suggested)
    inside = place.relative_to(root).as_posix()
    found = [shapes for file, shapes in fitting.items() if file.is_relative_to(place)]
    answered = [
        replace(each, size=same.pop(), note=f"as in {inside}")
        if each.size is None and len(same := {s[each.input][each.axis] for s in found}) == 1
        else each
        for each in suggested.sizes
    ]
    return NewModel(path, facts, replace(suggested, sizes=tuple(answered)), inside)


def _fit(shapes: Mapping[str, Sequence[int]], sizes: Mapping[_Place, OpenSize]) -> bool:
    """Whether a sample has the suggested ``sizes``; along the first axis it may have several."""
    for name, shape in shapes.items():
        for axis, given in enumerate(shape):
            size = sizes[name, axis].size if (name, axis) in sizes else None
            if size and (given % size if axis == 0 else given != size):
                return False
    return True


def _chosen_samples(
    root: Path, model: PurePosixPath, fitting: Iterable[Path], samples: Iterable[Path]
) -> Path | None:
    """Inputs to validate the model at ``model`` with: a sample, or a folder whose samples all fit.

    The first with the model's name wins, or else the nearest to the model.
    """

    def order(place: Path) -> tuple[bool, int, Path]:
        inside = place.relative_to(root)
        named = model.stem in (inside.stem, *inside.parts)
        shared = os.path.commonpath([root / model.parent, place])
        return not named, -len(shared), place

    fits = list(fitting)
    others = set(samples) - set(fits)
    places = set[Path]()
    for file in fits:
        folder = file.parent
        inside = [each for each in fits if each.is_relative_to(folder)]
        # A folder of inputs must have no other files, such as the model: any change there validates again.
        has_more = any(each.is_relative_to(folder) for each in (*others, root / model))
        places.add(file if len(inside) == 1 or has_more else folder)
    return min(places, key=order, default=None)


def _suggest(
    path: Path, facts: InspectReply, samples: Sequence[Path], workers: Workers
) -> SuggestReply:
    """Return sizes for the open dimensions of the ONNX file at ``path``, and constants, as far as found.

    Sizes are tried on the CPU, if ONNX Runtime can run the model.
    """
    if not samples and not any(_can_be_fixed(each) for each in facts.inputs):
        return SuggestReply()
    for run in (True, False):
        request = SuggestRequest(str(path.resolve()), run, tuple(map(str, samples)))
        with temp_dir() as folder:
            try:
                return workers.call(request, folder / "suggest", location=str(path))
            except BuildError:
                continue
    return SuggestReply()


def _can_be_fixed(tensor: TensorFacts) -> bool:
    return not tensor.is_fixed or ("int" in tensor.dtype and tensor.shape in ((), (1,)))

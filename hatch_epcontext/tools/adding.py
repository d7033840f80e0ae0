"""Adds models to a ``pyproject.toml``, with all that their project needs.

New tables are appended as text, with comments. tomlkit adds to the lists ``requires`` and ``models``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tomlkit.items import AoT, Array

from hatch_epcontext.config.build_hooks import NAME, hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import file_of
from hatch_epcontext.config.pyproject import FILE, parse
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import HOOK, ROOT, BuildError, ConfigError, Key, Kind, Problem
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME, oldest_releases
from hatch_epcontext.package.external_data import model_files
from hatch_epcontext.package.folder import SOURCE_FOLDERS, own_files
from hatch_epcontext.package.wheel import FOLDER, excluding, import_packages, loose_bounds
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import file_name, quoted_key, suggestion, to_toml
from hatch_epcontext.tools.configure import MODEL_TABLES
from hatch_epcontext.tools.inspecting import inspect_model
from hatch_epcontext.tools.pinning import Table
from hatch_epcontext.tools.project import HATCHLING, Project, requirements
from hatch_epcontext.worker.requests import InspectReply, SuggestReply, SuggestRequest

_PACKAGE, _BACKEND = "hatch-epcontext", "hatch_epcontext.backend"

_RUNTIME = ONNX_RUNTIME.removeprefix(">=")

_OUTPUTS = frozenset({"build", "dist", "node_modules", "site-packages", "__pycache__"})

_NOT_THE_APP = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
)
"""Folders whose models and packages are not the app's."""

_NO_NAMES = frozenset({"onnx", "model", "models"})
"""Folders that do not say what their ``model.onnx`` is."""


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, the facts of its file, and suggestions.

    ``pinned``: the keys of a model from elsewhere; ``path`` is then its location. ``name`` and ``settings``,
    other keys: those that the user chose. ``outcomes``: why each target fails, empty if it works.
    """

    path: str
    facts: InspectReply
    suggested: SuggestReply = SuggestReply()
    pinned: Table | None = None
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    outcomes: Mapping[str, str] = field(default_factory=dict)

    @property
    def plain_name(self) -> str:
        """The name of its file; of the folder of a ``model.onnx`` in the project."""
        file = PurePosixPath(file_of(self.path) if self.pinned else self.path)
        folders = [name for name in file.parts[:-1] if name.casefold() not in _NO_NAMES]
        return folders[-1] if folders and file.stem.casefold() == "model" else file.stem

    @property
    def names(self) -> Mapping[str, set[str]]:
        """The names that each of `MODEL_TABLES` can have for it."""
        inputs = {tensor.name for tensor in self.facts.inputs}
        sizes = {size for tensor in self.facts.inputs for size in tensor.sizes}
        dims = {size for size in sizes if isinstance(size, str)}
        return {"dims": dims, "shapes": inputs, "constants": inputs}

    def own(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """``settings`` without the names that only other models have; several shapes are a list."""
        own = dict(settings)
        for table, names in self.names.items():
            if isinstance(values := settings.get(table), Mapping):
                own[table] = {name: value for name, value in values.items() if name in names}
        return {key: value for key, value in own.items() if value != {}}

    @property
    def works(self) -> list[str]:
        """The targets that work."""
        return [target for target, reason in self.outcomes.items() if not reason]

    @property
    def failures(self) -> str:
        """Why other targets fail, in one line."""
        return "; ".join(f"{target}: {why}" for target, why in self.outcomes.items() if why)

    @property
    def questions(self) -> tuple[str, ...]:
        """The lines of the model's table that need an answer, with a question mark for each unknown size."""
        return tuple(line for line, is_open, _ in _size_lines(self) if is_open)


class Pyproject:
    """The ``pyproject.toml`` of the project in the folder ``root``, read once, with line ends of Unix.

    ``listed``: the names of the models that are configured, by their paths or locations. Raises ConfigError.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / FILE
        self.raw = _text(self.file)
        self.text = self.raw.replace("\r\n", "\n")
        try:
            self.project = Project(root, parse(self.text))
        except ValueError as error:
            raise _error(FILE, f"is not TOML: {error}.") from error
        self.table = self.project.table("tool").get("epcontext")
        has_models = isinstance(self.table, dict) and self.table.get("models")
        models = self.load(self.text).models if has_models else ()
        self.listed = {self.path_of(model): model.configured_name for model in models}

    def load(self, text: str, environ: Mapping[str, str] | None = None) -> Config:
        """The configuration in ``text``, a later version of the file."""
        # Files that another build hook makes need not exist.
        pending, table = bool(hooks_of_project(self.root)), parse(text)["tool"]["epcontext"]
        return load(self.root, table, {}, environ or {}, pending=pending)

    def path_of(self, model: Model) -> str:
        """The path of ``model`` in the project, or its location elsewhere."""
        return (
            model.download.url if model.download else model.path.relative_to(self.root).as_posix()
        )


def check_targets(
    pyproject: Pyproject, providers: tuple[str, ...], target: Mapping[str, Any]
) -> None:
    """Raise ConfigError if targets are chosen for a project that has a configuration."""
    if pyproject.table is not None and (providers or target):
        message = "exists already, and targets can only be chosen for a new configuration."
        raise _error(f"[{ROOT}]", message, "Add the target to it by hand.")


def check_names(models: Sequence[NewModel], settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for the names in ``settings`` that none of ``models`` has, each once."""
    problems = []
    for table in MODEL_TABLES:
        named = [(model.plain_name, name) for model in models for name in model.names[table]]
        plain = {name for _, name in named}
        known = plain | {f"{model}:{name}" for model, name in named}
        values = settings.get(table)
        for name in sorted((values if isinstance(values, Mapping) else {}).keys() - known):
            noun = "open dimension" if table == "dims" else "input"
            hint = suggestion(name, sorted(known if ":" in name else plain)) or None
            message = f"no model has an {noun} of this name."
            problems.append(Problem.at(Key() / table / name, Kind.UNKNOWN_INPUT, message, hint))
    ConfigError.check(problems)


def _text(file: Path) -> str:
    """The text of the ``pyproject.toml`` at ``file``; empty for a project of setuptools without one."""
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    if any((file.parent / name).is_file() for name in ("setup.py", "setup.cfg")):
        return ""
    message, hint = "does not exist.", "Create a project first, for example with: hatch new"
    raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))


def project_files(root: Path, suffix: str) -> Iterator[Path]:
    """The files of the project in ``root`` whose names end in ``suffix``, in order.

    Without those in tests, docs and examples, hidden folders, virtual environments, build outputs and
    packages that this tool wrote.
    """
    for path, folders, files in os.walk(root):
        folder = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if name.casefold() not in _NOT_THE_APP
            and not name.startswith(".")
            and name not in _OUTPUTS
            and not (folder / name / "pyvenv.cfg").exists()
            and own_files(folder / name) is None
        )
        yield from (folder / file for file in sorted(files) if file.casefold().endswith(suffix))


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
        with contextlib.suppress(BuildError):
            return NewModel(path, facts, workers.call(request, location=path))
    return NewModel(path, facts)


def add_models(
    pyproject: Pyproject, models: Sequence[NewModel], targets: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Config]:
    """The text of ``pyproject`` with all that ``models``, which it does not list, need; its configuration.

    The project also gets ``targets``, the keys of each by its provider, the build requirement, and the hook
    or the build back end. Raises ConfigError when that is impossible.
    """
    project, document = pyproject.project, tomlkit.parse(pyproject.text)
    appended = [*_build_system(document, project)]
    if not project.is_hatchling:
        # Its back end cannot say where an editable install has its packages.
        output = {"output": str(_output(project))}
        if pyproject.table is None:
            appended.append(_table(ROOT, output))
        elif "output" not in pyproject.table:
            document["tool"]["epcontext"].update(output)
    if (wrapped := _wrapped(project)) and project.table("tool", "epcontext", "build"):
        document["tool"]["epcontext"]["build"].update(wrapped)
    elif wrapped:
        appended.append(_table(f"{ROOT}.build", wrapped))
    appended += [_target(PROVIDERS[name], keys) for name, keys in targets.items()]
    static = pyproject.table is not None or any(PROVIDERS[n].static_shapes for n in targets)
    names = _named(models, pyproject.listed.values())
    tables = [_model(model, name, static=static) for model, name in names]
    has_table = isinstance(pyproject.table, dict)
    existing = document["tool"]["epcontext"].get("models") if has_table else None
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for model, table in zip(models, map(parse, tables), strict=True):
            (values,) = table["tool"]["epcontext"]["models"]
            is_path = values.keys() == {"path"}
            if model.failures:
                existing.add_line(comment=model.failures)
            existing.append(values["path"] if is_path else tomlkit.item(values, _parent=existing))
        tables = []
    result = tomlkit.dumps(document)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    try:
        return result, pyproject.load(result)
    except ValueError as error:
        raise _error(
            FILE,
            f"has values to which nothing can be added: {error}.",
            f"Write [tool] and [tool.hatch] as tables of their own, or add [{HOOK}] and [{ROOT}] by hand.",
        ) from error


def _error(location: str, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Problem(Kind.INVALID_PYPROJECT, location, message, hint))


def _build_system(document: tomlkit.TOMLDocument, project: Project) -> Iterator[str]:
    """Require this package, and let builds call it; yield the tables that are new."""
    is_hatchling = project.is_hatchling
    package, backend = (HATCHLING, project.backend) if is_hatchling else ("setuptools", _BACKEND)
    if "build-system" not in document:
        yield f'[build-system]\nrequires = ["{package}", "{_PACKAGE}"]\nbuild-backend = "{backend}"\n'
    else:
        table: Any = document["build-system"]
        if not isinstance(requires := table.setdefault("requires", [package]), list):
            raise _error(f"{FILE}: build-system.requires", "is not a list.", "Make it one.")
        if _PACKAGE not in {canonicalize_name(listed.name) for listed in requirements(requires)}:
            requires.append(_PACKAGE)
        # Without one front ends take setuptools.
        table["build-backend"] = backend
        if not is_hatchling:
            # Front ends reject it for a back end that is not in the project.
            table.pop("backend-path", None)
    hooks = "tool", "hatch", "build", "hooks"
    of_wheels = "tool", "hatch", "build", "targets", "wheel", "hooks"
    if is_hatchling and NAME not in {*project.table(*hooks), *project.table(*of_wheels)}:
        yield f"[{HOOK}]  # switches the hook on\n"


def _wrapped(project: Project) -> dict[str, Any]:
    """The keys of the back end that `_BACKEND` has to call; empty if they are there, or it is hatchling."""
    if project.is_hatchling or project.backend == _BACKEND:
        return {}
    path = project.table("build-system").get("backend-path")
    return {"backend": project.backend} | ({"backend-path": path} if path else {})


def _table(name: str, keys: Mapping[str, Any], *lines: str) -> str:
    """The text of the table ``name`` with ``keys``, and with ``lines`` after them."""
    written = (f"{key} = {to_toml(value)}" for key, value in keys.items())
    return "\n".join([f"[{name}]", *written, *lines, ""])


def _target(provider: Provider, keys: Mapping[str, Any]) -> str:
    """The table of a target for ``provider`` with ``keys``, and a chip as an example."""
    # Numbers name a chip too.
    chip = {"chip", *provider.facts_of(provider.chips)}
    needs_chip = chip.isdisjoint({*keys, *keys.get("provider-options", {})})
    name = f"{ROOT}.targets.{quoted_key(provider.name)}"
    lines = [provider.example] if provider.example and needs_chip else []
    return _table(name, {"provider": provider.name, **keys}, *lines)


def _named(
    models: Iterable[NewModel], names: Iterable[str]
) -> Iterator[tuple[NewModel, str | None]]:
    """Each model with the name that it needs, or None if its file's name is valid and not in ``names``."""
    used = {name.casefold() for name in names}
    for model in models:
        stem = PurePosixPath(file_of(model.path) if model.pinned else model.path).stem
        name = plain = model.name or file_name(model.plain_name, "-")
        number = 1
        while name.casefold() in used:
            number += 1
            name = f"{plain}-{number}"
        used.add(name.casefold())
        yield model, name if name != stem else None


def _model(model: NewModel, name: str | None, *, static: bool) -> str:
    lines = [f"[[{ROOT}.models]]"]
    for heading, tensors in (("in", model.facts.inputs), ("out", model.facts.outputs)):
        for tensor in tensors:
            facts = f"{tensor.name}: {tensor.dtype}, {tensor.shape_text or 'scalar'}"
            lines.append(f"# {heading}: {one_line(facts)}")
    if name is not None:
        lines.append(f"name = {to_toml(name)}")
    if model.pinned is None:
        lines.append(f"path = {tomlkit.item(model.path).as_string()}")
    else:
        lines += [f"{key} = {to_toml(value)}" for key, value in model.pinned.items()]
    for line, is_open, ones in _size_lines(model):
        # Dummy inputs have the size 1 anyway.
        lines.append(f"# {line}" if is_open or (ones and not static) else line)
    if "constants" not in model.settings:
        lines += _constants(model, static=static)
    if model.failures:
        lines += [f"# {model.failures}", f"targets = {to_toml(model.works)}"]
    others = model.settings.keys() - {"dims", "shapes"}
    lines += [f"{key} = {to_toml(model.settings[key])}" for key in sorted(others)]
    return "\n".join(lines) + "\n"


def _size_lines(model: NewModel) -> Iterator[tuple[str, bool, bool]]:
    """Each line with sizes of open dimensions, whether some are unknown, and whether all are 1."""
    tables = {key: dict(model.settings.get(key, {})) for key in ("dims", "shapes")}
    sizes: dict[str, list[tuple[int | None, str]]] = {"dims": [], "shapes": []}
    for tensor in model.facts.inputs:
        if tensor.name in tables["shapes"]:
            continue
        if tensor.shape is None:
            tables["shapes"][tensor.name] = None
            sizes["shapes"].append((None, f"{tensor.name}: which shape, such as [1, 3]?"))
            continue
        key, shape = "shapes" if None in tensor.shape else "dims", [*tensor.shape]
        for axis, name in enumerate(tensor.shape):
            if isinstance(name, int) or (key == "dims" and name in tables[key]):
                continue
            size = 1 if axis in model.suggested.batches.get(tensor.name, ()) else None
            shape[axis] = size
            if key == "dims":
                tables[key][str(name)] = shape[axis]
            what = name or f"axis {axis} of {tensor.name}"
            sizes[key].append((size, "1 is a guess" if size else f"{what}: which size?"))
        if key == "shapes":
            tables[key][tensor.name] = shape
    for key, notes in sizes.items():
        if tables[key]:
            values = {size for size, _ in notes}
            text = _with_questions(tables[key])
            comment = "; ".join(dict.fromkeys(one_line(note) for _, note in notes))
            comment += " (epcontext record shows it)" if None in values else ""
            line = f"{key} = {text}" + (f"  # {comment}" if comment else "")
            yield line, None in values, values == {1} and key not in model.settings


def _with_questions(value: Any) -> str:
    """``value`` in TOML, with a question mark for each unknown size: for None."""
    if isinstance(value, Mapping):
        items = (f"{quoted_key(name)} = {_with_questions(item)}" for name, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_with_questions, value))}]"
    return "?" if value is None else to_toml(value)


def _constants(model: NewModel, *, static: bool) -> Iterator[str]:
    """The line with inputs that can be constants: a comment, unless an EP needs some of them."""
    needed = [constant for constant in model.suggested.constants if static and constant.needed]
    if constants := needed or model.suggested.constants:
        values = {constant.input: constant.value for constant in constants}
        notes = dict.fromkeys(one_line(constant.note) for constant in constants)
        comment = "" if needed else "# "
        yield f"{comment}constants = {to_toml(values)}  # {'; '.join(notes)}"


def one_line(text: str) -> str:
    # A name can contain any characters, but a comment is one line.
    return re.sub(r"\s+", " ", text)


def left_to_do(project: Project, config: Config) -> list[tuple[str, list[str]]]:
    """What is left to do in the app and in its metadata: headings with lines."""
    name, *others = dict.fromkeys(to_toml(model.configured_name) for model in config.models)
    more = f"  # or {', '.join(others)}" if others else ""
    module = ".".join((config.output or _output(project)).parts)
    table = "[tool.poetry.dependencies]" if project.is_of_poetry else "the dependencies of the app"
    bounds = loose_bounds(config.targets, project.dependencies, project.requires_python)
    return [
        ("In the app:", [f"from {module} import load", f"session = load({name}){more}"]),
        (f"In {table}:", [*_dependencies(project, config)]),
        ("To keep the plain models out of the wheel:", [*_excluding(project, config)]),
        ("In the metadata:", [*bounds]),
    ]


def _excluding(project: Project, config: Config) -> Iterator[str]:
    """How the build back end leaves out the models in the app's import packages, which it may pack."""
    files = {}
    for model in (model for model in config.models if model.download is None):
        path = PurePosixPath(os.path.relpath(model.path, project.root))
        modules = (project.root / folder / "__init__.py" for folder in path.parents)
        if any(module.is_file() for module in modules):
            start = path.parts[0] in SOURCE_FOLDERS
            folder = PurePosixPath(*path.parts[start:-1])
            for file in model_files(project.root / path):
                name = os.path.relpath(file, project.root / path.parent)
                files[(folder / name).as_posix()] = file
    if files:
        yield excluding(config.build.backend or project.backend, project.root, files)


def _output(project: Project) -> PurePosixPath:
    """The folder of the models in the wheel: in the import package with the project's name, or in any."""
    name, root = str(canonicalize_name(project.name)).replace("-", "_"), project.root
    files = {path.relative_to(root).as_posix(): path for path in project_files(root, ".py")}
    folders = sorted(folder.parts for folder in import_packages(files))
    folders.sort(key=lambda parts: parts[0] not in SOURCE_FOLDERS)
    packages = [parts[parts[0] in SOURCE_FOLDERS and len(parts) > 1 :] for parts in folders]
    named = [package for package in packages if "_".join(package) == name]
    if not named and not files.keys().isdisjoint({f"{name}.py", f"src/{name}.py"}):
        # A module has no room for them.
        return PurePosixPath(f"{name}_{FOLDER}")
    return PurePosixPath(*(named or packages or [(name,)])[0], FOLDER)


def _dependencies(project: Project, config: Config) -> Iterator[str]:
    """The missing dependencies of the app."""
    listed = {canonicalize_name(Requirement(text).name) for text in project.dependencies}
    providers = {target.provider.name: target.provider for target in config.targets}.values()
    oldest = dict[str, Version]()
    for target in config.targets:
        for name, bound in oldest_releases(target).items():
            oldest[name] = max(bound, oldest.get(name, bound))
    if listed.isdisjoint(DISTRIBUTIONS):
        fitting = [set(provider.distributions) for provider in providers]
        name = next((n for n in DISTRIBUTIONS if all(n in f for f in fitting)), DISTRIBUTIONS[0])
        yield _dependency(project, f"{name}>={oldest.get(name, _RUNTIME)}")
    for provider in providers:
        # Those of the EP, also where the vendor's library compiles.
        for requirement in PROVIDERS[provider.name].requirements:
            if (name := canonicalize_name(Requirement(requirement).name)) not in listed:
                bounded = f"{name}>={oldest[name]}" if name in oldest else requirement
                text = _dependency(project, f"{bounded}{_marker(provider)}")
                yield f"{text}  # for {provider.name}; or in an extra"


def _dependency(project: Project, text: str) -> str:
    """The requirement ``text`` as a value of TOML, or as a key of Poetry's own table."""
    if not project.is_of_poetry:
        return to_toml(text)
    requirement = Requirement(text)
    version = str(requirement.specifier) or "*"
    table = {"version": version, "markers": str(requirement.marker)}
    return f"{requirement.name} = {to_toml(table if requirement.marker else version)}"


def _marker(provider: Provider) -> str:
    python = f"python_version >= '{provider.python[0]}.{provider.python[1]}'"
    systems = " or ".join(f"sys_platform == '{system}'" for system in provider.systems)
    parts = (python if provider.python > (3, 10) else "", systems and f"({systems})")
    return f"; {' and '.join(filter(None, parts))}" if any(parts) else ""

"""``epcontext init``: writes the tables for a project's models.

New tables are appended as text, with comments. tomlkit adds to the lists ``requires`` and ``models``.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import Any

import click
import tomlkit
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from tomlkit.items import AoT, Array

from hatch_epcontext.cli._common import Command, echo, existing_file, warn
from hatch_epcontext.cli._settings import (
    HATCHLING,
    Project,
    requirements,
    short_flags,
    use_flag_names,
    use_lines,
)
from hatch_epcontext.cli.doctor import provider_states
from hatch_epcontext.cli.fetch import Table
from hatch_epcontext.config.build_hooks import NAME, hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.location import file_of
from hatch_epcontext.config.pyproject import FILE, parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import (
    HOOK,
    ROOT,
    BuildError,
    ConfigError,
    InspectionError,
    Kind,
    Problem,
)
from hatch_epcontext.files import temp_dir, write_atomically
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME
from hatch_epcontext.package.folder import own_files
from hatch_epcontext.package.wheel import FOLDER
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.tools.configure import for_model, split
from hatch_epcontext.tools.inspecting import TIMEOUT, inspect_model
from hatch_epcontext.worker.requests import InspectReply, OpenSize, SuggestReply, SuggestRequest

_PACKAGE, _BACKEND = "hatch-epcontext", "hatchling.build"

_WRITABLE = [name for name, provider in PROVIDERS.items() if not provider.needs_library]

_UNKNOWN = "size that the user knows"
"""Stands for a question mark in a value, which TOML has not."""

_OUTPUTS = frozenset({"build", "dist", "node_modules", "site-packages", "__pycache__"})

_NOT_THE_APP = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
)
"""Folders whose models and packages are not the app's."""

_EXPORT = """\
The build backend is {backend}, which does not run Hatch's hooks, but packs a folder. Write it before each
build, and once after cloning, because the app imports it:
    epcontext export -o {folder} --overwrite
How {backend} packs it: https://hatch-epcontext.github.io/hatch-epcontext/adopting/#2-build-the-wheel
Keep the plain models out of {parent}, or exclude them: the backend may pack them too.
Or change to hatchling, which compiles the models in each build, and call epcontext init again."""


@dataclass(frozen=True)
class NewModel:
    """A model to add: its path in the project, with forward slashes, the facts of its file, and suggestions.

    ``pinned``: the keys of a model from elsewhere; ``path`` is then its location. ``name`` and ``settings``,
    other keys: those that the user chose.
    """

    path: str
    facts: InspectReply
    suggested: SuggestReply = SuggestReply()
    pinned: Table | None = None
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

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
        models = self.load(self.table).models if has_models else ()
        self.listed = {
            model.download.url if model.download else model.path.relative_to(root).as_posix(): (
                model.configured_name
            )
            for model in models
        }

    def load(self, table: Any) -> Config:
        """The configuration with ``table`` as `[tool.epcontext]`."""
        # Files that another build hook makes need not exist.
        return load(self.root, table, {}, {}, pending=bool(hooks_of_project(self.root)))


def tables_options(command: Command) -> Command:
    """``--provider`` and ``--dry-run``."""
    dry_run = click.option("--dry-run", is_flag=True, help="Show the changes, and write nothing.")
    provider = click.option(
        "-p",
        "--provider",
        "providers",
        multiple=True,
        type=click.Choice(_WRITABLE, case_sensitive=False),
        help="A provider to compile for; repeatable. The default is all that are installed and offer a "
        "device, or else cpu.",
    )
    return provider(dry_run(command))


@click.command("init")
@click.argument("models", nargs=-1, type=existing_file)
@tables_options
@short_flags
def command(
    models: tuple[Path, ...], providers: tuple[str, ...], settings: dict[str, Any], dry_run: bool
) -> None:
    """Write the tables for models into pyproject.toml.

    Without MODEL: all .onnx files of the project in the current folder, except in its tests, docs and
    examples. Sizes that a model implies are filled in; the others are questions in a comment.
    An existing configuration gets the models that it does not list; everything else stays as it is.

    A project of hatchling gets the build requirement and the hook. For other build backends the next steps
    are printed, as are the lines for the app.
    """
    pyproject = Pyproject(Path.cwd())
    use_flag_names({}, "nothing is written")
    target, of_models = split(settings)
    new = [*_read(pyproject.root, models)]
    stems = [PurePosixPath(model.path).stem for model in new]
    if pyproject.table is None:
        use_flag_names({m.path: Path(m.path) for m in new}, "nothing is written")
    else:
        use_lines(pyproject.root)
    new = [
        replace(model, settings=for_model(stem, stems, of_models))
        for model, stem in zip(new, stems, strict=True)
    ]
    if not new:
        message, hint = "has no ONNX models.", "Name them: epcontext init MODEL..."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, str(pyproject.root), message, hint))
    add_tables(pyproject, new, providers, target, dry_run=dry_run)


def add_tables(
    pyproject: Pyproject,
    models: Sequence[NewModel],
    names: tuple[str, ...],
    target: Mapping[str, Any],
    *,
    dry_run: bool,
) -> None:
    """Write the tables of ``models`` for the providers called ``names``, and show the next steps.

    ``target``: keys of each new target.
    """
    file, before = str(pyproject.file), pyproject.raw
    new = [model for model in models if model.path not in pyproject.listed]
    after, config = add_models(pyproject, new, _providers(pyproject, names), target)
    # A file with the line ends of Windows keeps them.
    text = after.replace("\n", "\r\n") if "\r\n" in before else after
    questions = [f"{model.path}: {line}" for model in new for line in model.questions]
    if dry_run:
        changed = before.splitlines(), text.splitlines()
        echo("\n".join(difflib.unified_diff(*changed, file, file, lineterm="")), lines=True)
    elif text == before:
        echo(f"{file} has all models already")
    else:
        # A link stays a link.
        write_atomically(pyproject.file.resolve(), text)
        # Before all sizes are known, there are only errors to see.
        echo(
            f"wrote {file}" + ("" if questions else "; to see the jobs: epcontext build --dry-run")
        )
    heading = 'The tables of the models need these lines, with a number for each "?":'
    for title, advice in (
        (heading, questions),
        *next_steps(Project(pyproject.root, parse(after)), config),
    ):
        if advice:
            echo(f"\n{title}", lines=True)
            echo(indent("\n".join(advice), "    "), lines=True)


def _providers(pyproject: Pyproject, names: tuple[str, ...]) -> list[Provider]:
    """The providers called ``names``, or those that are installed if nothing is configured yet."""
    if names or pyproject.table is not None:
        return [PROVIDERS[name] for name in dict.fromkeys(names)]
    states = [state for state in provider_states() if state.package]
    # A start tries the targets in their order.
    states.sort(key=lambda s: (s.provider == "cpu", PROVIDERS[s.provider].product != "context"))
    for state in states:
        if not state.devices:
            warn(
                f"{state.provider}: {state.package} is installed, but {state.reason} No target for it."
            )
    usable = [PROVIDERS[state.provider] for state in states if state.devices]
    if not usable:
        warn("no EP is installed here, so the target is cpu; choose others with -p.")
    return usable or [PROVIDERS["cpu"]]


def _text(file: Path) -> str:
    """The text of the ``pyproject.toml`` at ``file``; empty for a project of setuptools without one."""
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    if any((file.parent / name).is_file() for name in ("setup.py", "setup.cfg")):
        return ""
    message, hint = "does not exist.", "Create a project first, for example with: hatch new"
    raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))


def _read(root: Path, named: tuple[Path, ...]) -> Iterator[NewModel]:
    """The facts of the models; those that the user did not name are skipped if they are unusable."""
    with Workers(TIMEOUT) as workers:
        for path in named or _find_models(root):
            # A link in the project is inside, wherever its target is.
            inside = path.parent.resolve() / path.name
            if not inside.is_relative_to(root):
                message = f"is not inside the project {root}."
                hint = "Copy it into the project."
                raise ConfigError(Problem(Kind.OUTSIDE_PROJECT, str(path), message, hint))
            try:
                model = new_model(root, inside.relative_to(root).as_posix(), workers)
            except (InspectionError, ConfigError) as error:
                if named:
                    raise
                warn(f"skipped {path}: {error.problems[0].message}")
            else:
                yield model


def _find_models(root: Path) -> list[Path]:
    """The ONNX files of the project in ``root``, in order.

    Without those in tests, docs and examples, hidden folders, virtual environments, build outputs and
    packages that this tool wrote.
    """
    models: list[Path] = []
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
        models += [folder / file for file in sorted(files) if file.casefold().endswith(".onnx")]
    return models


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
    pyproject: Pyproject,
    models: Sequence[NewModel],
    providers: Sequence[Provider],
    target: Mapping[str, Any],
) -> tuple[str, Config]:
    """The text of ``pyproject`` with all that ``models``, which it does not list, need; its configuration.

    ``providers``, and ``target``, keys of their targets, must be empty if it is configured already. Projects
    of hatchling, and those without a build backend, also get the build requirement and the hook. Raises
    ConfigError when that is impossible.
    """
    if pyproject.table is not None and (providers or target):
        message = "exists already, and targets can only be chosen for a new configuration."
        raise _error(f"[{ROOT}]", message, "Add the target to it by hand.")
    document, appended = tomlkit.parse(pyproject.text), list[str]()
    if pyproject.project.backend == HATCHLING:
        appended += [*_build_system(document), *_hook_tables(pyproject.project)]
    if pyproject.table is None:
        appended += _head(providers, target)
    static = pyproject.table is not None or any(provider.static_shapes for provider in providers)
    names = _named(models, pyproject.listed.values())
    tables = [_model(model, name, static=static) for model, name in names]
    has_table = isinstance(pyproject.table, dict)
    existing = document["tool"]["epcontext"].get("models") if has_table else None
    if isinstance(existing, Array) and not isinstance(existing, AoT):
        for table in map(parse, tables):
            (model,) = table["tool"]["epcontext"]["models"]
            is_path = model.keys() == {"path"}
            existing.append(model["path"] if is_path else tomlkit.item(model, _parent=existing))
        tables = []
    result = tomlkit.dumps(document)
    for part in (*appended, *tables):
        result = result.rstrip("\n") + ("\n\n" if result.strip() else "") + part
    try:
        return result, pyproject.load(parse(result)["tool"]["epcontext"])
    except ValueError as error:
        raise _error(
            FILE,
            f"has values to which nothing can be added: {error}.",
            f"Write [tool] and [tool.hatch] as tables of their own, or add [{HOOK}] and [{ROOT}] by hand.",
        ) from error


def _error(location: str, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError(Problem(Kind.INVALID_PYPROJECT, location, message, hint))


def _build_system(document: tomlkit.TOMLDocument) -> Iterator[str]:
    """Add this package to the build requirements; yield the whole table if there is none."""
    if "build-system" not in document:
        yield f'[build-system]\nrequires = ["hatchling", "{_PACKAGE}"]\nbuild-backend = "{_BACKEND}"\n'
        return
    table: Any = document["build-system"]
    if not isinstance(requires := table.setdefault("requires", ["hatchling"]), list):
        raise _error(f"{FILE}: build-system.requires", "is not a list.", "Make it one.")
    if _PACKAGE not in {canonicalize_name(listed.name) for listed in requirements(requires)}:
        requires.append(_PACKAGE)
    # Without one front ends take setuptools.
    table.setdefault("build-backend", _BACKEND)


def _hook_tables(project: Project) -> Iterator[str]:
    """The tables that switch the hook on, for wheels and sdists, after the project's other hooks."""
    everywhere = project.table("tool", "hatch", "build", "hooks")
    of_wheels = project.table("tool", "hatch", "build", "targets", "wheel", "hooks")
    if NAME in everywhere or NAME in of_wheels:
        return
    if not of_wheels:
        yield f"[{HOOK}]  # switches the hook on\n"
        return
    # Hooks for all targets run before those for wheels.
    of_target = "tool.hatch.build.targets.{}.hooks"
    yield f"[{of_target.format('wheel')}.{NAME}]  # switches the hook on, after the other ones\n"
    yield f"[{of_target.format('sdist')}.{NAME}]  # checks that sdists contain the models\n"


def _head(providers: Sequence[Provider], target: Mapping[str, Any]) -> Iterator[str]:
    # Models for the CPU replace the source models.
    has_sources = all(provider.name != "cpu" for provider in providers)
    fallback = '# fallback = "none"  # do not ship the source models\n' if has_sources else ""
    yield f"[{ROOT}]\n{fallback}"
    for provider in providers:
        lines = [
            f"[{ROOT}.targets.{quoted_key(provider.name)}]",
            f"provider = {to_toml(provider.name)}",
        ]
        lines += [f"{key} = {to_toml(value)}" for key, value in target.items()]
        if provider.example and provider.example.strip("# ").partition(" =")[0] not in target:
            lines.append(provider.example)
        if provider.product == "context" and "min-coverage" not in target:
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
    if "constants" not in model.settings:
        lines += _constants(model, static=static)
    others = model.settings.keys() - {"dims", "shapes"}
    lines += [f"{key} = {to_toml(model.settings[key])}" for key in sorted(others)]
    return "\n".join(lines) + "\n"


def _size_lines(model: NewModel) -> Iterator[tuple[str, bool, bool]]:
    """Each line with sizes of open dimensions, whether some are unknown, and whether all are 1."""
    suggested = {(size.input, size.axis): size for size in model.suggested.sizes}
    tables = {key: dict(model.settings.get(key, {})) for key in ("dims", "shapes")}
    sizes: dict[str, list[tuple[int | None, str]]] = {"dims": [], "shapes": []}
    for tensor in model.facts.inputs:
        if tensor.name in tables["shapes"]:
            continue
        if tensor.shape is None:
            tables["shapes"][tensor.name] = _UNKNOWN
            sizes["shapes"].append((None, f"{tensor.name}: which shape, such as [1, 3]?"))
            continue
        key, shape = "shapes" if None in tensor.shape else "dims", [*tensor.shape]
        for axis, name in enumerate(tensor.shape):
            if isinstance(name, int) or (key == "dims" and name in tables[key]):
                continue
            unknown = OpenSize(tensor.name, axis, None, "which size?")
            size = suggested.get((tensor.name, axis), unknown)
            shape[axis] = size.size or _UNKNOWN
            if key == "dims":
                tables[key][str(name)] = shape[axis]
            what = "" if size.size else f"{name or f'axis {axis} of {tensor.name}'}: "
            sizes[key].append((size.size, what + size.note))
        if key == "shapes":
            tables[key][tensor.name] = shape
    for key, notes in sizes.items():
        if tables[key]:
            values = {size for size, _ in notes}
            text = to_toml(tables[key]).replace(to_toml(_UNKNOWN), "?")
            comment = "; ".join(dict.fromkeys(_one_line(note) for _, note in notes))
            line = f"{key} = {text}" + (f"  # {comment}" if comment else "")
            yield line, None in values, values == {1} and key not in model.settings


def _constants(model: NewModel, *, static: bool) -> Iterator[str]:
    """The line with inputs that can be constants: a comment, unless an EP needs some of them."""
    needed = [constant for constant in model.suggested.constants if static and constant.needed]
    if constants := needed or model.suggested.constants:
        values = {constant.input: constant.value for constant in constants}
        notes = dict.fromkeys(_one_line(constant.note) for constant in constants)
        comment = "" if needed else "# "
        yield f"{comment}constants = {to_toml(values)}  # {'; '.join(notes)}"


def _one_line(text: str) -> str:
    # A name can contain any characters, but a comment is one line.
    return re.sub(r"\s+", " ", text)


def next_steps(project: Project, config: Config) -> list[tuple[str, list[str]]]:
    """What is left to do in the app, in its metadata and in its build: headings with lines."""
    parent = _import_package(project)
    output, origin, notes = config.output or PurePosixPath(parent.name, FOLDER), "", list[str]()
    if project.backend != HATCHLING:
        # In a clone without the folder, a traceback shows this line.
        output, origin = PurePosixPath(parent.name, FOLDER), "  # made by: epcontext export"
        folder = parent / FOLDER
        notes.append(_EXPORT.format(backend=project.backend, folder=folder, parent=parent))
    with contextlib.suppress(InvalidSpecifier):
        if SpecifierSet(str(project.table("project").get("requires-python", ""))).contains("3.9"):
            notes.append("The loader needs Python 3.10 or newer: set requires-python accordingly.")
    name, *others = dict.fromkeys(to_toml(model.configured_name) for model in config.models)
    more = f"  # or {', '.join(others)}" if others else ""
    module = ".".join(output.parts)
    return [
        ("In the app:", [f"from {module} import load{origin}", f"session = load({name}){more}"]),
        ("In the dependencies of the app:", [*_dependencies(project, config)]),
        ("Note:", notes),
    ]


def _import_package(project: Project) -> PurePosixPath:
    """The folder of the app's import package in the project; a guess unless it has the project's name."""
    name = str(canonicalize_name(project.name)).replace("-", "_")
    packages = [
        PurePosixPath(file.parent.relative_to(project.root).as_posix())
        for source in ("src", "python", "lib", "")
        for file in sorted((project.root / source).glob("*/__init__.py"))
        if file.parent.name.casefold() not in _NOT_THE_APP
    ]
    named = (package for package in packages if package.name == name)
    return next(named, (packages or [PurePosixPath("src", name)])[0])


def _dependencies(project: Project, config: Config) -> Iterator[str]:
    """The missing dependencies of the app."""
    listed = {canonicalize_name(Requirement(text).name) for text in project.dependencies}
    providers = {target.provider.name: target.provider for target in config.targets}.values()
    if listed.isdisjoint(DISTRIBUTIONS):
        fitting = [set(provider.distributions) for provider in providers]
        name = next((n for n in DISTRIBUTIONS if all(n in f for f in fitting)), DISTRIBUTIONS[0])
        yield to_toml(name + ONNX_RUNTIME)
    for provider in providers:
        # Those of the EP, also where the vendor's library compiles.
        for requirement in PROVIDERS[provider.name].requirements:
            if canonicalize_name(Requirement(requirement).name) not in listed:
                text = to_toml(f"{requirement}{_marker(provider)}")
                yield f"{text}  (for {provider.name}; or in an extra)"


def _marker(provider: Provider) -> str:
    python = f"python_version >= '{provider.python[0]}.{provider.python[1]}'"
    systems = " or ".join(f"sys_platform == '{system}'" for system in provider.systems)
    parts = (python if provider.python > (3, 10) else "", systems and f"({systems})")
    return f"; {' and '.join(filter(None, parts))}" if any(parts) else ""

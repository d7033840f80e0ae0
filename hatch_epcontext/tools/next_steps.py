"""The user's next steps after ``epcontext init``: in the app, in its metadata, in its build."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from hatch_epcontext.config.build_hooks import hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME
from hatch_epcontext.package.wheel import FOLDER, output_folder
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import listing, to_toml
from hatch_epcontext.tools.project import (
    HATCHLING,
    ImportPackage,
    Project,
    find_hub_files,
    requirements,
)

_MAX_NAMED = 3
"""The most files that a note names."""

_OLDEST_PYTHON = (3, 10)
"""The oldest Python for the loader."""


@dataclass(frozen=True)
class NextSteps:
    """The user's next steps.

    ``module``: the module with ``load``; ``exported``: whether ``epcontext export`` writes it; ``models``:
    their names; ``dependencies``: those that the app needs but does not list, as strings in TOML, perhaps
    with a reason; ``notes``: sentences.
    """

    module: str
    exported: bool
    models: tuple[str, ...]
    dependencies: tuple[str, ...]
    notes: tuple[str, ...]


def next_steps(root: Path, text: str) -> NextSteps:
    """The next steps in the project in ``root``, whose ``pyproject.toml`` has a valid ``text``."""
    values = parse(text)
    pending = bool(hooks_of_project(root))
    config = load(root, values["tool"]["epcontext"], {}, {}, pending=pending)
    project = Project(root, values)
    names = tuple(dict.fromkeys(model.configured_name for model in config.models))
    if project.backend == HATCHLING:
        module, notes = _with_hatchling(project, config)
    else:
        module, notes = _with_export(project, config)
    notes += (*_python(project), *_downloaded_by_code(root, config))
    exported = project.backend != HATCHLING
    dependencies = tuple(_dependencies(values, config))
    return NextSteps(module, exported, names, dependencies, notes)


def _with_hatchling(project: Project, config: Config) -> tuple[str, tuple[str, ...]]:
    """The module with ``load`` in a wheel of hatchling, and notes about this wheel."""
    tree = project.hatch_tree()
    notes: list[str] = []
    output = config.output
    if output is None:
        try:
            output = output_folder(None, tree or {})
        except ConfigError:
            found = _package(project, config)
            output = PurePosixPath(_import_name(project) if found is None else found.name, FOLDER)
            if found is None:
                notes.append(
                    "The project has no import package yet, and the wheel needs one: create "
                    f"src/{output.parent}/__init__.py."
                )
    wheel = project.hatch_wheel
    if plain := [path for path in _paths(config) if _matches(path, wheel.get("exclude", ()))]:
        notes.append(
            f"The wheel leaves out {_names(plain)} (exclude in pyproject.toml): the app opens the "
            "compiled models. Where other code opens a plain file, remove it from exclude, and set "
            'fallback = "none" for its model.'
        )
    packed = {path.resolve() for path in (tree or {}).values()}
    if again := [path for path in _paths(config) if (config.root / path).resolve() in packed]:
        notes.append(
            f"The wheel also has plain files: {_names(again)}. Add the paths to exclude in "
            "[tool.hatch.build.targets.wheel], or move the files out of the package."
        )
    notes += [
        f"{path}: packed once more by [tool.hatch.build.targets.wheel.{key}]. Remove it there."
        for key in ("shared-data", "force-include")
        for path in _paths(config)
        if _is_in(path, wheel.get(key, {}))
    ]
    return ".".join(output.parts), tuple(notes)


def _with_export(project: Project, config: Config) -> tuple[str, tuple[str, ...]]:
    """The module with ``load`` that another build backend packs, and how it does so."""
    found = _package(project, config)
    name = PurePosixPath(_import_name(project)) if found is None else found.name
    folder = (PurePosixPath("src", name) if found is None else found.folder) / FOLDER
    front_end = "uv build" if project.backend == "uv_build" else "python -m build"
    commands = f"    epcontext export -o {folder} --overwrite\n    {front_end}"
    what = f"The build backend is {project.backend}, which does not run Hatch's hooks, but packs a folder"
    when = "Write it before each build, and once after cloning, because the app imports it"
    notes = [f"{what}. {when}:\n{commands}"]
    if found is None:
        notes.append(f"No import package was found: {folder.parent} is a guess.")
    package = ".".join(name.parts)
    if project.backend == "setuptools" and "project" not in project.values:
        notes += _without_metadata(project, package)
    elif packing := _PACKING.get(project.backend):
        notes += packing.advice(project.values, package, folder)
    if "project" in project.values:
        notes.append(
            'Or change to hatchling (requires = ["hatchling", "hatch-epcontext"], build-backend = '
            '"hatchling.build"), and call epcontext init again: then each build compiles the models.'
        )
    if inside := [path for path in _paths(config) if path.is_relative_to(folder.parent)]:
        notes.append(
            f"The backend may also pack plain models: {_names(inside)}. Move them out of "
            f"{folder.parent}, such as to models/, or exclude them."
        )
    return ".".join((*name.parts, FOLDER)), tuple(notes)


def _without_metadata(project: Project, package: str) -> Iterator[str]:
    """The addition to ``setup.py`` or ``setup.cfg``, unless it is there.

    With ``[tool.setuptools]`` in ``pyproject.toml``, setuptools would require ``[project]`` there.
    """
    files = _setup_files(project)
    if any(f"{FOLDER}/*" in text for text in files.values()):
        return
    if "setup.py" in files:
        addition = f'package_data={{"{package}": ["{FOLDER}/**"]}}'
        yield f"Add to setup() in setup.py, or merge with its package_data:\n    {addition}"
    else:
        yield f"Add to setup.cfg:\n    [options.package_data]\n    {package} = {FOLDER}/**"


def _setup_files(project: Project) -> dict[str, str]:
    """The texts of the files in which setuptools finds metadata besides ``pyproject.toml``."""
    paths = (project.root / name for name in ("setup.py", "setup.cfg"))
    return {path.name: path.read_text("utf-8", "replace") for path in paths if path.is_file()}


@dataclass(frozen=True)
class _Packing:
    """A build backend's setting to pack a folder: an ``item`` in the list ``key`` of ``[tool.<table>]``.

    ``{package}`` and ``{folder}`` stand for the import package, and for the exported folder.
    """

    table: str
    key: str
    item: str
    if_ignored: bool = True
    """Whether it is needed only if git ignores the folder."""

    def advice(
        self, values: Mapping[str, Any], package: str, folder: PurePosixPath
    ) -> Iterator[str]:
        """The user's addition to ``values``, those of ``pyproject.toml``, unless they have it."""
        key = self.key.format(package=to_toml(package))
        item = self.item.replace("{folder}", str(folder))
        given: Any = values.get("tool", {})
        # The dots in a package's name must not separate TOML keys.
        parts = (each.format(package=package) for each in self.key.split("."))
        for name in (*self.table.split("."), *parts):
            given = given.get(name) if isinstance(given, dict) else None
        start = "If the folder is in .gitignore, add" if self.if_ignored else "Add"
        if not given:
            yield f"{start} to [tool.{self.table}] in pyproject.toml:\n    {key} = [{item}]"
        elif item not in to_toml(given):
            yield f"{start} to the list {key} in [tool.{self.table}] of pyproject.toml:\n    {item}"


_PACKING: Mapping[str, _Packing] = {
    "setuptools": _Packing(
        "setuptools.package-data", "{package}", '"epcontext/**"', if_ignored=False
    ),
    "maturin": _Packing(
        "maturin", "include", '{ path = "{folder}/**/*", format = ["sdist", "wheel"] }'
    ),
    # Without the sdist, a wheel that is made of it has no models.
    "poetry-core": _Packing(
        "poetry", "include", '{ path = "{folder}/**/*", format = ["sdist", "wheel"] }'
    ),
    "scikit-build-core": _Packing("scikit-build", "sdist.include", '"{folder}/**"'),
}
"""The settings of build backends; the others pack all files of an import package."""


def _paths(config: Config) -> list[PurePosixPath]:
    root = config.root
    own = (each.path for each in config.models if each.download is None)
    paths = (PurePosixPath(path.relative_to(root).as_posix()) for path in own)
    return list(dict.fromkeys(paths))


def _names(paths: list[PurePosixPath]) -> str:
    return listing(map(str, paths), _MAX_NAMED)


def _matches(path: PurePosixPath, patterns: Iterable[str]) -> bool:
    return any(str(path) == pattern.lstrip("/") for pattern in patterns)


def _is_in(path: PurePosixPath, included: Mapping[str, str]) -> bool:
    return any(path.is_relative_to(source.strip("/")) for source in included)


def _downloaded_by_code(root: Path, config: Config) -> Iterator[str]:
    """A note for each model that the app downloads itself, and that the wheel could contain compiled."""
    hubs = (each.download.hub for each in config.models if each.download)
    listed = {(hub.repo, hub.path) for hub in hubs if hub}
    for each in find_hub_files(root):
        if (each.repo, each.path) not in listed:
            yield f"the code downloads {each}; this puts it into the wheel, compiled: epcontext add {each}"


def _package(project: Project, config: Config) -> ImportPackage | None:
    packages = {each.folder: each for each in project.packages()}
    folder = project.choose(packages, _paths(config))
    return None if folder is None else packages[folder]


def _import_name(project: Project) -> str:
    return str(canonicalize_name(project.name)).replace("-", "_")


def _dependencies(values: Mapping[str, Any], config: Config) -> Iterator[str]:
    """The missing dependencies of the app."""
    project = values.get("project", {})
    given: dict[str, SpecifierSet] = {
        canonicalize_name(each.name): each.specifier
        for each in requirements(project.get("dependencies"))
    }
    extras: dict[str, str] = {
        canonicalize_name(each.name): extra
        for extra, listed in project.get("optional-dependencies", {}).items()
        for each in requirements(listed)
    }
    providers = {each.provider.name: each.provider for each in config.targets}
    wanted = next((name for name in DISTRIBUTIONS if name in given), None)
    if wanted is None:
        name = _distribution(providers.values())
        only = f"  (so far only in the extra {extras[name]})" if name in extras else ""
        yield f"{to_toml(name + ONNX_RUNTIME)}{only}"
    elif given[wanted].contains("1.22"):
        yield f"{to_toml(wanted + ONNX_RUNTIME)}  (instead of {to_toml(f'{wanted}{given[wanted]}')})"
    for provider in providers.values():
        needed, library = provider.requirements, provider.compiler_library
        if provider.by_library and library is not None:
            newest = [*library.ep_versions.values()][-1]
            own = PROVIDERS[provider.name].requirements
            needed = tuple(f"{Requirement(each).name}=={newest}.*" for each in own)
        for requirement in needed:
            name = canonicalize_name(Requirement(requirement).name)
            if name not in given and name not in extras:
                text = to_toml(f"{requirement}{_marker(provider)}")
                yield f"{text}  (for {provider.name}; or in an extra)"


def _distribution(providers: Iterable[Provider]) -> str:
    possible = [set(provider.distributions) for provider in providers]
    return next(
        (name for name in DISTRIBUTIONS if all(name in each for each in possible)), DISTRIBUTIONS[0]
    )


def _marker(provider: Provider) -> str:
    parts = []
    if provider.python > _OLDEST_PYTHON:
        parts.append(f"python_version >= '{provider.python[0]}.{provider.python[1]}'")
    if provider.systems:
        systems = " or ".join(f"sys_platform == '{each}'" for each in provider.systems)
        parts.append(f"({systems})" if parts and len(provider.systems) > 1 else systems)
    return f"; {' and '.join(parts)}" if parts else ""


def _python(project: Project) -> Iterator[str]:
    """A note if the project may be for older versions of Python than the loader."""
    key, file = "requires-python", "pyproject.toml"
    given = project.values.get("project", {}).get(key)
    if "project" not in project.values and (files := _setup_files(project)):
        key, file = "python_requires", next(iter(files))
        found = re.search(r"python_requires\s*=\s*[\"']?([^\"'\n]*)", "\n".join(files.values()))
        given = found and found[1].strip()
    oldest, older = _OLDEST_PYTHON, f"{_OLDEST_PYTHON[0]}.{_OLDEST_PYTHON[1] - 1}"
    needed = f"the loader needs Python {oldest[0]}.{oldest[1]} or newer."
    try:
        if given is None:
            yield f"{key} is not set in {file}, and {needed}"
        elif isinstance(given, str) and SpecifierSet(given).contains(older):
            yield f"{key} is {to_toml(given)}, and {needed}"
    except InvalidSpecifier:
        return

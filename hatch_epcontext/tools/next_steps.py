"""What is left to do after ``epcontext init``: in the app, in its metadata, in its build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from hatch_epcontext.config.build_hooks import hooks_of_project
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ROOT
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME
from hatch_epcontext.package.wheel import FOLDER
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Provider
from hatch_epcontext.text import to_toml
from hatch_epcontext.tools.project import HATCHLING, NOT_THE_APP, Project

_SOURCES = ("src", "python", "lib", "")
"""Folders that contain import packages, in the usual layouts."""

_EXPORT = """\
The build backend is {backend}, which does not run Hatch's hooks, but packs a folder. Write it before each
build, and once after cloning, because the app imports it:
    epcontext export -o {folder} --overwrite
    {front_end}
Keep the plain models out of {parent}, or exclude them: the backend may pack them too."""

_MOVE = """\
Or change to hatchling (requires = ["hatchling", "hatch-epcontext"], build-backend = "hatchling.build"), and
call epcontext init again: then each build compiles the models."""

# Without the sdist, a wheel that is made of it has no models.
_INCLUDE = """\
If the folder is in .gitignore, add to the list include in [tool.{backend}] of pyproject.toml:
    {{ path = "{folder}/**/*", format = ["sdist", "wheel"] }}"""

_PACK = {
    "setuptools": """\
Add to [tool.setuptools.package-data] in pyproject.toml:
    "{package}" = ["epcontext/**"]""",
    # With [tool.setuptools] in pyproject.toml, setuptools would require [project] there.
    "setup.py": """\
Add to setup() in setup.py, or merge with its package_data (in setup.cfg: [options.package_data]):
    package_data={{"{package}": ["epcontext/**"]}}""",
    "maturin": _INCLUDE,
    "poetry": _INCLUDE,
    "scikit_build_core": """\
If the folder is in .gitignore, add to the list sdist.include in [tool.scikit-build] of pyproject.toml:
    "{folder}/**\"""",
}
"""How a build backend packs the folder; the others pack all files of an import package."""


def next_steps(root: Path, text: str) -> list[tuple[str, list[str]]]:
    """Headings with lines, for the project in ``root`` whose ``pyproject.toml`` has the valid ``text``."""
    values = parse(text)
    pending = bool(hooks_of_project(root))
    config = load(root, values["tool"]["epcontext"], {}, {}, pending=pending)
    project = Project(root, values)
    parent, is_guess = _import_package(project)
    output, origin, notes = config.output or PurePosixPath(parent.name, FOLDER), "", list[str]()
    if project.backend == HATCHLING:
        if is_guess and config.output is None:
            setting = f"output = {to_toml(str(output))} in [{ROOT}]"
            notes.append(f"{output.parent} is a guess: set {setting} if it is another folder.")
    else:
        # In a clone without the folder, a traceback shows this line.
        output, origin = PurePosixPath(parent.name, FOLDER), "  # made by: epcontext export"
        notes += _exporting(project, parent)
        if is_guess:
            notes.append(f"{parent} is a guess: replace it by the app's import package.")
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


def _import_package(project: Project) -> tuple[PurePosixPath, bool]:
    """The folder of the app's import package in the project, and whether that is a guess."""
    name = str(canonicalize_name(project.name)).replace("-", "_")
    packages = [
        PurePosixPath(file.parent.relative_to(project.root).as_posix())
        for source in _SOURCES
        for file in sorted((project.root / source).glob("*/__init__.py"))
        if file.parent.name.casefold() not in NOT_THE_APP
    ]
    if named := [package for package in packages if package.name == name]:
        return named[0], False
    return (packages or [PurePosixPath("src", name)])[0], len(packages) != 1


def _exporting(project: Project, parent: PurePosixPath) -> Iterator[str]:
    """How another build backend than hatchling packs the models in the import package ``parent``."""
    backend, has_metadata = project.backend, bool(project.table("project"))
    front_end = "uv build" if backend == "uv_build" else "python -m build"
    how = "setup.py" if backend == "setuptools" and not has_metadata else backend
    for text in (_EXPORT, _PACK.get(how), _MOVE if has_metadata else None):
        if text is not None:
            yield text.format(
                backend=backend,
                folder=parent / FOLDER,
                front_end=front_end,
                package=parent.name,
                parent=parent,
            )


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

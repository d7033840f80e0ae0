"""Facts of a project from its files: its build backend, its import packages, its models."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hatch_epcontext.config.location import HubFile, hub_file
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import known_text
from hatch_epcontext.package.reader import own_files

HATCHLING = "hatchling"

_BACKENDS = {
    "hatchling": HATCHLING,
    "setuptools": "setuptools",
    "maturin": "maturin",
    "scikit_build_core": "scikit-build-core",
    "poetry": "poetry-core",
    "pdm": "pdm-backend",
    "uv_build": "uv_build",
    "flit_core": "flit",
    "flit": "flit",
}
"""Names of build backends, by the first part of ``build-backend``."""

_OUTPUTS = frozenset({"build", "dist", "node_modules", "site-packages", "__pycache__"})

_NOT_THE_APP = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
)
"""Folders whose models and packages are not the app's."""

_SOURCES = ("src", "python", "lib", "")
"""Folders that contain import packages, in the usual layouts."""

_DEPTH = 4
"""The most names in an import package: ``livekit.plugins.silero`` has three."""


@dataclass(frozen=True)
class ImportPackage:
    """An import package: ``name`` is its installed path, ``folder`` that in the project."""

    name: PurePosixPath
    folder: PurePosixPath


@dataclass(frozen=True)
class Project:
    """The project in the folder ``root``; ``values`` are those of its ``pyproject.toml``."""

    root: Path
    values: Mapping[str, Any]

    @property
    def dependencies(self) -> list[str]:
        """The valid requirements of the app and of its extras."""
        table = _table(self.values, "project")
        listed = table.get("dependencies"), *_table(table, "optional-dependencies").values()
        return [str(each) for some in listed for each in requirements(some)]

    @property
    def name(self) -> str:
        """The project's name, or that of its folder."""
        name = _table(self.values, "project").get("name")
        return name if isinstance(name, str) else self.root.name

    @property
    def backend(self) -> str:
        """The name of the build backend; without any it is hatchling, for a new project."""
        system = _table(self.values, "build-system")
        given = system.get("build-backend")
        if isinstance(given, str):
            return _BACKENDS.get(re.split(r"[.:]", given)[0], given)
        old = any((self.root / name).is_file() for name in ("setup.py", "setup.cfg"))
        return "setuptools" if system or old else HATCHLING

    @property
    def hatch_build(self) -> Mapping[str, Any]:
        """Hatch's table with what counts for wheels and sdists."""
        return _table(_table(_table(self.values, "tool"), "hatch"), "build")

    @property
    def hatch_wheel(self) -> Mapping[str, Any]:
        """Hatch's table with what counts for wheels alone."""
        return _table(_table(self.hatch_build, "targets"), "wheel")

    def hatch_tree(self) -> dict[str, Path] | None:
        """The files that hatchling puts into the wheel, by their path in it; None if it raises an error."""
        from hatchling.builders.wheel import WheelBuilder

        try:
            builder = WheelBuilder(str(self.root), config=dict(self.values))
            selected = list(builder.recurse_selected_project_files())
        except Exception:
            # Metadata may need plugins that only the build environment has.
            return None
        return {Path(each.distribution_path).as_posix(): Path(each.path) for each in selected}

    def packages(self) -> list[ImportPackage]:
        """The outermost import packages in the project's folders, without tests and examples."""
        found: dict[PurePosixPath, PurePosixPath] = {}
        for source in dict.fromkeys((*self._configured_sources(), *_SOURCES)):
            for folder, _ in _walk(self.root / source, skip=_NOT_THE_APP):
                inside = folder.relative_to(self.root / source)
                is_package = (folder / "__init__.py").is_file()
                if is_package and inside.parts and len(inside.parts) <= _DEPTH:
                    name = PurePosixPath(inside.as_posix())
                    path = PurePosixPath(folder.relative_to(self.root).as_posix())
                    if path not in found.values():
                        found.setdefault(name, path)
        # A folder for packages can look like a namespace.
        packages = [
            ImportPackage(name, folder)
            for name, folder in found.items()
            if found.keys().isdisjoint(name.parents)
        ]
        return sorted(packages, key=lambda package: str(package.name))

    def _configured_sources(self) -> Iterator[str]:
        tool = _table(self.values, "tool")
        for table, key in (("maturin", "python-source"), ("uv", "module-root")):
            values = _table(tool, table)
            given = (_table(values, "build-backend") if table == "uv" else values).get(key)
            if isinstance(given, str) and ".." not in given and (self.root / given).is_dir():
                yield given.strip("/")

    def choose(
        self, packages: Iterable[PurePosixPath], models: Iterable[PurePosixPath]
    ) -> PurePosixPath | None:
        """The app's among ``packages``: the only one, that with the project's name, or that with ``models``.

        None if it is unknown.
        """
        all_of_them = list(packages)
        if len(all_of_them) == 1:
            return all_of_them[0]
        wanted = canonicalize_name(self.name)
        named = [p for p in all_of_them if canonicalize_name("-".join(p.parts)) == wanted]
        files = list(models)
        with_models = [p for p in all_of_them if any(file.is_relative_to(p) for file in files)]
        return next(iter([*named, *with_models]), None)


def project_name(root: Path) -> str:
    """The name in ``[project]``, or that of the folder if it has none; ``pyproject.toml`` was read before."""
    return Project(root, parse((root / "pyproject.toml").read_text(encoding="utf-8"))).name


def find_models(root: Path) -> tuple[list[Path], list[Path]]:
    """The ONNX files of the project in ``root``, and those in its tests, docs and examples.

    Hidden folders, virtual environments, build outputs and packages that this tool wrote are left out.
    """
    app: list[Path] = []
    others: list[Path] = []
    for folder, files in _walk(root):
        names = {part.casefold() for part in folder.relative_to(root).parts}
        found = [folder / name for name in files if name.casefold().endswith(".onnx")]
        (app if names.isdisjoint(_NOT_THE_APP) else others).extend(found)
    return app, others


def find_samples(root: Path) -> list[Path]:
    """The ``.npz`` files of the project in ``root``, also of its tests, and its folders of ONNX test data."""
    found = []
    for folder, files in _walk(root):
        found += [folder / name for name in files if name.endswith(".npz")]
        if any(name.startswith("input_") and name.endswith(".pb") for name in files):
            found.append(folder)
    return found


_MAX_CODE = 1 << 20
"""Bytes of a Python file that is searched for models."""

_HUB_CALLS = {
    "hf_hub_download": ("repo_id", "filename"),
    "from_pretrained": ("pretrained_model_name_or_path", "file_name"),
}
"""The functions that download from a hub, with the names of their arguments for repository and file."""


def find_hub_files(root: Path) -> list[HubFile]:
    """The models that the code of the project in ``root`` downloads from a hub, as far as its calls show."""
    found = []
    for folder, files in _walk(root, _NOT_THE_APP):
        for path in (folder / name for name in files if name.endswith(".py")):
            text = known_text(path) if path.stat().st_size <= _MAX_CODE else None
            if text and any(name in text for name in _HUB_CALLS):
                found += list(_hub_files(text))
    return list(dict.fromkeys(found))


def _hub_files(code: str) -> Iterator[HubFile]:
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):
        return
    # Constants of the module: REPO = "org/name".
    named = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            function = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            names = _HUB_CALLS.get(str(function))
            if names and (file := _hub_file(node, names, named)) is not None:
                yield file


def _hub_file(
    call: ast.Call, names: tuple[str, str], named: Mapping[str, ast.expr]
) -> HubFile | None:
    """The model that a ``call`` downloads; ``named``: the values of names."""
    # Only the first argument of from_pretrained has a place.
    places = dict(zip(names if "filename" in names else names[:1], call.args, strict=False))
    places |= {each.arg: each.value for each in call.keywords if each.arg}
    values = {}
    for name, given in places.items():
        value = named.get(given.id, given) if isinstance(given, ast.Name) else given
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            values[name] = value.value
    if values.get("repo_type", "model") != "model":
        return None
    repo, file = (values.get(name, "") for name in names)
    inside = "/".join(filter(None, (values.get("subfolder"), file)))
    revision = f"@{values['revision']}" if values.get("revision") else ""
    return hub_file(f"hf://{repo}{revision}/{inside}") if file.endswith(".onnx") else None


def requirements(listed: Any) -> Iterator[Requirement]:
    """The valid requirements in a list of ``pyproject.toml``."""
    for each in listed if isinstance(listed, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            yield Requirement(each)


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[tuple[Path, list[str]]]:
    """The folders of a project with the names of their files, in order."""
    for path, folders, files in os.walk(root):
        folder = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _OUTPUTS
            and name.casefold() not in skip
            and not (folder / name / "pyvenv.cfg").exists()
            and own_files(folder / name) is None
        )
        yield folder, sorted(files)


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name)
    return table if isinstance(table, dict) else {}

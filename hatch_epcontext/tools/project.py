"""Facts of a project from its files: its build backend, its requirements, its models."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.package.reader import own_files

HATCHLING = "hatchling"

_OUTPUTS = frozenset({"build", "dist", "node_modules", "site-packages", "__pycache__"})

NOT_THE_APP = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
)
"""Folders whose models and packages are not the app's."""


@dataclass(frozen=True)
class Project:
    """The project in the folder ``root``; ``values`` are those of its ``pyproject.toml``."""

    root: Path
    values: Mapping[str, Any]

    def table(self, *names: str) -> Mapping[str, Any]:
        """The table with these ``names``; empty if there is none."""
        table: Any = self.values
        for name in names:
            table = table.get(name) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else {}

    @property
    def dependencies(self) -> list[str]:
        """The valid requirements of the app and of its extras."""
        extras = self.table("project", "optional-dependencies").values()
        lists = self.table("project").get("dependencies"), *extras
        return [str(requirement) for listed in lists for requirement in requirements(listed)]

    @property
    def name(self) -> str:
        """The project's name, or that of its folder."""
        name = self.table("project").get("name")
        return name if isinstance(name, str) else self.root.name

    @property
    def backend(self) -> str:
        """The import name of the build backend; without any it is hatchling, for a new project."""
        name = self.table("build-system").get("build-backend")
        if isinstance(name, str):
            return re.split(r"[.:]", name)[0]
        old = any((self.root / file).is_file() for file in ("setup.py", "setup.cfg"))
        return "setuptools" if self.table("build-system") or old else HATCHLING


def project_name(root: Path) -> str:
    """The name in ``[project]``, or that of the folder if it has none; ``pyproject.toml`` was read before."""
    return Project(root, parse((root / "pyproject.toml").read_text(encoding="utf-8"))).name


def requirements(listed: Any) -> Iterator[Requirement]:
    """The valid requirements in a list of ``pyproject.toml``."""
    for text in listed if isinstance(listed, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            yield Requirement(text)


def find_models(root: Path) -> tuple[list[Path], list[Path]]:
    """The ONNX files of the project in ``root``, and those in its tests, docs and examples, in order.

    Hidden folders, virtual environments, build outputs and packages that this tool wrote are left out.
    """
    app: list[Path] = []
    others: list[Path] = []
    for path, folders, files in os.walk(root):
        folder = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _OUTPUTS
            and not (folder / name / "pyvenv.cfg").exists()
            and own_files(folder / name) is None
        )
        names = {part.casefold() for part in folder.relative_to(root).parts}
        models = [folder / file for file in sorted(files) if file.casefold().endswith(".onnx")]
        (app if names.isdisjoint(NOT_THE_APP) else others).extend(models)
    return app, others

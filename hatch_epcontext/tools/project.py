"""Facts of a project from its files: its build backend and its requirements."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.config.pyproject import parse

HATCHLING = "hatchling"


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

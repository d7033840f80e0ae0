"""A project as its ``pyproject.toml`` describes it, whatever builds it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from hatch_epcontext.config.pyproject import FILE, parse

HATCHLING = "hatchling"


@dataclasses.dataclass(frozen=True)
class Project:
    """The project in the folder ``root``; ``values`` are those of its ``pyproject.toml``."""

    root: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, root: Path) -> Project:
        """That in the folder ``root``, whose ``pyproject.toml`` was read before."""
        return cls(root, parse((root / FILE).read_text(encoding="utf-8")))

    def table(self, *names: str) -> Mapping[str, Any]:
        """The table with these ``names``; empty if there is none."""
        table: Any = self.values
        for name in names:
            table = table.get(name) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else {}

    @property
    def is_of_poetry(self) -> bool:
        """Whether its dependencies are in Poetry's own table."""
        in_own_table = "dependencies" in self.table("tool", "poetry")
        return in_own_table and "dependencies" not in self.table("project")

    @property
    def dependencies(self) -> list[str]:
        """The valid requirements of the app and of its extras; without versions in Poetry's own table."""
        extras = self.table("project", "optional-dependencies").values()
        own = list(self.table("tool", "poetry", "dependencies")) if self.is_of_poetry else []
        lists = self.table("project").get("dependencies"), *extras, own
        return [str(requirement) for listed in lists for requirement in requirements(listed)]

    @property
    def name(self) -> str:
        """The project's name, or that of its folder."""
        names = (self.table(*table).get("name") for table in (("project",), ("tool", "poetry")))
        return next((name for name in names if isinstance(name, str)), self.root.name)

    @property
    def backend(self) -> str:
        """The object path of its build back end; that of hatchling for a new project."""
        name = self.table("build-system").get("build-backend")
        if isinstance(name, str):
            return name
        old = any((self.root / file).is_file() for file in ("setup.py", "setup.cfg"))
        # As PEP 517 says.
        return (
            "setuptools.build_meta:__legacy__"
            if self.table("build-system") or old
            else "hatchling.build"
        )

    @property
    def is_hatchling(self) -> bool:
        """Whether hatchling builds it, which runs the hook."""
        return self.backend.partition(".")[0] == HATCHLING


def requirements(listed: Any) -> Iterator[Requirement]:
    """The valid requirements in a list of ``pyproject.toml``."""
    for text in listed if isinstance(listed, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            yield Requirement(text)

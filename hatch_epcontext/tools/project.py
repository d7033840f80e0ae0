"""A project as its ``pyproject.toml`` describes it, whatever builds it."""

from __future__ import annotations

import ast
import configparser
import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

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
        """The valid requirements of the app and of its extras."""
        extras: Iterable[Any] = self.table("project", "optional-dependencies").values()
        lists: list[Any] = [self.table("project").get("dependencies"), *extras]
        if self.is_of_poetry:
            own = self.table("tool", "poetry", "dependencies").items()
            lists = [[_of_poetry(name, value) for name, value in own if name != "python"]]
        elif "dependencies" not in self.table("project"):
            more = self._setup.get("extras_require")
            extras = more.values() if isinstance(more, dict) else ()
            lists = [*lists, self._setup.get("install_requires"), *extras]
        return [str(requirement) for listed in lists for requirement in requirements(listed)]

    @property
    def requires_python(self) -> str | None:
        """The versions of Python that it allows; empty for all, and None where only its back end knows."""
        project = self.table("project")
        python = (
            project.get("requires-python", "") if project else self._setup.get("python_requires")
        )
        if self.is_of_poetry:
            own = self.table("tool", "poetry", "dependencies").get("python", "")
            python = _of_poetry("", own)
        with contextlib.suppress(InvalidSpecifier):
            return str(SpecifierSet(python)) if isinstance(python, str) else None
        return None

    @functools.cached_property
    def _setup(self) -> Mapping[str, Any]:
        """What ``setup.cfg`` and ``setup.py`` write out of the arguments of `setup`."""
        found: dict[str, Any] = {}
        parser = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(configparser.Error, OSError, ValueError):
            parser.read(self.root / "setup.cfg", encoding="utf-8")
            options: dict[str, Any] = dict(parser["options"]) if "options" in parser else {}
            if "install_requires" in options:
                options |= {"install_requires": options["install_requires"].split("\n")}
            found |= options
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            tree = ast.parse((self.root / "setup.py").read_bytes())
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            for keyword in (keyword for call in calls for keyword in call.keywords):
                with contextlib.suppress(ValueError):
                    found[str(keyword.arg)] = ast.literal_eval(keyword.value)
        return found

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
        is_old = any((self.root / file).is_file() for file in ("setup.py", "setup.cfg"))
        # As PEP 517 says.
        is_of_setuptools = is_old or self.table("build-system")
        return "setuptools.build_meta:__legacy__" if is_of_setuptools else "hatchling.build"

    @property
    def is_hatchling(self) -> bool:
        """Whether hatchling builds it, which runs the hook."""
        return self.backend.partition(".")[0] == HATCHLING


def _of_poetry(name: str, value: Any) -> str:
    """The requirement of a key in Poetry's own table, without upper bounds of its own operators."""
    version = value.get("version", "") if isinstance(value, dict) else value
    text = re.sub(r"[\^~](?=\d)", ">=", version) if isinstance(version, str) else ""
    text = f"=={text}" if text[:1].isdecimal() else text.strip("* ")
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        text = ""
    return f"{name}{text}"


def requirements(listed: Any) -> Iterator[Requirement]:
    """The valid requirements in a list of ``pyproject.toml``."""
    for text in listed if isinstance(listed, list) else ():
        with contextlib.suppress(InvalidRequirement, TypeError):
            yield Requirement(text)

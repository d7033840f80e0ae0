"""``pyproject.toml`` as plain values, and the lines of its keys: only this chooses the TOML reader.

Python's TOML reader reports no lines. But the text up to the end of any statement is a document of its own,
so the line of a key is the last line of the shortest such document with the key.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import ROOT, ConfigError, Key, KeyNames, Kind, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.frozen import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FILE = "pyproject.toml"


def parse(text: str) -> dict[str, Any]:
    """The values in the TOML document ``text``; raises ValueError when it is not TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write(file: Path, text: str, before: str) -> None:
    """Write ``text``, with line ends of Unix, to ``file``, which had the text ``before``.

    A file with the line ends of Windows keeps them, and a link stays a link.
    """
    text = text.replace("\n", "\r\n") if "\r\n" in before else text
    write_atomically(file.resolve(), text)


def tool_table(root: Path) -> Any:
    """``[tool.epcontext]`` of the project in ``root``, or None if it is missing.

    Raises ConfigError when ``pyproject.toml`` is missing or is not TOML.
    """
    file = root / FILE
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "Run the command in the folder of a project."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), "is missing.", hint)) from None
    except ValueError as error:
        message = f"is not TOML: {error}."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message)) from None
    tool = values.get("tool", {})
    return tool.get("epcontext") if isinstance(tool, dict) else None


_Parts = tuple["str | int", ...]


class Lines:
    """The lines of ``text``, a ``pyproject.toml``, by the key of ``[tool.epcontext]``."""

    def __init__(self, text: str) -> None:
        self._lines = text.replace("\r\n", "\n").split("\n")
        self._prefixes: dict[int, Any] = {}
        self._values: Any = try_parse(text)

    def of(self, key: Key) -> int | None:
        """The line of ``key``, from 1, or of the innermost table that would contain it; None without one."""
        parts = (*ROOT.split("."), *key.parts)
        while len(parts) >= len(ROOT.split(".")):
            if _has(self._values, parts):
                return self._line(parts)
            parts = parts[:-1]
        return None

    def has(self, key: Key) -> bool:
        """Whether the file has ``key``."""
        return _has(self._values, (*ROOT.split("."), *key.parts))

    def _line(self, parts: _Parts) -> int:
        end = self._end(parts)
        before = end - 1
        while before and self._prefix(before) is None:
            before -= 1
        for number in range(before + 1, end):
            # An item of a list is complete before the list is.
            if _has(try_parse("\n".join([*self._lines[:number], "]"])), parts):
                return number
        return end if any(isinstance(part, int) for part in parts[-1:]) else before + 1

    def _end(self, parts: _Parts) -> int:
        """The last line of the statement that has ``parts``."""
        low, high = 1, len(self._lines)
        while low < high:
            middle = whole = (low + high) // 2
            while whole and self._prefix(whole) is None:
                whole -= 1
            if whole and _has(self._prefix(whole), parts):
                high = whole
            else:
                low = middle + 1
        return low

    def _prefix(self, count: int) -> Any:
        """The values of the first ``count`` lines; None if a statement continues after them."""
        if count not in self._prefixes:
            self._prefixes[count] = try_parse("\n".join(self._lines[:count]))
        return self._prefixes[count]


def try_parse(text: str) -> Any:
    """The values in ``text``; None if it is not TOML, or ends inside a statement."""
    try:
        return parse(text + "\n")
    except ValueError:
        return None


def _has(values: Any, parts: _Parts) -> bool:
    for part in parts:
        if isinstance(part, int):
            if not isinstance(values, list) or len(values) <= part:
                return False
        elif not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


@dataclass(frozen=True)
class PyprojectNames(KeyNames):
    """Names keys with the line of ``pyproject.toml`` in the folder ``root``: ``pyproject.toml:31: ...``."""

    root: Path

    def key(self, key: Key) -> str:
        """The name of ``key`` after the file and the line."""
        line = self._lines.of(key)
        return super().key(key) if line is None else f"{FILE}:{line}: {super().key(key)}"

    def is_table(self, model: Key) -> bool:
        """Whether the file has a table for ``model``."""
        return self._lines.has(Key(model.parts[:2]) / "path")

    @functools.cached_property
    def _lines(self) -> Lines:
        try:
            return Lines((self.root / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Lines("")

"""``pyproject.toml`` as plain values, and the lines of its keys: the one place that chooses the TOML reader.

The TOML reader of Python knows no lines. But the text up to the end of any statement is a document of its
own, so the line of a key is where the shortest such document that has the key ends.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import ROOT, ConfigError, Key, KeyNames, Kind, Problem, Setting
from hatch_epcontext.frozen import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FILE = "pyproject.toml"


def parse(text: str) -> dict[str, Any]:
    """The values in the TOML document ``text``; raises ValueError when it is not TOML."""
    return tomllib.loads(text)


def tool_table(root: Path) -> Any:
    """``[tool.epcontext]`` of the project in ``root``, or None if it is missing.

    Raises ConfigError when ``pyproject.toml`` is missing or is not TOML.
    """
    file = root / FILE
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), "is missing.")) from None
    except ValueError as error:
        message = f"is not TOML: {error}."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message)) from None
    tool = values.get("tool", {})
    return tool.get("epcontext") if isinstance(tool, dict) else None


_QUESTION = re.compile(r"#\s*(dims|shapes)\s*=\s*\{(?=.*(=\s*\?|[\[,]\s*\?\s*[\],]))")
"""A commented key with a question mark in place of a size, as ``epcontext init`` writes it."""

_Parts = tuple["str | int", ...]


@dataclass(frozen=True)
class Question:
    """A comment in a ``model``, as it is written, with a size that only the user knows.

    ``line`` counts from 1.
    """

    line: int
    text: str
    model: Any


class Lines:
    """The lines of ``text``, a ``pyproject.toml``, by the key of ``[tool.epcontext]``."""

    def __init__(self, text: str) -> None:
        self._lines = text.replace("\r\n", "\n").split("\n")
        self._prefixes: dict[int, Any] = {}
        self._values: Any = try_parse(text)

    def of(self, key: Key) -> int | None:
        """The line of ``key``, or of the innermost table that it would be in; None if there is none.

        Lines count from 1.
        """
        if (question := self.question(key)) is not None:
            return question.line
        parts = (*ROOT.split("."), *key.parts)
        while len(parts) >= len(ROOT.split(".")):
            if _has(self._values, parts):
                return self._line(parts)
            parts = parts[:-1]
        return None

    def question(self, key: Key) -> Question | None:
        """The question that stands in a comment in place of ``key``."""
        return self.questions.get(Key(key.parts[:3]))

    @functools.cached_property
    def questions(self) -> Mapping[Key, Question]:
        """All questions in place of keys of models."""
        found: dict[Key, Question] = {}
        # Finding a line parses the text many times, and few files ask anything.
        models = self._models if any(map(is_question, self._lines)) else ()
        for index, model in enumerate(models):
            key = Key(("models", index))
            start = self._line((*ROOT.split("."), *key.parts))
            for number, line in enumerate(self._lines[start - 1 :], start):
                if number > start and re.match(r"\s*(\[|\])", line):
                    break
                if (match := _QUESTION.search(line)) and not _has(model, (match[1],)):
                    question = Question(number, line[match.start() :].strip(), model)
                    found.setdefault(key / match[1], question)
                if number == start and not line.lstrip().startswith("["):
                    break
        return found

    @property
    def _models(self) -> Sequence[Any]:
        """The models as they are written."""
        models = self._values
        for part in (*ROOT.split("."), "models"):
            models = models.get(part) if isinstance(models, dict) else None
        return models if isinstance(models, list) else ()

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
        """The values of the first ``count`` lines; None if a statement goes on behind them."""
        if count not in self._prefixes:
            self._prefixes[count] = try_parse("\n".join(self._lines[:count]))
        return self._prefixes[count]


def is_question(line: str) -> bool:
    """Whether ``line`` asks for a size in a comment."""
    return _QUESTION.search(line) is not None


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
        """The name of ``key`` behind the file and the line."""
        line = self._lines.of(key)
        return super().key(key) if line is None else f"{FILE}:{line}: {super().key(key)}"

    def setting(self, setting: Setting) -> str:
        """The sentence that tells a user to write ``setting``, or to answer the question in its place."""
        question = self._lines.question(setting.key)
        if question is None:
            return super().setting(setting)
        return f'Fill in line {question.line} of {FILE}, and remove its "#": {question.text}'

    @property
    def warnings(self) -> list[str]:
        """A warning for each question in a comment, which is not answered."""
        return [
            f"{FILE}:{question.line}: is still a question, and open dimensions without a size were "
            f"tried with 1: {question.text}"
            for question in self._lines.questions.values()
        ]

    @functools.cached_property
    def _lines(self) -> Lines:
        try:
            return Lines((self.root / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Lines("")

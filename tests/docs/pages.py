"""What a reader of the README and of the pages in docs/ runs and writes: commands and files.

Commands are the lines of fenced blocks that call ``epcontext``, and code in lines that calls it with
arguments. A fenced block with a title (``toml title="pyproject.toml"``) is a file that the reader writes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.cli.app import app

SHELLS = ("console", "sh", "bash", "shell")

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_OPERATORS = {"|", "||", "&", "&&", ";", "(", ")", "$("}


@dataclass(frozen=True)
class Line:
    """One line for a shell, with what the page says that it prints."""

    page: str
    line: int
    text: str
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One call of ``epcontext`` on a page."""

    page: str
    line: int
    text: str
    """From the word ``epcontext`` on, with single spaces between its words: what a setting names it by."""
    words: tuple[str, ...]
    """The arguments after ``epcontext``, without the quotes of the shell."""
    output: tuple[str, ...] = ()
    """The lines that the page shows below it."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class File:
    """A file that the page shows, with its path as the title of the block."""

    page: str
    line: int
    path: str
    text: str


def items_of(page: str, text: str) -> list[Command | File | Line]:
    """The commands and files of a page, in their order, and the lines for a shell that call others."""
    found: list[Command | File | Line] = []
    for item in lines_of(page, text):
        commands = list(_commands(item)) if isinstance(item, Line) else []
        found += commands or [item]
    blank = _FENCE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), text)
    for match in re.finditer(r"`(epcontext\s[^`]+)`", blank):
        line = Line(page, blank.count("\n", 0, match.start()) + 1, match[1])
        found += [each for each in _commands(line) if len(each.words) > 1]
    return sorted(found, key=lambda item: item.line)


def lines_of(page: str, text: str) -> Iterator[Line | File]:
    """The lines for a shell in the blocks of a page, and the files, in their order."""
    for match in _FENCE.finditer(text):
        language, block = match["language"], match["text"]
        first = text.count("\n", 0, match.start()) + 2
        if title := re.search(r'title="([^"]+)"', match["rest"]):
            yield File(page, first, title[1], block)
        elif language == "console":
            yield from _console(page, first, block)
        else:
            shell = language in SHELLS
            for offset, line in _joined(block.splitlines()):
                # Examples in the help of commands are text, and so are sentences. YAML and Dockerfiles have
                # commands too.
                known = re.match(r"epcontext (\w+)", line)
                called = re.search(r"(?:RUN|run:|- ) *(.*\bepcontext [a-z].*)$", line)
                if (shell and line) or (known and known[1] in app.commands):
                    yield Line(page, first + offset, line)
                elif called:
                    yield Line(page, first + offset, called[1])


def _console(page: str, first: int, block: str) -> Iterator[Line]:
    """The lines with a prompt; what follows each, up to the next, is its output."""
    begun: list[tuple[int, str, list[str]]] = []
    for offset, line in _joined(block.splitlines()):
        if line.startswith("$ "):
            begun.append((first + offset, line.removeprefix("$ "), []))
        elif begun:
            begun[-1][2].append(line)
    for number, text, output in begun:
        yield Line(page, number, text, tuple(output))


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Each line with its offset; what a backslash continues is one line."""
    offset = 0
    while offset < len(lines):
        first, joined = offset, lines[offset].strip()
        while joined.endswith("\\") and offset + 1 < len(lines):
            offset += 1
            joined = f"{joined[:-1]} {lines[offset].strip().removeprefix('> ')}"
        offset += 1
        yield first, joined


def missing(output: tuple[str, ...], printed: str) -> list[str]:
    """The lines of ``output`` that are not in ``printed``, whatever the numbers, sizes and widths are.

    ``...`` stands for any text, and whether an artifact was compiled or in the cache makes no difference.
    """
    there = [_general(line) for line in printed.splitlines()]
    return [
        line
        for line in output
        if not any(re.fullmatch(_pattern(_general(line)), each) for each in there)
    ]


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split("..."))) if line else ".*"


def _general(line: str) -> str:
    # Windows has other separators.
    line = re.sub(r"\d+(\.\d+)*( (bytes|kB|MB))?", "0", line.replace("\\", "/"))
    line = re.sub(r", 0 s$", ", from the cache", line)
    return re.sub(r"([━─═])\1+|\s+", lambda match: match[1] or " ", line).strip()


def _commands(item: Line) -> Iterator[Command]:
    """The calls of ``epcontext`` in one line for a shell."""
    lexer = shlex.shlex(item.text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    call: list[str] = []
    for word in [*lexer, ";"]:
        if word in _OPERATORS:
            if call:
                yield Command(item.page, item.line, shlex.join(call), tuple(call[1:]), item.output)
            call = []
        elif call or word == "epcontext":
            call.append(word)


def pages(repository: Path) -> dict[str, list[Command | File | Line]]:
    """What the README and each page in docs/ have, for those that have a command."""
    files = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    found = {
        path.relative_to(repository).as_posix(): path.read_text(encoding="utf-8") for path in files
    }
    items = {name: items_of(name, text) for name, text in found.items()}
    return {
        name: listed
        for name, listed in items.items()
        if any(isinstance(item, Command) for item in listed)
    }

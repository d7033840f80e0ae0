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
class Command:
    """One call of ``epcontext`` on a page."""

    page: str
    line: int
    text: str
    """From the word ``epcontext`` on, with single spaces between its words: what a setting names it by."""
    words: tuple[str, ...]
    """The arguments after ``epcontext``, without the quotes of the shell."""
    variables: tuple[tuple[str, str], ...] = ()
    """What is set in front of it, such as ``NO_COLOR=1``."""
    writes: str | None = None
    """The file that its output goes into."""

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


def steps_of(page: str, text: str) -> list[Command | File]:
    """The commands and files of a page, in their order."""
    found: list[Command | File] = []
    for match in _FENCE.finditer(text):
        language, block = match["language"], match["text"]
        line = text.count("\n", 0, match.start()) + 2
        if title := re.search(r'title="([^"]+)"', match["rest"]):
            found.append(File(page, line, title[1], block))
            continue
        for offset, shell in _lines(language, block):
            found += _commands(page, line + offset, shell)
    blank = _FENCE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), text)
    for match in re.finditer(r"`((?:[A-Z_]+=\S+ )*epcontext\s[^`]+)`", blank):
        commands = _commands(page, blank.count("\n", 0, match.start()) + 1, match[1])
        found += [each for each in commands if len(each.words) > 1]
    return sorted(found, key=lambda step: step.line)


def _lines(language: str, block: str) -> Iterator[tuple[int, str]]:
    """The lines of a block that a shell runs, with continued ones joined, and the offset of each."""
    lines = block.splitlines()
    offset = 0
    while offset < len(lines):
        first, joined = offset, lines[offset].strip()
        while joined.endswith("\\") and offset + 1 < len(lines):
            offset += 1
            joined = f"{joined[:-1]} {lines[offset].strip().removeprefix('> ')}"
        offset += 1
        if language in SHELLS and joined.startswith("$ "):
            yield first, joined.removeprefix("$ ")
        elif language in (*SHELLS, "text", "") and language != "console":
            # Examples in the help of commands are text, and so are sentences.
            known = re.match(r"epcontext (\w+) ", joined)
            if language in SHELLS or (known and known[1] in app.commands):
                yield first, joined
        elif found := re.search(r"(?:RUN|run:|- ) *(.*\bepcontext [a-z].*)$", joined):
            yield first, found[1]


def _commands(page: str, line: int, shell: str) -> Iterator[Command]:
    """The calls of ``epcontext`` in one line for a shell."""
    lexer = shlex.shlex(shell, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    call: list[str] = []
    variables: list[tuple[str, str]] = []
    for word in [*lexer, ";"]:
        if word in _OPERATORS:
            if call:
                yield _command(page, line, call, variables)
            call, variables = [], []
        elif call or word == "epcontext":
            call.append(word)
        elif assigned := re.fullmatch(r"([A-Z_]+)=(.*)", word):
            variables.append((assigned[1], assigned[2]))


def _command(page: str, line: int, call: list[str], variables: list[tuple[str, str]]) -> Command:
    writes = None
    if ">" in call:
        where = call.index(">")
        writes, call = call[where + 1], call[:where]
    return Command(page, line, shlex.join(call), tuple(call[1:]), tuple(variables), writes)


def pages(repository: Path) -> dict[str, list[Command | File]]:
    """What the README and each page in docs/ have, for those that have a command."""
    files = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    found = {
        path.relative_to(repository).as_posix(): path.read_text(encoding="utf-8") for path in files
    }
    steps = {name: steps_of(name, text) for name, text in found.items()}
    return {
        name: listed
        for name, listed in steps.items()
        if any(isinstance(step, Command) for step in listed)
    }

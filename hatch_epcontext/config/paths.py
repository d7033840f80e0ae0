"""The files that a configuration names."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.build_hooks import NO_HOOKS, BuildHooks
from hatch_epcontext.errors import Checked, Key, Kind, Problem
from hatch_epcontext.text import show


@dataclass(frozen=True)
class Finder:
    """Finds files in the project at ``root``; unless it is ``confined``, anywhere.

    ``hooks`` are those that may make a file. With ``pending`` they still can: what is missing is no problem,
    and is returned all the same, except for the models that a glob will match.
    """

    root: Path
    confined: bool = True
    hooks: BuildHooks = NO_HOOKS
    pending: bool = False

    def models(self, key: Key, pattern: str) -> Checked[list[Path]]:
        """The models that a path or a glob names, in order."""
        if not any(character in pattern for character in "*?["):
            path = yield from self.file(key, pattern, "model")
            return [path] if path else []
        if not (yield from self._is_allowed(key, pattern)):
            return []
        found = sorted(path for path in self.root.glob(pattern) if path.is_file())
        if not found and not self.pending:
            yield self._not_found(key, f"no file matches {show(pattern)}.")
        return found

    def file(
        self, key: Key, path: str, what: str, *, or_folder: bool = False
    ) -> Checked[Path | None]:
        """The file at ``path``, or with ``or_folder`` the file or folder; ``what`` is its name in words."""
        if not (yield from self._is_allowed(key, path)):
            return None
        if self.pending or _exists(self.root / path, or_folder=or_folder):
            return self.root / path
        yield self._not_found(key, f"there is no {what} at {show(path)}.")
        return None

    def library(self, key: Key, written: str | None, path: Path) -> Checked[None]:
        """Check that the library at ``path``, which may be anywhere, exists."""
        if not self.pending and not _exists(path):
            hint = (
                "A path is absolute, or relative to the folder of pyproject.toml; "
                "a package is a name without slashes."
            )
            advice = self.hooks.advice()
            yield Problem.at(
                key,
                Kind.FILE_NOT_FOUND,
                f"there is no file {show(written)}.",
                f"{hint}\n{advice}" if advice else hint,
            )

    def _is_allowed(self, key: Key, path: str) -> Checked[bool]:
        pure = Path(path)
        if not path:
            yield Problem.at(key, Kind.MISSING_KEY, "is required: a path inside the project.")
            return False
        if not self.confined:
            return True
        if not pure.is_absolute() and path[0] not in "/~" and ".." not in pure.parts:
            return True
        yield Problem.at(
            key,
            Kind.OUTSIDE_PROJECT,
            f"{show(path)} is not a path inside the project.",
            "Write it relative to the folder of pyproject.toml, without '..': "
            "an sdist contains only the project.",
        )
        return False

    def _not_found(self, key: Key, message: str) -> Problem:
        hint = self.hooks.advice()
        if hint is None and self.confined:
            hint = "In a build from an sdist: check that the sdist contains it."
        return Problem.at(key, Kind.FILE_NOT_FOUND, message, hint)


def _exists(path: Path, *, or_folder: bool = False) -> bool:
    # A name that is too long, or that no file can have, is an error of its own on some systems.
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() or (or_folder and path.is_dir())
    return False

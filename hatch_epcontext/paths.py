"""The files that a configuration names: found, or told why not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hatch_epcontext.errors import Problem
from hatch_epcontext.structure import show


class Finder:
    """Finds files in the project at ``root``, and adds to ``problems`` what it does not find.

    Unless it is ``confined`` it takes paths to anywhere.
    """

    def __init__(self, root: Path, problems: list[Problem], *, confined: bool = True) -> None:
        self._root = root
        self._problems = problems
        self._confined = confined

    def matching(self, key: str, pattern: str) -> list[Path]:
        """The models that a path or a glob names, in order."""
        if not any(character in pattern for character in "*?["):
            path = self.file(key, pattern, "model")
            return [path] if path else []
        if not self._inside(key, pattern):
            return []
        found = sorted(path for path in self._root.glob(pattern) if path.is_file())
        if not found:
            self._absent(key, f"no file matches {show(pattern)}.")
        return found

    def file(self, key: str, path: str, what: str, *, folder: bool = False) -> Path | None:
        """The file, or with ``folder`` the file or folder, at ``path`` inside the project."""
        if not self._inside(key, path):
            return None
        if _is_there(self._root / path, folder=folder):
            return self._root / path
        self._absent(key, f"there is no {what} at {show(path)}.")
        return None

    def library(self, key: str, written: str | None, path: str) -> None:
        """See that the library at ``path``, which may be anywhere, is there."""
        if not _is_there(Path(path)):
            fix = (
                "A path is relative to the folder of pyproject.toml, or absolute; "
                "a package is a name without slashes."
            )
            self._problems.append(Problem(key, f"there is no file {show(written)}.", fix))

    def _inside(self, key: str, path: str) -> bool:
        pure = Path(path)
        if not path:
            self._problems.append(Problem(key, "is required: a path inside the project."))
            return False
        if not self._confined:
            return True
        if not pure.is_absolute() and path[0] not in "/~" and ".." not in pure.parts:
            return True
        what = f"{show(path)} is not a path inside the project."
        fix = (
            "Write it relative to the folder of pyproject.toml, without '..': "
            "what lies elsewhere is not in the sdist."
        )
        self._problems.append(Problem(key, what, fix))
        return False

    def _absent(self, key: str, what: str) -> None:
        fix = (
            "If this is a build from an sdist, see that the sdist has it." if self._confined else ""
        )
        self._problems.append(Problem(key, what, fix))


def _is_there(path: Path, *, folder: bool = False) -> bool:
    # A name that is too long, or that no file can have, is an error of its own on some systems.
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() or (folder and path.is_dir())
    return False

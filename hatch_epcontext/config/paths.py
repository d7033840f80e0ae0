"""The files that a configuration names."""

from __future__ import annotations

import contextlib
import os
import re
from functools import cached_property
from pathlib import Path

from hatch_epcontext.config.build_hooks import BuildHooks, hooks_of_project
from hatch_epcontext.config.genai_config import GENAI_CONFIG
from hatch_epcontext.config.settings import OptionFile
from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem
from hatch_epcontext.files import (
    USE_UTF8,
    file_sha256,
    is_inside,
    is_missing,
    is_regular,
    unreadable,
)
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Option
from hatch_epcontext.text import near_name, show

NO_HOME = "this user has no home folder, and so no cache folder"
"""Why there is no default folder, as in a container that runs as any user."""


def default_root() -> Path | None:
    """The user's cache folder for this package; None if the user has no home folder."""
    # Imported here: workers read configurations without it.
    import platformdirs

    try:
        root = Path(platformdirs.user_cache_dir("hatch-epcontext", appauthor=False))
    except RuntimeError:
        return None
    # Older versions of platformdirs leave the `~` as it is.
    return root if root.is_absolute() else None


@dataclass(frozen=True)
class Finder:
    """Finds files in the project at ``root``, or anywhere unless it is ``confined``.

    ``run_hooks`` are those that a build runs; None for a command. With ``pending`` they may still make files:
    a missing file is no problem and is returned anyway, except for models that a glob will match.
    """

    root: Path
    confined: bool = True
    run_hooks: BuildHooks | None = None
    pending: bool = False

    @cached_property
    def hooks(self) -> BuildHooks:
        """The project's other build hooks, which may make files."""
        if self.run_hooks is not None:
            return self.run_hooks
        return hooks_of_project(self.root) if self.confined else BuildHooks()

    def models(self, key: Key, pattern: str) -> Diagnosed[list[Path]]:
        """The models that a path or a glob names, in order."""
        if not is_glob(pattern):
            path = yield from self.file(key, pattern, "model")
            return [path] if path else []
        if not (yield from self._is_allowed(key, pattern)):
            return []
        # `Path.glob` leaves out a link to nowhere where the last part is no pattern.
        folder, slash, name = pattern.rpartition("/")
        name = "**/*" if name == "**" else name if is_glob(name) else f"[{name[:1]}]{name[1:]}"
        matched = {
            path: unreadable(path) for path in sorted({*self.root.glob(f"{folder}{slash}{name}")})
        }
        for path, rejection in matched.items():
            # Another hook may make the file.
            if rejection is not None and not (self.pending and self.hooks):
                inside = show(path.relative_to(self.root).as_posix())
                message = f"{show(pattern)} matches {inside}, which {rejection.message}"
                yield Problem.at(key, Kind.UNREADABLE_FILE, message, rejection.hint)
        if not matched and not self.pending:
            hint = None if _has_name(self.root / pattern) else USE_UTF8
            yield self._not_found(key, f"no file matches {show(pattern)}.", hint)
        return [path for path, rejection in matched.items() if rejection is None]

    def file(
        self, key: Key, path: str, what: str, *, or_folder: bool = False
    ) -> Diagnosed[Path | None]:
        """The file at ``path``, or with ``or_folder`` the file or folder; messages call it ``what``."""
        if not (yield from self._is_allowed(key, path)):
            return None
        file = self.root / path
        or_folder = or_folder or (what == "model" and is_genai_folder(file))
        if self.pending or (or_folder and os.path.isdir(file)):  # noqa: PTH112, names can be too long
            return file
        if is_missing(file):
            message = f"there is no {what} at {show(path)}."
            if what == "model" and is_glob(path):
                hint = f"A table has one model. Write only the globs: models = [{show(path)}]."
                yield Problem.at(key, Kind.FILE_NOT_FOUND, message, hint)
            else:
                yield self._not_found(key, message, near_path(self.root, file))
        elif rejection := unreadable(file):
            message = f"{show(path)} {rejection.message}"
            yield Problem.at(key, Kind.UNREADABLE_FILE, message, rejection.hint)
        else:
            return file
        return None

    def option(
        self, key: Key, option: Option | None, value: str
    ) -> Diagnosed[tuple[str, tuple[OptionFile, ...]]]:
        """The rendered ``value`` of the option at ``key`` without paths, and the files that it named.

        A path is absolute, or relative to the project. Of an unknown option only a file that is there counts.
        """
        if option is None:
            option = Option("file" if is_regular(self.root / value) else "text")
        return (
            (yield from self._files(key, option, value)) if option.kind == "file" else (value, ())
        )

    def _files(
        self, key: Key, option: Option, value: str
    ) -> Diagnosed[tuple[str, tuple[OptionFile, ...]]]:
        rendered, end, files = "", 0, list[OptionFile]()
        for match in re.finditer(option.paths, value):
            path = match[match.re.groups]
            yield from self._exists(key, path, self.root / path)
            files.append(named := self._option_file(key, path))
            rendered += value[end : match.start(match.re.groups)] + named.placeholder
            end = match.end(match.re.groups)
        return rendered + value[end:], tuple(files)

    def _option_file(self, key: Key, path: str) -> OptionFile:
        file = Path(os.path.normpath(self.root / path))
        sha256 = file_sha256(file) if is_regular(file) else ""
        # Names of folders in a wheel must not be too long for Windows.
        return OptionFile(key, str(file), f"{sha256[:32]}/{file.name}", sha256)

    def shipped(self, file: OptionFile) -> Diagnosed[None]:
        """Check that ``file``, which apps get, is in the project, where an sdist has it too."""
        if self.confined and not Path(file.path).is_relative_to(os.path.normpath(self.root)):
            message = f"{show(file.path)} is outside of the project, and apps need it."
            hint = "Copy the file into the project, or link it there: the wheel contains it."
            yield Problem.at(file.key, Kind.OUTSIDE_PROJECT, message, hint)

    def library(self, key: Key, written: str | None, path: Path) -> Diagnosed[None]:
        """Check that the library at ``path``, which may be anywhere, exists."""
        yield from self._exists(key, written, path, "; a package is a name without slashes")

    def _exists(self, key: Key, written: str | None, path: Path, more: str = "") -> Diagnosed[None]:
        if not self.pending and not is_regular(path):
            hint = f"A path is absolute, or relative to the folder of pyproject.toml{more}."
            advice = self.hooks.advice()
            message = f"there is no file {show(written)}."
            yield Problem.at(
                key, Kind.FILE_NOT_FOUND, message, f"{hint}\n{advice}" if advice else hint
            )

    def _is_allowed(self, key: Key, path: str) -> Diagnosed[bool]:
        if not path:
            other = ", or a url" if key.parts[-1:] == ("path",) else ""
            message = f"is required: a path inside the project{other}."
            yield Problem.at(key, Kind.MISSING_KEY, message)
            return False
        if "://" in path:
            message = f"{show(path)} is a location, and not a path."
            hint = "Write it as the url of a model's table, as epcontext add does."
            yield Problem.at(key, Kind.INVALID_VALUE, message, hint)
            return False
        if self.confined and not (is_inside(path) and path[0] != "~"):
            message = f"{show(path)} is not a path inside the project."
            hint = (
                "Write it relative to the folder of pyproject.toml, without '..': "
                "an sdist contains only the project."
            )
            yield Problem.at(key, Kind.OUTSIDE_PROJECT, message, hint)
            return False
        return True

    def _not_found(self, key: Key, message: str, near: str | None = None) -> Problem:
        hint = self.hooks.advice() or near
        if hint is None and self.confined:
            hint = "In a build from an sdist: check that the sdist contains it."
        return Problem.at(key, Kind.FILE_NOT_FOUND, message, hint)


def is_genai_folder(path: Path) -> bool:
    """Whether ``path`` is a folder of onnxruntime-genai."""
    # Also if it is a link to nowhere.
    return os.path.lexists(path / GENAI_CONFIG)


def is_glob(path: str) -> bool:
    """Whether ``path`` may match several files."""
    return any(character in path for character in "*?[")


def near_path(root: Path, path: Path) -> str | None:
    """A question about a file with a similar name beside ``path``, which does not exist, or one with its name
    anywhere in the project in ``root``; or how Python can read its name.
    """
    if not _has_name(path):
        return USE_UTF8
    with contextlib.suppress(OSError):
        if question := near_name(path.name, sorted(entry.name for entry in path.parent.iterdir())):
            return question
    for folder, folders, names in os.walk(root):
        # Hidden folders and virtual environments can be very large.
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "." and not os.path.lexists(Path(folder, name, "pyvenv.cfg"))
        )
        if path.name in names:
            return f"Did you mean {show(Path(folder, path.name).relative_to(root).as_posix())}?"
    return None


def _has_name(path: Path) -> bool:
    """Whether the locale has all letters of ``path``."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True

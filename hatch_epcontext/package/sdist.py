"""The sdist: all files that the wheel is built from are in it, or it is not made."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.build_hooks import ALL_HOOKS, NAME, BuildHooks, hooks_table
from hatch_epcontext.config.settings import SYNTHETIC, Config, Model, Target
from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem, SdistError, collect
from hatch_epcontext.files import is_lfs_pointer, is_portable, known_text
from hatch_epcontext.jobs.validation import input_files
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.package.selection import Reason, packed_files, reason_left_out
from hatch_epcontext.text import listing, show_size, to_toml

_INPUTS = (".npz", ".pb")
"""The files in a folder of inputs that are read."""


RECORDED_IGNORE = "# What an app saw, from epcontext record: it may contain personal data.\n*\n"
"""The ``.gitignore`` in a folder of recorded samples."""


@dataclass(frozen=True)
class Needed:
    """A file that the wheel is built from: its path in the project, with forward slashes.

    ``key`` names it, or the model that it belongs to. ``private``: nothing of it gets into the wheel.
    """

    path: str
    key: Key
    private: bool = False


@dataclass(frozen=True)
class Addition:
    """A file that is added to an sdist: its path there, the file itself, and why it would not be there."""

    path: str
    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({show_size(self.file.stat().st_size)}): {self.reason}"


@dataclass(frozen=True)
class Sdist:
    """What an sdist of ``config`` needs.

    ``hooks`` are those of the sdist, ``wheel_hooks`` those of the wheel that is built from it.
    """

    config: Config
    hooks: BuildHooks
    wheel_hooks: BuildHooks

    @property
    def downloaded(self) -> tuple[Model, ...]:
        """The models from elsewhere that the sdist contains; the shapes of one are one model."""
        return tuple(each for each in self._elsewhere if each.download and each.download.sdist)

    @property
    def _elsewhere(self) -> tuple[Model, ...]:
        found = {each.path: each for each in self.config.models if each.download is not None}
        return tuple(found.values())

    def not_contained(self) -> str | None:
        """A line about the models from elsewhere that the sdist does not contain, if there are any."""
        names = [
            each.configured_name
            for each in self._elsewhere
            if each.download and not each.download.sdist
        ]
        if not names:
            return None
        what = "models" if len(names) > 1 else "model"
        return (
            f"not in the sdist: the {what} {listing(names)}. A build from it needs the network, or epcontext "
            "fetch before it."
        )

    @property
    def makers(self) -> tuple[str, ...]:
        """The hooks that may make a file when the wheel is built from the sdist."""
        return self.wheel_hooks.before

    def additions(self, builder_config: Any, build_data: dict[str, Any]) -> Iterator[Addition]:
        """The files to add to what Hatch packs with ``build_data``.

        Raises SdistError for a file that is missing or unusable, or that somebody has kept out on purpose,
        and for recorded samples.
        """
        packed = packed_files(builder_config, build_data)
        problems = list(_recorded(packed))
        needed, invalid = collect(self._needed())
        for each in needed:
            file = self.config.root / each.path
            if not file.is_file():
                if not self.makers and not self.hooks.after:
                    problems.append(self._missing(each))
            elif each.path in packed:
                if self._leads_outside(packed[each.path], packed):
                    yield Addition(each.path, file.resolve(), "it is a link to another place")
            else:
                reason = reason_left_out(builder_config, each.path)
                if reason is Reason.EXCLUDED or (each.private and reason is Reason.IGNORED):
                    problems += [] if self.makers else [self._kept_out(each, reason)]
                elif set(self.makers) <= set(self.hooks.before):
                    yield Addition(each.path, file, reason.value)
        for path, file, _ in self._copies():
            if path not in packed:
                yield Addition(path, file, "it comes from elsewhere, and sdist is true")
        if invalid or problems:
            raise SdistError(*invalid, *problems)

    def _copies(self) -> Iterator[tuple[str, Path, Key]]:
        """The files of models from elsewhere that the sdist contains: their paths there, and their places."""
        for model in self.downloaded:
            assert model.download is not None, "only such models are downloaded"
            for name in model.download.files:
                path = f"{model.download.place_in_sdist}/{name}"
                yield path, model.path.parent / name, model.key

    def check(self, archive: Path) -> list[str]:
        """The needed files that are not in the finished sdist ``archive``, because a hook may make them.

        Raises SdistError if there are others.
        """
        needed, invalid = collect(self._needed())
        with tarfile.open(archive) as tar:
            files = _files(tar)
        needed += [Needed(path, key) for path, _, key in self._copies()]
        missing = [each for each in needed if each.path not in files]
        if self.makers and not invalid:
            return [each.path for each in missing]
        problems = [
            self._not_packed(each)
            if (self.config.root / each.path).is_file()
            else self._missing(each)
            for each in missing
        ]
        if invalid or problems:
            raise SdistError(*invalid, *problems)
        return []

    def warning(self, left_out: list[str]) -> str:
        """The message about the files ``left_out``, which `check` returned."""
        patterns = ", ".join(to_toml(f"/{path}") for path in left_out)
        plural = "s" if len(self.makers) > 1 else ""
        return (
            f"not in the sdist: {listing(left_out)}. The build hook{plural} {listing(self.makers)} must make "
            f"{'them' if len(left_out) > 1 else 'it'} for the wheel. If not, set artifacts = [{patterns}] in "
            "[tool.hatch.build.targets.sdist]."
        )

    def _needed(self) -> Diagnosed[list[Needed]]:
        """All files that the configuration names in the project, and those that they name."""
        found: dict[str, Needed] = {}
        for model in self.config.models:
            for each in (yield from self._of_model(model)):
                found.setdefault(each.path, each)
            for target in model.targets:
                for each in self._of_target(model, target):
                    found.setdefault(each.path, each)
        return list(found.values())

    def _of_model(self, model: Model) -> Diagnosed[list[Needed]]:
        files = [] if model.download else [Needed(self._relative(model.path), model.key)]
        if model.download is None and model.path.is_file():
            data = yield from _data_of(model)
            folder = model.path.parent
            files += [Needed(self._relative(folder / name), model.key) for name in data]
        inputs = model.validate.inputs
        if inputs not in SYNTHETIC:
            files += self._inputs(inputs, model.key / "validate" / "inputs")
        return files

    def _of_target(self, model: Model, target: Target) -> Iterator[Needed]:
        if target.calibration:
            yield from self._inputs(target.calibration, model.key / "quantize" / "inputs")
        plugin = target.provider.plugin
        settings = target.settings
        named = {target.key / "library": plugin.path if plugin else ""}
        for name, value in settings.session_options.items():
            named[target.key / "session-options" / name] = value
        named |= {file.key: file.path for file in target.files}
        for key, value in named.items():
            # Most options are no paths, and a library can be anywhere.
            if value and self._is_file(value):
                yield Needed(self._relative(self.config.root / value), key, private=True)

    def _inputs(self, path: str, key: Key) -> list[Needed]:
        files = input_files(path)
        if Path(path).is_dir():
            files = [file for file in files if file.suffix in _INPUTS]
        return [Needed(self._relative(each), key, private=True) for each in files or [Path(path)]]

    def _is_file(self, value: str) -> bool:
        path = Path(os.path.normpath(self.config.root / value))
        try:
            return path.is_file() and path.is_relative_to(self.config.root)
        except (OSError, ValueError):
            return False

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.config.root)).as_posix()

    def _leads_outside(self, file: Path, packed: Iterable[str]) -> bool:
        """Whether ``file`` is a link to something that is not in the sdist."""
        if not file.is_symlink():
            return False
        real = file.resolve()
        root = self.config.root.resolve()
        return not real.is_relative_to(root) or real.relative_to(root).as_posix() not in packed

    def _missing(self, each: Needed) -> Problem:
        advice = self.hooks.advice() or self.wheel_hooks.advice()
        return Problem.at(each.key, Kind.FILE_NOT_FOUND, f"there is no file {each.path}.", advice)

    def _kept_out(self, each: Needed, reason: Reason) -> Problem:
        message = f"{each.path} is not in the sdist: {reason.value}."
        if reason is Reason.IGNORED:
            hint = (
                "It is not added by itself, because nothing of it is in the wheel. If everybody may have "
                f"it, set artifacts = [{to_toml('/' + each.path)}] in [tool.hatch.build.targets.sdist]."
            )
        else:
            hint = "The wheel cannot be built from this sdist. Change that setting."
        return Problem.at(each.key, Kind.NOT_IN_SDIST, message, f"{hint}\n{self._switch_off()}")

    def _not_packed(self, each: Needed) -> Problem:
        message = f"{each.path} is not in the sdist, at least not as a file at this place."
        hint = self.hooks.advice() or (
            "Check what [tool.hatch.build] and [tool.hatch.build.targets.sdist] move or leave out, and that "
            "it is no link."
        )
        return Problem.at(each.key, Kind.NOT_IN_SDIST, message, f"{hint}\n{self._switch_off()}")

    def _switch_off(self) -> str:
        wanted = "If the sdist need not build the wheel, switch the hook off for sdists:"
        if self.hooks.table.startswith(f"{ALL_HOOKS}."):
            return (
                f"{wanted} write [{hooks_table('wheel')}.{NAME}] instead of [{self.hooks.table}]."
            )
        return f"{wanted} remove [{self.hooks.table}]."


def _recorded(packed: Mapping[str, Path]) -> Iterator[Problem]:
    """What `epcontext record` wrote: git ignores it, and Hatch reads no ``.gitignore`` inside of folders."""
    folders = {PurePosixPath(path).parent: file.parent for path, file in packed.items()}
    for folder, place in sorted(folders.items()):
        if known_text(place / ".gitignore") == RECORDED_IGNORE:
            yield Problem(
                Kind.RECORDED_SAMPLES,
                str(folder),
                "has samples of epcontext record, which are what an app saw, and the sdist would have them.",
                f"Set exclude = [{to_toml(f'/{folder}')}] in [tool.hatch.build.targets.sdist]. If everybody "
                "may have them, remove the .gitignore in that folder.",
            )


def _data_of(model: Model) -> Diagnosed[tuple[str, ...]]:
    """The files of the external data of ``model``, relative to its folder."""
    if is_lfs_pointer(model.path):
        message = f"{model.path.name} is a Git LFS pointer, not the model itself."
        yield Problem.at(model.key, Kind.INVALID_MODEL, message, "Run: git lfs pull")
        return ()
    try:
        names = external_data(model.path)
    except ValueError as error:
        message = f"{model.path.name} is not an ONNX model: {error}."
        yield Problem.at(model.key, Kind.INVALID_MODEL, message)
        return ()
    for name in names:
        if not is_portable(name):
            message = f"the external data {name!r} is outside the model's folder."
            hint = "Save the model with relative locations."
            yield Problem.at(model.key, Kind.EXTERNAL_DATA, message, hint)
    return tuple(filter(is_portable, names))


def _files(tar: tarfile.TarFile) -> frozenset[str]:
    """The files in an sdist, relative to its only folder; links count if what they link to is there."""
    members = {each.name.partition("/")[2]: each for each in tar.getmembers()}
    links = {
        name: posixpath.normpath(posixpath.join(posixpath.dirname(name), each.linkname))
        for name, each in members.items()
        if each.issym()
    }
    files = {name for name, each in members.items() if each.isfile() or each.islnk()}
    return frozenset(files | {name for name, target in links.items() if target in files})

"""The sdist: the files that the wheel is built from, and that Hatch does not pack, are added."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pathspec

from hatch_epcontext.config.build_hooks import NAME, BuildHooks
from hatch_epcontext.config.paths import near_path
from hatch_epcontext.config.settings import SYNTHETIC, Config, Model, Target
from hatch_epcontext.errors import Diagnosed, Key, Kind, Problem, SdistError, collect
from hatch_epcontext.files import is_lfs_pointer, is_portable, is_regular, known_text
from hatch_epcontext.jobs.boards import report_files
from hatch_epcontext.jobs.sources import input_files
from hatch_epcontext.package.external_data import external_data
from hatch_epcontext.package.wheel import Tree
from hatch_epcontext.text import to_toml

RECORDED_IGNORE = "# What an app saw, from epcontext record: it may contain personal data.\n*\n"
"""The ``.gitignore`` in a folder of recorded samples."""


@dataclass(frozen=True)
class Needed:
    """A file that the wheel is built from.

    ``key`` names it, or the model that it belongs to. ``private``: nothing of it gets into the wheel.
    """

    key: Key
    file: Path
    private: bool = False


def additions(
    config: Config,
    hooks: BuildHooks,
    wheel_hooks: BuildHooks,
    builder_config: Any,
    packed: Tree,
) -> dict[str, Path]:
    """The files to add to those that are ``packed`` in an sdist of ``config``, by their path in it.

    ``hooks`` are those of the sdist, ``wheel_hooks`` those of the wheel that is built from it. Raises
    SdistError for a file that is missing or unusable, or that somebody has kept out on purpose, and for
    recorded samples. What another hook makes for the wheel may be missing.
    """
    contents = {file.resolve() for file in packed.values() if not file.is_symlink()}
    files, problems = collect(_needed(config))
    problems += _recorded(packed)
    added = {}
    for path, needed in files.items():
        # Of a link to something else the sdist would have no more than the link.
        if path in packed and packed[path].resolve() in contents:
            continue
        hidden_by = _hidden_by(builder_config, path, private=needed.private)
        if needed.file.is_file() and hidden_by is None:
            added[path] = needed.file.resolve()
        elif not wheel_hooks.before:
            if hidden_by is None:
                advice = hooks.advice() or wheel_hooks.advice()
                advice = advice or near_path(config.root, needed.file)
                message = f"there is no file {path}."
                problem = Problem.at(needed.key, Kind.FILE_NOT_FOUND, message, advice)
            else:
                problem = _hidden(config, path, needed.key, hidden_by)
            problems.append(problem)
    SdistError.check(problems)
    return added


def _needed(config: Config) -> Diagnosed[dict[str, Needed]]:
    """All files that the configuration names, and those that they name, by their path in the sdist."""
    needed = list[Needed]()
    for model in config.models:
        needed += [] if model.download else (yield from _of_model(model))
        needed += (*_inputs_of(model), *_named_by_targets(model, config.root))
    reports = report_files(config.validated_on)
    needed += (Needed(Key() / "validated-on", report) for report in reports)
    files: dict[str, Needed] = {}
    for one in needed:
        files.setdefault(Path(os.path.relpath(one.file, config.root)).as_posix(), one)
    return files


def _named_by_targets(model: Model, root: Path) -> Iterator[Needed]:
    for target in model.targets:
        for key, value in _texts(target):
            file = Path(os.path.normpath(root / value))
            # Most options are no paths, and a library can be anywhere.
            if value and is_regular(file) and file.is_relative_to(root):
                yield Needed(key, file, private=True)


def _hidden(config: Config, path: str, key: Key, by: str) -> Problem:
    """The problem that the file at ``path``, which ``key`` names, is kept out of the sdist."""
    hint = (
        f"If everybody may have it, set artifacts = [{to_toml('/' + path)}] in "
        "[tool.hatch.build.targets.sdist].\n"
        "If the sdist need not build the wheel, switch the hook on for wheels only: "
        f"[tool.hatch.build.targets.wheel.hooks.{NAME}]."
    )
    if config.build.backend is not None:
        hint = "If everybody may have it, let your build back end add it to the sdist."
    message = f"{path} is not in the sdist, which builds no wheel without it: {by}."
    return Problem.at(key, Kind.NOT_IN_SDIST, message, hint)


def _hidden_by(builder_config: Any, path: str, *, private: bool) -> str | None:
    """The pattern that keeps the file at ``path`` out of the sdist on purpose, as a sentence.

    A model that git ignores is often only too large for it; other files may be private.
    """
    settings = builder_config.target_config
    if "exclude" not in settings:
        settings = builder_config.build_config
    sources = {"exclude": settings.get("exclude", [])}
    if private and not builder_config.ignore_vcs:
        sources[".gitignore or .hgignore"] = builder_config.load_vcs_exclusion_patterns()
    for source, patterns in sources.items():
        if _matches(patterns, path):
            pattern = next(one for one in reversed(patterns) if _matches([one], path))
            return f"{source} has {to_toml(pattern.strip())}"
    return None


def _matches(patterns: list[str], path: str) -> bool:
    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file(path)


def _of_model(model: Model) -> Diagnosed[list[Needed]]:
    """The file of ``model`` and those of its external data."""
    names: tuple[str, ...] = ()
    if model.path.is_file():
        try:
            names = external_data(model.path)
        except ValueError as error:
            message = f"{model.path.name} is not an ONNX model: {error}."
            hint = "Run: git lfs pull" if is_lfs_pointer(model.path) else None
            yield Problem.at(model.key, Kind.INVALID_MODEL, message, hint)
    for name in names:
        if not is_portable(name):
            message = f"the external data {name!r} is outside the model's folder."
            hint = "Save the model with relative locations."
            yield Problem.at(model.key, Kind.EXTERNAL_DATA, message, hint)
    others = (model.path.parent / name for name in (*names, *model.beside) if is_portable(name))
    return [Needed(model.key, file) for file in (model.path, *others)]


def _inputs_of(model: Model) -> Iterator[Needed]:
    key = model.key / "quantize" / "inputs"
    inputs = [(key, target.calibration) for target in model.targets if target.calibration]
    if model.validate.inputs not in SYNTHETIC:
        inputs.append((model.key / "validate" / "inputs", model.validate.inputs))
    for key, path in inputs:
        for file in input_files(path) or [Path(path)]:
            # Other files in a folder are not read.
            if file.suffix == ".npz" or not Path(path).is_dir():
                yield Needed(key, file, private=True)


def _texts(target: Target) -> Iterator[tuple[Key, str]]:
    """What ``target`` names, which may be files."""
    if target.provider.plugin:
        yield target.key_of("library"), target.provider.plugin.path
    for name, value in target.settings.session_options.items():
        yield target.key_of("session-options") / name, value
    for file in target.files:
        yield file.key, file.path


def _recorded(packed: Mapping[str, Path]) -> Iterator[Problem]:
    """What `epcontext record` wrote: git ignores it, and Hatch reads no ``.gitignore`` inside of folders."""
    folders = {PurePosixPath(path).parent: file.parent for path, file in packed.items()}
    for folder, real in sorted(folders.items()):
        if known_text(real / ".gitignore") == RECORDED_IGNORE:
            message = (
                "has samples of epcontext record, which are what an app saw, and the sdist would have "
                "them."
            )
            hint = (
                f"Set exclude = [{to_toml(f'/{folder}')}] in [tool.hatch.build.targets.sdist]. If everybody "
                "may have them, remove the .gitignore in that folder."
            )
            yield Problem(Kind.RECORDED_SAMPLES, str(folder), message, hint)

"""Writes the package of an editable install into the project itself.

An editable install puts the project on Python's path, which hides a package with the same name in
``site-packages``. So the package is written into the app's own package. Its manifest lists the files
that belong to it: no other file is removed or overwritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting
from hatch_epcontext.files import FileRecord, record_file, replace_files, sweep, temp_dir
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.package import manifest
from hatch_epcontext.package.modules import bytecode
from hatch_epcontext.package.reader import own_files
from hatch_epcontext.package.selection import Tree
from hatch_epcontext.package.wheel import OUTPUT
from hatch_epcontext.text import listing


def project_folder(output: PurePosixPath, tree: Tree) -> Path:
    """The folder of ``output`` in the project; raises ConfigError if no package contains it."""
    for path, source in tree.items():
        parent = PurePosixPath(path).parent
        if parent.parts and output.is_relative_to(parent):
            return source.parent / output.relative_to(parent)
    raise ConfigError(
        Problem.at(
            OUTPUT,
            Kind.NO_OUTPUT_PACKAGE,
            f'an editable install cannot write to "{output}": no package of the project contains it.',
            "Name a folder in one of the project's packages, or skip the models in editable installs.",
            Setting(OUTPUT),
            Setting(Key() / "editable", "skip"),
        )
    )


def owned_paths(output: PurePosixPath, folder: Path) -> frozenset[str]:
    """The files in ``folder`` that an editable install wrote, as paths in the wheel."""
    files = own_files(folder)
    names = () if files is None else (*files, manifest.FILE)
    return frozenset(str(output / name) for name in names)


def check(folder: Path) -> None:
    """Raise ConfigError if ``folder`` has files that no editable install wrote, or that were changed."""
    sweep(folder)
    files = own_files(folder)
    if files is None and any(path.is_file() for path in folder.glob("*")):
        message = "the folder has files of its own, and an editable install would write there."
        hint = "Choose a folder for the models alone."
        raise ConfigError(
            Problem(Kind.EDITABLE_CONFLICT, str(folder), message, hint, settings=(Setting(OUTPUT),))
        )
    if files and (changed := _changed(folder, files)):
        message = f"files were changed after an editable install wrote them: {listing(changed)}."
        hint = "Move them away, because the install would overwrite them."
        raise ConfigError(Problem(Kind.EDITABLE_CONFLICT, str(folder), message, hint))


def _changed(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    return [
        name
        for name, recorded in files.items()
        if (folder / name).is_file() and record_file(folder / name) != recorded
    ]


def write(result: Result, folder: Path, modules: Mapping[str, Path]) -> None:
    """Write the package of ``result`` into ``folder``: ``modules``, artifacts and manifest.

    Source models are not copied: the manifest has their paths, so that the app sees an edited model. Only
    those that the build has written are, which are nowhere else, and those from elsewhere, which nobody
    edits.
    """
    folders = manifest.source_folders(result.sources)
    copied = {
        f"{folders[source.model.name]}/{name}": source.model.path.parent / name
        for source in result.sources
        if _is_copied(source.model)
        for name in source.records
    }
    sources = {
        model.name: f"{folders[model.name]}/{model.path.name}"
        if _is_copied(model)
        else Path(os.path.relpath(model.path, folder)).as_posix()
        for model in (source.model for source in result.sources)
    }
    with temp_dir() as staging:
        # Every editable install writes these files again: a repository does not need them.
        ignore = staging / ".gitignore"
        ignore.write_text("*\n", encoding="utf-8", newline="\n")
        artifacts = {
            f"{built.job.folder}/{name}": built.artifact.folder / name
            for built in result.built
            for name in built.artifact.record.files
        }
        files = {ignore.name: ignore, **modules, **artifacts, **copied}
        own = {name: path for name, path in files.items() if name not in artifacts}
        records = {name: record_file(path) for name, path in own.items()}
        records |= manifest.artifact_files(result)
        saved = manifest.save(manifest.make(result, sources, records, "installed"), staging)
        replace_files(folder, {**files, manifest.FILE: saved}, _ours(folder)[0])


def _is_copied(model: Model) -> bool:
    return model.origin is not None or model.download is not None


def remove(folder: Path) -> list[str]:
    """Remove the files that an editable install wrote into ``folder``, and empty folders.

    Files that were changed since then are kept; returns their paths.
    """
    ours, kept = _ours(folder)
    if ours:
        replace_files(folder, {}, ours)
        with contextlib.suppress(OSError):
            folder.rmdir()
    return kept


def _ours(folder: Path) -> tuple[list[str], list[str]]:
    """The files in ``folder`` that an editable install wrote, and the paths of those that were changed."""
    sweep(folder)
    files = own_files(folder)
    if files is None:
        return [], []
    changed = _changed(folder, files)
    inside = [
        name
        for name in files
        if (folder / name).resolve().is_relative_to(folder.resolve()) and (folder / name).is_file()
    ]
    compiled = [path.relative_to(folder).as_posix() for path in bytecode(folder)]
    ours = [*compiled, *(name for name in inside if name not in changed), manifest.FILE]
    return ours, [str(folder / name) for name in inside if name in changed]

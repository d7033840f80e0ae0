"""Writes the package of an editable install into the project itself.

An editable install puts the project on Python's path, which hides a package with the same name in
``site-packages``. So the package is written into the app's own package. Its manifest lists the files
that belong to it: no other file is removed or overwritten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting
from hatch_epcontext.files import FileRecord, record_file
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
    files = own_files(folder)
    if files is None and any(path.is_file() for path in folder.glob("*")):
        raise ConfigError(
            Problem(
                Kind.EDITABLE_CONFLICT,
                str(folder),
                "the folder has files of its own, and an editable install would write there.",
                "Choose a folder for the models alone.",
                settings=(Setting(OUTPUT),),
            )
        )
    if files and (changed := _changed(folder, files)):
        raise ConfigError(
            Problem(
                Kind.EDITABLE_CONFLICT,
                str(folder),
                f"files were changed after an editable install wrote them: {listing(changed)}.",
                "Move them away, because the install would overwrite them.",
            )
        )


def _changed(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    return [
        name
        for name, recorded in files.items()
        if (folder / name).is_file() and record_file(folder / name) != recorded
    ]


def write(result: Result, folder: Path, modules: Mapping[str, Path]) -> None:
    """Write the package of ``result`` into ``folder``: ``modules``, artifacts and manifest.

    Source models are not copied: the manifest has their paths, so that the app sees an edited model. Only
    cut ones are, which are nowhere else, and those from elsewhere, which nobody edits.
    """
    remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Every editable install writes these files again: a repository does not need them.
    (folder / ".gitignore").write_text("*\n", encoding="utf-8", newline="\n")
    folders = manifest.source_folders(result.sources)
    copied = {
        f"{folders[source.model.name]}/{name}": source.model.path.parent / name
        for source in result.sources
        if _is_copied(source.model)
        for name in source.records
    }
    files = {
        ".gitignore": record_file(folder / ".gitignore"),
        **{name: record_file(path) for name, path in modules.items()},
        **manifest.artifact_files(result),
        **{name: record_file(path) for name, path in copied.items()},
    }
    sources = {
        model.name: f"{folders[model.name]}/{model.path.name}"
        if _is_copied(model)
        else Path(os.path.relpath(model.path, folder)).as_posix()
        for model in (source.model for source in result.sources)
    }
    # Before the files below: an interrupted install must not leave files that no manifest lists.
    manifest.save(manifest.make(result, sources, files, "installed"), folder)
    for built in result.built:
        shutil.copytree(built.artifact.folder, folder / built.job.folder, dirs_exist_ok=True)
    for name, path in {**modules, **copied}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def _is_copied(model: Model) -> bool:
    return bool(model.cut) or model.download is not None


def remove(folder: Path) -> list[str]:
    """Remove the files that an editable install wrote into ``folder``, and empty folders.

    Files that were changed since then are kept; returns their paths.
    """
    files = own_files(folder)
    if files is None:
        return []
    changed = _changed(folder, files)
    kept = []
    for name in files:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            continue
        if name in changed:
            kept.append(str(path))
        else:
            path.unlink()
    (folder / manifest.FILE).unlink()
    for compiled in bytecode(folder):
        compiled.unlink()
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        if path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
    return kept

"""The package in the project's own tree, which is what an editable install sees.

An editable install puts the project on the path, and what lies in ``site-packages`` under the same
name is not seen. So the package is written where the app's own code is, with a manifest that says
which files are ours; nothing else is ever removed or overwritten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path, PurePosixPath

from hatch_epcontext import manifest
from hatch_epcontext.artifact import record_file
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.result import Result
from hatch_epcontext.structure import from_json, to_json
from hatch_epcontext.tables import KEY
from hatch_epcontext.wheel import Tree


def folder_of(output: PurePosixPath, tree: Tree) -> Path:
    """Where in the project ``output`` is; raises ConfigError when no package of the project holds it."""
    for path, source in tree.items():
        parent = PurePosixPath(path).parent
        if parent.parts and output.is_relative_to(parent):
            return source.parent / output.relative_to(parent)
    raise ConfigError(
        Problem(
            f"{KEY}.output",
            f'an editable install has nowhere to put "{output}": no package of the project holds it.',
            'Name a folder in one, or set editable = "skip".',
        )
    )


def read(folder: Path) -> manifest.Manifest | None:
    """The manifest in ``folder``, if there is one and it is ours."""
    try:
        found = from_json((folder / manifest.FILE).read_bytes(), manifest.Manifest)
    except (OSError, ValueError):
        return None
    return found if found.is_ours else None


def owned(output: PurePosixPath, folder: Path) -> frozenset[str]:
    """The paths in the wheel of the files in ``folder`` that are ours."""
    found = read(folder)
    names = (*found.files, manifest.FILE) if found else ()
    return frozenset(str(output / name) for name in names)


def check(folder: Path) -> None:
    """Raise ConfigError when ``folder`` has files that are not ours, or that somebody has changed."""
    found = read(folder)
    if found is None and any(path.is_file() for path in folder.glob("*")):
        raise ConfigError(
            Problem(
                str(folder),
                "has files of its own, and an editable install would write there.",
                f"Give the models a folder of their own with {KEY}.output.",
            )
        )
    if found and (changed := _changed(folder, found)):
        raise ConfigError(
            Problem(
                str(folder),
                f"was written by an earlier install, and then changed: {', '.join(changed)}.",
                "Move the changed files away, for they would be overwritten.",
            )
        )


def _changed(folder: Path, found: manifest.Manifest) -> list[str]:
    return [
        name
        for name, recorded in found.files.items()
        if (folder / name).is_file() and record_file(folder / name) != recorded
    ]


def write(result: Result, folder: Path) -> None:
    """Write the package of ``result`` into ``folder``: loader, artifacts and manifest.

    Source models are not copied: the manifest names them where they are, so that an edit counts.
    """
    remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Made anew by every editable install, and of no use in a repository.
    (folder / ".gitignore").write_text("*\n", encoding="utf-8", newline="\n")
    files = {
        ".gitignore": record_file(folder / ".gitignore"),
        "__init__.py": record_file(manifest.loader()),
        **manifest.artifact_files(result),
    }
    sources: dict[str, str | None] = {
        source.model.name: Path(os.path.relpath(source.model.path, folder)).as_posix()
        for source in result.sources
    }
    # First, so that whatever of the rest gets written is known to be ours.
    made = manifest.make(result, sources, files)
    (folder / manifest.FILE).write_text(to_json(made), encoding="utf-8", newline="\n")
    shutil.copyfile(manifest.loader(), folder / "__init__.py")
    for built in result.built:
        shutil.copytree(built.artifact.folder, folder / built.job.folder, dirs_exist_ok=True)


def remove(folder: Path) -> list[str]:
    """Remove what a manifest in ``folder`` says is ours.

    Returns the files that somebody has changed, which are kept.
    """
    found = read(folder)
    if found is None:
        return []
    changed = _changed(folder, found)
    kept = []
    for name in found.files:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            continue
        if name in changed:
            kept.append(str(path))
        else:
            path.unlink()
    (folder / manifest.FILE).unlink()
    for compiled in (folder / "__pycache__").glob("__init__.*.pyc"):
        compiled.unlink()
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        if path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
    return kept

"""Artifacts -> files where a user wants them, all or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hatch_epcontext.errors import OutputError, Problem
from hatch_epcontext.result import Built, Source


def places(built: Iterable[Built], folder: Path, name: str | None = None) -> dict[Path, Path]:
    """Where each file goes -> where it is: below ``folder``, the context model as ``name`` if given.

    Sidecars come first, as nothing that is opened names what is not there yet.
    """
    sidecars, models = {}, {}
    for each in built:
        contexts = {context.model_file for context in each.artifact.record.contexts}
        for file in each.artifact.record.files:
            if file in contexts:
                models[folder / (name or file)] = each.artifact.folder / file
            else:
                sidecars[folder / file] = each.artifact.folder / file
    return {**sidecars, **models}


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise OutputError if any of ``paths`` is there."""
    problems = [
        Problem(str(path), "is there already.", "Take another place, or --overwrite.")
        for path in paths
        if path.exists()
    ]
    if problems:
        raise OutputError(*problems)


def refuse_sources(paths: Iterable[Path], sources: Iterable[Source]) -> None:
    """Raise OutputError if any of ``paths`` is a source model, or a file of its external data."""
    theirs = {
        (source.model.path.parent / name).resolve()
        for source in sources
        for name in (source.model.path.name, *source.facts.external_data)
    }
    problems = [
        Problem(str(path), "is the source's own file.", "Take another place.")
        for path in paths
        if path.resolve() in theirs
    ]
    if problems:
        raise OutputError(*problems)


def publish(files: Mapping[Path, Path], *, overwrite: bool) -> None:
    """Copy each file of ``files`` (target -> source) to its place, once all copies are whole.

    Folders are made if need be. Raises OutputError when a target is there and ``overwrite`` is not set.
    """
    if not overwrite:
        refuse_existing(files)
    staged: dict[Path, Path] = {}
    folders: list[Path] = []
    try:
        for folder in dict.fromkeys(target.parent for target in files):
            folder.mkdir(parents=True, exist_ok=True)
            # Beside the targets, for a file can only be renamed within its file system.
            folders.append(Path(tempfile.mkdtemp(prefix=".epcontext-", dir=folder)))
            for target, source in files.items():
                if target.parent == folder:
                    staged[target] = folders[-1] / target.name
                    shutil.copyfile(source, staged[target])
        for target, copy in staged.items():
            copy.replace(target)
    finally:
        for made in folders:
            shutil.rmtree(made, ignore_errors=True)

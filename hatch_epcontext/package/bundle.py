"""Artifacts -> the folder of a model package."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hatch_epcontext.config.settings import Model
from hatch_epcontext.files import FileRecord, link_or_copy, record_file, symlink_or_copy
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import PACKAGE, Result, Source
from hatch_epcontext.jobs.cache.index import changed_error
from hatch_epcontext.jobs.plan import ships_source
from hatch_epcontext.package import manifest
from hatch_epcontext.shipped import OPTION_FILES
from hatch_epcontext.system import writing


@dataclass(frozen=True)
class Bundle:
    """A model package on disk: ``files`` in ``folder``, which may have others, by their path there.

    The manifest is the last one, with the text of ``package``.

    ``sources``: those of ``files`` that the user can still change, each with the user's own file.
    """

    folder: Path
    files: Mapping[str, FileRecord]
    sources: Mapping[str, Path]
    package: manifest.ModelPackage

    def entries(self, output: PurePosixPath) -> dict[str, str]:
        """Absolute path -> path in the wheel, for Hatch's ``force_include``."""
        return {str(self.folder / name): str(output / name) for name in self.files}

    def check_sources(self, folder: Path) -> None:
        """Raise ModelError if a source in ``folder``, this package or a copy, is not what was built."""
        for name, path in self.sources.items():
            copy = folder / name
            if not copy.is_file() or record_file(copy) != self.files[name]:
                raise changed_error(path)


def bundle(result: Result, staging: Path, modules: Mapping[str, Path]) -> Bundle:
    """Put the artifacts, the sources if they are shipped, and the manifest into a folder in ``staging``.

    ``modules``: the Python modules that the folder gets too, by their path in it, each with its file.
    """
    with writing("the model package", staging):
        return _bundle(result, staging / PACKAGE, modules)


def _bundle(result: Result, folder: Path, modules: Mapping[str, Path]) -> Bundle:
    folder.mkdir(exist_ok=True)
    for built in result.built:
        place = folder / built.job.folder
        if built.artifact.folder != place:
            # Chips that were built alone may be there.
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(built.artifact.folder, place, copy_function=link_or_copy)
    files = manifest.artifact_files(result) | _copy_option_files(result, folder)
    sources = shipped_sources(result)
    folders = manifest.source_folders(result.sources)
    own: dict[str, Path] = {}
    for source in result.sources:
        if source.model.name in sources:
            shipped = folders[source.model.name]
            files |= _copy_source(source, folder, shipped)
            own |= {f"{shipped}/{name}": source.model.path.parent / name for name in source.records}
    for name, path in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
        files[name] = record_file(folder / name)
    package = manifest.make(result, sources, files)
    with_manifest = {**files, manifest.FILE: record_file(manifest.save(package, folder))}
    return Bundle(folder, with_manifest, own, package)


def _copy_option_files(result: Result, folder: Path) -> dict[str, FileRecord]:
    """Put the files that options name, and that apps need, into the package; returns their records.

    Raises ModelError if one was changed since the configuration was read.
    """
    files = {}
    for built in result.built:
        for file in built.job.target.shipped_files:
            name = f"{built.job.folder}/{OPTION_FILES}/{file.name}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, folder / name)
            files[name] = record_file(folder / name)
            if files[name].sha256 != file.sha256:
                raise changed_error(Path(file.path))
    return files


def _copy_source(source: Source, folder: Path, shipped: str) -> dict[str, FileRecord]:
    """Put the source's files into ``shipped`` of the package in ``folder``; returns their records."""
    files = {}
    for name, recorded in source.records.items():
        target = folder / shipped / name
        if not target.exists():
            # Other models may have the same files.
            target.parent.mkdir(parents=True, exist_ok=True)
            symlink_or_copy((source.model.path.parent / name).resolve(), target)
        files[f"{shipped}/{name}"] = recorded
    return files


def shipped_sources(result: Result) -> dict[str, str]:
    """The models whose sources the package contains, each with the source's path in it."""
    folders = manifest.source_folders(result.sources)
    return {
        source.model.name: f"{folders[source.model.name]}/{source.model.path.name}"
        for source in result.sources
        if _ships_source(source.model, result)
    }


def _ships_source(model: Model, result: Result) -> bool:
    targets = (
        built.job.target
        for built in result.built
        for other in built.job.models
        if other.configured_name == model.configured_name
    )
    return ships_source(model, targets)

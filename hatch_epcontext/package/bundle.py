"""Artifacts -> the folder of a model package, with the Python modules that are shipped beside the models."""

from __future__ import annotations

import json
import keyword
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath, PurePosixPath

import hatch_epcontext
from hatch_epcontext.cache.build import changed_error
from hatch_epcontext.config.genai_config import tokenizer_files
from hatch_epcontext.config.settings import Model
from hatch_epcontext.files import FileRecord, link_or_copy, put_files, record_file, symlink_or_copy
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import PACKAGE, Result, Source
from hatch_epcontext.jobs.genai import overlays
from hatch_epcontext.jobs.plan import ships_source
from hatch_epcontext.package import manifest
from hatch_epcontext.shipped import OPTION_FILES
from hatch_epcontext.system import writing

_PYINSTALLER = "__pyinstaller"
"""The folder of the hook for PyInstaller; no model has such a name."""


@dataclass(frozen=True)
class Bundle:
    """A model package on disk: ``files`` in ``folder``, which may have others, by their path there.

    The manifest is the last one, with the text of ``package``.
    """

    folder: Path
    files: Mapping[str, FileRecord]
    package: manifest.ModelPackage

    def entries(self, output: PurePosixPath) -> dict[str, Path]:
        """Its files, by their path in a wheel with the package in ``output``."""
        return {str(output / name): self.folder / name for name in self.files}


def bundle(
    result: Result,
    staging: Path,
    modules: Mapping[str, Path],
    installed: Path | None = None,
    companions: Mapping[str, str] | None = None,
) -> Bundle:
    """Put the artifacts, the sources if they are shipped, and the manifest into a folder in ``staging``.

    ``modules``: the Python modules that the folder gets too, by their path in it, each with its file.
    ``installed``: the folder in the project for which it is made, for an editable install. Its manifest has
    the sources' own paths, so that the app sees an edited model. Only those that the build has written are in
    it, which are nowhere else, and those from elsewhere, which nobody edits. ``companions``: as in
    `manifest.make`.
    """
    with writing("the model package", staging):
        return _bundle(result, staging / PACKAGE, modules, installed, companions)


def _bundle(
    result: Result,
    folder: Path,
    modules: Mapping[str, Path],
    installed: Path | None,
    companions: Mapping[str, str] | None,
) -> Bundle:
    folder.mkdir(exist_ok=True)
    artifact_folders = manifest.artifact_folders(result)
    for built in result.built:
        copied = folder / built.job.folder
        is_first = artifact_folders[built.job.folder] == built.job.folder
        if built.folder != copied or not is_first:
            # What was compiled alone may be there, of single chips.
            shutil.rmtree(copied, ignore_errors=True)
            if is_first:
                shutil.copytree(built.folder, copied, copy_function=link_or_copy)
    files = manifest.artifact_files(result) | _copy_option_files(result, folder)
    folders = manifest.source_folders(result.sources)
    paths: dict[str, str] = {}
    tokenizers = _shared_tokenizers(result) if installed is None else {}
    for source in result.sources:
        model, shipped = source.model, folders[source.model.name]
        if model.is_stage:
            # The folder is shipped.
            continue
        # What the build, or a download, has written; of a language model the contexts are inside.
        only_here = model.origin or model.download or (model.genai and result.built)
        if _ships_source(model, result) if installed is None else only_here:
            records = source.records
            if model.ships_weights:
                paths[model.name] = f"{shipped}/{model.path.name}"
            else:
                # The other files of a language model.
                weights = {model.path.name, *source.facts.external_data}
                records = {name: records[name] for name in records if name not in weights}
            if model.name in tokenizers:
                others = [name for name in records if name not in tokenizer_files(records)]
                records = {name: records[name] for name in others}
            files |= _copy_source(source, folder, shipped, records)
        elif installed is not None:
            paths[model.name] = Path(os.path.relpath(model.path, installed)).as_posix()
    files |= _write_overlays(result, folder, tokenizers)
    for name, path in modules.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
        files[name] = record_file(folder / name)
    if installed is not None:
        # Every editable install writes these files again: a repository does not need them.
        ignore = folder / ".gitignore"
        ignore.write_text("*\n", encoding="utf-8", newline="\n")
        files[ignore.name] = record_file(ignore)
    layout: manifest.Layout = "portable" if installed is None else "installed"
    package = manifest.make(result, paths, files, layout, companions)
    with_manifest = {**files, manifest.FILE: record_file(manifest.save(package, folder))}
    return Bundle(folder, with_manifest, package)


def _write_overlays(
    result: Result, folder: Path, tokenizers: Mapping[str, str]
) -> dict[str, FileRecord]:
    """Write what each target changes in the configuration of each language model; returns the records."""
    files = {}
    for path, changes in overlays(result).items():
        name, _, _ = path.partition("/")
        if name in tokenizers:
            changes["model"]["tokenizer_dir"] = tokenizers[name]
        file = folder / path / "overlay.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{json.dumps(changes, indent=2)}\n", encoding="utf-8", newline="\n")
        files[f"{path}/{file.name}"] = record_file(file)
    return files


def _shared_tokenizers(result: Result) -> dict[str, str]:
    """Where genai finds the tokenizer of each folder that another one of the same model has too."""
    shared: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for model, records in ((source.model, source.records) for source in result.sources):
        if model.genai is None or model.is_stage or not _ships_source(model, result):
            continue
        files = [(name, records[name].sha256) for name in tokenizer_files(model.genai.beside)]
        inside = model.genai.tokenizer_dir
        key = (model.genai.app_name or model.name, inside, *files)
        if files and key in owners:
            shared[model.name] = str(PurePosixPath("..", owners[key], inside))
        owners.setdefault(key, model.name)
    return shared


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


def _copy_source(
    source: Source, folder: Path, shipped: str, records: Mapping[str, FileRecord]
) -> dict[str, FileRecord]:
    """Put the source's files with ``records`` into ``shipped`` of the package; returns the records there."""
    # Other models may have the same files.
    put_files(records, source.model.path.parent, folder / shipped, symlink_or_copy)
    return {f"{shipped}/{name}": recorded for name, recorded in records.items()}


def _ships_source(model: Model, result: Result) -> bool:
    targets = (
        built.job.target
        for built in result.built
        for member in built.job.models
        if member.configured_name == model.configured_name
    )
    if model.genai is not None and (model.plain_targets or any(targets)):
        # Its targets need the folder, if not the weights in it.
        return True
    return ships_source(model, targets)


def loader_file() -> Path:
    """The module that is shipped next to the manifest, as ``__init__.py``."""
    return Path(hatch_epcontext.__file__).with_name("loader.py")


def modules(import_name: str | None, models: Collection[Model]) -> Mapping[str, Path]:
    """The modules of a package, by their path in it: the loader, and what the models need beside it.

    With ``import_name``, the package's name, also the hook for PyInstaller, which finds it by that name.
    """
    beside = {
        name: loader_file().with_name(name)
        for name in ("_check.py", "_runner.py", "_user_cache.py")
    }
    shipped = {"__init__.py": loader_file(), **beside}
    if any(target.settings.recompile for model in models for target in model.targets):
        shipped["_recompile.py"] = loader_file().with_name("_recompile.py")
    if any(model.genai for model in models):
        shipped["genai.py"] = loader_file().with_name("_genai.py")
    if import_name is not None:
        folder = Path(__file__).with_name("pyinstaller")
        shipped[f"{_PYINSTALLER}/__init__.py"] = folder / "__init__.py"
        shipped[f"{_PYINSTALLER}/hook-{import_name}.py"] = folder / "hook.py"
    return shipped


def import_name(path: PurePath) -> str | None:
    """The name by which Python imports the folder at ``path`` in a wheel; None if it cannot."""
    is_importable = all(part.isidentifier() and not keyword.iskeyword(part) for part in path.parts)
    return ".".join(path.parts) if path.parts and is_importable else None


def import_name_in_tree(folder: Path) -> str | None:
    """The name by which Python imports ``folder`` of a source tree.

    Its parents are packages as far as they have an ``__init__.py``. None if the nearest has none: such a
    folder is on no path of Python's, but somewhere on a disk.
    """
    parts = [folder.name]
    for parent in folder.parents:
        if not (parent / "__init__.py").is_file():
            break
        parts.insert(0, parent.name)
    return import_name(PurePosixPath(*parts)) if len(parts) > 1 else None

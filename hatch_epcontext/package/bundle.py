"""Artifacts -> the folder of a model package."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hatch_epcontext.build.artifact import Result
from hatch_epcontext.config.settings import Config
from hatch_epcontext.files import link_or_copy, record_file
from hatch_epcontext.package import manifest, model_package


@dataclass(frozen=True)
class Bundle:
    """A model package on disk: ``files`` in ``folder``, by their path there, the manifest last."""

    folder: Path
    files: tuple[str, ...]

    def entries(self, output: PurePosixPath) -> dict[str, str]:
        """Absolute path -> path in the wheel, for Hatch's ``force_include``."""
        return {str(self.folder / name): str(output / name) for name in self.files}


def bundle(result: Result, config: Config, staging: Path, *, loader: bool = True) -> Bundle:
    """Put the artifacts, the sources if they are shipped, and the manifest into a folder in ``staging``.

    With ``loader`` the folder is also a Python package, which opens the models.
    """
    folder = staging / "bundle"
    folder.mkdir()
    for built in result.built:
        shutil.copytree(
            built.artifact.folder, folder / built.job.folder, copy_function=link_or_copy
        )
    files = manifest.artifact_files(result)
    sources: dict[str, str] = {}
    for source in result.sources:
        model = source.model
        if config.fallback != "source":
            continue
        shipped = manifest.source_folder(model.name)
        sources[model.name] = f"{shipped}/{model.path.name}"
        for name in (model.path.name, *source.facts.external_data):
            target = folder / shipped / name
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy((model.path.parent / name).resolve(), target)
            files[f"{shipped}/{name}"] = record_file(target)
    if loader:
        shutil.copyfile(manifest.loader_file(), folder / "__init__.py")
        files["__init__.py"] = record_file(folder / "__init__.py")
    content = model_package.write(manifest.make(result, sources, files))
    (folder / model_package.FILE).write_text(content, encoding="utf-8", newline="\n")
    return Bundle(folder, (*files, model_package.FILE))

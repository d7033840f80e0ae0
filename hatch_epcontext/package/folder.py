"""A model package in a folder: read strictly, compared with its manifest, and replaced by a new one.

An editable install puts the project on Python's path, which hides a package with the same name in
``site-packages``. So the package is written into the app's own package.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.errors import InspectionError, Key, Kind, OutputError, Problem, Setting
from hatch_epcontext.files import (
    FileRecord,
    is_inside,
    is_intact,
    read_regular,
    replace_files,
    sweep,
)
from hatch_epcontext.jobs.artifact import GENERATOR, Source
from hatch_epcontext.jobs.sources import check_unchanged
from hatch_epcontext.package.bundle import Bundle
from hatch_epcontext.package.manifest import (
    FILE,
    ModelPackage,
    PackageMetadata,
    PlainMetadata,
    Variant,
    VariantMetadata,
)
from hatch_epcontext.package.wheel import OUTPUT, Tree, output_error
from hatch_epcontext.serialize import from_plain
from hatch_epcontext.shipped import METADATA, SOURCE
from hatch_epcontext.text import MAX_NAMED, listing


def read(text: bytes, location: str) -> ModelPackage | None:
    """The package whose manifest is ``text``; None if this package did not write it.

    Raises InspectionError, with its ``location``, if it is no JSON, or not as this package writes it.
    """
    try:
        content = json.loads(text)
        # Python reads infinities and half characters, and no file can have such a name.
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _invalid(location, f"{FILE} is not JSON: {error}.") from error
    if not _is_ours(content):
        return None
    try:
        package = _typed(from_plain(content, ModelPackage))
    except (ValueError, KeyError) as error:
        raise _invalid(location, f"{FILE} is not as this version writes it: {error}.") from error
    if package.layout == "portable":
        # A variant's file is one of these, so it is inside, too.
        wrong = [f"{name!r} is outside of it" for name in package.files if not is_inside(name)]
        wrong += [f"{name!r} is not among its files" for name in package.unrecorded]
        if wrong:
            raise _invalid(location, f"{FILE} names files of the package, and {'; '.join(wrong)}.")
    return package


def _is_ours(content: Any) -> bool:
    metadata = content.get("additional_metadata") if isinstance(content, dict) else None
    return isinstance(metadata, dict) and METADATA in metadata


def _typed(package: ModelPackage) -> ModelPackage:
    """``package`` with what is ours in its variants; raises ValueError or KeyError without that."""
    components = {
        name: dataclasses.replace(
            component,
            variants={target: _variant(variant) for target, variant in component.variants.items()},
            additional_metadata={METADATA: component.about},
        )
        for name, component in package.components.items()
    }
    return dataclasses.replace(package, components=components)


def _variant(variant: Variant) -> Variant:
    about = variant.additional_metadata[METADATA]
    is_plain = isinstance(about, dict) and about.get("product") == SOURCE
    facts = from_plain(about, PlainMetadata if is_plain else VariantMetadata)
    return dataclasses.replace(
        variant, executor_info={"ort": variant.ort}, additional_metadata={METADATA: facts}
    )


def _invalid(location: str, message: str) -> InspectionError:
    return InspectionError(Problem(Kind.INVALID_PACKAGE, location, message))


def own_files(folder: Path) -> Mapping[str, FileRecord] | None:
    """The files that the manifest in ``folder`` records, without itself; None unless this package wrote it.

    They count also where the rest of the manifest is invalid: a new package replaces it.
    """
    try:
        content = json.loads(read_regular(folder / FILE))
        if not _is_ours(content):
            return None
        about = from_plain(content["additional_metadata"][METADATA], PackageMetadata)
    except (OSError, ValueError, RecursionError):
        return None
    return about.files if about.generator.split(" ")[0] == GENERATOR else None


def damaged_files(folder: Path, package: ModelPackage) -> Iterator[Problem]:
    """The files of a package that are missing or changed; without a record, the missing model files."""
    for name, recorded in sorted(package.files.items()):
        if not is_intact(folder / name, recorded):
            message = "is missing, or differs from its record in the manifest."
            hint = "Restore it, or write the package again."
            yield Problem(Kind.CHANGED_FILE, str(folder / name), message, hint)
    for name in package.unrecorded:
        if not (folder / name).is_file():
            yield Problem(Kind.CHANGED_FILE, str(folder / name), "is missing.")
    if package.layout == "portable":
        # Also links that the manifest does not name: a model may name them.
        root = os.path.realpath(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                message = "is a link to a file outside of the package, which ONNX Runtime rejects."
                yield Problem(Kind.INVALID_PACKAGE, str(path), message)


SOURCE_FOLDERS = ("src", "python", "lib")
"""Where projects have their import packages, besides their own folder; the most usual first."""


def project_folder(output: PurePosixPath, tree: Tree) -> Path:
    """The folder of ``output`` in the project; raises ConfigError if no package contains it."""
    for path, source in tree.items():
        parent = PurePosixPath(path).parent
        if parent.parts and output.is_relative_to(parent):
            return source.parent / output.relative_to(parent)
    message = (
        f'an editable install cannot write to "{output}": no package of the project contains it.'
    )
    hint = (
        "Name a folder in one of the project's packages, of which a single module has none, or skip the "
        "models in editable installs."
    )
    raise output_error(message, hint, Setting(OUTPUT), Setting(Key() / "editable", "skip"))


def owned_paths(output: PurePosixPath, folder: Path) -> frozenset[str]:
    """The files in ``folder`` that an editable install wrote, as paths in the wheel."""
    files = own_files(folder)
    names = () if files is None else (*files, FILE)
    return frozenset(str(output / name) for name in names)


def reject_others(folder: Path, *, edited: bool) -> None:
    """Raise OutputError if ``folder`` has files that its manifest does not name, or is no package.

    With ``edited`` also if a file is not as the manifest says: git ignores the folder of an editable install,
    and could not restore it.
    """
    sweep(folder)
    recorded = own_files(folder)
    written = {} if recorded is None else recorded
    others = [
        name
        for name in _files(folder)
        # Python writes bytecode when it imports the loader.
        if "__pycache__" not in PurePosixPath(name).parts
        and (name != FILE or recorded is None)
        and (name not in written or (edited and not is_intact(folder / name, written[name])))
    ]
    if others:
        message = (
            f"the folder has files that this tool did not write: {listing(others, MAX_NAMED)}."
        )
        hint = "Choose another folder, or move them away: they are never overwritten."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), message, hint))


def publish(bundle: Bundle, sources: Iterable[Source], folder: Path, *, edited: bool) -> None:
    """Make ``folder`` the package of ``bundle``, made of ``sources``, as a whole, or leave it as it is.

    Raises as `reject_others`; OSError; and ModelError if a source has changed.
    """
    reject_others(folder, edited=edited)
    # Real copies: the bundle only links files of the cache and of the project.
    files = {name: bundle.folder / name for name in bundle.files}
    replace_files(folder, files, _files(folder), lambda _: check_unchanged(sources))


def _files(folder: Path) -> list[str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return [path.relative_to(folder).as_posix() for path in paths]

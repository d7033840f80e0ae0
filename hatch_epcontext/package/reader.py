"""Reads the manifest of a model package that this package wrote, strictly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import InspectionError, Kind, Problem
from hatch_epcontext.files import FileRecord, is_inside, is_intact, read_regular
from hatch_epcontext.jobs.artifact import GENERATOR
from hatch_epcontext.package.manifest import (
    FILE,
    ModelPackage,
    PackageMetadata,
    SourceMetadata,
    Variant,
    VariantMetadata,
)
from hatch_epcontext.serialize import from_plain
from hatch_epcontext.shipped import METADATA, SOURCE

PATH_OPTIONS = frozenset(
    {"ep.context_file_path", "session.model_external_initializers_file_folder_path"}
)
"""Session options that name a file of the package."""

OUTPUT_OPTIONS = frozenset(
    {
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.enable_profiling",
        "session.optimized_model_filepath",
    }
)
"""Session options that name a file to write: ONNX Runtime refuses a package with one."""


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
    is_source = isinstance(about, dict) and about.get("product") == SOURCE
    type_: type[SourceMetadata | VariantMetadata] = SourceMetadata if is_source else VariantMetadata
    return dataclasses.replace(
        variant,
        executor_info={"ort": variant.ort},
        additional_metadata={METADATA: from_plain(about, type_)},
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
        if not is_intact(folder, {name: recorded}):
            message = "is missing, or differs from its record in the manifest."
            hint = "Restore it, or write the package again."
            yield Problem(Kind.CHANGED_FILE, str(folder / name), message, hint)
    for name in package.unrecorded:
        if not (folder / name).is_file():
            yield Problem(Kind.CHANGED_FILE, str(folder / name), "is missing.")
    if package.layout == "portable":
        # Also links that the manifest does not name: a model may name them.
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() and _leads_outside(path, folder):
                message = "is a link to a file outside of the package, which ONNX Runtime refuses."
                yield Problem(Kind.INVALID_PACKAGE, str(path), message)


def _leads_outside(link: Path, folder: Path) -> bool:
    try:
        return not link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        # A loop of links, where nothing can be.
        return False

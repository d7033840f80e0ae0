"""Reads model packages of any tool, strictly: all that is wrong is reported, each with its place."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from hatch_epcontext.errors import InspectionError, Kind, Problem
from hatch_epcontext.files import FileRecord, is_inside, is_intact, read_regular
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import GENERATOR
from hatch_epcontext.package.manifest import (
    ASSET,
    FILE,
    SCHEMA_VERSION,
    Component,
    Layout,
    ModelPackage,
    OrtInfo,
    PackageMetadata,
    Variant,
    default_folder,
    joined,
    ours,
)
from hatch_epcontext.serialize import refuse_constant, valid_part
from hatch_epcontext.text import dotted, show

T = TypeVar("T")

DAMAGED_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What `zipfile` raises for contents that it cannot read."""

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

_COMPONENT_FILE = "component.json"
_ASSET_URI = re.compile(r"sha256:[0-9a-f]{64}")
_ASSET_FORM = "sha256: and 64 lower-case hex digits"
_VERSION = re.compile(r"([0-9]+)(?:\.([0-9]+))?")

_MAX_LEVELS = 150
"""How deep a manifest may be nested; ONNX Runtime opens one of 100, and Python's recursion has limits."""


@dataclass(frozen=True)
class FolderFiles:
    """The files in a folder on disk."""

    folder: Path

    def read(self, name: str) -> bytes:
        """The contents of a file; raises OSError if there is none, or ValueError for an invalid name."""
        return read_regular(self.folder / name)

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""
        # Of a name that no file can have, some versions of Python raise an error.
        with contextlib.suppress(OSError):
            return (self.folder / name).is_dir()
        return False

    def leads_outside(self, name: str) -> bool:
        """Whether links lead from ``name`` to a place that is not in the package."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            return not (self.folder / name).resolve().is_relative_to(self.folder.resolve())
        # Nothing can be there: a loop of links, or a name that no file can have.
        return False


@dataclass(frozen=True)
class ArchiveFiles:
    """The files below a folder in a zip archive, such as a wheel."""

    archive: zipfile.ZipFile
    folder: PurePosixPath

    def read(self, name: str) -> bytes:
        try:
            return self.archive.read(str(self.folder / name))
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "it is missing", name) from None
        except DAMAGED_ARCHIVE as error:
            raise OSError(errno.EIO, f"it is damaged ({error})", name) from None

    def is_folder(self, name: str) -> bool:
        path = self.folder / name
        prefix = f"{path}/" if path.parts else ""
        return any(each.startswith(prefix) for each in self.archive.namelist())

    def leads_outside(self, name: str) -> bool:
        return False


Files = FolderFiles | ArchiveFiles
"""The files of a package, wherever they are; names are relative, with forward slashes."""


def read(files: Files, location: str) -> ModelPackage:
    """Read the package in ``files``.

    Raises InspectionError with all problems, each with its place below ``location``.
    """
    reader = _Reader(files, location)
    package = reader.package()
    if package is None or reader.problems:
        raise InspectionError(*reader.problems)
    return package


def is_package(files: Files) -> bool:
    """Whether a ``manifest.json``, a common name, can be that of a model package."""
    try:
        content = json.loads(files.read(FILE))
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(content, dict) and bool({"schema_version", "components"} & content.keys())


def own_files(folder: Path) -> Mapping[str, FileRecord] | None:
    """The files that the manifest in ``folder`` records, without itself; None unless this package wrote it.

    They count also where the rest of the manifest is invalid: a new package replaces it.
    """
    try:
        content = json.loads(read_regular(folder / FILE))
    except (OSError, ValueError, RecursionError):
        return None
    metadata = content.get("additional_metadata") if isinstance(content, dict) else None
    found = ours(metadata, PackageMetadata)
    return found.files if found and found.generator.split(" ")[0] == GENERATOR else None


def damaged_files(folder: Path, package: ModelPackage) -> Iterator[Problem]:
    """The files of a package that are missing or changed; without a record, the missing model files."""
    for name, recorded in sorted(package.files.items()):
        if not is_intact(folder, {name: recorded}):
            message = "is missing, or differs from its record in the manifest."
            yield Problem(Kind.CHANGED_FILE, str(folder / name), message)
    for name in package.unrecorded:
        if not (folder / name).is_file():
            yield Problem(Kind.CHANGED_FILE, str(folder / name), "is missing.")
    if package.layout == "portable":
        # Also links that the manifest does not name: a model may name them.
        links = (path for path in sorted(folder.rglob("*")) if path.is_symlink())
        names = (path.relative_to(folder).as_posix() for path in links)
        for name in dict.fromkeys((*package.files, *package.unrecorded, *names)):
            if FolderFiles(folder).leads_outside(name):
                message = "is a link to a file outside of the package, which ONNX Runtime refuses."
                yield Problem(Kind.INVALID_PACKAGE, str(folder / name), message)


_ABSENT: Any = None
"""The value of a key that is left out. ONNX Runtime refuses null, and so do the types without None."""


# The types as they are written. Unknown keys are refused, as ONNX Runtime does.
@dataclass(frozen=True, kw_only=True)
class _VariantJson:
    variant_directory: str = _ABSENT
    ep: str = _ABSENT
    device: str = _ABSENT
    compatibility_string: str = _ABSENT
    executor_info: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _ComponentJson:
    variants: Mapping[str, _VariantJson]
    component_name: str = _ABSENT
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _ManifestJson:
    schema_version: str | int
    components: Mapping[str, str | _ComponentJson]
    package_name: str = _ABSENT
    package_version: str = _ABSENT
    description: str = _ABSENT
    layout: Layout = "portable"
    shared_assets: Mapping[str, str] = field(default_factory=dict)
    additional_metadata: Any = None


_Place = tuple["str | int", ...]

_UNREADABLE: Any = object()
"""In place of the contents of a file that cannot be read, for JSON has null."""


class _Reader:
    """Reads what can be read, and collects the problems of the rest."""

    def __init__(self, files: Files, location: str) -> None:
        self.problems: list[Problem] = []
        self._files = files
        self._location = location
        self._confined = True
        self._strict = True
        self._assets: Mapping[str, str] = {}

    def package(self) -> ModelPackage | None:
        content = self._json("", FILE, ())
        if content is _UNREADABLE or not self._is_known_version(content):
            return None
        manifest = self._structured(content, _ManifestJson, ())
        if manifest is None:
            return None
        self._confined = manifest.layout == "portable"
        self._assets = manifest.shared_assets
        for uri, path in self._assets.items():
            place = ("shared_assets", uri)
            if not _ASSET_URI.fullmatch(uri):
                self._add(place, f"must be named {_ASSET_FORM}.")
            self._leaves_package(path, place)
        if not content["components"]:
            self._add(("components",), "is empty, and a package needs a component.")
        components = {
            name: self._component(given, ("components", name))
            for name, given in manifest.components.items()
        }
        version = str(manifest.schema_version)
        metadata = manifest.additional_metadata
        return ModelPackage(components, manifest.layout, metadata, version)

    def _is_known_version(self, content: Any) -> bool:
        """Whether the manifest's version is missing or one that can be read."""
        if not isinstance(content, dict) or "schema_version" not in content:
            return True
        version = content["schema_version"]
        found = _VERSION.fullmatch(str(version)) if type(version) in (str, int) else None
        message, hint = f'must be a version such as "{SCHEMA_VERSION}", not {show(version)}.', None
        if found and found[1] == SCHEMA_VERSION.partition(".")[0]:
            # A newer minor version may have more keys.
            self._strict = not (found[2] or "").strip("0")
            return True
        if found:
            message = f"is {version}, and this version reads {SCHEMA_VERSION}."
            hint = "Use a newer version of hatch-epcontext, or the tool that wrote it."
        self._add(("schema_version",), message, hint)
        return False

    def _component(self, given: str | _ComponentJson, place: _Place) -> Component:
        folder = ""
        if isinstance(given, str):
            file = joined(given, _COMPONENT_FILE) if self._files.is_folder(given) else given
            folder = PurePath(file).parent.as_posix()
            found = self._structured(self._json("", file, place), _ComponentJson, place)
            if found is None:
                return Component({})
            given = found
        variants = {
            name: self._variant(name, each, folder, (*place, "variants", name))
            for name, each in given.variants.items()
        }
        return Component(variants, given.additional_metadata)

    def _variant(self, name: str, given: _VariantJson, folder: str, place: _Place) -> Variant:
        directory = self._directory(name, given.variant_directory, folder, place)
        if self._strict and given.device not in (None, "cpu", "gpu", "npu"):
            message = f'must be "cpu" or "gpu" or "npu", not {show(given.device)}.'
            self._add((*place, "device"), message)
        ort = None
        # A file that a variant outside of the package names is no second problem.
        for executor, info in given.executor_info.items() if directory else ():
            where = (*place, "executor_info", executor)
            content = self._json(directory, info, where) if isinstance(info, str) else info
            if executor == "ort":
                ort = self._ort(content, where)
        asset = ASSET.fullmatch(ort.model_file) if ort else None
        return Variant(
            directory=directory,
            ep=given.ep,
            device=given.device,
            compatibility_string=given.compatibility_string,
            ort=ort,
            asset_folder=self._assets.get(asset[1]) if asset else None,
            metadata=given.additional_metadata,
        )

    def _directory(self, name: str, given: str | None, folder: str, place: _Place) -> str:
        """The variant's directory from the package; empty if it is outside."""
        # ONNX Runtime takes the name where none is given, also if there is no such folder.
        where = place if given is None else (*place, "variant_directory")
        path = name if given is None else given
        if self._leaves_package(path, where):
            return ""
        directory = joined(folder, path)
        if given is not None and not self._files.is_folder(directory):
            self._add(where, f"names the folder {directory!r}, which is missing.")
        return directory

    def _ort(self, info: Any, place: _Place) -> OrtInfo | None:
        ort = self._structured(info, OrtInfo, place, strict=False)
        if ort is None:
            return None
        for name, value in ort.session_options.items():
            where = (*place, "session_options", name)
            if name in OUTPUT_OPTIONS:
                self._add(where, "names an output file, which ONNX Runtime refuses in a package.")
            elif name in PATH_OPTIONS:
                self._check_path(value, where)
        self._check_path(ort.model_file, (*place, "model_file"))
        return ort

    def _check_path(self, path: str, place: _Place) -> None:
        """Refuse a ``path`` that leaves the package, or is in a shared asset that there is not."""
        if not path.startswith("sha256:"):
            self._leaves_package(path, place)
        elif (asset := ASSET.fullmatch(path)) is None:
            self._add(place, f"must be a path, or begin with {_ASSET_FORM}.")
        elif not is_inside(asset[2] or "."):
            # In no layout.
            self._add(place, f"names {path!r}, which is outside of the shared asset.")
        elif asset[1] not in self._assets:
            folder = default_folder(asset[1])
            if not self._files.is_folder(folder):
                self._add(place, f"names a shared asset, and {folder!r} is missing.")

    def _json(self, folder: str, path: str, place: _Place) -> Any:
        """The contents of the JSON file at ``path`` from ``folder``, or `_UNREADABLE`."""
        if self._leaves_package(path, place):
            return _UNREADABLE
        name = joined(folder, path)
        if name != FILE and self._confined and self._files.leads_outside(name):
            self._add(place, f"{name} is a link to a file outside of the package.")
            return _UNREADABLE
        try:
            text = self._files.read(name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self._add(place, f"{name} cannot be read: {reason}.")
            return _UNREADABLE
        try:
            content = json.loads(text.decode("utf-8-sig"), parse_constant=refuse_constant)
            _refuse_unportable(content)
        except (ValueError, RecursionError) as error:
            self._add(place, f"{name} is not JSON: {error}.")
            return _UNREADABLE
        return content

    def _structured(
        self, value: Any, type_: type[T], place: _Place, *, strict: bool = True
    ) -> T | None:
        """What of ``value`` is valid; None if nothing is, or if it could not be read."""
        if value is _UNREADABLE:
            return None
        found, wrong = valid_part(value, type_, strict=strict and self._strict)
        for path, message in wrong:
            self._add((*place, *path), message)
        return found

    def _leaves_package(self, path: str, place: _Place) -> bool:
        if path and not (self._confined and not is_inside(path)):
            return False
        self._add(
            place, f"names {path!r}, which is outside of the package, or not a relative path."
        )
        return True

    def _add(self, place: _Place, message: str, hint: str | None = None) -> None:
        location = f"{self._location}: {dotted(place)}" if place else self._location
        self.problems.append(Problem(Kind.INVALID_PACKAGE, location, message, hint))


def _refuse_unportable(content: Any) -> None:
    """Raise ValueError for what Python reads in JSON, and ONNX Runtime does not."""
    # No recursion, which has limits.
    values = [(content, 1)]
    while values:
        value, level = values.pop()
        if level > _MAX_LEVELS:
            raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep")
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number in it is too large")
        elif isinstance(value, dict):
            values += ((each, level + 1) for item in value.items() for each in item)
        elif isinstance(value, list):
            values += ((each, level + 1) for each in value)

"""ONNX Runtime's model package: the types of its manifest, read strictly and written.

The format, schema 1.0: ``model_package/README.md`` and
``onnxruntime/core/session/model_package/README.md`` in ONNX Runtime's repository. A package is a folder
with a ``manifest.json``; it has components (models), and each component has variants.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, Protocol

from hatch_epcontext.errors import Diagnosed, Kind, Problem
from hatch_epcontext.files import is_inside
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.serialize import InvalidJsonError, from_plain, refuse_constant, to_plain
from hatch_epcontext.text import dotted, show

FILE = "manifest.json"
"""The name of the manifest."""

SCHEMA_VERSION = "1.0"

Layout = Literal["portable", "installed"]
"""``"installed"`` allows absolute paths and ``..``; a portable package can be moved."""

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
_ASSET = re.compile(rf"({_ASSET_URI.pattern})(?:/(.*))?", re.DOTALL)
_ASSET_FORM = "sha256: and 64 lower-case hex digits"
_VERSION = re.compile(r"([0-9]+)(?:\.([0-9]+))?")

_MAX_LEVELS = 150
"""How deep a manifest may be nested; ONNX Runtime opens one of 100, and Python's recursion has limits."""


@dataclass(frozen=True, kw_only=True)
class OrtInfo:
    """What ONNX Runtime needs to open a variant.

    ``model_file`` is relative to the variant's directory. Options are those of a session and of the EP.
    """

    model_file: str
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One form of a component. ``directory`` is relative to the package, with forward slashes.

    ``asset_folder``: where the manifest puts the shared asset that ``ort`` names, if it says so.
    ``metadata`` is what any tool has written there; `hatch_epcontext.package.manifest` has ours.
    """

    directory: str
    ep: str | None
    device: str | None = None
    compatibility_string: str | None = None
    ort: OrtInfo | None = None
    asset_folder: str | None = None
    metadata: Any = None

    @property
    def model_file(self) -> str | None:
        """The model file's path from the package; None if the variant is not for ONNX Runtime."""
        if self.ort is None:
            return None
        if asset := _ASSET.fullmatch(self.ort.model_file):
            return _joined(self.asset_folder or _default_folder(asset[1]), asset[2] or "")
        return _joined(self.directory, self.ort.model_file)


@dataclass(frozen=True)
class Component:
    """A model, with its variants in order of preference."""

    variants: Mapping[str, Variant]
    metadata: Any = None


@dataclass(frozen=True)
class ModelPackage:
    """A model package, whose components are all read."""

    components: Mapping[str, Component]
    layout: Layout = "portable"
    metadata: Any = None
    schema_version: str = SCHEMA_VERSION


class Files(Protocol):
    """The files of a package, wherever they are; names are relative, with forward slashes."""

    def read(self, name: str) -> bytes:
        """The contents of a file; raises OSError if there is none, or ValueError for an invalid name."""

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""

    def leads_outside(self, name: str) -> bool:
        """Whether links lead from ``name`` to a place that is not in the package."""


@dataclass(frozen=True)
class FolderFiles:
    """The files in a folder on disk."""

    folder: Path

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def is_folder(self, name: str) -> bool:
        # Of a name that no file can have, some versions of Python raise an error.
        with contextlib.suppress(OSError):
            return (self.folder / name).is_dir()
        return False

    def leads_outside(self, name: str) -> bool:
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


def write(package: ModelPackage) -> str:
    """The text of the manifest of ``package``, the same for equal packages."""
    content = {
        "schema_version": package.schema_version,
        "layout": package.layout,
        "components": {name: _component(each) for name, each in package.components.items()},
        "additional_metadata": package.metadata,
    }
    # Not sorted: the order of the variants is that of preference.
    return json.dumps(_portable(_without_none(content)), indent=2, allow_nan=False) + "\n"


def _component(component: Component) -> dict[str, Any]:
    return {
        "variants": {name: _variant(each) for name, each in component.variants.items()},
        "additional_metadata": component.metadata,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    return {
        "variant_directory": variant.directory,
        "ep": variant.ep,
        "device": variant.device,
        "compatibility_string": variant.compatibility_string,
        "executor_info": {"ort": to_plain(variant.ort)} if variant.ort else None,
        "additional_metadata": variant.metadata,
    }


def _without_none(value: Any) -> Any:
    """``value`` without the keys of the format that have no value; metadata stays as it is."""
    if not isinstance(value, dict):
        return value
    return {
        key: item if key == "additional_metadata" else _without_none(item)
        for key, item in value.items()
        if item is not None
    }


def _portable(value: Any) -> Any:
    """``value`` as any JSON parser takes it: Python also writes infinities and half characters."""
    if isinstance(value, dict):
        return {_portable(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return math.copysign(sys.float_info.max, value)
    return value


_ABSENT: Any = None
"""The value of a key that is left out. ONNX Runtime refuses null, and so do the types without None."""


# The types as they are written. Unknown keys are refused, as ONNX Runtime does.
@dataclass(frozen=True, kw_only=True)
class _ManifestJson:
    schema_version: str | int
    components: Mapping[str, Any]
    package_name: str = _ABSENT
    package_version: str = _ABSENT
    description: str = _ABSENT
    layout: Layout = "portable"
    shared_assets: Mapping[str, str] = field(default_factory=dict)
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _ComponentJson:
    variants: Mapping[str, Any]
    component_name: str = _ABSENT
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _VariantJson:
    variant_directory: str = _ABSENT
    ep: str = _ABSENT
    device: str = _ABSENT
    compatibility_string: str = _ABSENT
    executor_info: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    additional_metadata: Any = None


def read(files: Files, location: str) -> Diagnosed[ModelPackage | None]:
    """Read the package in ``files``; yield all problems, each with its place below ``location``.

    Returns None if the manifest cannot be read at all.
    """
    reader = _Reader(files, location)
    package = yield from reader.package()
    return package


class _Reader:
    def __init__(self, files: Files, location: str) -> None:
        self._files = files
        self._location = location
        self._confined = True
        self._strict = True
        self._assets: Mapping[str, str] = {}
        # How many tables did not have the form of their type.
        self._invalid = 0

    def package(self) -> Diagnosed[ModelPackage | None]:
        content = yield from self._json(FILE, ())
        if content is _UNREADABLE or not (yield from self._is_known_version(content)):
            return None
        manifest = yield from self._structured(content, _ManifestJson, ())
        if manifest is None:
            return None
        self._confined = manifest.layout == "portable"
        self._assets = manifest.shared_assets
        for uri, path in self._assets.items():
            if not _ASSET_URI.fullmatch(uri):
                yield self._problem(("shared_assets", uri), f"must be named {_ASSET_FORM}.")
            yield from self._leaves_package(path, ("shared_assets", uri))
        if not manifest.components:
            yield self._problem(("components",), "is empty, and a package needs a component.")
        components = {}
        for name, value in manifest.components.items():
            before = self._invalid
            component = yield from self._component(value, ("components", name))
            if component is not None and self._invalid == before:
                components[name] = component
        return ModelPackage(
            components,
            manifest.layout,
            manifest.additional_metadata,
            str(manifest.schema_version),
        )

    def _is_known_version(self, content: Any) -> Diagnosed[bool]:
        """Whether the manifest's version is missing or one that can be read."""
        if not isinstance(content, dict) or "schema_version" not in content:
            return True
        version = content["schema_version"]
        found = _VERSION.fullmatch(str(version)) if type(version) in (str, int) else None
        place = ("schema_version",)
        if found is None:
            message = f'must be a version such as "{SCHEMA_VERSION}", not {show(version)}.'
            yield self._problem(place, message)
            return False
        if found[1] != SCHEMA_VERSION.partition(".")[0]:
            yield self._problem(
                place,
                f"is {version}, and this version reads {SCHEMA_VERSION}.",
                "Use a newer version of hatch-epcontext, or the tool that wrote it.",
            )
            return False
        # A newer minor version may have more keys.
        self._strict = not (found[2] or "").strip("0")
        return True

    def _component(self, value: Any, place: tuple[str, ...]) -> Diagnosed[Component | None]:
        folder = ""
        if isinstance(value, str):
            if (yield from self._leaves_package(value, place)):
                return None
            is_folder = self._files.is_folder(value)
            file = _joined(value, _COMPONENT_FILE) if is_folder else value
            folder = PurePath(file).parent.as_posix()
            value = yield from self._json(file, place)
            if value is _UNREADABLE:
                return None
        found = yield from self._structured(value, _ComponentJson, place)
        if found is None:
            return None
        variants = {}
        for name, given in found.variants.items():
            where = (*place, "variants", name)
            each = yield from self._structured(given, _VariantJson, where)
            variant = each and (yield from self._variant(name, each, folder, where))
            if variant is not None:
                variants[name] = variant
        return Component(variants, found.additional_metadata)

    def _variant(
        self, name: str, found: _VariantJson, folder: str, place: tuple[str, ...]
    ) -> Diagnosed[Variant | None]:
        directory = yield from self._directory(name, found.variant_directory, folder, place)
        if directory is None:
            return None
        if self._strict and found.device not in (None, "cpu", "gpu", "npu"):
            message = f'must be "cpu" or "gpu" or "npu", not {show(found.device)}.'
            yield self._problem((*place, "device"), message)
        ort = None
        for executor, given in found.executor_info.items():
            where = (*place, "executor_info", executor)
            info = yield from self._executor_info(given, directory, where)
            if executor == "ort" and info is not _UNREADABLE:
                ort = yield from self._ort(info, where)
        asset = _ASSET.fullmatch(ort.model_file) if ort else None
        return Variant(
            directory=directory,
            ep=found.ep,
            device=found.device,
            compatibility_string=found.compatibility_string,
            ort=ort,
            asset_folder=self._assets.get(asset[1]) if asset else None,
            metadata=found.additional_metadata,
        )

    def _directory(
        self, name: str, given: str | None, folder: str, place: tuple[str, ...]
    ) -> Diagnosed[str | None]:
        """The variant's directory from the package; None if it is outside."""
        if given is None:
            # ONNX Runtime takes the name, also where there is no such folder.
            outside = yield from self._leaves_package(name, place)
            return None if outside else _joined(folder, name)
        place = (*place, "variant_directory")
        if (yield from self._leaves_package(given, place)):
            return None
        directory = _joined(folder, given)
        if not self._files.is_folder(directory):
            yield self._problem(place, f"names the folder {directory!r}, which is missing.")
        return directory

    def _executor_info(self, info: Any, directory: str, place: tuple[str, ...]) -> Diagnosed[Any]:
        """What stands in the manifest or in the file that it names."""
        if not isinstance(info, str):
            return info
        if (yield from self._leaves_package(info, place)):
            return _UNREADABLE
        content = yield from self._json(_joined(directory, info), place)
        return content

    def _ort(self, info: Any, place: tuple[str, ...]) -> Diagnosed[OrtInfo | None]:
        ort: OrtInfo | None = yield from self._structured(info, OrtInfo, place, strict=False)
        if ort is None:
            return None
        for name, value in ort.session_options.items():
            where = (*place, "session_options", name)
            if name in OUTPUT_OPTIONS:
                message = "names an output file, which ONNX Runtime refuses in a package."
                yield self._problem(where, message)
            elif name in PATH_OPTIONS:
                yield from self._is_wrong_path(value, where)
        wrong = yield from self._is_wrong_path(ort.model_file, (*place, "model_file"))
        return None if wrong else ort

    def _is_wrong_path(self, path: str, place: tuple[str, ...]) -> Diagnosed[bool]:
        """Whether ``path`` leaves the package, or is in a shared asset that there is not."""
        if not path.startswith("sha256:"):
            wrong = yield from self._leaves_package(path, place)
            return wrong
        asset = _ASSET.fullmatch(path)
        if asset is None:
            yield self._problem(place, f"must be a path, or begin with {_ASSET_FORM}.")
        elif not is_inside(asset[2] or "."):
            # In no layout.
            yield self._problem(place, f"names {path!r}, which is outside of the shared asset.")
        else:
            folder = _default_folder(asset[1])
            if asset[1] in self._assets or self._files.is_folder(folder):
                return False
            yield self._problem(place, f"names a shared asset, and {folder!r} is missing.")
        return True

    def _json(self, name: str, place: tuple[str, ...]) -> Diagnosed[Any]:
        """The contents of a JSON file, or `_UNREADABLE`."""
        if name != FILE and self._confined and self._files.leads_outside(name):
            message = f"{name} is a link to a file outside of the package."
            yield self._problem(place, message)
            return _UNREADABLE
        try:
            text = self._files.read(name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            yield self._problem(place, f"{name} cannot be read: {reason}.")
            return _UNREADABLE
        try:
            content = json.loads(text.decode("utf-8-sig"), parse_constant=refuse_constant)
            _refuse_unportable(content)
        except (ValueError, RecursionError) as error:
            yield self._problem(place, f"{name} is not JSON: {error}.")
            return _UNREADABLE
        return content

    def _structured(
        self, value: Any, type_: type[Any], place: tuple[str, ...], *, strict: bool = True
    ) -> Diagnosed[Any]:
        try:
            return from_plain(value, type_, strict=strict and self._strict)
        except InvalidJsonError as error:
            self._invalid += 1
            for path, message in error.reasons:
                yield self._problem((*place, *path), message)
            if strict and self._strict:
                # Unknown keys are not in the way of reading the rest, which may have errors too.
                with contextlib.suppress(InvalidJsonError):
                    return from_plain(value, type_, strict=False)
        return None

    def _leaves_package(self, path: str, place: tuple[str, ...]) -> Diagnosed[bool]:
        if not path or (self._confined and not is_inside(path)):
            yield self._problem(
                place, f"names {path!r}, which is outside of the package, or not a relative path."
            )
            return True
        return False

    def _problem(
        self, place: tuple[str | int, ...], message: str, hint: str | None = None
    ) -> Problem:
        location = f"{self._location}: {dotted(place)}" if place else self._location
        return Problem(Kind.INVALID_PACKAGE, location, message, hint)


_UNREADABLE: Any = object()
"""In place of the contents of a file that cannot be read, for JSON has null."""


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


def _default_folder(uri: str) -> str:
    """The folder of a shared asset that the manifest does not put elsewhere."""
    return f"shared_assets/{uri.replace(':', '-')}"


def _joined(*parts: str) -> str:
    """A path with forward slashes; parts of an installed package can be absolute on this system."""
    return PurePath(*parts).as_posix()

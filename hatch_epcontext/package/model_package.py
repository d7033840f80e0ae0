"""ONNX Runtime's model package: the types of its manifest, read strictly and written.

The format, schema 1.0: ``model_package/README.md`` and
``onnxruntime/core/session/model_package/README.md`` in ONNX Runtime's repository. A package is a folder
with a ``manifest.json``; it has components (models), and each component has variants.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, Protocol

from hatch_epcontext.errors import Checked, Kind, Problem
from hatch_epcontext.serialize import InvalidJsonError, from_plain, to_plain
from hatch_epcontext.text import dotted

FILE = "manifest.json"
"""The name of the manifest."""

SCHEMA_VERSION = "1.0"

Layout = Literal["portable", "installed"]
"""``"installed"`` allows absolute paths and ``..``; a portable package can be moved."""

_COMPONENT_FILE = "component.json"
_ASSET = re.compile(r"sha256:([0-9a-f]{64})(/.*)?")


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

    ``metadata`` is what any tool has written there; `hatch_epcontext.package.manifest` has ours.
    """

    directory: str
    ep: str | None
    device: Literal["cpu", "gpu", "npu"] | None = None
    compatibility_string: str | None = None
    ort: OrtInfo | None = None
    metadata: Any = None

    @property
    def model_file(self) -> str | None:
        """The model file's path from the package; None if the variant is not for ONNX Runtime."""
        if self.ort is None:
            return None
        if asset := _ASSET.fullmatch(self.ort.model_file):
            return f"shared_assets/sha256-{asset[1]}{asset[2] or ''}"
        return str(PurePosixPath(self.directory) / self.ort.model_file)


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
        """The contents of a file; raises OSError or KeyError if there is none."""

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""


@dataclass(frozen=True)
class FolderFiles:
    """The files in a folder on disk."""

    folder: Path

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def is_folder(self, name: str) -> bool:
        return (self.folder / name).is_dir()


@dataclass(frozen=True)
class ArchiveFiles:
    """The files below a folder in a zip archive, such as a wheel."""

    archive: zipfile.ZipFile
    folder: PurePosixPath

    def read(self, name: str) -> bytes:
        return self.archive.read(str(self.folder / name))

    def is_folder(self, name: str) -> bool:
        prefix = f"{self.folder / name}/"
        return any(each.startswith(prefix) for each in self.archive.namelist())


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


# The types as they are written. Unknown keys are refused, as ONNX Runtime does.
@dataclass(frozen=True, kw_only=True)
class _ManifestJson:
    schema_version: str | int
    components: Mapping[str, Any]
    package_name: str | None = None
    package_version: str | None = None
    description: str | None = None
    layout: Layout = "portable"
    shared_assets: Mapping[str, str] = field(default_factory=dict)
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _ComponentJson:
    variants: Mapping[str, Any]
    component_name: str | None = None
    additional_metadata: Any = None


@dataclass(frozen=True, kw_only=True)
class _VariantJson:
    variant_directory: str | None = None
    ep: str | None = None
    device: Literal["cpu", "gpu", "npu"] | None = None
    compatibility_string: str | None = None
    executor_info: Mapping[str, Any] = field(default_factory=dict)
    additional_metadata: Any = None


def read(files: Files, location: str) -> Checked[ModelPackage | None]:
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

    def package(self) -> Checked[ModelPackage | None]:
        content = yield from self._json(FILE, ())
        if content is None:
            return None
        version = str(content.get("schema_version", "")) if isinstance(content, dict) else ""
        # A newer minor version may have more keys.
        self._strict = version in ("", "1", SCHEMA_VERSION)
        if version and version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
            yield self._problem(
                ("schema_version",),
                f"is {version}, and this version reads {SCHEMA_VERSION}.",
                "Use a newer version of hatch-epcontext, or the tool that wrote it.",
            )
            return None
        manifest = yield from self._structured(content, _ManifestJson, ())
        self._confined = manifest is None or manifest.layout == "portable"
        if manifest is not None and not manifest.components:
            yield self._problem(("components",), "is empty, and a package needs a component.")
        components = {}
        # Also where the manifest has other errors, so that all are found at once.
        for name, value in _table(content, "components").items():
            component = yield from self._component(value, ("components", name))
            if component is not None:
                components[name] = component
        if manifest is None:
            return None
        return ModelPackage(components, manifest.layout, manifest.additional_metadata, version)

    def _component(self, value: Any, place: tuple[str, ...]) -> Checked[Component | None]:
        folder = PurePosixPath()
        if isinstance(value, str):
            if (yield from self._leaves_package(value, place)):
                return None
            file = value
            if self._files.is_folder(value):
                file = str(PurePosixPath(value) / _COMPONENT_FILE)
            folder = PurePosixPath(file).parent
            value = yield from self._json(file, place)
            if value is None:
                return None
        found = yield from self._structured(value, _ComponentJson, place)
        variants = {}
        for name, each in _table(value, "variants").items():
            where = (*place, "variants", name)
            body = yield from self._structured(each, _VariantJson, where)
            if body is not None:
                variant = yield from self._variant(name, body, folder, where)
                if variant is not None:
                    variants[name] = variant
        if found is None:
            return None
        return Component(variants, found.additional_metadata)

    def _variant(
        self, name: str, found: _VariantJson, folder: PurePosixPath, place: tuple[str, ...]
    ) -> Checked[Variant | None]:
        given = found.variant_directory if found.variant_directory is not None else name
        if (yield from self._leaves_package(given, (*place, "variant_directory"))):
            return None
        directory = str(folder / given)
        if found.variant_directory is not None and not self._files.is_folder(directory):
            yield self._problem(
                (*place, "variant_directory"), f"names the folder {directory!r}, which is missing."
            )
        info = found.executor_info.get("ort")
        where = (*place, "executor_info", "ort")
        if isinstance(info, str):
            if (yield from self._leaves_package(info, where)):
                return None
            info = yield from self._json(str(PurePosixPath(directory) / info), where)
        ort = None
        if info is not None:
            ort = yield from self._structured(info, OrtInfo, where, strict=False)
        if ort is not None:
            model_place = (*where, "model_file")
            asset = _ASSET.fullmatch(ort.model_file)
            inside = (asset[2] or "/").lstrip("/") or "." if asset else ort.model_file
            if (yield from self._leaves_package(inside, model_place)):
                ort = None
        return Variant(
            directory=directory,
            ep=found.ep,
            device=found.device,
            compatibility_string=found.compatibility_string,
            ort=ort,
            metadata=found.additional_metadata,
        )

    def _json(self, name: str, place: tuple[str, ...]) -> Checked[Any]:
        try:
            return json.loads(self._files.read(name), parse_constant=_refuse_constant)
        except (OSError, KeyError) as error:
            reason = getattr(error, "strerror", None) or "it is missing"
            yield self._problem(place, f"{name} cannot be read: {reason}.")
        except (ValueError, RecursionError) as error:
            yield self._problem(place, f"{name} is not JSON: {error}.")
        return None

    def _structured(
        self, value: Any, type_: type[Any], place: tuple[str, ...], *, strict: bool = True
    ) -> Checked[Any]:
        for key, item in value.items() if isinstance(value, dict) else ():
            if item is None and key != "additional_metadata":
                yield self._problem((*place, key), "must not be null: leave the key out.")
        try:
            return from_plain(value, type_, strict=strict and self._strict)
        except InvalidJsonError as error:
            for path, message in error.reasons:
                yield self._problem((*place, *path), message)
        return None

    def _leaves_package(self, path: str, place: tuple[str, ...]) -> Checked[bool]:
        if self._confined and not is_inside(path):
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


def _table(content: Any, key: str) -> Mapping[str, Any]:
    """The table ``key`` of ``content``; empty if there is none, which is an error of its own."""
    table = content.get(key) if isinstance(content, dict) else None
    return table if isinstance(table, dict) else {}


def _refuse_constant(name: str) -> None:
    # Python reads them, and other parsers do not.
    raise ValueError(f"{name} is not a number in JSON")


def is_inside(path: str) -> bool:
    """Whether the relative ``path`` stays in its folder, on any system; also if it is the folder."""
    pure, windows = PurePosixPath(path), PureWindowsPath(path)
    return bool(path) and not (
        pure.is_absolute() or windows.drive or windows.root or ".." in windows.parts
    )

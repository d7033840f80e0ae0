"""The facts of a file: an ONNX model, a wheel, or a folder with a manifest."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from hatch_epcontext.build.requirements import TOOLS, check_environment
from hatch_epcontext.errors import BuildError, InspectionError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.ipc.protocol import InspectReply, InspectRequest
from hatch_epcontext.package import manifest, wheel
from hatch_epcontext.package.manifest import Manifest
from hatch_epcontext.serialize import from_json

READING = tuple(each for each in TOOLS if Requirement(each).name in ("onnx", "numpy"))
"""The requirements to read an ONNX file."""

TIMEOUT = 300.0
"""Seconds for reading one ONNX file."""


@dataclass(frozen=True)
class Inspection:
    """The facts of a file or folder.

    ``manifests``: by the folder of each, inside the wheel or the folder; ``model``: the facts of an
    ONNX file, None for anything else.
    """

    path: str
    manifests: Mapping[str, Manifest]
    model: InspectReply | None = None


def inspect(path: Path) -> Inspection:
    """Read the facts of the file or folder at ``path``.

    Raises InspectionError when it cannot be inspected, and RequirementError for an ONNX file when onnx
    is not installed.
    """
    if path.is_dir():
        found = {
            file.parent.relative_to(path).as_posix(): _read(file.read_bytes(), file)
            for file in sorted(path.rglob(manifest.FILE))
        }
        return Inspection(str(path), _not_empty(found, path))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if _is_manifest(name)]
            found = {
                str(PurePosixPath(name).parent): _read(archive.read(name), path) for name in names
            }
        return Inspection(str(path), _not_empty(found, path))
    return Inspection(str(path), {}, inspect_model(path))


def inspect_model(path: Path) -> InspectReply:
    """Read the facts of the ONNX file at ``path``; raises as `inspect` does."""
    if not path.is_file():
        message = "is a folder, and not an ONNX file." if path.is_dir() else "does not exist."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message))
    check_environment((), READING)
    request = InspectRequest(str(path.resolve()))
    with temp_dir() as folder:
        try:
            return Workers(TIMEOUT).call(request, folder / "inspect", location=str(path))
        except BuildError as error:
            raise InspectionError(*error.problems) from error


def verify(path: Path, inspection: Inspection) -> int:
    """Check all files that the manifests or the model name; returns their number.

    Raises InspectionError, or WheelError for a wheel, with all files that are missing or changed.
    """
    if inspection.model is not None:
        return verify_model(path, inspection.model)
    if path.is_dir():
        problems = [
            Problem(
                Kind.CHANGED_FILE,
                str(path / folder / name),
                "is missing, or differs from its record in the manifest.",
            )
            for folder, found in inspection.manifests.items()
            for name in manifest.changed_files(path / folder, found)
        ]
        if problems:
            raise InspectionError(*problems)
        return sum(len(found.files) for found in inspection.manifests.values())
    return sum(wheel.verify(path, PurePosixPath(folder)) for folder in inspection.manifests)


def verify_model(path: Path, model: InspectReply) -> int:
    """Check that all files that the ONNX file names are in its folder; returns their number."""
    if problems := list(_check_files(path, model)):
        raise InspectionError(*problems)
    sidecars = [context for context in model.contexts if context.sidecar]
    return len(sidecars) + len(model.external_data)


def _check_files(path: Path, model: InspectReply) -> Iterator[Problem]:
    for context in model.contexts:
        if context.sidecar and context.sha256 is None:
            message = f"the sidecar {context.sidecar!r} of {context.node} is not in its folder."
            yield Problem(Kind.CHANGED_FILE, str(path), message)
    for name in model.external_data:
        if not (path.parent / name).is_file():
            message = f"the external data {name!r} is not in its folder."
            yield Problem(Kind.CHANGED_FILE, str(path), message)
    for name in model.outside:
        message = f"the external data {name!r} is outside of its folder."
        yield Problem(Kind.EXTERNAL_DATA, str(path), message)


def _is_manifest(name: str) -> bool:
    return PurePosixPath(name).name == manifest.FILE


def _read(text: bytes, path: Path) -> Manifest:
    try:
        return from_json(text, Manifest)
    except ValueError as error:
        message = f"its {manifest.FILE} cannot be read: {error}."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message)) from error


def _not_empty(found: dict[str, Manifest], path: Path) -> dict[str, Manifest]:
    if not found:
        raise InspectionError(
            Problem(
                Kind.INVALID_PATH,
                str(path),
                f"has no {manifest.FILE}.",
                "Name a wheel or a package that was built with models, or an ONNX file.",
            )
        )
    return found

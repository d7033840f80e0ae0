"""What a file says of itself: an ONNX model, a wheel, or a folder with a manifest."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hatch_epcontext import manifest, wheel
from hatch_epcontext.errors import BuildError, InspectionError, Problem
from hatch_epcontext.manifest import Manifest
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import DescribeReply, DescribeRequest
from hatch_epcontext.requirements import check_environment
from hatch_epcontext.structure import from_json

READING = ("onnx>=1.19", "numpy>=2.0")
"""What it takes to read an ONNX file."""

TIMEOUT = 300.0
"""Seconds for reading one ONNX file."""


@dataclass(frozen=True)
class Inspection:
    """``manifests``: by the folder in which each lies, inside the wheel or the folder; ``model``: what
    an ONNX file says, for one.
    """

    path: str
    manifests: Mapping[str, Manifest]
    model: DescribeReply | None = None


def inspect(path: Path) -> Inspection:
    """What is to be told of the file or folder at ``path``.

    Raises InspectionError when it is nothing that can be inspected, and RequirementError when an ONNX file
    cannot be read for lack of onnx.
    """
    if path.is_dir():
        found = {
            file.parent.relative_to(path).as_posix(): _read(file.read_bytes(), file)
            for file in sorted(path.rglob(manifest.FILE))
        }
        return Inspection(str(path), _some(found, path))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if _is_manifest(name)]
            found = {
                str(PurePosixPath(name).parent): _read(archive.read(name), path) for name in names
            }
        return Inspection(str(path), _some(found, path))
    check_environment((), READING)
    with tempfile.TemporaryDirectory(
        prefix="hatch-epcontext-", ignore_cleanup_errors=True
    ) as temporary:
        try:
            reply: DescribeReply = Workers(TIMEOUT).call(
                DescribeRequest(str(path.resolve())),
                Path(temporary) / "describe",
                where=str(path),
            )
        except BuildError as error:
            raise InspectionError(*error.problems) from error
    return Inspection(str(path), {}, reply)


def verify(path: Path, inspection: Inspection) -> int:
    """Check all files that the manifests or the model name; returns how many are right.

    Raises InspectionError, or WheelError for a wheel, with those that are not.
    """
    if inspection.model is not None:
        missing = [
            f"the sidecar {context.sidecar!r} of {context.node}"
            for context in inspection.model.contexts
            if context.sidecar and not context.sha256
        ]
        missing += [
            f"the external data {name!r}"
            for name in inspection.model.external_data
            if not (path.parent / name).is_file()
        ]
        missing += [f"{name!r}, which is not in its folder," for name in inspection.model.outside]
        if missing:
            raise InspectionError(
                *(Problem(str(path), f"needs {each} and has it not.") for each in missing)
            )
        return len([c for c in inspection.model.contexts if c.sidecar]) + len(
            inspection.model.external_data
        )
    if path.is_dir():
        problems = [
            Problem(str(path / folder / name), "is not what the manifest says.")
            for folder, found in inspection.manifests.items()
            for name in manifest.changed_files(path / folder, found)
        ]
        if problems:
            raise InspectionError(*problems)
        return sum(len(found.files) for found in inspection.manifests.values())
    return sum(wheel.prove(path, PurePosixPath(folder)) for folder in inspection.manifests)


def _is_manifest(name: str) -> bool:
    return PurePosixPath(name).name == manifest.FILE


def _read(text: bytes, where: Path) -> Manifest:
    try:
        return from_json(text, Manifest)
    except ValueError as error:
        raise InspectionError(
            Problem(str(where), f"its {manifest.FILE} cannot be read: {error}.")
        ) from error


def _some(found: dict[str, Manifest], path: Path) -> dict[str, Manifest]:
    if not found:
        raise InspectionError(
            Problem(
                str(path),
                f"has no {manifest.FILE}.",
                "Name a wheel or a package that was built with models, or an ONNX file.",
            )
        )
    return found

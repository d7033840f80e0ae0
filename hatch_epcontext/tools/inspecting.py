"""The facts of a file: an ONNX model, a wheel, or a folder with a model package."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import HOOK, BuildError, InspectionError, Kind, Problem
from hatch_epcontext.files import is_regular, read_regular
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import TOOLS, check_environment
from hatch_epcontext.package.folder import damaged_files, read
from hatch_epcontext.package.manifest import FILE, ModelPackage
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE, differences
from hatch_epcontext.providers import find
from hatch_epcontext.worker.requests import InspectReply, InspectRequest

READING = tuple(tool for tool in TOOLS if Requirement(tool).name in ("onnx", "numpy"))
"""The requirements to read an ONNX file."""

TIMEOUT = 300.0
"""Seconds for reading one ONNX file."""

WHEEL, _SDISTS = ".whl", (".tar.gz", ".zip", ".tgz")
_BESIDE = "Copy it beside the model, or make both again."


@dataclass(frozen=True)
class Inspection:
    """The facts of a file or folder.

    ``packages``: the model packages, by the folder of each inside the wheel or the folder; ``model``:
    the facts of an ONNX file, None for anything else.
    """

    path: str
    packages: Mapping[str, ModelPackage]
    model: InspectReply | None = None


def inspect(path: Path) -> Inspection:
    """Read the facts of the file or folder at ``path``.

    Raises InspectionError when it cannot be inspected, and RequirementError for an ONNX file when onnx
    is not installed.
    """
    if path.is_dir():
        files = [file for file in sorted(path.rglob(FILE)) if file.is_file()]
        manifests = {
            file.parent.relative_to(path).as_posix(): partial(read_regular, file) for file in files
        }
        return Inspection(str(path), _read_all(manifests, path))
    # Not a pipe, which would block.
    if is_regular(path) and path.suffix == WHEEL:
        return _inspect_wheel(path)
    if path.name.endswith(_SDISTS):
        message = "is an sdist, which has the source models and nothing compiled."
        hint = "Name the wheel that is built from it."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message, hint))
    return Inspection(str(path), {}, inspect_model(path))


def _inspect_wheel(path: Path) -> Inspection:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [PurePosixPath(name) for name in archive.namelist() if name[-1:] != "/"]
            manifests = {
                str(name.parent): partial(archive.read, str(name))
                for name in names
                if name.name == FILE
            }
            return Inspection(str(path), _read_all(manifests, path))
    except zipfile.BadZipFile as error:
        message = f"is damaged, or not a wheel: it cannot be opened ({error})."
        raise InspectionError(
            Problem(Kind.INVALID_PATH, str(path), message, "Build or download it again.")
        ) from error


def inspect_model(path: Path, workers: Workers | None = None) -> InspectReply:
    """Read the facts of the ONNX file at ``path``, with ``workers`` if given; raises as `inspect` does."""
    if not path.is_file():
        message = "is no file." if path.exists() else "does not exist."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message))
    check_environment((), READING)
    request = InspectRequest(str(path.resolve()))
    try:
        return (workers or Workers(TIMEOUT)).call(request, location=str(path))
    except BuildError as error:
        raise InspectionError(*error.problems) from error


def verify(path: Path, inspection: Inspection) -> int:
    """Compare the files that the manifests or the model name with their records; a wheel's by its RECORD.

    Returns their number; raises InspectionError with all that is missing or changed.
    """
    if inspection.model is not None:
        return verify_model(path, inspection.model)
    problems = list[Problem]()
    for folder, package in inspection.packages.items():
        if path.is_dir():
            problems += damaged_files(path / folder, package)
        else:
            problems += differences(path, PurePosixPath(folder), package.files)
    InspectionError.check(problems)
    packages = inspection.packages.values()
    return sum(len(package.files) + len(package.unrecorded) for package in packages)


def verify_model(path: Path, model: InspectReply) -> int:
    """As `verify`, for the ONNX file at ``path``: all files that it names must be in its folder."""
    InspectionError.check(_check_files(path, model))
    return len(model.external_data) + sum(bool(context.sidecar) for context in model.contexts)


def _check_files(path: Path, model: InspectReply) -> Iterator[Problem]:
    for context in model.contexts:
        if context.sidecar and context.sha256 is None:
            message = f"the sidecar {context.sidecar!r} of {context.node} is not in its folder."
            yield Problem(Kind.CHANGED_FILE, str(path), message, _BESIDE)
        elif context.main and not context.size:
            message = f"the context of {context.node} is empty."
            yield Problem(Kind.CHANGED_FILE, str(path), message)
    if model.contexts and not any(context.main for context in model.contexts):
        message = "has no context: each EPContext node refers to that of another one."
        yield Problem(Kind.CHANGED_FILE, str(path), message)
    yield from _wrong_blobs(path, model)
    for name in model.external_data:
        if not is_regular(path.parent / name):
            message = f"the external data {name!r} is not in its folder."
            yield Problem(Kind.CHANGED_FILE, str(path), message, _BESIDE)
    for name in model.outside:
        message = f"the external data {name!r} is outside of its folder."
        yield Problem(Kind.EXTERNAL_DATA, str(path), message)


def _wrong_blobs(path: Path, model: InspectReply) -> Iterator[Problem]:
    for source in dict.fromkeys(context.source for context in model.contexts):
        own = [context for context in model.contexts if context.source == source]
        whole = (context for context in own if context.sha256 or not context.sidecar)
        blobs = [(context.header, context.size) for context in whole]
        if (known := find(source)) is None:
            continue
        if reason := known.wrong_blobs(model.compatibility.get(known.ep, ""), blobs):
            yield Problem(Kind.CHANGED_FILE, str(path), f"{reason}.")


def _read_all(manifests: Mapping[str, Callable[[], bytes]], path: Path) -> dict[str, ModelPackage]:
    """The packages by folder; raises InspectionError with all problems, also if there is no package.

    ``manifests``: for each folder, what reads the manifest in it.
    """
    packages: dict[str, ModelPackage] = {}
    problems: list[Problem] = []
    for folder, content in manifests.items():
        location = str(path) if folder == "." else f"{path}: {folder}"
        try:
            package = read(content(), location)
        except InspectionError as error:
            problems += error.problems
        except (OSError, *DAMAGED_ARCHIVE) as error:
            message = f"{FILE} cannot be read: {error}."
            problems.append(Problem(Kind.INVALID_PACKAGE, location, message))
        else:
            if package is not None:
                packages[folder] = package
    InspectionError.check(problems)
    if not packages:
        message = f"has no {FILE} of a model package that hatch-epcontext wrote."
        hint = "Name a wheel or a package that was built with models, or an ONNX file."
        if path.suffix == WHEEL:
            hint = (
                "The build left them out: check that pyproject.toml switches the hook on "
                f"([{HOOK}]) or names the build back end hatch_epcontext.backend, and that "
                f"{PREFIX}SKIP was not set."
            )
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message, hint))
    return packages

"""What a library of a plugin EP offers on this machine, and whether it compiles EP contexts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem, UnavailableError
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.providers import Plugin, find
from hatch_epcontext.tools.environment import TIMEOUT
from hatch_epcontext.worker.requests import EpDevice, LibraryRequest, TrialRequest


@dataclass(frozen=True)
class LibraryTrial:
    """Whether an EP compiles a small model into an EP context on one device, and else what it does."""

    compiles: bool
    account: str


def describe_library(library: str) -> tuple[str, tuple[EpDevice, ...]]:
    """Register ``library``, the path of a file or a package, in a worker: its name there, and its devices.

    Raises ConfigError when there is no such file, RequirementError when ONNX Runtime is missing, and
    BuildError when the library cannot be loaded, crashes, hangs or offers no device.
    """
    path = _path(library)
    if path and not Path(path).is_file():
        message, hint = "is not a file.", "A path has a slash, or ends with .so, .dll or .dylib."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))
    check_environment((), INSPECTION)
    request = LibraryRequest(path, "" if path else library)
    reply = Workers(TIMEOUT).call(request, location=f"library {library}")
    ((name, offered),) = reply.items()
    if not offered.devices:
        message = f"it was registered as {name}, and offers no device on this machine."
        message = "\n".join(filter(None, (message, offered.reason)))
        hint = "Try it on a machine that has one, or with another release of ONNX Runtime."
        raise UnavailableError(Problem(Kind.NO_DEVICE, f"library {library}", message, hint))
    return name, offered.devices


def _path(library: str) -> str:
    return str(Path(library).expanduser().absolute()) if is_path(library) else ""


def options_of(ep: str, options: Mapping[str, str]) -> dict[str, str]:
    """``options`` with those that this EP needs by default, if it is a known one."""
    known = find(ep)
    return known.complete(known.devices[0], options) if known else dict(options)


def try_library(
    library: str, name: str, devices: Iterable[EpDevice], options: Mapping[str, str]
) -> Iterator[LibraryTrial]:
    """What the EPs in ``library``, registered as ``name``, do with a small model on each of ``devices``.

    Each device has a worker of its own, which the library may crash or hang.
    """
    path = _path(library)
    plugin = Plugin("" if path else library, library, name, path)
    for position, device in enumerate(devices):
        request = TrialRequest(plugin, position, options_of(device.ep, options))
        try:
            trial = Workers(TIMEOUT).call(request, location=device.ep)
        except BuildError as error:
            reason = " ".join(error.problems[0].message.split())
            yield LibraryTrial(False, f"compiles no EP contexts: {reason}")
            continue
        if trial.opset is not None:
            yield LibraryTrial(True, f"compiles EP contexts, up to opset {trial.opset}")
            continue
        does = "but runs the model" if trial.runs else "and does not run the model"
        yield LibraryTrial(False, f"compiles no EP contexts, {does}: {trial.reason}")

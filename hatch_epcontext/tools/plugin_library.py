"""What the library of any plugin EP offers, and the target that uses it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import ROOT, ConfigError, Kind, Problem, UnavailableError
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment, installed, owners
from hatch_epcontext.text import file_name, quoted_key, to_toml
from hatch_epcontext.worker.requests import LibraryReply, LibraryRequest


def describe_library(library: str, workers: Workers) -> LibraryReply:
    """Register ``library``, the path of a file or a package, in a worker, and list its devices.

    Raises ConfigError when there is no such file or package, RequirementError when ONNX Runtime is missing,
    and BuildError when the library cannot be loaded, crashes, hangs or offers no device.
    """
    path = os.path.abspath(os.path.expanduser(library)) if is_path(library) else ""  # noqa: PTH100, PTH111
    if path and not Path(path).is_file():
        message, hint = (
            "is not a file.",
            "Name the library's file, or a package with get_library_path().",
        )
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))
    if not path and importlib.util.find_spec(library.partition(".")[0]) is None:
        message = "is not a package that is installed here."
        hint = "A path has a slash, or ends with .so, .dll or .dylib."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))
    check_environment((), INSPECTION)
    request = LibraryRequest(path, "" if path else library)
    with temp_dir() as folder:
        reply = workers.call(request, folder / "library", location=f"library {library}")
    if not reply.devices:
        reasons = "".join(f"\n{reason}" for reason in reply.reasons)
        message = (
            f"it was registered as {reply.name}, and offers no device on this machine.{reasons}"
        )
        hint = "Try it on a machine that has one, or with another release of ONNX Runtime."
        raise UnavailableError(Problem(Kind.NO_DEVICE, f"library {library}", message, hint))
    return reply


def target_tables(library: str, reply: LibraryReply) -> Iterator[str]:
    """The table of a target for each EP that the library offers, as it is written in ``pyproject.toml``."""
    for ep in dict.fromkeys(device.ep for device in reply.devices):
        name = file_name(ep.removesuffix("ExecutionProvider").lower(), "-")
        keys: dict[str, object] = {"provider": "plugin", "library": library, "ep-name": ep}
        if reply.name != ep:
            keys["registration-name"] = reply.name
        if not is_path(library):
            packages = sorted(owners(library.partition(".")[0]))
            keys["requirements"] = [f"{name}>={installed(name)}" for name in packages]
        keys["device"] = next(device.kind for device in reply.devices if device.ep == ep)
        lines = [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        yield "\n".join([f"[{ROOT}.targets.{quoted_key(name)}]", *lines])

"""The libraries of plugin EPs: load and register them, and say why one cannot be loaded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import Kind, Problem, UnavailableError
from hatch_epcontext.providers import MissingLibrary, Plugin, missing
from hatch_epcontext.text import listing


def preload() -> None:
    """Load libraries of CUDA that pip installed: they are not on the search path of the system's loader."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def register(plugin: Plugin, ep: str) -> None:
    """Register the library of ``plugin``.

    Raises UnavailableError when that fails, or when the library does not offer ``ep``.
    """
    if any(device.ep_name == ep for device in ort.get_ep_devices()):
        return
    offered = sorted({device.ep_name for device in load(plugin, ep)})
    if offered and ep not in offered:
        message = (
            f"{plugin.package} was registered as {plugin.registration_name!r} and "
            f"offers {listing(offered)}, not {ep}."
        )
        hint = "Set ep-name to the name that it offers."
        raise UnavailableError(Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint))


def load(plugin: Plugin, ep: str | None) -> list[Any]:
    """Register the library of ``plugin``, and return the devices of all EPs that it offers.

    ``ep`` is the EP that messages name, None if it is not known yet. Raises UnavailableError.
    """
    before = {device.ep_name for device in ort.get_ep_devices()}
    library = plugin.path
    try:
        library = library_of(plugin)
        _register_once(plugin.registration_name, library)
    except Exception as error:
        raise UnavailableError(_registration_problem(plugin, ep, error, Path(library))) from error
    return [device for device in ort.get_ep_devices() if device.ep_name not in before]


@functools.cache
def _register_once(name: str, library: str) -> None:
    # That a library is registered shows only where it finds a device, and twice is an error.
    ort.register_execution_provider_library(name, library)


def library_of(plugin: Plugin) -> str:
    """The path of the library of ``plugin``; raises what importing its package raises."""
    return plugin.path or str(importlib.import_module(plugin.module).get_library_path())


def _registration_problem(
    plugin: Plugin, ep: str | None, error: Exception, library: Path
) -> Problem:
    if isinstance(error, ModuleNotFoundError):
        message = f"the package of {ep or 'the EP'} cannot be imported: {error}."
        hint = f"Install {plugin.package}, or add the package that contains it to its requirements."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    if isinstance(error, AttributeError):
        message = f"{plugin.module} is not the package of a plugin EP: {error}."
        hint = "Such a package has get_library_path(). Without one, name the path of the library instead."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    if "CreateEpFactories" in str(error):
        message = f"{plugin.path or plugin.package} is a library, but not that of an EP: {error}."
        hint = "Name the library that ONNX Runtime registers."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    return unloadable(ep, str(error), library)


def unloadable(ep: str | None, message: str, library: Path) -> Problem:
    """The problem of an EP's ``library`` that cannot be loaded, with the libraries that it lacks.

    ``message`` is the error of the system's loader, or of ONNX Runtime, which may not name them.
    """
    what = f"the library of {ep}" if ep else "the library"
    if lacking := missing_for(library) or list(filter(None, [missing(message)])):
        verb = "are" if len(lacking) > 1 else "is"
        message = f"{what} cannot be loaded, because {listing(map(str, lacking))} {verb} missing."
        hint = "\n".join(dict.fromkeys(library.advice for library in lacking))
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    hint = "Check that the file is a library for this system and this version of ONNX Runtime."
    return Problem(Kind.UNLOADABLE_LIBRARY, "", f"{what} cannot be loaded: {message}", hint)


def missing_for(library: Path) -> list[MissingLibrary]:
    """The libraries that ``library`` needs, and the system does not find; without ``ldd`` only the first."""
    names = [str(library)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ("ldd", str(library))
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        names += re.findall(r"^[ \t]*(\S+) => not found", result.stdout, re.MULTILINE)
    lacking = list[MissingLibrary | None]()
    for name in names:
        # A library that this process has loaded, from a pip package, is not missing.
        try:
            ctypes.CDLL(name)
        except OSError as error:
            lacking.append(missing(str(error)))
    return list(dict.fromkeys(filter(None, lacking)))

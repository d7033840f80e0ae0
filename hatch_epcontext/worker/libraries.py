"""Register the libraries of EPs, and explain why one cannot be loaded."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import Kind, Problem, UnavailableError
from hatch_epcontext.providers import MissingLibrary, Plugin, missing
from hatch_epcontext.text import listing


def register(plugin: Plugin, ep: str, *, virtual: bool = False) -> None:
    """Register the library of ``plugin``.

    Raises UnavailableError when that fails, or when the library does not offer ``ep``.
    """
    if any(device.ep_name == ep for device in ort.get_ep_devices()):
        return
    offered = sorted({device.ep_name for device in load(plugin, ep, virtual=virtual)})
    if offered and ep not in offered:
        raise UnavailableError(
            Problem(
                Kind.UNLOADABLE_LIBRARY,
                "",
                f"{plugin.package} was registered as {registered_name(plugin, virtual=virtual)!r} and "
                f"offers {listing(offered)}, not {ep}.",
                "Set ep-name to the name that it offers.",
            )
        )


def load(plugin: Plugin, ep: str | None, *, virtual: bool = False) -> list[Any]:
    """Register the library of ``plugin``, and return the devices of all EPs that it offers.

    ``ep`` is the EP that messages name, None if it is not known yet. Raises UnavailableError.
    """
    before = {device.ep_name for device in ort.get_ep_devices()}
    library = plugin.path
    try:
        library = library or _library_in(plugin.module)
        ort.register_execution_provider_library(registered_name(plugin, virtual=virtual), library)
    except Exception as error:
        raise UnavailableError(_registration_problem(plugin, ep, error, Path(library))) from error
    return [device for device in ort.get_ep_devices() if device.ep_name not in before]


def _library_in(module: str) -> str:
    return str(importlib.import_module(module).get_library_path())


def registered_name(plugin: Plugin, *, virtual: bool) -> str:
    """The name under which the library of ``plugin`` is registered; a suffix requests virtual devices."""
    return plugin.registration_name + (".virtual" if virtual else "")


def _registration_problem(
    plugin: Plugin, ep: str | None, error: Exception, library: Path
) -> Problem:
    if isinstance(error, ModuleNotFoundError):
        message = f"the package of {ep or 'the EP'} cannot be imported: {error}."
        hint = f"Install {plugin.package}, or add the package that contains it to its requirements."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    if isinstance(error, AttributeError):
        return Problem(
            Kind.UNLOADABLE_LIBRARY,
            "",
            f"{plugin.module} is not the package of a plugin EP: {error}.",
            "Such a package has get_library_path(). Without one, name the path of the library instead.",
        )
    if "CreateEpFactories" in str(error):
        message = f"{plugin.path or plugin.package} is a library, but not that of an EP: {error}."
        hint = "Name the library that ONNX Runtime registers."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, hint)
    return unloadable(ep, str(error), library)


def unloadable(ep: str | None, message: str, library: Path) -> Problem:
    """The problem of an EP's ``library`` that cannot be loaded, with the first library that it lacks.

    ``message`` is the error of the system's loader, or of ONNX Runtime, which may not name it.
    """
    what = f"the library of {ep}" if ep else "the library"
    if lacking := missing(message) or _lacking(library):
        message = f"{what} cannot be loaded, because {lacking} is missing."
        return Problem(Kind.UNLOADABLE_LIBRARY, "", message, lacking.advice)
    hint = "Check that the file is a library for this system and this version of ONNX Runtime."
    return Problem(Kind.UNLOADABLE_LIBRARY, "", f"{what} cannot be loaded: {message}", hint)


def _lacking(library: Path) -> MissingLibrary | None:
    """The first library that ``library`` needs, and the system does not find."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return missing(str(error))
    return None


def missing_in_package(plugin: Plugin) -> list[str]:
    """Missing libraries that libraries in the package of ``plugin`` need, and what to do.

    An EP loads them when it begins to compile, and then often reports only that it compiles no node.
    """
    needed: dict[MissingLibrary, list[str]] = {}
    library = Path(_library_in(plugin.module))
    for path in sorted(library.parent.glob(f"*{library.suffix}")):
        # Not the error of the NPU's own libraries, which are for another processor.
        if lacking := _lacking(path):
            needed.setdefault(lacking, []).append(path.name)
    return [
        f"{lacking} is missing, and {listing(names)} of {plugin.package} cannot be loaded. {lacking.advice}"
        for lacking, names in needed.items()
    ]

"""The libraries of EPs: registered, or told why not, with what they miss."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.providers import Plugin, missing


class AbsentError(BuildError):
    """The target's EP, or a device that it could run on, is not here."""


def register(plugin: Plugin, ep: str, *, virtual: bool = False) -> None:
    """Register the library of ``plugin``; raises AbsentError when that fails or does not bring ``ep``."""
    if any(device.ep_name == ep for device in ort.get_ep_devices()):
        return
    before = {device.ep_name for device in ort.get_ep_devices()}
    name = plugin.registration_name + (".virtual" if virtual else "")
    library = plugin.path
    try:
        library = library or str(importlib.import_module(plugin.module).get_library_path())
        ort.register_execution_provider_library(name, library)
    except Exception as error:
        raise AbsentError(_unregistered(plugin, ep, error, Path(library))) from error
    brought = sorted({device.ep_name for device in ort.get_ep_devices()} - before)
    if brought and ep not in brought:
        raise AbsentError(
            Problem(
                "",
                f"{plugin.package} was registered as {name!r} and brought "
                f"{' and '.join(brought)}, not {ep}.",
                "Set ep-name to what it brings. Some libraries call their EP what they are "
                "registered as: then set registration-name.",
            )
        )


def _unregistered(plugin: Plugin, ep: str, error: Exception, library: Path) -> Problem:
    if isinstance(error, ModuleNotFoundError):
        return Problem(
            "",
            f"the package of {ep} cannot be imported: {error}.",
            f"Install {plugin.package}, or name what brings it in requirements.",
        )
    if isinstance(error, AttributeError):
        return Problem(
            "",
            f"{plugin.module} is no package of a plugin EP: {error}.",
            "Such a package has get_library_path(); otherwise library can be the library's path.",
        )
    if "CreateEpFactories" in str(error):
        return Problem(
            "", f"{plugin.path or plugin.package} is a library, and not that of an EP: {error}."
        )
    return unloadable(ep, str(error), library)


def unloadable(ep: str, message: str, library: Path) -> Problem:
    """Why the library of ``ep`` does not load, and what it misses; ``message`` is the loader's own."""
    lacking = _lacking(library) or [name for name in [missing(message)] if name]
    if not lacking:
        return Problem(
            "",
            f"the library of {ep} cannot be loaded: {message}",
            "See that it is one, and for this system and this version of ONNX Runtime.",
        )
    suppliers = dict.fromkeys(supplier for _, supplier in lacking)
    verb = "are" if len(lacking) > 1 else "is"
    return Problem(
        "",
        f"the library of {ep} cannot be loaded, because {_listed(name for name, _ in lacking)} "
        f"{verb} not on this machine.",
        "\n".join(
            f"Install {supplier or 'what brings'} "
            f"({_listed(name for name, brought_by in lacking if brought_by == supplier)})."
            for supplier in suppliers
        ),
    )


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _lacking(library: Path) -> list[tuple[str, str]]:
    """All libraries that ``library`` needs and the system's loader does not find, with their suppliers.

    The loader's own message has only the first.
    """
    try:
        listed = subprocess.run(
            ["ldd", library], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    lacking: list[tuple[str, str]] = []
    for name in re.findall(r"^\s*(\S+) => not found", listed, re.MULTILINE):
        # What was loaded beforehand, such as from pip's packages, is there all the same.
        try:
            ctypes.CDLL(name)
        except OSError as error:
            lacking += filter(None, [missing(str(error))])
    return list(dict.fromkeys(lacking))

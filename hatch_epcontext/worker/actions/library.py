"""Register the library of an unknown EP, and list what it offers."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.libraries import load
from hatch_epcontext.worker.progress import step
from hatch_epcontext.worker.requests import EpDevice, LibraryReply, LibraryRequest
from hatch_epcontext.worker.session import incompatibilities


def handle(request: LibraryRequest) -> LibraryReply:
    """Return the devices of all EPs in the library; raises UnavailableError when it cannot be loaded."""
    package = _package(request) if request.module else None
    main = _own_name(package)
    module = request.module if package is not None or not request.path else ""
    name = request.name or main or request.default_name
    plugin = Plugin(module, module or "the library", name, "" if module else request.path)
    step(f"registering the library as {name}")
    devices = tuple(map(_facts, load(plugin, None, virtual=request.virtual)))
    reasons = tuple(incompatibilities(name)) if not devices else ()
    return LibraryReply(module, name, main, devices, reasons)


def _package(request: LibraryRequest) -> ModuleType | None:
    """The package whose ``get_library_path()`` leads to the library; None if it has none, or another one."""
    step(f"importing {request.module}")
    # Any package can be the one that the path is in.
    with contextlib.suppress(Exception):
        package = importlib.import_module(request.module)
        own = package.get_library_path()
        if not request.path or Path(own).samefile(request.path):
            return package
    return None


def _own_name(package: ModuleType | None) -> str | None:
    """The EP that ``package`` names first, in the way that packages of plugin EPs share."""
    for function in ("get_ep_name", "get_ep_names"):
        with contextlib.suppress(Exception):
            found = getattr(package, function)()
            name = found if isinstance(found, str) else found[0]
            return str(name)
    return None


def _facts(device: Any) -> EpDevice:
    return EpDevice(
        device.ep_name,
        device.ep_vendor,
        device.device.type.name.lower(),
        device.device.vendor,
        device.device.vendor_id,
        device.device.device_id,
        dict(device.ep_metadata),
        dict(device.device.metadata),
    )

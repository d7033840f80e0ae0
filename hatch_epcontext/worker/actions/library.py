"""Register the library of an unknown EP, and list what it offers."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.libraries import load
from hatch_epcontext.worker.requests import EpDevice, LibraryReply, LibraryRequest
from hatch_epcontext.worker.session import describe_device, incompatibilities

_AFFIXES = re.compile(r"^(lib)?(onnxruntime_(providers_|ep_)?)?|(_ep)?(_plugin)?$")
"""What a library's name has around that of its EP."""


def handle(request: LibraryRequest) -> LibraryReply:
    """Return the devices of all EPs in the library; raises UnavailableError when it cannot be loaded."""
    stem = Path(request.path or request.module).name.split(".")[0]
    name = _own_name(request.module) or _AFFIXES.sub("", stem) or "ep"
    plugin = Plugin(request.module, request.module or request.path, name, request.path)
    devices = (
        EpDevice(device.ep_name, device.device.type.name.lower(), describe_device(device))
        for device in load(plugin, None)
    )
    return LibraryReply(name, tuple(devices), tuple(incompatibilities(name)))


def _own_name(module: str) -> str | None:
    """The EP that the package ``module`` names first, in the way that packages of plugin EPs share."""
    for function in ("get_ep_name", "get_ep_names") if module else ():
        with contextlib.suppress(Exception):
            names = getattr(importlib.import_module(module), function)()
            return str(names if isinstance(names, str) else names[0])
    return None

"""List the devices that an unknown library of an EP offers on this machine."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from hatch_epcontext.providers import Plugin
from hatch_epcontext.worker.actions.devices import describe_devices
from hatch_epcontext.worker.libraries import load
from hatch_epcontext.worker.requests import Devices, LibraryRequest
from hatch_epcontext.worker.session import incompatibilities

_AFFIXES = re.compile(r"^(lib)?(onnxruntime_(providers_|ep_)?)?|(_ep)?(_plugin)?$")
"""What a library's name has around that of its EP."""


def handle(request: LibraryRequest) -> Mapping[str, Devices]:
    """Load the library, and return its devices; raises UnavailableError when it cannot be loaded."""
    path, module = request.path, request.module
    stem = Path(path or module).name.split(".")[0]
    name = _own_name(module) or _AFFIXES.sub("", stem) or "ep"
    devices = describe_devices(load(Plugin(module, module or path, name, path), None))
    return {name: Devices(devices, "\n".join(incompatibilities(name)) or None)}


def _own_name(module: str) -> str | None:
    """The EP that the package ``module`` names first, in the way that packages of plugin EPs share."""
    for function in ("get_ep_name", "get_ep_names") if module else ():
        with contextlib.suppress(Exception):
            names = getattr(importlib.import_module(module), function)()
            return str(names if isinstance(names, str) else names[0])
    return None

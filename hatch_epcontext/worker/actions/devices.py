"""List the devices that EPs offer on this machine: known ones, and those of an unknown library."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import onnxruntime as ort

from hatch_epcontext.errors import UnavailableError
from hatch_epcontext.providers import PROVIDERS, Plugin, Provider
from hatch_epcontext.worker.libraries import load, missing_in_package, register
from hatch_epcontext.worker.requests import (
    DevicesReply,
    DevicesRequest,
    EpDevice,
    LibraryDevices,
    ProviderDevices,
)
from hatch_epcontext.worker.session import add_built_in, describe_device, incompatibilities

_AFFIXES = re.compile(r"^(lib)?(onnxruntime_(providers_|ep_)?)?|(_ep)?(_plugin)?$")
"""What a library's name has around that of its EP."""


def handle(request: DevicesRequest) -> DevicesReply:
    """Load the libraries, and return the devices of their EPs, or the reasons for none.

    Raises UnavailableError when the unknown library cannot be loaded.
    """
    providers = {name: _list_devices(PROVIDERS[name]) for name in request.providers}
    is_named = request.path or request.module
    return DevicesReply(providers, _describe(request.path, request.module) if is_named else None)


def _list_devices(provider: Provider) -> ProviderDevices:
    try:
        if provider.plugin is None:
            add_built_in(ort.SessionOptions(), provider, {})
            # Such an EP does not list its devices before a session is opened.
            return ProviderDevices((f"{provider.ep} loads",))
        register(provider.plugin, provider.ep)
    except UnavailableError as error:
        problem = error.problems[0]
        return ProviderDevices((), "\n".join(filter(None, [problem.message, problem.advice()])))
    devices = tuple(describe_device(d) for d in ort.get_ep_devices() if d.ep_name == provider.ep)
    if devices:
        return ProviderDevices(devices, "\n".join(missing_in_package(provider.plugin)) or None)
    needs = [f"It needs {provider.needs}."] if provider.needs else []
    reasons = [f"{provider.ep} finds no device.", *needs, *incompatibilities(provider.ep)]
    return ProviderDevices((), "\n".join(reasons))


def _describe(path: str, module: str) -> LibraryDevices:
    stem = Path(path or module).name.split(".")[0]
    name = _own_name(module) or _AFFIXES.sub("", stem) or "ep"
    devices = (
        EpDevice(device.ep_name, device.device.type.name.lower(), describe_device(device))
        for device in load(Plugin(module, module or path, name, path), None)
    )
    return LibraryDevices(name, tuple(devices), tuple(incompatibilities(name)))


def _own_name(module: str) -> str | None:
    """The EP that the package ``module`` names first, in the way that packages of plugin EPs share."""
    for function in ("get_ep_name", "get_ep_names") if module else ():
        with contextlib.suppress(Exception):
            names = getattr(importlib.import_module(module), function)()
            return str(names if isinstance(names, str) else names[0])
    return None

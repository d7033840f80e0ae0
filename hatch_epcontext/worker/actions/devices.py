"""List the devices that EPs offer on this machine: known ones, and those of an unknown library."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import UnavailableError
from hatch_epcontext.providers import PROVIDERS, MissingLibrary, Plugin, Provider
from hatch_epcontext.text import listing
from hatch_epcontext.worker.requests import Devices, DevicesRequest, EpDevice
from hatch_epcontext.worker.session import (
    add_built_in,
    describe_device,
    incompatibilities,
    library_of,
    load,
    missing_for,
    register,
)

_AFFIXES = re.compile(r"^(lib)?(onnxruntime_(providers_|ep_)?)?|(_ep)?(_plugin)?$")
"""What a library's name has around that of its EP."""


def handle(request: DevicesRequest) -> Mapping[str, Devices]:
    """Load the libraries, and return the devices of their EPs, or the reasons for none.

    Raises UnavailableError when the unknown library cannot be loaded.
    """
    if request.path or request.module:
        return _describe(request.path, request.module)
    return {name: _list_devices(PROVIDERS[name]) for name in request.providers}


def _list_devices(provider: Provider) -> Devices:
    try:
        if provider.plugin is None:
            add_built_in(ort.SessionOptions(), provider, {})
            # Such an EP does not list its devices before a session is opened.
            return Devices((EpDevice(provider.ep, "", f"{provider.ep} loads"),))
        register(provider.plugin, provider.ep)
    except UnavailableError as error:
        problem = error.problems[0]
        return Devices(reason="\n".join(filter(None, [problem.message, problem.advice()])))
    if devices := _offered(d for d in ort.get_ep_devices() if d.ep_name == provider.ep):
        return Devices(devices, "\n".join(_missing_in_package(provider.plugin)) or None)
    needs = [f"It needs {provider.needs}."] if provider.needs else []
    reasons = [f"{provider.ep} finds no device.", *needs, *incompatibilities(provider.ep)]
    return Devices(reason="\n".join(reasons))


def _offered(devices: Iterable[Any]) -> tuple[EpDevice, ...]:
    return tuple(
        EpDevice(
            device.ep_name,
            device.device.type.name.lower(),
            describe_device(device),
            device.device.vendor,
            (device.device.vendor_id, device.device.device_id),
            # Where the library is says nothing of the machine, but who uses it.
            {
                name: value
                for facts in (device.device.metadata, device.ep_metadata)
                for name, value in facts.items()
                if name != "library_path"
            },
        )
        for device in devices
    )


def _missing_in_package(plugin: Plugin) -> list[str]:
    """Missing libraries that libraries in the package of ``plugin`` need, and what to do.

    An EP loads them when it begins to compile, and then often reports only that it compiles no node. Drivers
    are needed only for devices that this machine may lack, and that the EP does not offer then.
    """
    needed: dict[MissingLibrary, list[str]] = {}
    library = Path(library_of(plugin))
    for path in sorted(library.parent.glob(f"*{library.suffix}")):
        # Not the error of the NPU's own libraries, which are for another processor.
        for lacking in missing_for(path):
            if not lacking.is_driver:
                needed.setdefault(lacking, []).append(path.name)
    return [
        f"{lacking} is missing, and {listing(names)} of {plugin.package} cannot be loaded. {lacking.advice}"
        for lacking, names in needed.items()
    ]


def _describe(path: str, module: str) -> dict[str, Devices]:
    stem = Path(path or module).name.split(".")[0]
    name = _own_name(module) or _AFFIXES.sub("", stem) or "ep"
    devices = _offered(load(Plugin(module, module or path, name, path), None))
    return {name: Devices(devices, "\n".join(incompatibilities(name)) or None)}


def _own_name(module: str) -> str | None:
    """The EP that the package ``module`` names first, in the way that packages of plugin EPs share."""
    for function in ("get_ep_name", "get_ep_names") if module else ():
        with contextlib.suppress(Exception):
            names = getattr(importlib.import_module(module), function)()
            return str(names if isinstance(names, str) else names[0])
    return None

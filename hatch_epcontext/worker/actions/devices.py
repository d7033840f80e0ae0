"""List the devices that known EPs offer on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import UnavailableError
from hatch_epcontext.providers import PROVIDERS, MissingLibrary, Plugin, Provider
from hatch_epcontext.text import listing
from hatch_epcontext.worker import libraries, session
from hatch_epcontext.worker.requests import Devices, DevicesReply, DevicesRequest, EpDevice, Runtime


def handle(request: DevicesRequest) -> DevicesReply:
    """Load the libraries, and return the devices of their EPs, or the reasons for none."""
    runtime = Runtime(
        ort.__version__, tuple(ort.get_available_providers()), hasattr(ort, "get_ep_devices")
    )
    devices = {
        name: _list_devices(PROVIDERS[name], runtime, request.compatibility.get(name, ()))
        for name in request.providers
    }
    return DevicesReply(runtime, devices)


def _list_devices(provider: Provider, runtime: Runtime, compatibility: Sequence[str]) -> Devices:
    if not runtime.lists_devices:
        return Devices(reason=f"onnxruntime {runtime.version} is too old.", is_all=True)
    before = len(ort.get_ep_devices())
    try:
        if provider.plugin is None:
            session.add_built_in(ort.SessionOptions(), provider, {})
            # Such an EP does not list its devices before a session is opened.
            return Devices((EpDevice(provider.ep, "", f"{provider.ep} loads"),))
        # As apps do.
        libraries.preload()
        libraries.register(provider.plugin, provider.ep)
    except UnavailableError as error:
        problem = error.problems[0]
        reason = "\n".join(filter(None, [problem.message, problem.advice()]))
        # The loader also takes the devices of its library that have the name of another EP.
        return Devices(reason=reason, is_all=len(ort.get_ep_devices()) == before)
    own = [device for device in ort.get_ep_devices() if device.ep_name == provider.ep]
    if devices := describe_devices(own, compatibility):
        return Devices(devices, "\n".join(_missing_in_package(provider.plugin)) or None, True)
    needs = [f"It needs {provider.needs}."] if provider.needs else []
    reasons = [f"{provider.ep} finds no device.", *needs, *session.incompatibilities(provider.ep)]
    return Devices(reason="\n".join(reasons), is_all=True)


def describe_devices(
    devices: Iterable[Any], compatibility: Sequence[str] = ()
) -> tuple[EpDevice, ...]:
    """What ONNX Runtime knows of ``devices``, and which of the contexts' strings each of them cannot run."""
    return tuple(
        EpDevice(
            device.ep_name,
            device.device.type.name.lower(),
            session.describe_device(device),
            device.device.vendor,
            (device.device.vendor_id, device.device.device_id),
            # Where the library is says nothing of the machine, but who uses it.
            {
                name: value
                for facts in (device.device.metadata, device.ep_metadata)
                for name, value in facts.items()
                if name != "library_path"
            },
            tuple(text for text in compatibility if session.is_incompatible([device], text)),
        )
        for device in devices
    )


def _missing_in_package(plugin: Plugin) -> list[str]:
    """Missing libraries that libraries in the package of ``plugin`` need, and what to do.

    An EP loads them when it begins to compile, and then often reports only that it compiles no node. Drivers
    are needed only for devices that this machine may lack, and that the EP does not offer then.
    """
    needed: dict[MissingLibrary, list[str]] = {}
    library = Path(libraries.library_of(plugin))
    for path in sorted(library.parent.glob(f"*{library.suffix}")):
        # Not the error of the NPU's own libraries, which are for another processor.
        for lacking in libraries.missing_for(path):
            if not lacking.is_driver:
                needed.setdefault(lacking, []).append(path.name)
    return [
        f"{lacking} is missing, and {listing(names)} of {plugin.package} cannot be loaded. {lacking.advice}"
        for lacking, names in needed.items()
    ]

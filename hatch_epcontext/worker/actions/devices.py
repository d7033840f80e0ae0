"""List the devices that EPs offer on this machine."""

from __future__ import annotations

import onnxruntime as ort

from hatch_epcontext.errors import UnavailableError
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.worker.libraries import missing_in_package, register
from hatch_epcontext.worker.requests import DevicesReply, DevicesRequest, ProviderDevices
from hatch_epcontext.worker.session import add_built_in, describe_device, incompatibilities


def handle(request: DevicesRequest) -> DevicesReply:
    """Load the libraries of the providers, and return the devices of their EPs, or the reasons for none."""
    return DevicesReply({name: _list_devices(PROVIDERS[name]) for name in request.providers})


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

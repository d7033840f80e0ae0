"""List the devices that an EP offers on this machine."""

from __future__ import annotations

import onnxruntime as ort

from hatch_epcontext.errors import UnavailableError
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.libraries import missing_in_package, register
from hatch_epcontext.worker.requests import DevicesReply, DevicesRequest
from hatch_epcontext.worker.session import add_built_in, describe_device, incompatibilities


def handle(request: DevicesRequest) -> DevicesReply:
    """Load the provider's library, and return the devices of its EP, or the reason for none."""
    provider = PROVIDERS[request.provider]
    try:
        if provider.plugin is None:
            add_built_in(ort.SessionOptions(), provider, {})
            # Such an EP does not list its devices before a session is opened.
            return DevicesReply((f"{provider.ep} loads",))
        register(provider.plugin, provider.ep)
    except UnavailableError as error:
        problem = error.problems[0]
        return DevicesReply((), "\n".join(filter(None, [problem.message, problem.advice()])))
    devices = tuple(describe_device(d) for d in ort.get_ep_devices() if d.ep_name == provider.ep)
    if devices:
        return DevicesReply(devices, "\n".join(missing_in_package(provider.plugin)) or None)
    needs = [f"It needs {provider.needs}."] if provider.needs else []
    reasons = [f"{provider.ep} finds no device.", *needs, *incompatibilities(provider.ep)]
    return DevicesReply((), "\n".join(reasons))

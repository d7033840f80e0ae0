"""What this machine has for an EP: its library, and the devices that it offers."""

from __future__ import annotations

import onnxruntime as ort

from hatch_epcontext.protocol import SurveyReply, SurveyRequest
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.libraries import AbsentError, register
from hatch_epcontext.worker.session import add_built_in, described, incompatibilities


def survey(request: SurveyRequest) -> SurveyReply:
    """Load the provider's library, and list the devices of its EP, or say why there are none."""
    provider = PROVIDERS[request.provider]
    try:
        if provider.plugin is None:
            add_built_in(ort.SessionOptions(), provider, {})
            # These do not say which devices they have before a session is opened.
            return SurveyReply((f"{provider.ep} loads",), "")
        register(provider.plugin, provider.ep)
    except AbsentError as error:
        problem = error.problems[0]
        return SurveyReply((), f"{problem.what}\n{problem.fix}".strip())
    devices = tuple(described(d) for d in ort.get_ep_devices() if d.ep_name == provider.ep)
    if devices:
        return SurveyReply(devices, "")
    reasons = list(incompatibilities(provider.ep))
    needs = [f"It needs {provider.needs}."] if provider.needs else []
    why = [f"{provider.ep} finds no device here.", *needs, *reasons]
    return SurveyReply((), "\n".join(why))

"""ONNX Runtime sessions: registering an EP, picking its devices, opening models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.protocol import TargetSpec
from hatch_epcontext.providers import PROVIDERS, Product, Provider

LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def provider_of(target: TargetSpec) -> Provider:
    """What is known of the target's provider."""
    return PROVIDERS[target.provider]


def options(target: TargetSpec, provider_options: Mapping[str, str]) -> ort.SessionOptions:
    """Session options with the target's EP added; ``provider_options`` are those of the moment."""
    provider = provider_of(target)
    result = ort.SessionOptions()
    for key, value in target.session_options.items():
        result.add_session_config_entry(key, value)
    result.add_provider_for_devices(_devices(provider, target.device), dict(provider_options))
    return result


def cpu_options() -> ort.SessionOptions:
    """Session options for the CPU EP alone."""
    result = ort.SessionOptions()
    result.add_provider("CPUExecutionProvider", {})
    return result


def context_options(target: TargetSpec, product: Product) -> ort.SessionOptions:
    """Session options to open an artifact with, as the loader does."""
    result = options(target, target.load_options)
    if product == "context":
        # What would have to be compiled now was not compiled then.
        result.add_session_config_entry("session.disable_model_compile", "1")
    return result


def open_session(model: Path | bytes, session_options: ort.SessionOptions) -> ort.InferenceSession:
    """A session that stays with its EP: by default one that fails is replaced by the CPU's."""
    return ort.InferenceSession(model, session_options, enable_fallback=0)


def _devices(provider: Provider, device: str) -> list[Any]:
    """The EP's devices of the kind that is wanted, or else its others.

    An EP that cross-compiles offers whatever the build machine has: QNN a CPU, where it simulates.
    """
    if provider.plugin is not None:
        _register(provider)
    offered = [each for each in ort.get_ep_devices() if each.ep_name == provider.ep]
    if not offered:
        there = ", ".join(f"{d.ep_name} on {d.device.type.name}" for d in ort.get_ep_devices())
        raise BuildError(Problem("", f"{provider.ep} finds no device here. There are: {there}."))
    return [each for each in offered if each.device.type.name.lower() == device] or offered[:1]


def _register(provider: Provider) -> None:
    assert provider.plugin is not None
    plugin = provider.plugin
    if any(device.ep_name == provider.ep for device in ort.get_ep_devices()):
        return
    try:
        library = importlib.import_module(plugin.module).get_library_path()
        ort.register_execution_provider_library(plugin.registration_name, library)
    except Exception as error:
        raise BuildError(
            Problem(
                "",
                f"the library of {provider.ep} cannot be loaded: {error}",
                f"See that {plugin.package} is installed for this platform and Python.",
            )
        ) from error

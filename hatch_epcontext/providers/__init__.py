"""What is known of execution providers: data and small pure functions, for both sides of the process border.

Every module here that holds a ``PROVIDER`` is registered; nothing else has to change for a new one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hatch_epcontext.providers.base import Device, Plugin, Product, Profile, Provider, Tolerance
from hatch_epcontext.providers.libraries import missing
from hatch_epcontext.providers.option import Option, OptionValue, Scalar, render

__all__ = [
    "FLAVOURS",
    "PROVIDERS",
    "Device",
    "Option",
    "OptionValue",
    "Plugin",
    "Product",
    "Profile",
    "Provider",
    "Scalar",
    "Tolerance",
    "find",
    "missing",
    "render",
]


def _registered() -> dict[str, Provider]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    found = [module.PROVIDER for module in modules if hasattr(module, "PROVIDER")]
    return {provider.name: provider for provider in sorted(found, key=lambda p: p.name)}


PROVIDERS: Mapping[str, Provider] = _registered()

FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-vitisai",
    "onnxruntime-windowsml",
    "onnxruntime-openvino",
    "onnxruntime-webgpu",
    "onnxruntime-rocm",
    "onnxruntime-trt-rtx",
)
"""Distributions that all install the import package ``onnxruntime`` and overwrite one another."""


def find(name: str) -> Provider | None:
    """The provider of that name, of that EP, or of another spelling of either."""
    return next((provider for provider in PROVIDERS.values() if provider.answers_to(name)), None)

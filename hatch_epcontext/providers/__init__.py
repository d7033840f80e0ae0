"""What is known of execution providers: data and small pure functions, for both sides of the process border.

Every module here that holds a ``PROVIDER`` is registered; nothing else has to change for a new one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hatch_epcontext.providers.base import (
    Device,
    Option,
    Plugin,
    Product,
    Provider,
    Scalar,
    Tolerance,
    render,
)

__all__ = [
    "FLAVOURS",
    "PROVIDERS",
    "Device",
    "Option",
    "Plugin",
    "Product",
    "Provider",
    "Scalar",
    "Tolerance",
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

FLAVOURS = ("onnxruntime", "onnxruntime-gpu")
"""Distributions that all install the import package ``onnxruntime`` and overwrite one another."""

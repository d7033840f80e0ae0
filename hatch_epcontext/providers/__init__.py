"""Knowledge about execution providers: data and small pure functions, for builds and workers.

Each module of this package that has a ``PROVIDER`` is registered. To add a provider, add a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hatch_epcontext.providers.base import HEADER as HEADER
from hatch_epcontext.providers.base import QUANTIZED as QUANTIZED
from hatch_epcontext.providers.base import CompilerLibrary as CompilerLibrary
from hatch_epcontext.providers.base import Plugin as Plugin
from hatch_epcontext.providers.base import Product as Product
from hatch_epcontext.providers.base import Profile as Profile
from hatch_epcontext.providers.base import Provider as Provider
from hatch_epcontext.providers.base import Tolerance as Tolerance
from hatch_epcontext.providers.messages import MissingLibrary as MissingLibrary
from hatch_epcontext.providers.messages import is_benign as is_benign
from hatch_epcontext.providers.messages import missing as missing
from hatch_epcontext.providers.option import Option as Option
from hatch_epcontext.providers.option import OptionValue as OptionValue
from hatch_epcontext.providers.option import render as render

# The loader declares `Device`, because it is copied into other packages and can import nothing of this one.
from hatch_epcontext.shipped import Device as Device


def _registered() -> dict[str, Provider]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    providers = [module.PROVIDER for module in modules if hasattr(module, "PROVIDER")]
    return {provider.name: provider for provider in sorted(providers, key=lambda p: p.name)}


PROVIDERS: Mapping[str, Provider] = _registered()

DISTRIBUTIONS = (
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
"""ONNX Runtime's distributions. Each installs the import package ``onnxruntime``, over the others' files."""


def find(name: str) -> Provider | None:
    """The provider with this name or EP name, in any spelling; None for an unknown name."""
    return next((provider for provider in PROVIDERS.values() if provider.has_name(name)), None)


def describe_chip(name: str, compatibility: str) -> str:
    """What a context with this ``compatibility`` is for, in words; ``name``: that of its provider or EP.

    Empty if that is unknown: another version of the package may have other providers.
    """
    provider = find(name)
    return provider.describe(provider.compiled_for(compatibility)) if provider else ""


def configured(
    name: str,
    ep: str,
    plugin: Plugin | None,
    *,
    by_library: bool = False,
    with_plugins: bool = False,
) -> Provider:
    """The provider called ``name``, with the EP that a configuration names and the library of that EP.

    ``by_library``: the vendor's library compiles; ``with_plugins``: with those that the EP's package has.
    """
    provider = PROVIDERS[name]
    if by_library and (library := provider.compiler_library) is not None:
        provider = provider.changed(
            by_library=True,
            requirements=library.requirements + library.plugin_requirements * with_plugins,
            conflicts=(),
            distributions=DISTRIBUTIONS,
            exclusive_device=False,
        )
    if (ep, plugin) != (provider.ep, provider.plugin):
        own = ("onnxruntime", "onnxruntime-gpu")
        provider = provider.changed(
            ep=ep,
            plugin=plugin,
            distributions=tuple(dict.fromkeys((*own, *provider.distributions))),
            # Only the configuration can name the library's requirements.
            requirements=provider.requirements if provider.by_library else (),
            systems=provider.systems if provider.by_library else (),
        )
    return provider

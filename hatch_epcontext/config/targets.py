"""A target's table together with its provider, and with the plugin library that the table names."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.tables import TargetTable
from hatch_epcontext.errors import Key
from hatch_epcontext.providers import Plugin, Provider, find


@dataclass(frozen=True)
class NamedTarget:
    """A target as it is written: its name, its place, and its provider, None if that is unknown."""

    name: str
    key: Key
    table: TargetTable
    provider: Provider | None


def named_target(name: str, key: Key, table: TargetTable, root: Path) -> NamedTarget:
    """The target with its provider, changed by the table's ``library``, ``ep-name`` and so on."""
    provider = find(table.provider)
    if provider is not None and (table.library or provider.needs_library):
        provider = _with_library(provider, table, root)
    if provider is not None and table.allow_unknown_options and provider.product == "context":
        provider = _that_shares_weights(provider)
    return NamedTarget(name, key, table, provider)


def is_path(library: str) -> bool:
    """Whether ``library`` is the path of a file, and not the name of a package."""
    return re.fullmatch(r"\w+(\.\w+)*", library) is None or Path(library).suffix in LIBRARIES


LIBRARIES = (".so", ".dll", ".dylib")
"""How the names of shared libraries end."""


def _that_shares_weights(provider: Provider) -> Provider:
    """The provider for an EP that may share weights, although this package does not know that it can."""
    if provider.shares_weights:
        return provider
    # Only an attempt to open them shows whether the machine can.
    return dataclasses.replace(provider, shares_weights=True, loads_shared=True)


def _expand(library: str) -> Path:
    try:
        return Path(library).expanduser()
    except RuntimeError:
        # No home folder: the file is then reported as missing.
        return Path(library)


def _with_library(provider: Provider, table: TargetTable, root: Path) -> Provider:
    ep = table.ep_name or provider.ep
    library = table.library or ""
    path = str(root / _expand(library)) if library and is_path(library) else ""
    module = "" if path else library
    own = ("onnxruntime", "onnxruntime-gpu")
    return dataclasses.replace(
        provider,
        ep=ep,
        plugin=Plugin(module, module or "its library", table.registration_name or ep, path),
        distributions=tuple(dict.fromkeys((*own, *provider.distributions))),
        # Only the table can name what the library needs.
        requirements=(),
        systems=(),
    )

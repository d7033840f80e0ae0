"""A target's table together with its provider, and with the plugin library that the table names."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hatch_epcontext.config.tables import TargetTable
from hatch_epcontext.errors import Key
from hatch_epcontext.files import file_sha256
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.providers import Plugin, Provider, configured, find
from hatch_epcontext.system import LIBRARIES


@dataclass(frozen=True)
class NamedTarget:
    """A target as configured: its name, its place and its provider.

    With ``unchecked`` it allows unknown options. ``library_sha256``: of its library, if the table has a path.
    """

    name: str
    key: Key
    table: TargetTable
    provider: Provider
    unchecked: bool = False
    library_sha256: str | None = None


def named_target(name: str, key: Key, table: TargetTable, root: Path) -> NamedTarget | None:
    """The target with its provider, changed by the table's ``library``, ``ep-name`` and so on.

    None if the provider is unknown.
    """
    provider = find(table.provider)
    if provider is None:
        return None
    ep, plugin = provider.ep, provider.plugin
    if table.library or provider.needs_library:
        ep = table.ep_name or ep
        plugin = _plugin(table.library or "", ep, root)
    unchecked = bool(table.allow_unknown_options)
    by_library = table.compute_capabilities is not None
    provider = configured(provider.name, ep, plugin, unchecked=unchecked, by_library=by_library)
    sha256 = None
    if plugin is not None and plugin.path:
        # `Finder.library` reports a missing file, and an impossible name.
        with contextlib.suppress(OSError, ValueError):
            sha256 = file_sha256(Path(plugin.path))
    return NamedTarget(name, key, table, provider, unchecked, sha256)


def is_path(library: str) -> bool:
    """Whether ``library`` is the path of a file, not the name of a package."""
    return re.fullmatch(r"\w+(\.\w+)*", library) is None or Path(library).suffix in LIBRARIES


def _expand(library: str) -> Path:
    try:
        return Path(library).expanduser()
    except RuntimeError:
        # Without a home folder the file is reported as missing.
        return Path(library)


def _plugin(library: str, registration_name: str, root: Path) -> Plugin:
    path = str(root / _expand(library)) if library and is_path(library) else ""
    module = "" if path else library
    return Plugin(module, module or "its library", registration_name, path)

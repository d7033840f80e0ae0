"""Hatch's entry point.

Hatch imports this module in every command of an environment that has the package,
so it imports nothing of the package before Hatch calls for the hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hatchling.plugin import hookimpl

if TYPE_CHECKING:
    from hatch_epcontext.plugin import EpcontextBuildHook


@hookimpl
def hatch_register_build_hook() -> type[EpcontextBuildHook]:
    from hatch_epcontext.plugin import EpcontextBuildHook

    return EpcontextBuildHook

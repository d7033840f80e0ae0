"""The project's other build hooks, which may make the files that the configuration names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import listing

NAME = "epcontext"
"""The name of our hook."""

_MAKE_NO_MODELS = frozenset({"vcs", "version"})
"""Hooks that are known to write only a file with the version."""


@dataclass(frozen=True)
class BuildHooks:
    """The other build hooks of a project that may make files, in the order in which Hatch runs them.

    ``before`` and ``after`` ours.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def advice(self) -> str | None:
        """What to do if one of them makes a missing file; None if there are none."""
        if not self:
            return None
        return (
            f"If a build hook makes it ({listing(self.before + self.after)}), write the table of that hook "
            "above this one's: Hatch runs the hooks of [tool.hatch.build.hooks] first, and then those of one "
            "target. epcontext's commands run none; hatch build -t wheel --hooks-only does."
        )


def read_hooks(builder_config: Any) -> BuildHooks:
    """The hooks in the configuration of one of hatchling's builders, without those that are switched off."""
    names = list(builder_config.hook_config)
    index = names.index(NAME) if NAME in names else len(names)
    return BuildHooks(_makers(names[:index]), _makers(names[index + 1 :]))


def hooks_of_project(root: Path) -> BuildHooks:
    """The hooks that run in a build of the wheel of ``root``; none if that is no valid project."""
    from hatchling.builders.wheel import WheelBuilder

    # A build, or the check of its configuration, reports what is wrong with the project.
    with contextlib.suppress(Exception):
        return read_hooks(WheelBuilder(str(root)).config)
    return BuildHooks()


def _makers(names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _MAKE_NO_MODELS)

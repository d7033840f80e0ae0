"""The project's other build hooks, which may make the files that the configuration names."""

from __future__ import annotations

import contextlib
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatch_epcontext.errors import HOOK
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import listing, quoted_key

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "epcontext"
"""The name of our hook."""

ALL_HOOKS = "tool.hatch.build.hooks"
"""Hatch's table of hooks for all targets, which run before those of one target."""

_MAKE_NO_MODELS = frozenset({"vcs", "version"})
"""Hooks that are known to write only a file with the version."""


def hooks_table(target: str) -> str:
    """Hatch's table of the hooks for ``target`` alone."""
    return f"tool.hatch.build.targets.{target}.hooks"


@dataclass(frozen=True)
class BuildHooks:
    """The other build hooks of a project that may make files, in the order in which Hatch runs them.

    ``before`` and ``after`` ours. ``tables``: the table that gives each hook, also ours, its place;
    ``target``: Hatch's name of what is built. They are ``run`` in a build, but not by a command.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    target: str = "wheel"
    run: bool = True

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    @property
    def table(self) -> str:
        """The table that gives our hook its place."""
        return self.tables.get(NAME, HOOK)

    def advice(self) -> str | None:
        """What to do if one of them makes a missing file; None if there are none."""
        if not self:
            return None
        if not self.run:
            return (
                f"If a build hook makes it ({listing(self.before + self.after)}), run the hooks first, which "
                f"this command does not: hatch build -t {self.target} --hooks-only"
            )
        lines = [self.right_order()] if self.after else []
        if self.before:
            lines.append(f"{_subject(self.before)} ran before this one, and did not make it.")
        return "\n".join(lines)

    def right_order(self) -> str:
        """What to do if one of those ``after`` ours, of which there is one, makes a file that ours reads."""
        last = self.after[-1]
        maker, own = self.tables[last], self.table
        verb = "runs" if len(self.after) == 1 else "run"
        order = f"{_subject(self.after)} {verb} after this one. If the file is made there, change the order:"
        if maker.rpartition(".")[0] == own.rpartition(".")[0]:
            return f"{order}\nmove [{own}] below [{maker}]."
        hooks = hooks_table(self.target)
        sdist = (
            f" Add [{hooks_table('sdist')}.{NAME}], so that sdists are checked too."
            if self.target == "wheel"
            else ""
        )
        return (
            f"{order}\nwrite [{hooks}.{NAME}] below [{maker}], and remove [{own}], because hooks of "
            f"[{ALL_HOOKS}] run first.{sdist}"
        )


def read_hooks(builder_config: Any) -> BuildHooks:
    """The hooks in the configuration of one of hatchling's builders, without those that are switched off."""
    names = list(builder_config.hook_config)
    place = names.index(NAME) if NAME in names else len(names)
    everywhere = builder_config.build_config.get("hooks", {})
    target = builder_config.plugin_name
    tables = {
        name: f"{ALL_HOOKS if name in everywhere else hooks_table(target)}.{quoted_key(name)}"
        for name in names
    }
    return BuildHooks(_makers(names[:place]), _makers(names[place + 1 :]), tables, target)


def hooks_of_project(root: Path) -> BuildHooks:
    """The hooks that run in a build of the wheel of ``root``; none if that is no valid project."""
    from hatchling.builders.wheel import WheelBuilder

    # A build, or the check of its configuration, reports what is wrong with the project.
    with contextlib.suppress(Exception):
        return read_hooks(WheelBuilder(str(root)).config)
    return BuildHooks()


def _makers(names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _MAKE_NO_MODELS)


def _subject(names: tuple[str, ...]) -> str:
    return f"The build hook{'s' if len(names) > 1 else ''} {listing(names)}"

"""Which files Hatch packs, as its own builder selects them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pathspec

Tree = Mapping[str, Path]
"""Files that Hatch packs, by their path in the archive, with forward slashes."""


class Reason(Enum):
    """Why Hatch leaves a file out of an sdist, as the beginning of a sentence."""

    EXCLUDED = "exclude in pyproject.toml leaves it out"
    IGNORED = ".gitignore or .hgignore leaves it out"
    NOT_INCLUDED = "Hatch's settings, such as include or only-packages, do not select it"


def selected_files(builder_config: Any) -> dict[str, Path]:
    """The files of the project that the settings of a target select, without what build hooks add."""
    selected = []
    # Hatch raises ValueError for a project that ships nothing but models.
    with contextlib.suppress(ValueError):
        selected = list(builder_config.builder.recurse_selected_project_files())
    return _tree(selected)


def packed_files(builder_config: Any, build_data: dict[str, Any]) -> dict[str, Path]:
    """The same with what settings force into the archive, and with what hooks have added until now."""
    with builder_config.set_build_data(build_data):
        files = selected_files(builder_config)
        for source, path in builder_config.get_force_include().items():
            # A later hook can make it.
            with contextlib.suppress(FileNotFoundError):
                files |= _tree(builder_config.builder.recurse_forced_files({source: path}))
    return files


def reason_left_out(builder_config: Any, path: str) -> Reason:
    """Why Hatch's settings do not select the file at ``path``, relative to the project."""
    settings = builder_config.target_config
    if "exclude" not in settings:
        settings = builder_config.build_config
    if _matches(settings.get("exclude", []), path):
        return Reason.EXCLUDED
    if not builder_config.ignore_vcs and _matches(
        builder_config.load_vcs_exclusion_patterns(), path
    ):
        return Reason.IGNORED
    return Reason.NOT_INCLUDED


def _matches(patterns: list[str], path: str) -> bool:
    return pathspec.GitIgnoreSpec.from_lines(patterns).match_file(path)


def _tree(files: Any) -> dict[str, Path]:
    return {Path(each.distribution_path).as_posix(): Path(each.path) for each in files}

"""``pyproject.toml`` as plain values: the one place that chooses the TOML reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import ConfigError, Kind, Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(text: str) -> dict[str, Any]:
    """The values in the TOML document ``text``; raises ValueError when it is not TOML."""
    return tomllib.loads(text)


def tool_table(root: Path) -> Any:
    """``[tool.epcontext]`` of the project in ``root``, or None if it is missing.

    Raises ConfigError when ``pyproject.toml`` is missing or is not TOML.
    """
    file = root / "pyproject.toml"
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), "is missing.")) from None
    except ValueError as error:
        message = f"is not TOML: {error}."
        raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message)) from None
    tool = values.get("tool", {})
    return tool.get("epcontext") if isinstance(tool, dict) else None

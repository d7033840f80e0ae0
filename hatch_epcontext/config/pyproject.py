"""``pyproject.toml`` as plain values: the one place that chooses the TOML reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(text: str) -> dict[str, Any]:
    """The values in the TOML document ``text``; raises ValueError when it is not TOML."""
    return tomllib.loads(text)


def tool_table(root: Path) -> Any:
    """``[tool.epcontext]`` of the project in ``root``, or None if it is missing."""
    values = parse((root / "pyproject.toml").read_text(encoding="utf-8"))
    return values.get("tool", {}).get("epcontext")

"""Checks of ``[tool.epcontext]`` without its targets and models, and of the hook's own table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hatch_epcontext.config.tables import RootTable
from hatch_epcontext.errors import ROOT, Key, Kind, Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import quoted_key, show

_HOOK_KEYS = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
"""The keys of a hook's table, which are Hatch's own."""


def check_hook(table: Mapping[str, Any], name: str) -> Iterator[Problem]:
    """The hook's own table, which belongs to Hatch and is called ``name``."""
    for key in sorted(table.keys() - _HOOK_KEYS):
        message = "is not one of Hatch's keys for a hook."
        hint = f"The configuration belongs in [{ROOT}]."
        yield Problem(Kind.UNKNOWN_KEY, f"{name}.{quoted_key(key)}", message, hint)


def check_root(table: RootTable) -> Iterator[Problem]:
    """``[tool.epcontext]`` without its targets and models."""
    root = Key()
    if table.output is not None and not all(map(str.isidentifier, table.output.split("/"))):
        message = f"must be a package's path in the wheel, not {show(table.output)}."
        hint = 'Write it like "my_app/epcontext": the app imports it as my_app.epcontext.'
        yield Problem.at(root / "output", Kind.INVALID_VALUE, message, hint)
    if not table.models:
        message = "is required: the models to build."
        hint = 'For example ["models/name.onnx"].'
        yield Problem.at(root / "models", Kind.MISSING_KEY, message, hint)
    if not table.targets:
        message = "is required: what to compile for."
        hint = f"Add a table [{ROOT}.targets.<name>] with a provider: {', '.join(PROVIDERS)}."
        yield Problem.at(root / "targets", Kind.MISSING_KEY, message, hint)

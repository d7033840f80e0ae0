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
        yield Problem(
            Kind.UNKNOWN_KEY,
            f"{name}.{quoted_key(key)}",
            "is not one of Hatch's keys for a hook.",
            f"The configuration belongs in [{ROOT}].",
        )


def check_root(table: RootTable) -> Iterator[Problem]:
    """``[tool.epcontext]`` without its targets and models."""
    root = Key()
    if table.output is not None and not all(map(str.isidentifier, table.output.split("/"))):
        yield Problem.at(
            root / "output",
            Kind.INVALID_VALUE,
            f"must be a package's path in the wheel, not {show(table.output)}.",
            'Write it like "my_app/epcontext": the app imports it as my_app.epcontext.',
        )
    if not table.models:
        yield Problem.at(
            root / "models",
            Kind.MISSING_KEY,
            "is required: the models to build.",
            'For example ["models/name.onnx"].',
        )
    if not table.targets:
        yield Problem.at(
            root / "targets",
            Kind.MISSING_KEY,
            "is required: what to compile for.",
            f"Add a table [{ROOT}.targets.<name>] with a provider: {', '.join(PROVIDERS)}.",
        )

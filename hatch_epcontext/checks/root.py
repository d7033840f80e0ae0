"""``[tool.epcontext]`` but for its targets and models, and the hook's own table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.tags import parse_tag

from hatch_epcontext.checks.common import check_min_coverage
from hatch_epcontext.errors import Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.structure import at, show, toml_key
from hatch_epcontext.tables import KEY, RootTable, TargetTable

RESERVED = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
"""Hatch's own keys in a hook's table."""


def check_hook(table: Mapping[str, Any]) -> Iterator[Problem]:
    """The hook's own table, which is Hatch's."""
    for key in table.keys() - RESERVED:
        yield Problem(
            f"tool.hatch.build.targets.wheel.hooks.epcontext{at(key)}",
            "is not one of Hatch's keys for a hook.",
            f"What to build stands in [{KEY}].",
        )


def check_root(table: RootTable) -> Iterator[Problem]:
    """``[tool.epcontext]`` but for its targets and models."""
    yield from check_min_coverage(KEY, table)
    if table.jobs != "auto" and table.jobs < 1:
        yield Problem(f"{KEY}.jobs", f"must be at least 1, and is {table.jobs}.")
    if not table.timeout > 0:
        yield Problem(f"{KEY}.timeout", f"must be more than 0 seconds, and is {table.timeout:g}.")
    if table.output is not None and not all(map(str.isidentifier, table.output.split("/"))):
        yield Problem(
            f"{KEY}.output",
            f"must be a package's path in the wheel, and is {show(table.output)}.",
            'Write it like "my_app/epcontext": the app imports it as my_app.epcontext.',
        )
    if table.wheel_tag not in ("auto", "any") and not _is_tag(table.wheel_tag):
        yield Problem(
            f"{KEY}.wheel-tag",
            f"must be a wheel tag, and is {show(table.wheel_tag)}.",
            'Allowed: "auto", "any", or three parts such as "py3-none-win_arm64".',
        )
    if table.max_size is not None:
        try:
            size_in_bytes(table.max_size)
        except ValueError as allowed:
            yield Problem(f"{KEY}.max-size", f"must be {allowed}, and is {show(table.max_size)}.")
    if not table.models:
        yield Problem(
            f"{KEY}.models", "is required: the models to build.", 'Such as ["models/name.onnx"].'
        )
    if table.provider is None and not table.targets:
        yield Problem(
            KEY,
            "names no target.",
            f'Add provider = "..." or a table [{KEY}.targets.<name>]. '
            f"Providers: {', '.join(PROVIDERS)}.",
        )
    if table.targets:
        for field in dataclasses.fields(TargetTable):
            empty = {} if field.default is dataclasses.MISSING else field.default
            if field.name != "min_coverage" and getattr(table, field.name) not in (None, empty):
                yield Problem(
                    f"{KEY}.{toml_key(field.name)}",
                    "belongs to a target, and this configuration has [targets].",
                    f"Move it to [{KEY}.targets.<name>].",
                )


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size_in_bytes(size: int | str) -> int:
    """Bytes of ``250000``, ``"250000"`` or ``"250 MB"``; raises ValueError with what is allowed."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMG]?B)?", str(size).strip())
    if found is None or not (count := int(float(found[1]) * _UNITS[(found[2] or "B").upper()])):
        raise ValueError('a number of bytes, or a size such as "250 MB"')
    return count


def _is_tag(text: str) -> bool:
    try:
        return text.count("-") == 2 and bool(parse_tag(text))
    except ValueError:
        return False

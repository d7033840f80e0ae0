"""Errors about a configuration as errors about the flags that it was made from."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hatch_epcontext.errors import BuildError, EpcontextError, Problem
from hatch_epcontext.tables import KEY

_FLAGS = {
    "provider": "--provider",
    "provider-options": "--option",
    "session-options": "--config",
    "dims": "--dim",
    "shapes": "--shape",
    "constants": "--constant",
    "device": "--device",
    "embed": "--embed",
    "optimization": "--optimization",
    "inputs": "--inputs",
    "share-weights": "--share-weights",
}
"""The flag in which a user writes a key; all others are written with ``--set``."""


@contextlib.contextmanager
def told_in_flags(models: Mapping[str, Path], headline: str) -> Iterator[None]:
    """Errors about the configuration as errors about the flags that it came from.

    ``headline``: what it means when a model fails, where nothing is shipped.
    """
    try:
        yield
    except EpcontextError as error:
        paths = [str(path) for path in models.values()]
        error.problems = tuple(_in_flags(problem, paths) for problem in error.problems)
        if isinstance(error, BuildError):
            error.headline = headline
        raise


def _in_flags(problem: Problem, paths: Sequence[str]) -> Problem:
    return dataclasses.replace(
        problem,
        where=_flag(problem.where, paths),
        what=re.sub(rf"{re.escape(KEY)}[\w.\[\]-]*", lambda m: _flag(m[0], paths), problem.what),
        fix=_fix(problem.fix, paths),
    )


def _flag(key: str, paths: Sequence[str]) -> str:
    found = re.fullmatch(
        rf"{re.escape(KEY)}(?:\.models\[(\d+)\])?(?:\.([a-z-]+))?(?:\.(.+))?", key, re.DOTALL
    )
    if found is None:
        # What is wrong with the whole of a target, or with what its provider has to have installed.
        return "--provider" if key.startswith(f"{KEY}: ") else key
    index, name, rest = found.groups()
    path = f"{paths[int(index)]}" if index is not None else ""
    if not name:
        return path or "--provider"
    flag = f"{_FLAGS[name]}" if name in _FLAGS else f"--set {name}"
    said = flag if rest is None else f"{flag}{' ' if name in _FLAGS else '.'}{rest}"
    return f"{path}: {said}" if path else said


_FIXES = (
    (
        re.compile(r"Fix it in the model's table, such as: dims = \{ (.+) \}"),
        lambda pairs: (
            "Fix it: " + " ".join(f"--dim {pair.replace(' ', '')}" for pair in pairs.split(", "))
        ),
    ),
    (
        re.compile(r"Fix it in the model's table, such as: shapes = \{ (.+) = \[(.+)\] \}"),
        lambda name, sizes: f"Fix it: --shape {name}={sizes.replace(' ', '')}",
    ),
    (
        re.compile(r"allow-unknown-options = true in the target's table"),
        lambda: "--set allow-unknown-options=true",
    ),
    (
        re.compile(r"Build (\w+.*), or choose other targets with HATCH_EPCONTEXT_TARGETS"),
        lambda where: f"Run this {where}",
    ),
    (re.compile(r"Say in constants"), lambda: "Say with --constant"),
)


def _fix(text: str, paths: Sequence[str]) -> str:
    for pattern, told in _FIXES:
        text = pattern.sub(lambda m, told=told: told(*m.groups()), text)  # type: ignore[misc]
    return re.sub(rf"{re.escape(KEY)}[\w.\[\]-]*", lambda m: _flag(m[0].rstrip("."), paths), text)

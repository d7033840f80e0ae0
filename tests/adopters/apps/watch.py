"""Runs in an adopter's environment: which targets its models open on, and how long that takes."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def watch(package: str, device: str) -> Callable[[], dict[str, str]]:
    """Let the loader in ``package`` open models on ``device``; "plain" is a package without a loader.

    What is returned gives the targets of all models that were opened since.
    """
    opened: dict[str, str] = {}
    if device == "plain":
        return lambda: opened
    loader = importlib.import_module(f"{package}.epcontext")
    original = loader.load

    @functools.wraps(original)
    def load(name: str, **keys: Any) -> Any:
        # As an app does for a simulator; by default the loader skips it, and takes the CPU.
        session = original(name, **(keys if device == "cpu" else keys | {"device": device}))
        opened[name] = loader.target_of(session)
        return session

    for module in list(sys.modules.values()):
        if vars(module).get("load") is original:
            vars(module)["load"] = load
    return lambda: opened


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What ``function`` returns, and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def report(**facts: Any) -> None:
    """Print ``facts`` in a line of its own."""
    sys.stdout.write(f"\n{json.dumps(facts)}\n")

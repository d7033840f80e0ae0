"""Checks that tables of several kinds have in common."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hatch_epcontext.errors import Key, KeyNames, Kind, Problem
from hatch_epcontext.text import is_device, show, toml_key

MAX_NAME = 150
"""The most characters of a name: file names with suffixes then fit every file system."""


def check_values(key: Key, value: Any) -> Iterator[Problem]:
    """All values inside of ``value``, which is at ``key``, each by the check that its key declares."""
    for parts, message in _invalid_values(value, ()):
        # Only now: making a key for each value would take a third of the time.
        place = Key((*key.parts, *parts), key.model, key.name)
        yield Problem.at(place, Kind.INVALID_VALUE, message)


def _invalid_values(
    value: Any, parts: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The place and the message of each invalid value in ``value``, which is at ``parts``."""
    items: Iterable[tuple[str | int, Any]] = ()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        items = [(toml_key(field.name), getattr(value, field.name)) for field in fields]
        for field, (name, item) in zip(fields, items, strict=True):
            check = field.metadata["check"]
            if item is not None and check is not None and (allowed := check(item)):
                shown = "" if field.metadata["is_url"] else f", not {show(item)}"
                yield (*parts, name), f"must be {allowed}{shown}."
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    for name, item in items:
        if isinstance(item, (Mapping, tuple)) or dataclasses.is_dataclass(item):
            yield from _invalid_values(item, (*parts, name))


def check_name(key: Key, name: str) -> Iterator[Problem]:
    """A model's or target's name, which becomes a folder in the wheel."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith("."):
        message = f"{show(name)} cannot be the name of a folder in the wheel."
        hint = "Use letters, digits, '.', '_' and '-', with a letter or digit first."
        yield Problem.at(key, Kind.INVALID_NAME, message, hint)
    elif is_device(name):
        message = f"{show(name)} is the name of a device on Windows, where the wheel could not be unpacked."
        yield Problem.at(key, Kind.INVALID_NAME, message, "Choose another name.")
    elif len(name) > MAX_NAME:
        message = f"has {len(name)} characters, which is too long for file names: {show(name)}."
        yield Problem.at(
            key, Kind.INVALID_NAME, message, f"Give a name with at most {MAX_NAME} characters."
        )


def check_duplicates(named: Iterable[tuple[Key, str]], what: str) -> Iterator[Problem]:
    """Keys and names: no two may be equal, ignoring case, because they would share a folder.

    A key can have several names; only its first duplicate is a problem.
    """
    seen: dict[str, Key] = {}
    reported: list[Key] = []
    for key, name in named:
        first = seen.setdefault(name.casefold(), key)
        if first is not key and not any(other is key for other in reported):
            reported.append(key)
            message = f"has the same name as {KeyNames().key(first)}: {show(name)}."
            yield Problem.at(key, Kind.DUPLICATE_NAME, message, f"Give each {what} its own name.")

"""``HATCH_EPCONTEXT_*``: what wins over TOML, for CI and one-off builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hatch_epcontext.errors import Problem
from hatch_epcontext.structure import show, suggestion

PREFIX = "HATCH_EPCONTEXT_"

Editable = Literal["source", "compile", "skip"]
Validate = Literal["auto", "require", "structure", False]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Environment:
    """What the environment says; None where it says nothing. ``overrides`` are its settings as text."""

    skip: bool = False
    targets: tuple[str, ...] | None = None
    from_cache: tuple[str, ...] | None = None
    cache_dir: Path | None = None
    no_cache: bool = False
    jobs: int | None = None
    timeout: float | None = None
    editable: Editable | None = None
    validate: Validate | None = None
    report: Path | None = None
    overrides: tuple[str, ...] = ()


def read_environment(environ: Mapping[str, str]) -> tuple[Environment, list[Problem]]:
    """The settings in ``environ``, and what is wrong with them; an empty variable counts as unset."""
    given = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and value.strip()
    }
    settings: dict[str, Any] = {}
    problems = []
    for name, text in given.items():
        if name not in _READERS:
            what, fix = "is not a variable that is read.", suggestion(name, sorted(_READERS))
            problems.append(Problem(PREFIX + name, what, fix))
            continue
        try:
            settings[name.lower()] = _READERS[name](text)
        except ValueError as allowed:
            problems.append(Problem(PREFIX + name, f"must be {allowed}, and is {show(text)}."))
    overrides = tuple(f"{PREFIX}{name}={text}" for name, text in given.items())
    return Environment(**settings, overrides=overrides), problems


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("1 or 0")
    return text.lower() in _TRUE


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise ValueError("a number of seconds above 0")
    return seconds


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _elsewhere(text: str) -> Path:
    # Front ends build in folders of their own, which are gone afterwards.
    if not Path(text).expanduser().is_absolute():
        raise ValueError("an absolute path")
    return _path(text)


def _editable(text: str) -> str:
    return _choice(text, tuple(get_args(Editable)))


def _validate(text: str) -> str | Literal[False]:
    choices = [choice for choice in get_args(Validate) if choice]
    return False if text.lower() in _FALSE else _choice(text, (*choices, "false"))


def _choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(" or ".join(choices))
    return text


_READERS = {
    "SKIP": _switch,
    "TARGETS": _names,
    "FROM_CACHE": _names,
    "CACHE_DIR": _path,
    "NO_CACHE": _switch,
    "JOBS": _count,
    "TIMEOUT": _seconds,
    "EDITABLE": _editable,
    "VALIDATE": _validate,
    "REPORT": _elsewhere,
}

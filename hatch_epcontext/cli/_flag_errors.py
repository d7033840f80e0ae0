"""The wording of errors: messages name flags, or the lines of a project's ``pyproject.toml``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.config.pyproject import PyprojectNames
from hatch_epcontext.errors import (
    BuildError,
    EpcontextError,
    InspectionError,
    Key,
    KeyNames,
    Setting,
)
from hatch_epcontext.files import for_windows
from hatch_epcontext.text import dotted, to_toml

_Parts = tuple["str | int", ...]

_META = f"{__name__}.wording"

_PAIRS = {
    "provider-options": "--option",
    "session-options": "--config",
    "dims": "--dim",
    "shapes": "--shape",
    "constants": "--constant",
}
"""Tables with a flag for each of their keys."""

_VALUES, _SWITCHES = (
    ("provider", "device", "optimization"),
    ("embed", "from-memory", "share-weights"),
)
"""Keys whose flags have their names: with a value, and alone."""

_OF_MODELS = ("dims", "shapes", "constants")
"""Tables whose keys can have a model's name before them."""

_INPUTS = ("validate", "inputs")


class ExistingPath(click.Path):
    """A file or folder that exists."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=True, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails if there is none."""
        if rejection := for_windows(os.fspath(value)):
            self.fail(f"{value} {rejection.message} {rejection.hint}", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True)
class FlagNames(KeyNames):
    """Names keys by their flags; ``models``: the command's by name, in the order of the configuration."""

    models: Mapping[str, Path]

    def key(self, key: Key) -> str:
        """The flag for ``key``, after the file of the model that it belongs to."""
        index, parts = _split(key)
        if index is None:
            return _flag(parts) if parts else "--provider"
        path = str(list(self.models.values())[index])
        return f"{path}: {_flag(parts)}" if parts else path

    def targets(self, names: tuple[str, ...]) -> str:
        """Nothing: there is only one."""
        return ""

    def setting(self, setting: Setting) -> str:
        """The instruction with the flags for ``setting``; dots stand for a value that the user chooses."""
        return f"Add {self._flags(setting)}"

    def _flags(self, setting: Setting) -> str:
        index, parts = _split(setting.key)
        name, value = parts[0] if parts else "provider", setting.value
        if name in _OF_MODELS and len(parts) > 1 and isinstance(parts[1], int):
            return f"--set {name}=..."
        if name in _PAIRS:
            several = index is not None and name in _OF_MODELS and len(self.models) > 1
            model = f"{list(self.models)[index or 0]}:" if several else ""
            return _pairs(_PAIRS[str(name)], model, "".join(map(str, parts[1:2])), value)
        if name in _SWITCHES:
            return f"--no-{name}" if value is False else f"--{name}"
        if name in _VALUES or parts == _INPUTS:
            flag = _flag(parts or (name,))
            return f"{flag} {'...' if value is None else shlex.quote(_text(value))}"
        return _pairs("--set", "", dotted(parts), value)


def _split(key: Key) -> tuple[int | None, _Parts]:
    """The index of the key's model, if it has one, and the rest of the key inside its table."""
    parts = key.parts
    if parts[:1] == ("models",) and len(parts) > 1:
        assert isinstance(parts[1], int)
        return parts[1], parts[2:]
    # There is only one target, and its keys have no prefix.
    return None, parts[2:] if parts[:1] == ("targets",) else parts


def _flag(parts: _Parts) -> str:
    name, *rest = parts
    if parts == ("models",):
        return "MODEL"
    if parts == _INPUTS:
        return "--inputs"
    if name in _PAIRS and not any(isinstance(part, int) for part in rest[:1]):
        return f"{_PAIRS[str(name)]} {dotted(rest)}".rstrip()
    has_own = not rest and name in (*_VALUES, *_SWITCHES)
    return f"--{name}" if has_own else f"--set {dotted(parts)}"


def _pairs(flag: str, model: str, name: str, value: Any) -> str:
    """``flag`` with ``name`` and ``value``; without a name, for each name and value of a table.

    ``model`` comes before each name. Dots stand for a value that the user must choose.
    """
    if value is None:
        return f"{flag} {model}{name or 'NAME'}=..."
    pairs = {name: value} if name else value
    text = _sizes if flag == "--shape" else _text
    return " ".join(
        f"{flag} {shlex.quote(f'{model}{key}={text(item)}')}" for key, item in pairs.items()
    )


def _sizes(shape: Any) -> str:
    return ",".join(map(str, shape))


def _text(value: Any) -> str:
    """A value in the form of flags: TOML, and strings without quotes."""
    return value if isinstance(value, str) else to_toml(value)


def use_flag_names(models: Mapping[str, Path], headline: str) -> None:
    """Make the errors of the running command name flags.

    ``headline``: the headline of errors of models, for a command that makes no wheel.
    """
    click.get_current_context().meta[_META] = FlagNames(models), headline


def use_lines(project: Path) -> None:
    """Make the errors of the running command name the lines of the ``pyproject.toml`` in ``project``."""
    click.get_current_context().meta[_META] = PyprojectNames(project), None


def error_text(error: EpcontextError, ctx: click.Context) -> str:
    """The message for ``error``, worded as the command chose with `use_flag_names` or `use_lines`."""
    names, headline = ctx.meta.get(_META, (KeyNames(), None))
    if isinstance(error, BuildError):
        return error.text(names, headline or f"{ctx.invoked_subcommand} failed")
    return error.text(names, headline if isinstance(error, InspectionError) else None)

"""What commands work on: settings as flags, or a project; and messages that name keys so."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from hatch_epcontext.cli._common import Command, existing_file, existing_folder
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import PyprojectNames, parse, tool_table
from hatch_epcontext.config.settings import SYNTHETIC, Config
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    InspectionError,
    Key,
    KeyNames,
    Setting,
)
from hatch_epcontext.package.wheel import check_app
from hatch_epcontext.providers import PROVIDERS, Device
from hatch_epcontext.text import dotted, show, to_toml
from hatch_epcontext.tools.configure import MODEL_TABLES, nested
from hatch_epcontext.tools.project import Project

_PROVIDER: tuple[tuple[str, ...], ...] = ((), ("provider",))
"""The target, and its key with a flag of its own."""

_META = f"{__name__}.wording"


def _value(text: str) -> Any:
    """``text`` as TOML, or ``text`` itself where it is not TOML."""
    try:
        values = parse(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text


def _shape(text: str) -> Any:
    """The list of the sizes in ``text``, or ``text`` itself if it has others."""
    sizes = _value(f"[{text}]")
    return sizes if isinstance(sizes, list) else text


def key_and_value(text: str) -> tuple[str, str]:
    """Those of ``key=value``; raises click's BadParameter for another text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{show(text)} is not key=value.")
    return key, value


def _pair(text: str, table: str = "", read: Callable[[str], Any] = _value) -> Mapping[str, Any]:
    """``key=value`` of ``table``; without one, any key of TOML."""
    key, value = key_and_value(text)
    if table:
        return {table: {key: read(value)}}
    for line in (text, f"{key} = {to_toml(value)}"):
        with contextlib.suppress(ValueError):
            return parse(line)
    return {key.strip(): _value(value)}


def _flag(*names: str, read: Callable[[str], Mapping[str, Any]], **attributes: Any) -> Command:
    """A flag whose values, as ``read``, are part of the command's ``settings``.

    Click reads the flags in the order in which each comes first on the line, and the last value counts.
    """

    def collect(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        texts = value if isinstance(value, tuple) else filter(None, (value,))
        ctx.params["settings"] = nested(ctx.params.get("settings", {}), *map(read, texts))

    return click.option(*names, callback=collect, expose_value=False, **attributes)


_SHORT = (
    _flag(
        "-O", "--option", read=partial(_pair, table="provider-options"),
        multiple=True, metavar="K=V", help="An option of the provider.",
    ),
    _flag(
        "--dim", read=partial(_pair, table="dims"),
        multiple=True, metavar="N=V", help="The size of a dimension, such as batch=1.",
    ),
    _flag(
        "--set", read=_pair,
        multiple=True, metavar="KEY=V", help="Any key, such as min-coverage=0.9; repeatable.",
    ),
)  # fmt: skip

_ALL = (
    *_SHORT[:2],
    _flag(
        "--shape",
        read=partial(_pair, table="shapes", read=_shape),
        multiple=True, metavar="X=1,3,224,224", help="The whole shape of an input.",
    ),
    _flag(
        "--constant", read=partial(_pair, table="constants"),
        multiple=True, metavar="X=V", help="The value that an input is frozen to.",
    ),
    _flag(
        "--inputs", read=lambda text: {"validate.inputs": text},
        metavar="X", help=f"Dummy inputs: {', '.join(SYNTHETIC)} or a path.",
    ),
    _flag(
        "--device", read=lambda text: {"device": text}, type=click.Choice(get_args(Device)),
        help="The device; the provider has a default.",
    ),
    _flag(
        "--library", read=lambda text: {"library": text},
        metavar="PATH", help="The library of a plugin EP.",
    ),
    _SHORT[2],
)  # fmt: skip


def switch(name: str, settings: Mapping[str, Any], help: str) -> Command:  # noqa: A002
    """A flag without a value that stands for ``settings``."""
    return _flag(name, read=lambda _: settings, is_flag=True, help=help)


def setting_flags(command: Command) -> Command:
    """All flags for keys; the command gets their values as ``settings``."""
    return _with_options(command, *_ALL)


def short_flags(command: Command) -> Command:
    """``-O``, ``--dim`` and ``--set``; the command gets their values as ``settings``."""
    return _with_options(command, *_SHORT)


def _with_options(command: Command, *options: Command) -> Command:
    """``command`` with these options, in this order in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def provider_option(*, required: bool = True) -> Callable[[Command], Command]:
    """``--provider``."""
    return click.option(
        "-p",
        "--provider",
        required=required,
        metavar="P",
        shell_complete=lambda _, __, start: [n for n in PROVIDERS if n.startswith(start)],
        help="The execution provider; epcontext doctor lists them.",
    )


def models_argument(
    *, required: bool = True, type_: click.Path = existing_file
) -> Callable[[Command], Command]:
    """``MODEL...``."""
    metavar = "MODEL..." if required else "[MODEL...]"
    return click.argument("models", nargs=-1, required=required, metavar=metavar, type=type_)


_OF_ARGUMENTS = ((), ("path",), ("targets",))
"""The keys of a model that are no flags."""


class SettingNames(KeyNames):
    """Names keys by their flags; ``models``: the command's by name, in the order of the configuration."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = models

    def key(self, key: Key) -> str:
        """The flag for ``key``, after the file of the model that it belongs to."""
        if len(key.parts) == 1 and key.parts not in _PROVIDER:
            return f"--set {dotted(key.parts)}"
        index, parts = _split(key)
        if index is None:
            return f"--set {dotted(parts)}" if parts not in _PROVIDER else "--provider"
        path = str(list(self._models.values())[index])
        return f"{path}: --set {dotted(parts)}" if parts not in _OF_ARGUMENTS else path

    def targets(self, names: tuple[str, ...]) -> str:
        """Nothing: there is only one."""
        return ""

    def setting(self, setting: Setting) -> str:
        """The instruction with the flags for ``setting``; dots stand for a value that the user chooses."""
        index, parts = _split(setting.key)
        if parts in _PROVIDER:
            return f"Add --provider {setting.value or '...'}"
        if parts == ("targets",):
            # There is only one, which that flag names.
            return ""
        values = {parts: setting.value}
        if parts in [(table,) for table in MODEL_TABLES] or isinstance(setting.value, Mapping):
            values = {(*parts, name): v for name, v in (setting.value or {"NAME": None}).items()}
        if index is not None and parts[0] in MODEL_TABLES and len(self._models) > 1:
            model = list(self._models)[index]
            values = {(p[0], f"{model}:{p[1]}", *p[2:]): v for p, v in values.items() if p[1:]}
        texts = (f"{dotted(parts)}={_text(value)}" for parts, value in values.items())
        return " ".join(["Add", *(f"--set {shlex.quote(text)}" for text in texts)])


def _split(key: Key) -> tuple[int | None, tuple[str | int, ...]]:
    """The index of the key's model, if it has one, and the rest of the key inside its table."""
    parts = key.parts
    if parts[:1] == ("models",) and len(parts) > 1:
        assert isinstance(parts[1], int)
        return parts[1], parts[2:]
    # There is only one target, and its keys have no prefix.
    return None, parts[2:] if parts[:1] == ("targets",) else parts


def _text(value: Any) -> str:
    """A value as `_value` reads it; dots for one that the user chooses."""
    if value is None:
        return "..."
    return value if isinstance(value, str) and _value(value) == value else to_toml(value)


def use_flag_names(models: Mapping[str, Path], headline: str) -> None:
    """Make the errors of the running command name flags.

    ``headline``: the headline of errors of models, for a command that makes no wheel.
    """
    click.get_current_context().meta[_META] = SettingNames(models), headline


def use_lines(project: Path) -> None:
    """Make the errors of the running command name the lines of the ``pyproject.toml`` in ``project``."""
    click.get_current_context().meta[_META] = PyprojectNames(project), None


def error_text(error: EpcontextError, ctx: click.Context) -> str:
    """The message for ``error``, worded as the command chose with `use_flag_names` or `use_lines`."""
    names, headline = ctx.meta.get(_META, (KeyNames(), None))
    if isinstance(error, BuildError):
        return error.text(names, headline or f"{ctx.invoked_subcommand} failed")
    return error.text(names, headline if isinstance(error, InspectionError) else None)


def project_options(command: Command) -> Command:
    """``PROJECT`` and ``--target``."""
    targets = click.option(
        "--target", "targets", multiple=True, help="Only this target; repeatable."
    )
    return click.argument("project", type=existing_folder, default=Path())(targets(command))


def project_config(project: Path, targets: tuple[str, ...] = ()) -> Config:
    """The configuration of the project in ``project``, for these targets, or for all.

    Raises ConfigError as `load` does, and for an unknown target.
    """
    use_lines(project)
    config = _load(project, targets)
    check_app(config.targets, Project.read(project).dependencies)
    return config


def _load(project: Path, targets: tuple[str, ...]) -> Config:
    """The project's configuration, for ``targets`` if there are any."""
    variable = f"{PREFIX}TARGETS"
    environ = {**os.environ, **({variable: ",".join(targets)} if targets else {})}
    try:
        return load(project, tool_table(project), {}, environ)
    except ConfigError as error:
        name = {variable: "--target"} if targets else {}
        raise error.changed(
            lambda p: dataclasses.replace(p, location=name.get(p.location, p.location))
        ) from error

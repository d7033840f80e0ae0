"""Flags for the keys of a configuration: provider, options, shapes; and the values of their texts."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import SYNTHETIC
from hatch_epcontext.config.tables import Optimization
from hatch_epcontext.providers import PROVIDERS, Device
from hatch_epcontext.text import show
from hatch_epcontext.tools.configure import JobSettings

Command = Callable[..., Any]

_Pairs = Iterable[tuple[str, str]]


# Not subscripted: only newer releases of click have type parameters here.
class _Pair(click.ParamType):  # type: ignore[type-arg]
    """``key=value``, split at the first ``=``."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not equals or not key:
            self.fail(f"{show(value)} is not {self.name}.", param, ctx)
        return key, text


def _providers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in PROVIDERS if name.startswith(incomplete)]


def provider_option(*, required: bool = True) -> Callable[[Command], Command]:
    """``--provider``."""
    return click.option(
        "-p",
        "--provider",
        required=required,
        metavar="P",
        shell_complete=_providers,
        help="The execution provider; epcontext doctor lists them.",
    )


def models_argument(*, required: bool = True) -> Callable[[Command], Command]:
    """``MODEL...``."""
    return click.argument(
        "models",
        nargs=-1,
        required=required,
        metavar="MODEL..." if required else "[MODEL...]",
        type=ExistingPath(dir_okay=False),
    )


def _pairs(*names: str, help: str, metavar: str) -> Command:  # noqa: A002
    return click.option(*names, type=_Pair(), multiple=True, metavar=metavar, help=help)


_FLAGS = (
    _pairs(
        "-O", "--option", "options", metavar="K=V",
        help="An option of the provider.",
    ),
    _pairs(
        "-C", "--config", "configs", metavar="K=V",
        help="A session option of ONNX Runtime.",
    ),
    click.option(
        "-d", "--device", type=click.Choice(get_args(Device)),
        help="The device; the provider has a default.",
    ),
    _pairs(
        "--dim", "dims", metavar="N=V",
        help="The size of a dimension, such as batch=1.",
    ),
    _pairs(
        "--shape", "shapes", metavar="X=1,3,224,224",
        help="The whole shape of an input.",
    ),
    _pairs(
        "--constant", "constants", metavar="X=V",
        help="The value that an input is frozen to.",
    ),
    click.option(
        "-i", "--inputs", metavar="X",
        help=f"Dummy inputs: {', '.join(SYNTHETIC)} or a path.",
    ),
)  # fmt: skip
"""Flags about opening a session and about a model's inputs."""

_OPTIMIZATION = click.option(
    "-l",
    "--optimization",
    type=click.Choice(get_args(Optimization)),
    metavar="L",
    help="Of the graph: none, basic, extended or all.",
)

_SETTING = _pairs(
    "--set", "settings", metavar="KEY=TOML", help="Any other key, such as min-coverage=0.9."
)


def loading_flags(command: Command) -> Command:
    """The flags about opening and running models; the command gets their values as ``job``."""
    return _with_options(_bundled(command), *_FLAGS, _SETTING)


def job_flags(*, required: bool = True) -> Callable[[Command], Command]:
    """The flags about compiling models; the command gets ``provider``, and the others as ``job``.

    Without ``required`` the command's models may be a project's, and ``provider`` None.
    """
    flags = (provider_option(required=required), *_FLAGS, _OPTIMIZATION, _SETTING)
    return lambda command: _with_options(_bundled(command), *flags)


def _bundled(command: Command) -> Command:
    names = inspect.signature(job_settings).parameters

    @functools.wraps(command)
    def bundled(**values: Any) -> Any:
        flags = {name: values.pop(name) for name in names if name in values}
        return command(job=job_settings(**flags), **values)

    return bundled


def _with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """``command`` with these options, in this order in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def job_settings(
    *,
    options: _Pairs,
    configs: _Pairs,
    device: str | None,
    settings: _Pairs,
    dims: _Pairs,
    shapes: _Pairs,
    constants: _Pairs,
    inputs: str | None,
    optimization: str | None = None,
) -> JobSettings:
    """The settings in flags; an invalid value stays text, which the checks reject.

    ``settings``: a key may occur several times. Its tables are merged; of other values the last one counts.
    """
    merged: dict[str, Any] = {}
    for key, text in settings:
        merged[key] = _merge(merged.get(key), _value(text))
    return JobSettings(
        provider_options={key: _table(text) for key, text in options},
        session_options=dict(configs),
        device=device,
        optimization=optimization,
        dims={key: _whole(text) for key, text in dims},
        shapes={key: _sizes(text) for key, text in shapes},
        constants={key: _value(text) for key, text in constants},
        validate={} if inputs is None else {"inputs": inputs},
        settings=merged,
    )


def _merge(first: Any, second: Any) -> Any:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return {**first, **{key: _merge(first.get(key), value) for key, value in second.items()}}


def _whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sizes(text: str) -> Any:
    return [_whole(size.strip()) for size in text.split(",")] if text.strip() else []


def _table(text: str) -> Any:
    """``text`` as a table, as messages show it, or ``text`` itself."""
    table = _value(text)
    return table if isinstance(table, dict) else text


def _value(text: str) -> Any:
    """``text`` as TOML, or ``text`` itself where it is not TOML."""
    try:
        values = parse(f"value = {text}")
    except ValueError:
        return text
    return values["value"] if len(values) == 1 else text

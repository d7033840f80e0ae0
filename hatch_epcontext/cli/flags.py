"""Flags that say what a configuration says: provider, options, shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from hatch_epcontext.providers import PROVIDERS, Device
from hatch_epcontext.structure import show
from hatch_epcontext.tables import (
    MADE_UP,
    Optimization,
)

Command = Callable[..., Any]


@dataclass(frozen=True)
class Flags:
    """What a user said of how models are compiled, each as it was split at its first ``=``."""

    provider: str
    options: Mapping[str, str]
    configs: Mapping[str, str]
    device: str | None
    dims: Sequence[tuple[str, str]]
    shapes: Sequence[tuple[str, str]]
    constants: Sequence[tuple[str, str]]
    inputs: str | None
    optimization: str | None
    settings: Mapping[str, str]


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


def _mapping(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    return dict(pairs)


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
        help=f"The execution provider: {', '.join(PROVIDERS)}; or ONNX Runtime's name of the EP.",
    )


models_argument = click.argument(
    "models",
    nargs=-1,
    required=True,
    metavar="MODEL...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)


def _pairs(*names: str, help: str, metavar: str, mapping: bool = False) -> Command:  # noqa: A002
    return click.option(
        *names,
        type=_Pair(),
        multiple=True,
        metavar=metavar,
        help=help,
        callback=_mapping if mapping else None,
    )


LOADING = (
    _pairs(
        "-O", "--option", "options", metavar="K=V", mapping=True,
        help="An option of the provider; repeatable.",
    ),
    _pairs(
        "-C", "--config", "configs", metavar="K=V", mapping=True,
        help="A session option of ONNX Runtime; repeatable.",
    ),
    click.option(
        "-d", "--device", type=click.Choice(get_args(Device)),
        help="The device to use; the provider's own if left out.",
    ),
)  # fmt: skip
"""Flags about opening a session."""

SHAPES = (
    _pairs(
        "--dim", "dims", metavar="N=V",
        help="The size of an open dimension, such as batch=1; repeatable.",
    ),
    _pairs(
        "--shape", "shapes", metavar="X=1,3,224,224",
        help="The whole shape of an input; repeatable.",
    ),
    _pairs(
        "--constant", "constants", metavar="X=V",
        help="An input that is frozen to a value, such as sr=16000; repeatable.",
    ),
    click.option(
        "-i", "--inputs",
        help=f"Dummy inputs: {', '.join(MADE_UP)}, an .npz, or a folder of .pb.",
    ),
)  # fmt: skip
"""Flags about a model's inputs."""

OPTIMIZATION = click.option(
    "-l",
    "--optimization",
    type=click.Choice(get_args(Optimization)),
    help="ONNX Runtime's graph optimization before partitioning; basic if left out.",
)

SETTING = _pairs(
    "--set",
    "settings",
    metavar="KEY=TOML",
    mapping=True,
    help="Any other key of a target's or a model's table, such as min-coverage=0.9 or "
    "tolerance={atol=0.1}; repeatable.",
)


def job_flags(command: Command) -> Command:
    """All flags of `Flags`, which the command gets as ``flags``."""
    names = [field.name for field in dataclasses.fields(Flags)]

    @functools.wraps(command)
    def bundled(**given: Any) -> Any:
        return command(flags=Flags(**{name: given.pop(name) for name in names}), **given)

    return with_options(bundled, provider_option(), *LOADING, *SHAPES, OPTIMIZATION, SETTING)


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """``command`` with these options, which its help shows in this order."""
    for option in reversed(options):
        command = option(command)
    return command

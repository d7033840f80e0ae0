"""Flags that say what a configuration says: models, provider, options, shapes.

They become the tables of ``[tool.epcontext]`` and so pass the same checks; what is wrong is told with the
flag in place of the dotted key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from hatch_epcontext.config import Config, load
from hatch_epcontext.environment import PREFIX
from hatch_epcontext.errors import BuildError, EpcontextError, Problem
from hatch_epcontext.providers import PROVIDERS, Device
from hatch_epcontext.pyproject import parse
from hatch_epcontext.structure import show, suggestion, toml_key
from hatch_epcontext.tables import (
    KEY,
    MADE_UP,
    ModelTable,
    NarrowableTable,
    Optimization,
    RootTable,
    TargetTable,
)

Command = Callable[..., Any]
Tables = dict[str, Any]

GROUP = "shared-weights"
"""What models are called together that share weights."""

_ENVIRONMENT = ("CACHE_DIR", "NO_CACHE", "JOBS", "TIMEOUT", "REPORT")
"""Those variables that do not speak of a project's targets and models."""

_OWN = frozenset({"provider", "models", "targets", "name", "path", "share_weights"})
_OF_WHEELS = frozenset(
    {
        "default_targets",
        "editable",
        "fallback",
        "max_size",
        "output",
        "platforms",
        "requirements",
        "wheel_tag",
    }
)

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


def _settable() -> dict[str, bool]:
    """Keys that ``--set`` takes, and whether each is a model's."""
    of_models = {f.name for f in dataclasses.fields(ModelTable)} - {
        f.name for f in dataclasses.fields(NarrowableTable)
    }
    of_targets = {
        f.name for f in (*dataclasses.fields(RootTable), *dataclasses.fields(TargetTable))
    }
    names = sorted((of_models | of_targets) - _OWN - _OF_WHEELS)
    return {toml_key(name): name in of_models for name in names}


SETTABLE = _settable()


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


class _Pair(click.ParamType[tuple[str, str]]):
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


def configuration(
    models: Mapping[str, Path],
    flags: Flags,
    *,
    embed: bool | None = None,
    share_weights: bool = False,
    validate: bool = True,
) -> Config:
    """The configuration that the flags come to, for models by name; raises ConfigError as `load` does."""
    tables = []
    for name, path in models.items():
        table: Tables = {
            "name": name,
            "path": str(path.absolute()),
            "dims": _of(name, models, flags.dims, _whole),
            "shapes": _of(name, models, flags.shapes, _sizes),
            "constants": _of(name, models, flags.constants, value),
        }
        if flags.inputs is not None:
            made_up = flags.inputs in MADE_UP
            table["inputs"] = flags.inputs if made_up else str(Path(flags.inputs).absolute())
        if share_weights:
            table["share-weights"] = GROUP
        if not validate:
            table["validate"] = False
        tables.append(table)
    root: Tables = {
        "provider": flags.provider,
        "provider-options": dict(flags.options),
        "session-options": dict(flags.configs),
        "models": tables,
    }
    for key, given in (
        ("device", flags.device),
        ("optimization", flags.optimization),
        ("embed", embed),
    ):
        if given is not None:
            root[key] = given
    for key, text in flags.settings.items():
        if key not in SETTABLE:
            what = f"{show(key)} is not a key that can be set."
            raise click.BadParameter(
                f"{what} {suggestion(key, list(SETTABLE))}", param_hint="--set"
            )
        for each in tables if SETTABLE[key] else [root]:
            each[key] = value(text)
    environ = {
        name: text
        for name, text in os.environ.items()
        if name.removeprefix(PREFIX) in _ENVIRONMENT and name.startswith(PREFIX)
    }
    return load(Path.cwd(), root, {}, environ, confined=False)


def _of(
    model: str,
    models: Mapping[str, Path],
    pairs: Sequence[tuple[str, str]],
    read: Callable[[str], Any],
) -> dict[str, Any]:
    """Those of ``pairs`` that are for ``model``: all but those that begin with another one's name."""
    found = {}
    for key, text in pairs:
        head, colon, rest = key.partition(":")
        if colon and head in models:
            if head != model:
                continue
            key = rest  # noqa: PLW2901
        found[key] = read(text)
    return found


def _whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sizes(text: str) -> Any:
    return [_whole(size.strip()) for size in text.split(",")] if text.strip() else []


def value(text: str) -> Any:
    """``text`` as TOML, or as itself where it is none."""
    try:
        return parse(f"value = {text}")["value"]
    except ValueError:
        return text


def names_of(models: Sequence[Path], out: Path | None = None) -> dict[str, Path]:
    """Models by name: each file's stem, or for a single one what ``out`` calls its context model."""
    if out is not None:
        (path,) = models
        return {_name(out.stem.removesuffix("_ctx")): path}
    names: dict[str, Path] = {}
    for path in models:
        name = _name(path.stem)
        if name in names:
            raise click.UsageError(
                f"{names[name]} and {path} are both called {name}, and so would be what is made of them."
            )
        names[name] = path
    return names


def _name(stem: str) -> str:
    # What a model's name may be, for it becomes a folder.
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem).strip("._-") or "model"


@contextlib.contextmanager
def told_in_flags(models: Mapping[str, Path], flags: Flags, headline: str) -> Iterator[None]:
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
        return key
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
    (re.compile(r"Say in constants"), lambda: "Say with --constant"),
)


def _fix(text: str, paths: Sequence[str]) -> str:
    for pattern, told in _FIXES:
        text = pattern.sub(lambda m, told=told: told(*m.groups()), text)  # type: ignore[misc]
    return re.sub(rf"{re.escape(KEY)}[\w.\[\]-]*", lambda m: _flag(m[0].rstrip("."), paths), text)

"""Tables and environment -> `Config`, with every problem at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config import tables
from hatch_epcontext.config.build_hooks import BuildHooks
from hatch_epcontext.config.environ import PREFIX, Environment, read_environment
from hatch_epcontext.config.paths import Finder
from hatch_epcontext.config.resolve import Resolver
from hatch_epcontext.config.settings import BuildSettings, Config, Model
from hatch_epcontext.errors import HOOK, ROOT, ConfigError, Diagnosed, Key, Kind, Problem, collect
from hatch_epcontext.serialize import from_toml
from hatch_epcontext.text import parse_size, quoted_key, show, toml_key

_TABLES = {
    f"[{ROOT}.targets.<name>]": tables.TargetTable,
    f"[[{ROOT}.models]]": tables.ModelTable,
    f"[{ROOT}.build]": tables.BuildTable,
    f"[{ROOT}.wheel]": tables.WheelTable,
    f"[{ROOT}]": tables.RootTable,
}

_HOOK_KEYS = frozenset(
    {
        "dependencies",
        "enable-by-default",
        "require-runtime-dependencies",
        "require-runtime-features",
    }
)
"""The keys of a hook's table, which are Hatch's own."""


def load(
    root: Path,
    table: object,
    hook_table: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    confined: bool = True,
    hooks: BuildHooks | None = None,
    pending: bool = False,
) -> Config:
    """The configuration of the project in ``root``.

    ``table`` is ``[tool.epcontext]``, or None if it is missing; ``hook_table`` is the hook's own. With
    ``confined`` all files must be inside the project, because a build from an sdist has no others. ``hooks``
    are the project's other build hooks in a build; a command has none. With ``pending`` hooks may still make
    files: no file counts as missing, and a glob without files is one model with the glob as its path. Raises
    ConfigError with all problems of the tables and the environment.
    """
    finder = Finder(root, confined, hooks, pending)
    make, problems = collect(_load(finder, table, hook_table, environ))
    if problems or make is None:
        # Models share targets, and so the problems of these.
        raise ConfigError(*{str(problem): problem for problem in problems}.values())
    return make()


def _load(
    finder: Finder, table: object, hook_table: Mapping[str, Any], environ: Mapping[str, str]
) -> Diagnosed[Callable[[], Config] | None]:
    """Return what makes the configuration if there are no problems, and yield these."""
    environment = yield from read_environment(environ)
    if environment.no_cache and environment.from_cache:
        message = f"contradicts {PREFIX}NO_CACHE."
        yield Problem(Kind.INVALID_VARIABLE, f"{PREFIX}FROM_CACHE", message, "Unset one of them.")
    if hook_table:
        yield from _check_hook(hook_table)
    if table is None:
        hint = 'The shortest configuration: models = ["models/name.onnx"] and targets.npu.provider = "qnn".'
        yield Problem(Kind.INVALID_PYPROJECT, f"[{ROOT}]", "is missing in pyproject.toml.", hint)
        return None
    parsed, mistyped = collect(from_toml(table, tables.RootTable, Key()))
    mistyped = [_with_model(_with_owner(problem), table) for problem in mistyped]
    yield from (problem for problem in mistyped if _is_selected(problem, environment))
    models, invalid = collect(Resolver(parsed, environment, finder).models())
    invalid += (_with_model(problem, table) for problem in _check_values(parsed, ()))
    build = dataclasses.replace(parsed.build, **environment.build)
    reports = None
    if parsed.validated_on is not None:
        reports = yield from finder.file(
            Key() / "validated-on", parsed.validated_on, "folder with reports", or_folder=True
        )
    cluster = {Key() / "build" / name for name in ("scheduler", "shared-cache")}
    if cluster.isdisjoint(problem.key for problem in (*mistyped, *invalid)):
        invalid += _check_build(build, environment)
    # An invalid part was left out: report nothing else about it.
    own = (problem for problem in invalid if not _is_about(problem, mistyped))
    yield from (problem for problem in own if _is_selected(problem, environment))
    config = partial(_config, finder.root, parsed, build, models, environment)
    return lambda: replace(config(), validated_on=reports)


def _is_selected(problem: Problem, environment: Environment) -> bool:
    """Whether ``problem`` concerns what is built: a target that is left out may be for another machine."""
    parts = problem.key.parts if problem.key else ()
    inside = parts[2:] if parts[:1] == ("models",) else parts
    is_of_target = inside[:1] == ("targets",) and len(inside) > 1
    return environment.targets is None or not is_of_target or inside[1] in environment.targets


def _with_owner(problem: Problem) -> Problem:
    """``problem``, whose hint names the table that has its unknown key, if another one has."""
    if problem.key is None or problem.kind is not Kind.UNKNOWN_KEY:
        return problem
    name = problem.key.parts[-1]
    for owner, table in _TABLES.items():
        if name in {toml_key(field.name) for field in dataclasses.fields(table)}:
            return replace(problem, hint=f"It is a key of {owner}.")
    return problem


def _with_model(problem: Problem, table: Any) -> Problem:
    """``problem`` with the name and the path of its model, as far as ``table`` has them."""
    parts = problem.key.parts if problem.key else ()
    if problem.key is None or len(parts) < 2 or parts[0] != "models":
        return problem
    item = table["models"][parts[1]]
    keys = item if isinstance(item, dict) else {}
    path, name = (
        text if isinstance(text := keys.get(key), str) and text else None
        for key in ("path", "name")
    )
    return replace(problem, key=replace(problem.key, model=path, name=name))


def _is_about(problem: Problem, others: list[Problem]) -> bool:
    """Whether the key of ``problem`` lies inside that of one of ``others``, or around it."""
    return any(
        problem.key is not None
        and other.key is not None
        and (problem.key.contains(other.key) or other.key.contains(problem.key))
        for other in others
    )


def _check_hook(table: Mapping[str, Any]) -> Diagnosed[None]:
    """The hook's own table, which belongs to Hatch."""
    for key in sorted(table.keys() - _HOOK_KEYS):
        message = "is not one of Hatch's keys for a hook."
        hint = f"The configuration belongs in [{ROOT}]."
        yield Problem(Kind.UNKNOWN_KEY, f"{HOOK}.{quoted_key(key)}", message, hint)


def _check_values(table: Any, parts: tuple[str | int, ...]) -> Iterator[Problem]:
    """All values inside of ``table``, which is at ``parts``, each by what its key declares."""
    for field in dataclasses.fields(table):
        value, own = getattr(table, field.name), (*parts, toml_key(field.name))
        # What a model changes of a target needs no provider; that of a target is another check.
        declared = tables.declaration_of(field)
        if declared.required and not value and not isinstance(table, tables.TargetTable):
            doc = declared.doc
            yield Problem.at(Key(own), Kind.MISSING_KEY, f"is required: {doc[0].lower()}{doc[1:]}")
        for inside, allowed, wrong in tables.faults_of_key(field, value):
            shown = "" if declared.is_secret else f", not {show(wrong)}"
            message = f"must be {allowed}{shown}."
            yield Problem.at(Key((*own, *inside)), Kind.INVALID_VALUE, message)
        yield from _check_tables(value, own)


def _check_tables(value: Any, parts: tuple[str | int, ...]) -> Iterator[Problem]:
    """The tables in ``value``."""
    if dataclasses.is_dataclass(value):
        yield from _check_values(value, parts)
    elif isinstance(value, Mapping | tuple):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _check_tables(item, (*parts, name))


def _check_build(build: tables.BuildTable, environment: Environment) -> Diagnosed[None]:
    """Requirements between the keys of ``build``, including those of the environment."""
    url, key = None if environment.no_cache else build.shared_cache, Key() / "build"
    if url is not None and not (build.shared_cache_keys or url.startswith("file://")):
        message = "is required with a shared cache: the trusted public keys."
        hint = "Make a pair of keys with `epcontext cache new-key`. Only a folder (file://) works without."
        yield Problem.at(key / "shared-cache-keys", Kind.MISSING_KEY, message, hint)
    if build.scheduler is not None and url is None:
        yield Problem.at(
            key / "shared-cache",
            Kind.MISSING_KEY,
            "is required with a scheduler: models and artifacts go through it.",
            'For example "s3://bucket/folder", or "file:///mnt/folder" of all machines. An empty '
            f"{PREFIX}SCHEDULER builds here."
            + (f" {PREFIX}NO_CACHE switches it off." if environment.no_cache else ""),
        )


def _config(
    root: Path,
    table: tables.RootTable,
    build: tables.BuildTable,
    models: list[Model],
    environment: Environment,
) -> Config:
    limit, used = build.memory_limit, {t.name for model in models for t in model.targets}
    selected = table.targets if environment.targets is None else environment.targets
    return Config(
        root=root,
        # A model without any selected target may still be shipped as its source.
        models=tuple(m for m in models if m.targets or m.genai or m.fallback != "none"),
        output=PurePosixPath(table.output) if table.output is not None else None,
        editable=environment.editable or table.editable,
        build=BuildSettings(
            **{
                **vars(build),
                "memory_limit": None if limit is None else parse_size(limit),
                "shared_cache": None if environment.no_cache else build.shared_cache,
                "shared_cache_write": environment.shared_cache_write,
                "shared_cache_key": environment.shared_cache_key,
            }
        ),
        wheel=dataclasses.replace(table.wheel, **environment.wheel),
        environment=environment,
        report=environment.report,
        unused=tuple(Key() / "targets" / name for name in selected if name not in used),
    )

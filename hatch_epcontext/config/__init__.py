"""``[tool.epcontext]`` and the environment -> Config, with every error at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.checks import check_hook, size_in_bytes
from hatch_epcontext.config.reader import Reader
from hatch_epcontext.config.settings import Config, Model, Target
from hatch_epcontext.environment import Validate, read_environment
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.structure import from_toml
from hatch_epcontext.tables import KEY, RootTable

__all__ = ["MOST_JOBS", "Config", "Model", "Target", "load"]

MOST_JOBS = 4
"""Workers at once by default: each needs the memory of a compiler."""


def load(
    root: Path,
    table: object,
    hook_table: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    confined: bool = True,
) -> Config:
    """The configuration of the project in ``root``.

    ``table`` is ``[tool.epcontext]``, or None if there is none; ``hook_table`` is the hook's own. With
    ``confined`` all files have to be inside the project, as what is built from an sdist needs it.
    Raises ConfigError with all that is wrong in any of the three.
    """
    settings, problems = read_environment(environ)
    problems += check_hook(hook_table)
    if table is None:
        missing = Problem(
            f"[{KEY}]",
            "is not in pyproject.toml, and the hook is switched on.",
            'The shortest one: provider = "qnn" and models = ["models/name.onnx"].',
        )
        raise ConfigError(*problems, missing)
    parsed, mistyped = from_toml(table, RootTable, KEY)
    if settings.no_cache and settings.from_cache:
        what = "takes from the cache what HATCH_EPCONTEXT_NO_CACHE says not to use."
        problems.append(Problem("HATCH_EPCONTEXT_FROM_CACHE", what, "Unset one of them."))
    reader = Reader(root, parsed, settings.targets, settings.from_cache, confined=confined)
    models = reader.models()
    # Models share targets, and so what is wrong with them; and what was left out for its type is
    # not to be missed on top of that.
    mistyped_keys = [problem.where for problem in mistyped]
    problems += mistyped
    problems += [
        problem
        for problem in dict.fromkeys(reader.problems)
        if not any(_one_inside_the_other(problem.where, key) for key in mistyped_keys)
    ]
    if problems:
        raise ConfigError(*problems)
    jobs = settings.jobs or parsed.jobs
    return Config(
        root=root,
        # A model that none of the wanted targets is for can still be shipped as it is.
        models=tuple(
            _validated(model, settings.validate)
            for model in models
            if model.targets or parsed.fallback == "source"
        ),
        output=PurePosixPath(parsed.output) if parsed.output is not None else None,
        jobs=min(os.cpu_count() or 1, MOST_JOBS) if jobs == "auto" else jobs,
        timeout=settings.timeout or parsed.timeout,
        fallback=parsed.fallback,
        editable=settings.editable or parsed.editable,
        wheel_tag=parsed.wheel_tag,
        max_size=size_in_bytes(parsed.max_size) if parsed.max_size is not None else None,
        cache_dir=settings.cache_dir,
        use_cache=not settings.no_cache,
        report=settings.report,
        overrides=settings.overrides,
    )


def _one_inside_the_other(a: str, b: str) -> bool:
    short, long = sorted((a, b), key=len)
    return long.startswith(short) and long[len(short) : len(short) + 1] in ("", ".", "[")


def _validated(model: Model, override: Validate | None) -> Model:
    return model if override is None else dataclasses.replace(model, validate=override)

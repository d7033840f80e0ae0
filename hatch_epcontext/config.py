"""``[tool.epcontext]`` and the environment -> Config, with every error at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hatch_epcontext.checks import (
    check_groups,
    check_hook,
    check_model,
    check_name,
    check_narrowing,
    check_root,
    check_target,
    check_twins,
    fitting,
    size_in_bytes,
)
from hatch_epcontext.environment import Editable, Validate, read_environment
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.options import render_options
from hatch_epcontext.paths import Finder
from hatch_epcontext.providers import Device, Profile, Provider, Tolerance
from hatch_epcontext.structure import at, from_toml, show, suggestion
from hatch_epcontext.tables import (
    KEY,
    MADE_UP,
    Fallback,
    ModelTable,
    Optimization,
    Policy,
    RootTable,
    TargetTable,
    ToleranceTable,
)
from hatch_epcontext.targets import NamedTarget, named_target

MOST_JOBS = 4
"""Workers at once by default: each needs the memory of a compiler."""


@dataclass(frozen=True)
class Target:
    """A named place a model is compiled for, with what the model narrowed and the defaults filled in.

    ``key`` is where the optimization profiles stand in the configuration; they are also in
    ``provider_options``, as the EP wants them. ``external_initializers``: bytes from which what is left
    outside of the contexts goes into a file of its own, or None. With ``from_cache`` nothing is compiled
    in this build.
    """

    name: str
    key: str
    provider: Provider
    provider_options: Mapping[str, str]
    session_options: Mapping[str, str]
    load_options: Mapping[str, str]
    device: Device
    device_filter: Mapping[str, str]
    policy: Policy | None
    virtual_devices: bool
    profiles: tuple[Profile, ...]
    platforms: tuple[str, ...]
    requirements: tuple[str, ...] | None
    optimization: Optimization
    embed: bool
    in_memory: bool
    external_initializers: int | None
    min_coverage: float
    from_cache: bool

    @property
    def needs_ep(self) -> bool:
        """Whether the EP itself has to be there to build: basic optimizations are the same for all."""
        return self.provider.product == "context" or self.optimization not in ("none", "basic")


@dataclass(frozen=True)
class Model:
    """A source model, with the targets that it is built for in this build.

    ``path`` is absolute, and so is ``inputs`` unless they are made up; ``key`` is where the model
    stands in the configuration. ``tolerance`` is what the configuration says, or None for what the
    provider says.
    """

    name: str
    path: Path
    key: str
    targets: tuple[Target, ...]
    share_weights: str | None
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, Any]
    inputs: str
    tolerance: ToleranceTable | Literal[False] | None
    validate: Validate

    def tolerance_for(self, provider: Provider) -> Tolerance | None:
        """How far outputs on ``provider`` may be from the CPU EP's; None for no comparison."""
        if self.tolerance is False:
            return None
        given = dataclasses.asdict(self.tolerance) if self.tolerance else {}
        return dataclasses.replace(
            provider.tolerance, **{k: v for k, v in given.items() if v is not None}
        )


@dataclass(frozen=True)
class Config:
    """A checked configuration. ``output`` is None for ``<import package>/epcontext``."""

    root: Path
    models: tuple[Model, ...]
    output: PurePosixPath | None
    jobs: int
    timeout: float
    fallback: Fallback
    editable: Editable
    wheel_tag: str
    max_size: int | None
    cache_dir: Path | None
    use_cache: bool
    overrides: tuple[str, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        """One target of each name that some model is built for, in order."""
        return tuple({t.name: t for model in self.models for t in model.targets}.values())


def load(
    root: Path,
    table: object,
    hook_table: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration of the project in ``root``.

    ``table`` is ``[tool.epcontext]``, or None if there is none; ``hook_table`` is the hook's own.
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
    reader = _Reader(root, parsed, settings.targets, settings.from_cache)
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
        overrides=settings.overrides,
    )


def _one_inside_the_other(a: str, b: str) -> bool:
    short, long = sorted((a, b), key=len)
    return long.startswith(short) and long[len(short) : len(short) + 1] in ("", ".", "[")


def _validated(model: Model, override: Validate | None) -> Model:
    return model if override is None else dataclasses.replace(model, validate=override)


class _Reader:
    """Turns the tables into models and targets, and notes what is wrong on the way.

    ``wanted`` are the only targets that count in this build, or None for all; those in ``cached``
    come from the cache.
    """

    def __init__(
        self,
        root: Path,
        table: RootTable,
        wanted: tuple[str, ...] | None,
        cached: tuple[str, ...] | None,
    ) -> None:
        self._root = root
        self._table = table
        self.problems: list[Problem] = [*check_root(table)]
        self._finder = Finder(root, self.problems)
        self._targets = self._read_targets()
        self._defaults = self._named(table.default_targets, f"{KEY}.default-targets")
        self._wanted = self._named(wanted, "HATCH_EPCONTEXT_TARGETS")
        self._cached = self._named(cached, "HATCH_EPCONTEXT_FROM_CACHE")

    def _read_targets(self) -> dict[str, NamedTarget]:
        table = self._table
        if table.targets:
            found = {n: (f"{KEY}.targets{at(n)}", t) for n, t in table.targets.items()}
        elif table.provider is not None:
            names = (f.name for f in dataclasses.fields(TargetTable))
            short = TargetTable(**{name: getattr(table, name) for name in names})
            found = {table.provider: (KEY, short)}
        else:
            found = {}
        targets = {n: named_target(n, key, t, self._root) for n, (key, t) in found.items()}
        for target in targets.values():
            self.problems += check_target(target)
            plugin = target.provider.plugin if target.provider else None
            if plugin is not None and plugin.path:
                self._finder.library(f"{target.key}.library", target.table.library, plugin.path)
        self.problems += check_twins(((t.key, t.name) for t in targets.values()), "target")
        return targets

    def _named(self, names: tuple[str, ...] | None, key: str) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in self._targets:
                what, fix = f"{show(name)} is not a target.", suggestion(name, list(self._targets))
                self.problems.append(Problem(key, what, fix))
        return names

    def models(self) -> list[Model]:
        """All models, each with those of its targets that are wanted."""
        models = []
        for index, item in enumerate(self._table.models):
            key = f"{KEY}.models[{index}]"
            if isinstance(item, ModelTable):
                path = self._finder.file(f"{key}.path", item.path, "model")
                models.append(self._model(key, item, path or self._root / item.path))
            else:
                models += [
                    self._model(key, ModelTable(path=item), path)
                    for path in self._finder.matching(key, item)
                ]
        self.problems += check_twins(((model.key, model.name) for model in models), "model")
        self.problems += check_groups(
            (model.key, model.name, model.share_weights) for model in models
        )
        return models

    def _model(self, key: str, table: ModelTable, path: Path) -> Model:
        name = table.name if table.name is not None else path.stem
        self.problems += check_name(f"{key}.name", name)
        self.problems += check_model(key, table)
        inputs = table.inputs
        if inputs not in MADE_UP:
            what = f"file or folder of inputs (nor is it one of {', '.join(MADE_UP)})"
            inputs = str(self._finder.file(f"{key}.inputs", inputs, what, folder=True))
        return Model(
            name=name,
            path=path,
            key=key,
            targets=self._targets_of(key, table),
            share_weights=table.share_weights,
            dims=table.dims,
            shapes=table.shapes,
            constants=table.constants,
            inputs=inputs,
            tolerance=table.tolerance,
            validate=table.validate,
        )

    def _targets_of(self, key: str, table: ModelTable) -> tuple[Target, ...]:
        names = self._named(table.targets, f"{key}.targets")
        if names is None:
            names = self._defaults if self._defaults is not None else tuple(self._targets)
        if not names and self._targets:
            self.problems.append(Problem(f"{key}.targets", "names no target."))
        known = [
            self._targets[name]
            for name in dict.fromkeys(names)
            if name in self._targets and self._targets[name].provider is not None
        ]
        self.problems += check_narrowing(key, table, known)
        targets = [self._narrow(key, table, target, known) for target in known]
        return tuple(t for t in targets if self._wanted is None or t.name in self._wanted)

    def _narrow(
        self, model_key: str, table: ModelTable, named: NamedTarget, others: list[NamedTarget]
    ) -> Target:
        target, provider = named.table, named.provider
        assert provider is not None
        model, lax = fitting(table, named, others), target.allow_unknown_options
        options = render_options(
            {**target.provider_options, **model.provider_options}, provider, lax=lax
        )
        profiles = tuple(
            {name: dataclasses.asdict(shapes) for name, shapes in profile.items()}
            for profile in model.profiles or target.profiles
        )
        if provider.profiles and profiles:
            options.update(provider.profiles.render(profiles))
        options = provider.complete(options)
        if not lax:
            key = model_key if model.provider_options else named.key
            for option, what in provider.contradictions(options).items():
                self.problems.append(Problem(f"{key}.provider-options.{option}", f"{what}."))

        def first(field: str, default: Any) -> Any:
            values = (getattr(table, field) for table in (model, target, self._table))
            return next((value for value in values if value is not None), default)

        embed = first("embed", "auto")
        external = first("external_initializers", False)
        loading = {**target.load_options, **model.load_options}
        return Target(
            name=named.name,
            key=model_key if model.profiles else named.key,
            provider=provider,
            provider_options=options,
            session_options=render_options({**target.session_options, **model.session_options}),
            load_options={
                **provider.loading(options),
                **render_options(loading, provider, lax=lax),
            },
            device=first("device", "npu" if target.virtual_devices else provider.devices[0]),
            device_filter={
                name: str(value)
                for name, value in (model.device_filter or target.device_filter).items()
            },
            policy=model.policy or target.policy,
            virtual_devices=target.virtual_devices,
            profiles=profiles,
            platforms=target.platforms,
            requirements=target.requirements,
            optimization=first("optimization", "basic"),
            # External is what large models need, and no EP is known to want it otherwise.
            embed=embed if embed != "auto" else first("in_memory", False),
            in_memory=first("in_memory", False),
            external_initializers=first("external_initializers_threshold", 1024)
            if external
            else None,
            min_coverage=first("min_coverage", 1.0),
            from_cache=self._cached is not None and named.name in self._cached,
        )

"""Tables -> models and targets, with everything that is wrong on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hatch_epcontext.checks import (
    check_groups,
    check_model,
    check_name,
    check_narrowing,
    check_root,
    check_target,
    check_twins,
    fitting,
)
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import Problem
from hatch_epcontext.options import render_options
from hatch_epcontext.paths import Finder
from hatch_epcontext.structure import at, show, suggestion
from hatch_epcontext.tables import KEY, MADE_UP, ModelTable, RootTable, TargetTable
from hatch_epcontext.targets import NamedTarget, named_target


class Reader:
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
        *,
        confined: bool = True,
    ) -> None:
        self._root = root
        self._table = table
        self.problems: list[Problem] = [*check_root(table)]
        self._finder = Finder(root, self.problems, confined=confined)
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

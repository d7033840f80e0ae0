"""Tables -> models and targets, each model's targets with what the model changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatch_epcontext.config.environ import ALL, PREFIX, Environment
from hatch_epcontext.config.genai import check_part, check_targets, read_folder
from hatch_epcontext.config.location import Download, check_url, file_of
from hatch_epcontext.config.models import (
    check_groups,
    check_location,
    check_model,
    check_sharing,
    expand,
)
from hatch_epcontext.config.options import render_options
from hatch_epcontext.config.paths import NO_HOME, Finder, default_root, is_genai_folder, is_glob
from hatch_epcontext.config.settings import SYNTHETIC, CompileSettings, Model, OptionFile, Target
from hatch_epcontext.config.tables import (
    FallbackTable,
    ModelTable,
    QuantizedType,
    QuantizeTable,
    RootTable,
    TargetTable,
    ValidateTable,
    declaration_of,
)
from hatch_epcontext.config.targets import (
    NamedTarget,
    check_name,
    check_target,
    check_target_name,
    named_target,
)
from hatch_epcontext.errors import Diagnosed, Key, KeyNames, Kind, Problem, collect
from hatch_epcontext.files import mentions
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import Cut
from hatch_epcontext.providers import Profile, Provider
from hatch_epcontext.shipped import CPU_EP, SOURCE
from hatch_epcontext.text import listing, show, suggestion, toml_key

_OPTIONS = ("provider_options", "session_options", "load_options")
"""The keys of a target that are merged with those of a model's target; that replaces all others."""

_MISSING = TargetTable()
"""The values of keys of a target that stand for missing ones."""


class Resolver:
    """Resolves the models and targets of one configuration."""

    def __init__(self, table: RootTable, environment: Environment, finder: Finder) -> None:
        self._root = finder.root
        self._table = table
        self._environment = environment
        self._finder = finder
        self._targets: Mapping[str, NamedTarget | None] = {}

    def models(self) -> Diagnosed[list[Model]]:
        """Return all models, each with those of its targets that are selected; yield all problems."""
        self._targets = yield from self._read_targets()
        for names, location in (
            (self._environment.targets, f"{PREFIX}TARGETS"),
            ({*(self._environment.from_cache or ())} - {ALL}, f"{PREFIX}FROM_CACHE"),
        ):
            yield from self._check_names(names, location)
        models: list[tuple[Model, ModelTable]] = []
        for index, item in enumerate(self._table.models):
            for files in (yield from self._model_files(Key(("models", index)), item)):
                for key, table, path, name in (yield from self._folders(*files)):
                    models.append((yield from self._model(key, table, path, name)))
        # The whole configuration is right or wrong, whatever is selected.
        yield from _check_model_names([size for model in models for size in expand(*model)])
        return [size for model, table in models for size in expand(self._selected(model), table)]

    def _model_files(
        self, key: Key, item: str | ModelTable
    ) -> Diagnosed[list[tuple[Key, ModelTable, Path]]]:
        """The models of an ``item`` at ``key``, each with its key, its table and its file."""
        if isinstance(item, ModelTable):
            key = dataclasses.replace(
                key, model=item.path or item.url or None, name=item.name or None
            )
            yield from check_location(key, item)
            if item.url is not None:
                return [(key, item, (yield from self._path_in_cache(key, item)))]
            path = yield from self._finder.file(key / "path", item.path, "model")
            # A path for Windows is one problem: the name that follows from it is right.
            return [(key, item, path or self._root / item.path.replace("\\", "/"))]
        paths = yield from self._finder.models(key, item)
        if not paths and self._finder.pending:
            # For its targets: their requirements are installed before the models are made.
            name = f"pending-{key.parts[-1]}"
            return [(key, ModelTable(path=item, name=name), self._root / item)]
        return [
            (dataclasses.replace(key, model=self._relative(path)), ModelTable(path=item), path)
            for path in paths
        ]

    def _folders(
        self, key: Key, table: ModelTable, path: Path
    ) -> Diagnosed[list[tuple[Key, ModelTable, Path, str]]]:
        """A model, and those of its targets with other folders, with the name for apps of these."""
        changes = table.targets if isinstance(table.targets, Mapping) else {}
        named = {name: change.path for name, change in changes.items() if change and change.path}
        others: dict[Path, list[str]] = {}
        for target, text in named.items():
            path_key = key / "targets" / target / "path"
            folder = yield from self._finder.file(path_key, text, "model")
            if folder is None or self._finder.pending:
                continue
            if not (is_genai_folder(folder) and is_genai_folder(path)):
                message = "is for a folder of onnxruntime-genai, instead of another one."
                yield Problem.at(path_key, Kind.NOT_APPLICABLE, message, "Remove it.")
            elif folder != path:
                others.setdefault(folder, []).append(target)
        if not named:
            return [(key, table, path, "")]
        name, left_out = table.name or path.name, [n for names in others.values() for n in names]
        own = {n: dataclasses.replace(change, path="") for n, change in changes.items() if change}
        targets: dict[str, Any] = {**changes, **own, **dict.fromkeys(left_out, False)}
        # The plain folder on the CPU is that of its target.
        cpus = {n for n in left_out if (t := self._targets.get(n)) and t.provider.ep == CPU_EP}
        main = dataclasses.replace(table, targets=targets)
        models = [(key, dataclasses.replace(main, fallback="none") if cpus else main, path, "")]
        for folder, names in others.items():
            targets = dict.fromkeys(self._targets, False)
            other = dataclasses.replace(
                table,
                name=f"{name}.{names[0]}",
                targets=targets | {n: own[n] for n in names},
                fallback="none" if cpus.isdisjoint(names) else table.fallback,
            )
            where = dataclasses.replace(key, model=self._relative(folder))
            models.append((where, other, folder, name))
        return models

    def _path_in_cache(self, key: Key, table: ModelTable) -> Diagnosed[Path]:
        """The path of a model from elsewhere in the user's cache."""
        folder = self._environment.cache_dir or default_root()
        if folder is None:
            hint = f"Set {PREFIX}CACHE_DIR to a folder."
            yield Problem.at(key / "url", Kind.NOT_DOWNLOADED, f"{NO_HOME}.", hint)
        download = _download(table)
        if download is None or folder is None:
            # There are problems: nothing is downloaded.
            is_valid = check_url(table.url or "") is None
            return self._root / (file_of(table.url or "") if is_valid else f"{key.parts[-1]}.onnx")
        return download.path(folder)

    def _selected(self, model: Model) -> Model:
        """``model`` with those of its targets that the environment selects."""
        targets = [target for target in model.targets if self._is_selected(target.name)]
        selected = dataclasses.replace(model, targets=tuple(targets))
        companions = {target.name: target.companion for target in selected.compiled_targets}
        companions[SOURCE] = model.companion
        modules = {
            name: (companion or "").replace("-", "_") for name, companion in companions.items()
        }
        modules = modules if any(modules.values()) else {}
        return dataclasses.replace(selected, companion_modules=modules)

    def _is_selected(self, name: str) -> bool:
        """Whether the environment selects the target."""
        names = self._environment.targets
        return names is None or name in names

    def _relative(self, path: Path) -> str:
        inside = path.is_relative_to(self._root)
        return (path.relative_to(self._root) if inside else path).as_posix()

    def _read_targets(self) -> Diagnosed[Mapping[str, NamedTarget | None]]:
        """The targets by name; None for those with an unknown provider."""
        targets: dict[str, NamedTarget | None] = {}
        keys = {name: Key() / "targets" / name for name in self._table.targets}
        for name, table in self._table.targets.items():
            key = keys[name]
            targets[name] = target = yield from self._target(name, key, table)
            if table.path:
                message = "is for a target in a model's table, where it names the model's folder."
                yield Problem.at(key / "path", Kind.NOT_APPLICABLE, message, "Move it there.")
            if target is not None:
                # No model may use it.
                yield from self._resolve(target, _TargetKeys(key, key, TargetTable()))
        yield from _check_duplicates(((key, name) for name, key in keys.items()), "target")
        return targets

    def _target(self, name: str, key: Key, table: TargetTable) -> Diagnosed[NamedTarget | None]:
        """The target at ``key``; None if its provider is unknown."""
        yield from check_target_name(key, name, table.provider)
        target = named_target(name, key, table, self._root)
        if target is not None:
            yield from check_target(target)
            if target.provider.plugin is not None and (path := target.provider.plugin.path):
                yield from self._finder.library(key / "library", table.library, Path(path))
        return target

    def _check_names(self, names: Iterable[str] | None, location: Key | str) -> Diagnosed[None]:
        for name in names or ():
            if name not in self._targets:
                message, hint = f"{show(name)} is not a target.", suggestion(name, self._targets)
                key = location if isinstance(location, Key) else None
                yield Problem(Kind.UNKNOWN_TARGET, str(location), message, hint, key)

    def _model(
        self, key: Key, table: ModelTable, path: Path, app_name: str
    ) -> Diagnosed[tuple[Model, ModelTable]]:
        """The model, and its table with what follows from its folder.

        ``app_name``: how apps call it, if it is one of several folders.
        """
        is_folder, genai = is_genai_folder(path), None
        name = table.name or (path.name if is_folder else path.stem)
        if not app_name and (table.name is not None or not is_glob(name)):
            yield from check_name(key / "name", name)
        yield from check_model(key, table)
        fallback = table.fallback or self._table.fallback
        if is_folder:
            # What others lack is no fault of this build.
            selected = {n: t if self._is_selected(n) else None for n, t in self._targets.items()}
            path, table, genai = yield from read_folder(key, table, path, selected)
            genai = genai and dataclasses.replace(genai, app_name=app_name)
            fallback = "source" if fallback == "auto" else fallback
        else:
            yield from self._check_single(key, table, path)
        validate = yield from self._validate(key / "validate", table.validate)
        targets = yield from self._targets_of(key, table)
        targets = tuple(_with_plugins(target, path) for target in targets)
        companion = fallback.companion if isinstance(fallback, FallbackTable) else None
        model = Model(
            name=name,
            path=path,
            key=key,
            constants=table.constants,
            validate=validate,
            targets=targets,
            share_weights=table.share_weights or None,
            fallback="source" if isinstance(fallback, FallbackTable) else fallback,
            companion=companion,
            cut=Cut(table.cut.inputs, table.cut.outputs) if table.cut else Cut(),
            license=table.license,
            download=_download(table),
            genai=genai,
        )
        yield from check_targets(model)
        return model, table

    def _check_single(self, key: Key, table: ModelTable, path: Path) -> Diagnosed[None]:
        """A model at ``path`` that is no folder."""
        if problems := [*check_part(key, path)]:
            yield from problems
        elif table.context_length is not None and not self._finder.pending:
            message = "is for a folder of onnxruntime-genai, and this is a single model."
            yield Problem.at(key / "context-length", Kind.NOT_APPLICABLE, message, "Remove it.")

    def _validate(self, key: Key, value: Any) -> Diagnosed[ValidateTable]:
        table = value if isinstance(value, ValidateTable) else ValidateTable(mode=value)
        if self._environment.validate is not None:
            table = dataclasses.replace(table, mode=self._environment.validate)
        if table.inputs not in SYNTHETIC:
            what = f"file or folder of inputs, and none of the generated ones ({', '.join(SYNTHETIC)}),"
            path = yield from self._finder.file(key / "inputs", table.inputs, what, or_folder=True)
            table = dataclasses.replace(table, inputs=str(path))
        return table

    def _targets_of(self, key: Key, table: ModelTable) -> Diagnosed[tuple[Target, ...]]:
        yield from self._check_names(table.targets or (), key / "targets")
        changes = table.targets if isinstance(table.targets, Mapping) else {}
        candidates = table.targets if isinstance(table.targets, tuple) else self._targets
        names = [name for name in candidates if changes.get(name) is not False]
        if not names and self._targets:
            hint = f"Name one: {listing(self._targets)}."
            yield Problem.at(key / "targets", Kind.UNKNOWN_TARGET, "names no target.", hint)
        named, targets = list[NamedTarget](), list[Target]()
        for name in dict.fromkeys(names):
            if (target := self._targets.get(name)) is None:
                continue
            keys = _TargetKeys(
                target.key, key / "targets" / name, changes.get(name) or TargetTable()
            )
            if changed := (yield from self._changed(target, keys)):
                named.append(changed)
                targets.append((yield from self._resolve(changed, keys)))
        if table.share_weights and named:
            yield from check_sharing(key / "share-weights", named)
        return tuple(targets)

    def _changed(self, target: NamedTarget, keys: _TargetKeys) -> Diagnosed[NamedTarget | None]:
        """``target`` with the changes of a model, checked as any target."""
        if not keys.changed:
            return target
        table = _merge(target.table, keys.changes)
        changed, problems = collect(self._target(target.name, target.key, table))
        yield from map(keys.move, problems)
        return changed

    def _resolve(self, named: NamedTarget, keys: _TargetKeys) -> Diagnosed[Target]:
        provider, table = named.provider, _with_defaults(named.table)
        unchecked = bool(table.allow_unknown_options)
        profiles: tuple[Profile, ...] = tuple(
            {name: dataclasses.asdict(shapes) for name, shapes in profile.items()}
            for profile in table.profiles or ()
        )
        chips = provider.facts_of(table.chips)
        options = {name: value for name, value in chips.items() if name in provider.options}
        options |= render_options(table.provider_options, provider, unchecked=unchecked)
        if provider.profiles and profiles:
            options.update(provider.profiles.render(profiles))
        device = table.device or provider.devices[0]
        options = provider.complete(device, options)
        loading = render_options(table.load_options, provider, unchecked=unchecked)
        files: list[OptionFile] = []
        for field, rendered in (("provider_options", options), ("load_options", loading)):
            for name, value in rendered.items():
                key = keys.of(toml_key(field), name)
                option = provider.options.get(name)
                rendered[name], own = yield from self._finder.option(key, option, value)
                files += own
        load_options = {**provider.loading(options), **loading}
        if not unchecked:
            contradictions = provider.contradictions(device, {**options, **load_options})
            for name, message in contradictions.items():
                field = "load-options" if name in table.load_options else "provider-options"
                yield Problem.at(keys.of(field, name), Kind.CONFLICTING_OPTIONS, f"{message}.")
        calibration = yield from self._calibration(keys.of("quantize"), table)
        cached = self._environment.from_cache
        assert table.min_coverage is not None, "the table has a value for a missing key"
        target = Target(
            name=named.name,
            key=named.key,
            changes=keys.changed,
            settings=_compile_settings(table, named, options),
            plugin=provider.plugin,
            load_options=load_options,
            files=tuple(files),
            profiles=profiles,
            platforms=table.platforms or (),
            companion=table.companion,
            requirements=table.requirements,
            min_coverage=table.min_coverage,
            resources=table.resources or {},
            from_cache=cached is not None and not {ALL, named.name}.isdisjoint(cached),
            calibration=calibration,
        )
        for file in target.shipped_files:
            yield from self._finder.shipped(file)
        return target

    def _calibration(self, key: Key, table: TargetTable) -> Diagnosed[str]:
        """The absolute path of the calibration inputs, empty if the model is not quantized."""
        if not isinstance(table.quantize, QuantizeTable) or not table.quantize.inputs:
            return ""
        if table.dequantize:
            message = "is set together with dequantize, which undoes it."
            yield Problem.at(key, Kind.CONFLICTING_KEYS, message, "Keep one of them.")
        inputs = table.quantize.inputs
        path = yield from self._finder.file(
            key / "inputs", inputs, "file or folder of inputs", or_folder=True
        )
        return str(path or "")


@dataclass(frozen=True)
class _TargetKeys:
    """Where the keys of a target are written: at ``target``, and the ``changes`` of a model at ``model``."""

    target: Key
    model: Key
    changes: TargetTable

    @property
    def changed(self) -> Mapping[str, Key]:
        """The keys that the model changes."""
        names = (toml_key(name) for name in _given(self.changes))
        return {name: self.model / name for name in names}

    def of(self, name: str, *inside: str | int) -> Key:
        """The key ``name`` where it is written, or of what is ``inside`` of its table."""
        field = name.replace("-", "_")
        is_own = name in self.changed
        if is_own and inside and field in _OPTIONS:
            is_own = inside[0] in getattr(self.changes, field)
        key = self.model if is_own else self.target
        return Key((*key.parts, name, *inside), key.model, key.name)

    def move(self, problem: Problem) -> Problem:
        """``problem`` of the merged table, at the key where it is written."""
        if problem.key is None or len(problem.key.parts) <= len(self.target.parts):
            return problem
        _, _, name, *inside = problem.key.parts
        key = self.of(str(name), *inside)
        return dataclasses.replace(problem, key=key, location=str(key))


def _download(table: ModelTable) -> Download | None:
    """Where the model of ``table`` comes from, if that is not the project, and is valid and pinned."""
    if table.url is None or table.sha256 is None or check_url(table.url) is not None:
        return None
    return Download(table.url, table.sha256, table.data)


def _check_model_names(models: Sequence[Model]) -> Diagnosed[None]:
    """The names of all models and of their weight-sharing groups."""
    names = ((model.key, name) for model in models for name in (model.configured_name, model.name))
    yield from _check_duplicates(names, "model")
    yield from check_groups(models)
    for model in models:
        is_valid = not any(check_name(model.key, model.configured_name))
        if model.shape_set is not None and model.size_key is not None and is_valid:
            yield from check_name(model.size_key, model.name)


def _check_duplicates(named: Iterable[tuple[Key, str]], what: str) -> Diagnosed[None]:
    """Keys and names: no two may be equal, ignoring case, because they would share a folder.

    A key can have several names; only its first duplicate is a problem.
    """
    seen: dict[str, Key] = {}
    reported: list[Key] = []
    for key, name in named:
        first = seen.setdefault(name.casefold(), key)
        if first is not key and not any(other is key for other in reported):
            reported.append(key)
            message = f"has the same name as {KeyNames().key(first)}: {show(name)}."
            yield Problem.at(key, Kind.DUPLICATE_NAME, message, f"Give each {what} its own name.")


def _merge(target: TargetTable, changes: TargetTable) -> TargetTable:
    """``target`` with the ``changes`` of a model."""
    merged = dict(_given(changes))
    for name in _OPTIONS:
        merged[name] = {**getattr(target, name), **getattr(changes, name)}
    return dataclasses.replace(target, **merged)


def _given(table: TargetTable) -> Mapping[str, Any]:
    """The values of the keys that ``table`` has, by the names of their fields."""
    return {name: value for name, value in vars(table).items() if value != getattr(_MISSING, name)}


def _with_defaults(table: TargetTable) -> TargetTable:
    """``table`` with the defaults of its missing keys."""
    missing = {
        field.name: declaration_of(field).otherwise
        for field in dataclasses.fields(TargetTable)
        if getattr(table, field.name) is None
    }
    return dataclasses.replace(table, **missing)


def _compile_settings(
    table: TargetTable, named: NamedTarget, options: Mapping[str, str]
) -> CompileSettings:
    """The settings of a merged ``table``; fields with the names of keys are copied."""
    provider = named.provider
    keys = {key.name for key in dataclasses.fields(table)}
    names = {field.name for field in dataclasses.fields(CompileSettings)}
    copied = {name: getattr(table, name) for name in names & keys}
    plugin = provider.plugin
    device = table.device or provider.devices[0]
    static_shapes = table.static_shapes
    if static_shapes is None:
        static_shapes = not provider.leaves_shapes_open(device)
    library, chips = provider.compiler_library, provider.facts_of(table.chips)
    derived = {
        "provider": provider.name,
        "ep": provider.ep,
        "library_module": (plugin.module or None) if plugin else None,
        "library_sha256": named.library_sha256,
        "provider_options": options,
        "session_options": render_options(table.session_options),
        "device": device,
        "static_shapes": static_shapes,
        "compile_with": "library" if provider.by_library else "ep",
        # Their order changes nothing.
        "compute_capabilities": tuple(
            gpu
            for gpu in (library.capabilities if library else ())
            if gpu in chips.get("compute capability", "").split(",")
        ),
        "quantize": _quantize(table, provider),
    }
    return CompileSettings(**{**copied, **derived})


def _with_plugins(target: Target, path: Path) -> Target:
    """``target``, for which a library needs its plugins if the model at ``path`` names their operators."""
    library = target.provider.compiler_library if target.provider.by_library else None
    if library is None or not mentions(path, library.plugins):
        return target
    settings = dataclasses.replace(target.settings, compile_with="library-and-plugins")
    return dataclasses.replace(target, settings=settings)


def _quantize(table: TargetTable, provider: Provider) -> QuantizedType | None:
    if not isinstance(table.quantize, QuantizeTable):
        return None
    return table.quantize.activation or provider.quantized_activation

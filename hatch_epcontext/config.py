"""``[tool.epcontext]`` and the environment -> Config, with every error at once."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag

from hatch_epcontext.environment import Editable, Validate, read_environment
from hatch_epcontext.errors import ConfigError, Problem
from hatch_epcontext.options import check_options, check_session_options, render_options
from hatch_epcontext.providers import PROVIDERS, Device, Provider, Scalar, Tolerance
from hatch_epcontext.structure import at, from_toml, show, suggestion, toml_key

KEY = "tool.epcontext"

SOURCE = "source"
"""The name that stands for the source model where others stand for a target."""

RESERVED = frozenset(
    {"dependencies", "enable-by-default", "require-runtime-dependencies", "require-runtime-features"}
)
"""Hatch's own keys in a hook's table."""

Optimization = Literal["none", "basic", "extended", "all"]
Fallback = Literal["source", "none"]
Options = Mapping[str, Scalar]


def _options() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NarrowableTable:
    """Keys of a target that a model may narrow: tables are merged, other values replaced."""

    provider_options: Options = _options()
    session_options: Options = _options()
    load_options: Options = _options()
    device: Device | None = None
    optimization: Optimization | None = None
    embed: bool | None = None
    min_coverage: float | None = None


@dataclass(frozen=True, kw_only=True)
class TargetTable(NarrowableTable):
    """``[tool.epcontext.targets.<name>]``."""

    provider: str
    platforms: tuple[str, ...] = ()
    requirements: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ToleranceTable:
    """``tolerance = { rtol = 1e-2, atol = 1e-2, cosine = 0.99 }``; what is left out, the provider says."""

    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelTable(NarrowableTable):
    """``[[tool.epcontext.models]]``."""

    path: str
    name: str | None = None
    targets: tuple[str, ...] | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "random"
    tolerance: ToleranceTable | Literal[False] | None = None
    validate: Validate = "auto"


@dataclass(frozen=True, kw_only=True)
class RootTable(NarrowableTable):
    """``[tool.epcontext]``: with ``provider`` the short form, which has one target named after it."""

    provider: str | None = None
    platforms: tuple[str, ...] = ()
    requirements: tuple[str, ...] | None = None
    models: tuple[str | ModelTable, ...]
    targets: Mapping[str, TargetTable] = field(default_factory=dict)
    output: str | None = None
    default_targets: tuple[str, ...] | None = None
    jobs: int | Literal["auto"] = "auto"
    timeout: float = 1800.0
    fallback: Fallback = "source"
    editable: Editable = "source"
    wheel_tag: str = "auto"


@dataclass(frozen=True)
class Target:
    """A named place a model is compiled for, with what the model narrowed and the defaults filled in."""

    name: str
    provider: Provider
    provider_options: Mapping[str, str]
    session_options: Mapping[str, str]
    load_options: Mapping[str, str]
    device: Device
    platforms: tuple[str, ...]
    requirements: tuple[str, ...] | None
    optimization: Optimization
    embed: bool
    min_coverage: float


@dataclass(frozen=True)
class Model:
    """A source model, with the targets that it is built for in this build.

    ``path`` is absolute; ``key`` is where the model stands in the configuration. ``tolerance`` is what
    the configuration says, or None for what the provider says.
    """

    name: str
    path: Path
    key: str
    targets: tuple[Target, ...]
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
    misplaced = [
        Problem(
            f"tool.hatch.build.targets.wheel.hooks.epcontext{at(key)}",
            "is not one of Hatch's keys for a hook.",
            f"What to build stands in [{KEY}].",
        )
        for key in hook_table.keys() - RESERVED
    ]
    if table is None:
        raise ConfigError(
            *misplaced,
            Problem(
                f"[{KEY}]",
                "is not in pyproject.toml, and the hook is switched on.",
                'The shortest one: provider = "qnn" and models = ["models/name.onnx"].',
            ),
        )
    settings, problems = read_environment(environ)
    problems += misplaced
    try:
        parsed = from_toml(table, RootTable, KEY)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    reader = _Reader(root, parsed, settings.targets)
    models = reader.models()
    problems += [*_root_problems(parsed), *reader.problems]
    if problems:
        raise ConfigError(*problems)
    jobs = settings.jobs or parsed.jobs
    return Config(
        root=root,
        models=tuple(
            dataclasses.replace(model, validate=settings.validate)
            if settings.validate is not None
            else model
            for model in models
            if model.targets
        ),
        output=PurePosixPath(parsed.output) if parsed.output is not None else None,
        jobs=min(os.cpu_count() or 1, 4) if jobs == "auto" else jobs,
        timeout=settings.timeout or parsed.timeout,
        fallback=parsed.fallback,
        editable=settings.editable or parsed.editable,
        wheel_tag=parsed.wheel_tag,
        cache_dir=settings.cache_dir,
        use_cache=not settings.no_cache,
        overrides=settings.overrides,
    )


def _root_problems(table: RootTable) -> Iterator[Problem]:
    if table.jobs != "auto" and table.jobs < 1:
        yield Problem(f"{KEY}.jobs", f"must be at least 1, and is {table.jobs}.")
    if not table.timeout > 0:
        yield Problem(f"{KEY}.timeout", f"must be more than 0 seconds, and is {table.timeout:g}.")
    if table.output is not None and not all(map(str.isidentifier, table.output.split("/"))):
        yield Problem(
            f"{KEY}.output",
            f"must be a package's path in the wheel, and is {show(table.output)}.",
            'Write it like "my_app/epcontext": the app imports it as my_app.epcontext.',
        )
    if table.wheel_tag not in ("auto", "any"):
        try:
            if table.wheel_tag.count("-") != 2 or not parse_tag(table.wheel_tag):
                raise ValueError(table.wheel_tag)
        except ValueError:
            yield Problem(
                f"{KEY}.wheel-tag",
                f"must be a wheel tag, and is {show(table.wheel_tag)}.",
                'Allowed: "auto", "any", or three parts such as "py3-none-win_arm64".',
            )


def _name_problem(key: str, name: str) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith("."):
        yield Problem(
            key,
            f"{show(name)} cannot be the name of a folder in the wheel.",
            "Use letters, digits, '.', '_' and '-', with a letter or digit first.",
        )


class _Reader:
    """Turns the tables into models and targets, and notes what is wrong on the way."""

    def __init__(self, root: Path, table: RootTable, wanted: tuple[str, ...] | None) -> None:
        self.root = root
        self.table = table
        self.problems: list[Problem] = []
        self.tables = self._target_tables()
        self.defaults = self._known(table.default_targets, f"{KEY}.default-targets")
        self.wanted = self._known(wanted, "HATCH_EPCONTEXT_TARGETS")

    def complain(self, key: str, what: str, fix: str = "") -> None:
        self.problems.append(Problem(key, what, fix))

    def _target_tables(self) -> dict[str, tuple[str, TargetTable]]:
        """Each target's name -> its dotted key and its table."""
        table, tables = self.table, dict[str, tuple[str, TargetTable]]()
        short = {
            f.name: getattr(table, f.name)
            for f in dataclasses.fields(TargetTable)
            # It may stand at the top of the long form too, for all targets.
            if f.name != "min_coverage"
        }
        if table.provider is not None and not table.targets:
            provider = TargetTable(**short, min_coverage=table.min_coverage)
            tables[table.provider] = (KEY, provider)
        elif table.targets:
            for name in short:
                if short[name] not in (None, (), {}):
                    self.complain(
                        f"{KEY}.{toml_key(name)}",
                        "belongs to a target, and this configuration has [targets].",
                        f"Move it to [{KEY}.targets.<name>].",
                    )
            for name, target in table.targets.items():
                key = f"{KEY}.targets{at(name)}"
                self.problems += _name_problem(key, name)
                if name == SOURCE:
                    self.complain(key, f'"{SOURCE}" stands for the source model; take another name.')
                tables[name] = (key, target)
            self._no_twins(((key, name) for name, (key, _) in tables.items()), "target")
        else:
            self.complain(
                KEY,
                "names no target.",
                f'Add provider = "..." or a table [{KEY}.targets.<name>]. '
                f"Providers: {', '.join(PROVIDERS)}.",
            )
        for name in list(tables):
            key, target = tables[name]
            self._check_target(key, target)
            if target.provider not in PROVIDERS:
                del tables[name]
        return tables

    def _check_target(self, key: str, target: TargetTable) -> None:
        provider = PROVIDERS.get(target.provider)
        if provider is None:
            self.complain(
                f"{key}.provider",
                f"{show(target.provider)} is not a provider that exists here.",
                suggestion(target.provider, list(PROVIDERS)),
            )
            return
        self._check_narrowable(key, target, provider)
        if target.embed and provider.product != "context":
            self.complain(
                f"{key}.embed", f"the {provider.name} provider makes no contexts to embed."
            )
        for index, platform in enumerate(target.platforms):
            if not re.fullmatch(r"[a-z0-9_]+", platform):
                self.complain(
                    f"{key}.platforms[{index}]",
                    f"must be a wheel's platform tag, and is {show(platform)}.",
                    'Such as "win_arm64", "manylinux_2_34_aarch64" or "any".',
                )
        for index, requirement in enumerate(target.requirements or ()):
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                self.complain(
                    f"{key}.requirements[{index}]",
                    f"{show(requirement)} is not a requirement: {str(error).splitlines()[0]}.",
                )

    def _check_narrowable(self, key: str, table: NarrowableTable, provider: Provider) -> None:
        self.problems += check_options(key, table.provider_options, table.load_options, provider)
        self.problems += check_session_options(f"{key}.session-options", table.session_options)
        self._check_coverage(key, table)
        if table.device not in (None, "any", *provider.devices):
            self.complain(
                f"{key}.device",
                f"the {provider.name} provider does not run on {show(table.device)}.",
                f"Allowed: {', '.join(provider.devices)}, any.",
            )

    def _check_coverage(self, key: str, table: NarrowableTable) -> None:
        if table.min_coverage is not None and not 0 <= table.min_coverage <= 1:
            self.complain(
                f"{key}.min-coverage", f"must be from 0 to 1, and is {table.min_coverage:g}."
            )

    def _no_twins(self, named: Iterator[tuple[str, str]], what: str) -> None:
        seen: dict[str, tuple[str, str]] = {}
        for key, name in named:
            # Their folders would be one on a file system that ignores case.
            if (twin := seen.setdefault(name.casefold(), (key, name))) != (key, name):
                self.complain(
                    key,
                    f"has the same name as {twin[0]}: {show(name)}.",
                    f"Give each {what} a name of its own.",
                )

    def _known(self, names: tuple[str, ...] | None, key: str) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in self.tables and name not in self.table.targets:
                self.complain(
                    key,
                    f"{show(name)} is not a target.",
                    suggestion(name, list(self.tables)),
                )
        return names

    def models(self) -> list[Model]:
        """All models, with those targets that are wanted and known."""
        self._check_coverage(KEY, self.table)
        if not self.table.models:
            self.complain(f"{KEY}.models", "names no model.", 'Such as models = ["models/a.onnx"].')
        models: list[Model] = []
        for index, item in enumerate(self.table.models):
            key = f"{KEY}.models[{index}]"
            if isinstance(item, ModelTable):
                if path := self._file(f"{key}.path", item.path, "model"):
                    models.append(self._model(key, item, path))
                else:
                    self._targets(key, item)
            else:
                models += [
                    self._model(key, ModelTable(path=item), path)
                    for path in self._matching(key, item)
                ]
        self._no_twins(((model.key, model.name) for model in models), "model")
        return models

    def _matching(self, key: str, pattern: str) -> list[Path]:
        if not any(character in pattern for character in "*?["):
            path = self._file(key, pattern, "model")
            return [path] if path else []
        if not self._inside(key, pattern):
            return []
        found = sorted(path for path in self.root.glob(pattern) if path.is_file())
        if not found:
            self.complain(key, f"no file matches {show(pattern)}.", _SDIST)
        return found

    def _inside(self, key: str, path: str) -> bool:
        pure = Path(path)
        if not path or pure.is_absolute() or path[0] in "/~" or ".." in pure.parts:
            self.complain(
                key,
                f"{show(path)} is not a path inside the project.",
                "Write it relative to the folder of pyproject.toml, without '..': "
                "what lies elsewhere is not in the sdist.",
            )
            return False
        return True

    def _file(self, key: str, path: str, what: str, *, folder: bool = False) -> Path | None:
        if not self._inside(key, path):
            return None
        found = self.root / path
        if not (found.is_file() or (folder and found.is_dir())):
            self.complain(key, f"there is no {what} at {show(path)}.", _SDIST)
            return None
        return found

    def _model(self, key: str, table: ModelTable, path: Path) -> Model:
        name = table.name if table.name is not None else path.stem
        self.problems += _name_problem(f"{key}.name", name)
        inputs = table.inputs
        if inputs not in ("ones", "random", "zeros"):
            what = 'file or folder of inputs (nor is it "ones", "random" or "zeros")'
            inputs = str(self._file(f"{key}.inputs", inputs, what, folder=True))
        self._check_values(key, table)
        return Model(
            name=name,
            path=path,
            key=key,
            targets=self._targets(key, table),
            dims=table.dims,
            shapes=table.shapes,
            constants=table.constants,
            inputs=inputs,
            tolerance=table.tolerance,
            validate=table.validate,
        )

    def _check_values(self, key: str, table: ModelTable) -> None:
        for name, size in table.dims.items():
            if size < 1:
                self.complain(f"{key}.dims{at(name)}", f"must be at least 1, and is {size}.")
        for name, shape in table.shapes.items():
            if any(size < 0 for size in shape):
                self.complain(
                    f"{key}.shapes{at(name)}", f"must not be negative, and is {show(list(shape))}."
                )
            if name in table.constants:
                self.complain(
                    f"{key}.shapes{at(name)}", "is frozen in constants, which gives it its shape."
                )
        for name, value in table.constants.items():
            if not _is_constant(value):
                self.complain(
                    f"{key}.constants{at(name)}",
                    f"must be a number, true or false, a string or a list, and is {show(value)}.",
                )
        if isinstance(table.tolerance, ToleranceTable):
            for name, bound in dataclasses.asdict(table.tolerance).items():
                if bound is not None and (bound < 0 or (name == "cosine" and bound > 1)):
                    self.complain(f"{key}.tolerance.{name}", f"is out of range: {bound:g}.")

    def _targets(self, key: str, table: ModelTable) -> tuple[Target, ...]:
        names = self._known(table.targets, f"{key}.targets")
        if names is None:
            names = self.defaults if self.defaults is not None else tuple(self.tables)
        targets = []
        for name in dict.fromkeys(names):
            if name in self.tables:
                target_key, target = self.tables[name]
                provider = PROVIDERS[target.provider]
                self._check_narrowable(key, table, provider)
                targets.append(self._narrow(key if table.provider_options else target_key, name, target, table))
        self.problems = list(dict.fromkeys(self.problems))
        if not targets and self.tables and not names:
            self.complain(f"{key}.targets", "names no target.")
        return tuple(t for t in targets if self.wanted is None or t.name in self.wanted)

    def _narrow(self, key: str, name: str, target: TargetTable, model: ModelTable) -> Target:
        provider = PROVIDERS[target.provider]
        options = provider.complete(
            render_options({**target.provider_options, **model.provider_options}, provider)
        )
        for option, what in provider.contradictions(options).items():
            self.complain(f"{key}.provider-options.{option}", f"{what}.")

        def first(field_: str, default: Any) -> Any:
            for table in (model, target, self.table):
                if (value := getattr(table, field_)) is not None:
                    return value
            return default

        return Target(
            name=name,
            provider=provider,
            provider_options=options,
            session_options=render_options({**target.session_options, **model.session_options}),
            load_options={
                **provider.loading(options),
                **render_options({**target.load_options, **model.load_options}, provider),
            },
            device=first("device", provider.devices[0]),
            platforms=target.platforms,
            requirements=target.requirements,
            optimization=first("optimization", "basic"),
            embed=first("embed", False) and provider.product == "context",
            min_coverage=first("min_coverage", 1.0),
        )


_SDIST = "If this is a build from an sdist, see that the sdist has it."


def _is_constant(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_constant, value))
    return isinstance(value, str | bool | int | float)

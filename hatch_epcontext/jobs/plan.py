"""Config -> Plan: the jobs, their build requirements, and where each result goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hatch_epcontext.config.settings import Config, Model, Target
from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.requirements import FARM, genai_requirements, requirements
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.shipped import CPU_EP
from hatch_epcontext.text import file_name, listing

CACHE_FORMAT = 37
"""A part of the keys of the cache; increased when workers treat the same request differently, or a stored
document has other fields."""

_NOT_COMPILED = frozenset(
    {
        *("path", "key", "size_key", "validate", "targets", "share_weights"),
        *("shape_set", "fallback", "cut", "license", "download", "origin", "genai"),
        *("companion", "companion_modules", "content", "defaults"),
    }
)
"""Fields of a model that do not change what is compiled. All others count, including future ones."""


@dataclass(frozen=True)
class Job:
    """Models that are compiled together for one target: several only when they share weights.

    ``models`` are as this target needs them. ``group``: the name of their weight-sharing group. ``chip``: for
    a job of `jobs_alone`, the options that name its chip, if its target has several. ``is_only``: whether the
    models have no other targets.
    """

    models: tuple[Model, ...]
    target: Target
    group: str | None = None
    chip: str = ""
    is_only: bool = True

    @property
    def name(self) -> str:
        """The name of the group or of the only model."""
        return self.group or self.models[0].name

    @property
    def location(self) -> str:
        """The job in a message: ``"digits -> x-elite"``."""
        return " -> ".join(self._names)

    @property
    def _names(self) -> tuple[str, str]:
        """What the job compiles, and for which target and chip."""
        members = f" ({' + '.join(model.name for model in self.models)})" if self.group else ""
        chip = f" ({self.chip})" if self.chip else ""
        return self.name + members, self.target.name + chip

    def located(self, error: BuildError) -> BuildError:
        """``error``, with the job's location in problems that have none, and its target in those with the key
        of a model with several. Keys that the folder of a language model decides are no remedies.
        """
        decided = ("constants", "cut", "dims") if self.models[0].genai else ()
        problems: Iterable[Problem] = (
            dataclasses.replace(
                problem,
                settings=tuple(s for s in problem.settings if s.key.parts[-1] not in decided),
            )
            for problem in error.located(*self._names).problems
        )
        if not self.is_only:
            own = (self.target.name,)
            problems = (
                dataclasses.replace(p, targets=p.targets or own) if p.key is not None else p
                for p in problems
            )
        return type(error)(*problems)

    @property
    def reason_not_to_open(self) -> str:
        """Why only the EP's own device, and no simulator, can open the artifact; empty if that can.

        This holds for contexts for several chips, and for contexts that share weights, unless the
        provider is known to open these anywhere. Then the results of `jobs_alone` are validated instead.
        """
        provider, options = self.target.provider, self.target.settings.provider_options
        kind = " for several chips" if len(provider.per_chip(options)) > 1 else ""
        if self.group is not None and not provider.loads_shared:
            kind += " that share weights"
        return f"{provider.ep} cannot open contexts{kind} on this machine" if kind else ""

    @property
    def jobs_alone(self) -> tuple[Job, ...]:
        """A job for each model on each chip whose result is run instead; empty where nothing is to be run."""
        return tuple(
            Job((model,), with_options(self.target, options), chip=chip, is_only=self.is_only)
            for model in self.models
            if self.reason_not_to_open and model.validate.mode == "auto"
            for chip, options in self._chips().items()
        )

    @property
    def may_answer(self) -> bool:
        """Whether onnxruntime-genai is to answer with the result: all stages, which a simulator runs.

        A GPU needs another distribution of it.
        """
        model, genai = self.models[0], self.models[0].genai
        is_run = model.validate.mode in ("auto", "require") and model.tolerance_for(self.target)
        is_whole = genai and (not genai.stage or len(self.models) == len(genai.stages))
        return bool(self.target.provider.simulator and is_run and is_whole)

    @property
    def may_dequantize(self) -> bool:
        """Whether the target leaves open that dynamic quantization is undone."""
        settings = self.target.settings
        is_open = settings.dequantize is None and settings.quantize is None
        return is_open and self.target.provider.product == "context"

    @property
    def dequantized(self) -> Job:
        """The job with the dynamic quantization of its models undone."""
        settings = dataclasses.replace(self.target.settings, dequantize=True)
        return dataclasses.replace(self, target=dataclasses.replace(self.target, settings=settings))

    @property
    def folder(self) -> str:
        """The artifact's folder below the output folder, where `jobs_alone` are not shipped."""
        folder, genai = f"{self.name}/{self.target.name}", self.models[0].genai
        if genai is not None:
            # onnxruntime-genai opens only files below the model's folder.
            folder = f"{self.models[0].configured_name}/{self.target.name}"
            folder += f".{genai.stage}" if genai.stage and not self.group else ""
        return f"{folder}/{file_name(self.chip, '-')}" if self.chip else folder

    def fingerprint(self, contents: Sequence[str], calibration: str = "") -> str:
        """The hex sha256 that identifies what the job compiles to, with any versions: no paths, no times.

        ``contents``: the hex sha256 of each model; ``calibration``: identifies the inputs for which models
        are quantized.
        """
        models = [
            # Without a comparison, preparation may accept the result of another simplifier.
            (sha256, model_settings(model), model.is_compared)
            for sha256, model in zip(contents, self.models, strict=True)
        ]
        return value_sha256([CACHE_FORMAT, models, self.target.settings, calibration])

    def _chips(self) -> Mapping[str, Mapping[str, str]]:
        """The options that name a chip, by their text, for each distinct chip; one chip has no text."""
        chips = self.target.provider.per_chip(self.target.settings.provider_options)
        if len(chips) == 1:
            return {"": chips[0]}
        return {self.target.provider.describe(chip): chip for chip in chips}


@dataclass(frozen=True)
class Plan:
    """All jobs of a build, and the distributions that they need, as requirement strings."""

    config: Config
    jobs: tuple[Job, ...]
    requirements: tuple[str, ...]

    @property
    def local_targets(self) -> tuple[Target, ...]:
        """The targets that this machine compiles for, instead of the workers of a cluster."""
        return self.config.compiled_targets if self.config.build.scheduler is None else ()


def plan(config: Config) -> Plan:
    """The plan for ``config``; raises ConfigError when its targets cannot be built in one environment."""
    jobs = jobs_of(config)
    return Plan(config, jobs, _requirements(config))


def _requirements(config: Config) -> tuple[str, ...]:
    if config.environment.only_from_cache:
        return ()
    if config.build.scheduler is not None:
        return FARM
    opens = any(m.genai and m.validate.mode in ("auto", "require") for m in config.models)
    return (*requirements(config.compiled_targets), *(genai_requirements() if opens else ()))


def jobs_of(config: Config) -> tuple[Job, ...]:
    """The jobs of ``config``; raises ConfigError for models that cannot be compiled together."""
    jobs: list[Job] = []
    problems: list[Problem] = []
    for model in config.models:
        for target in model.compiled_targets:
            members = _members(config, model, target) or [(model, target)]
            if members[0][0] is model:
                group = model.share_weights if len(members) > 1 else None
                problems += _check_group(members) if group else ()
                models = tuple(member.on(target) for member, _ in members)
                is_only = all(len(member.targets) == 1 for member, _ in members)
                jobs.append(Job(models, target, group, is_only=is_only))
    if problems:
        # A model with several shapes is several `Model`s, with the same problems.
        raise ConfigError(*{str(problem): problem for problem in problems}.values())
    return tuple(jobs)


def _members(config: Config, model: Model, target: Target) -> list[tuple[Model, Target]]:
    """The models of a model's group, each with its own ``target``; only some EPs share weights."""
    if model.share_weights is None or not target.provider.shares_weights:
        return []
    return [
        (member, own)
        for member in config.models
        if member.share_weights == model.share_weights
        for own in member.targets
        if own.name == target.name
    ]


def _check_group(members: list[tuple[Model, Target]]) -> Iterator[Problem]:
    (_, first), *others = members
    clashes = {
        "embed": ("shares one sidecar on", "puts it inside each context model"),
        "recompile": ("compiles models together for", "lets the loader compile each by itself"),
    }
    for model, target in members:
        for name, (shares, separates) in clashes.items():
            if getattr(target.settings, name):
                yield Problem.at(
                    model.key / "share-weights",
                    Kind.CONFLICTING_KEYS,
                    f"{shares} the target {target.name}, and {name} = true {separates}.",
                    f"Remove {name}, or the group.",
                )
    for model, target in others:
        if dataclasses.replace(target, changes=first.changes) != first:
            keys = listing(sorted({*target.changes, *first.changes}))
            yield Problem.at(
                model.key / "share-weights",
                Kind.INVALID_SHARING,
                "the models of a group are compiled together, and this model has other settings for "
                f"the target {target.name} than {members[0][0].name}.",
                f"Set {keys} in the target and not in the model, or give both models the same.",
            )


def model_settings(model: Model) -> dict[str, Any]:
    """What the configuration fixes in ``model``."""
    return {name: value for name, value in vars(model).items() if name not in _NOT_COMPILED}


def with_options(target: Target, options: Mapping[str, str]) -> Target:
    """``target`` with the provider options ``options`` instead of those with the same names."""
    options = {**target.settings.provider_options, **options}
    settings = dataclasses.replace(target.settings, provider_options=options)
    return dataclasses.replace(target, settings=settings)


def ships_source(model: Model, targets: Iterable[Target]) -> bool:
    """Whether a wheel contains the source of ``model``, whose shapes are compiled for ``targets``.

    With ``fallback = "auto"`` it does unless one of their variants replaces the source.
    """
    if model.fallback != "auto":
        return model.fallback == "source"
    return not any(map(_runs_anywhere, targets))


def _runs_anywhere(target: Target) -> bool:
    """Whether the CPU EP of any machine runs what is compiled for ``target``."""
    return (
        target.settings.ep == CPU_EP
        and not target.platforms
        # With all optimizations the graph has the memory layout of the processor that made it.
        and target.settings.optimization != "all"
    )
